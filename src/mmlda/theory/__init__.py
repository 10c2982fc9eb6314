"""The paper's mathematics: pure functions in float64.

`theorems` states the results, `integrals` evaluates them, `means` places the class means (`codes` in closed form,
`optimiser` by search), `bounds` says how far apart they can be and `matching` orders them, `distribution` is the
Max-Mahalanobis distribution, `latent` compares features with it, and `lda` brings classes of any shared covariance into
its standard form.
"""

from mmlda.theory.bounds import cosine_bound, welch_bound
from mmlda.theory.distribution import MaxMahalanobisDistribution, empirical_priors
from mmlda.theory.latent import LatentFit, latent_fit
from mmlda.theory.lda import discriminants, standard_form, whiten
from mmlda.theory.matching import match_means
from mmlda.theory.means import (
    Arrangement,
    arrange_means,
    generate_opt_means,
    max_cosine,
    separated_means,
)
from mmlda.theory.theorems import (
    approximate_robustness,
    bayes_error,
    bayes_error_estimate,
    evaluate_theorems,
    expected_distance,
    expected_distance_derivative,
    relative_efficiency,
    robustness,
    robustness_bound,
    soft_target_gap,
)

__all__ = [
    "Arrangement",
    "LatentFit",
    "MaxMahalanobisDistribution",
    "approximate_robustness",
    "arrange_means",
    "bayes_error",
    "bayes_error_estimate",
    "cosine_bound",
    "discriminants",
    "empirical_priors",
    "evaluate_theorems",
    "expected_distance",
    "expected_distance_derivative",
    "generate_opt_means",
    "latent_fit",
    "match_means",
    "max_cosine",
    "relative_efficiency",
    "robustness",
    "robustness_bound",
    "separated_means",
    "soft_target_gap",
    "standard_form",
    "welch_bound",
    "whiten",
]
