"""The paper's mathematics: pure functions in float64.

`theorems` states the results, `integrals` evaluates them, `means` places the class means (`codes` in closed form,
`optimiser` by search), and `distribution` is the Max-Mahalanobis distribution itself.
"""

from mmlda.theory.distribution import LatentFit, MaxMahalanobisDistribution, empirical_priors, latent_fit
from mmlda.theory.means import (
    Arrangement,
    arrange_means,
    cosine_bound,
    generate_opt_means,
    max_cosine,
    separated_means,
    welch_bound,
)
from mmlda.theory.theorems import (
    approximate_robustness,
    bayes_error,
    bayes_error_estimate,
    discriminants,
    expected_distance,
    expected_distance_derivative,
    relative_efficiency,
    robustness,
    robustness_bound,
    soft_target_gap,
    standard_form,
    whiten,
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
    "expected_distance",
    "expected_distance_derivative",
    "generate_opt_means",
    "latent_fit",
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
