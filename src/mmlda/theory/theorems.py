r"""The paper's theorems as functions: efficiency, distance to the boundary, robustness, Bayes error.

The functions are pure and compute in float64. Scalars return a Python float, arrays (and lists) an array,
tensors a tensor on the same device; the arguments of elementwise functions broadcast. `docs/theory.md`
compares each formula with the paper's.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmlda._utils.checks import check_count, check_positive, invalid
from mmlda.theory.arguments import lift, mixture
from mmlda.theory.integrals import efficiency, sampled_error, simplex_error, two_class_error
from mmlda.theory.means import generate_opt_means, pairwise_distances


def _delta_zeta(delta: Any, zeta: Any) -> tuple[Tensor, Tensor, Callable[[Tensor], Any]]:
    (d, z), back = lift(broadcast=True, delta=delta, zeta=zeta)
    if (d < 0).any():
        raise invalid("delta", ">= 0, as a distance is", delta)
    return d, z, back


# ---- Theorem 1: logistic regression against LDA -----------------------------------------------------------


def relative_efficiency(zeta: Any, delta: Any, p: int | float) -> Any:
    r"""Efron's asymptotic relative efficiency of logistic regression to LDA, `Eff_p(zeta, Delta)` (Theorem 1).

    With `zeta = log(pi_1 / pi_0)`, class 1 on the `+Delta/2` side, and
    `A_i = \int x^i w(x) dx`, `w(x) = exp(-Delta^2/8) phi(x) / (pi_0 exp(-Delta x/2) + pi_1 exp(Delta x/2))`::

        Eff_p = (Q_1 + (p - 1) Q_2) / (Q_3 + (p - 1) Q_4).

    Parameters
    ----------
    zeta
        Log prior ratio.
    delta
        Mahalanobis distance between the two classes, >= 0; the limit at 0 is 1. Broadcasts with `zeta`.
    p
        Dimension of the input: a positive integer or `math.inf`.

    Returns
    -------
    float, array or tensor
        Efficiency in (0, 1].

    Examples
    --------
    >>> round(relative_efficiency(zeta=0.0, delta=2.0, p=1), 3)
    0.899
    >>> relative_efficiency(0.0, [0.0, 1.0, 4.0], math.inf).round(3).tolist()
    [1.0, 0.995, 0.343]
    """
    if not (isinstance(p, float | np.floating) and p == math.inf):
        p = check_count("p", p, 1)
    d, z, back = _delta_zeta(delta, zeta)
    d, z = torch.broadcast_tensors(d, z)
    if d.numel() == 0:
        return back(d.clone())
    # 368 nodes per element: work in blocks, so that a large grid does not fill memory.
    blocks = zip(d.flatten().split(4096), z.flatten().split(4096))
    return back(torch.cat([efficiency(d_, z_, p) for d_, z_ in blocks]).reshape(d.shape))


# ---- Theorem 2 and Corollary 1: distance to the boundary ---------------------------------------------------


def expected_distance(delta: Any, zeta: Any = 0.0) -> Any:
    r"""Mean distance of a sample of class i to the LDA boundary between i and j, `E[d_ij]` (Theorem 2).

    With `a = Delta/2 + zeta/Delta`, it is the mean of a folded normal distribution::

        E[d] = sqrt(2/pi) exp(-a^2/2) + a (1 - 2 Phi(-a)).

    `d` is unsigned: a misclassified sample counts as if it were robust. At `delta = 0` the boundary does not
    depend on x: E[d] is sqrt(2/pi) for zeta = 0, and infinite otherwise (one class everywhere).

    Parameters
    ----------
    delta
        Mahalanobis distance between the classes, >= 0.
    zeta
        Log prior ratio `log(pi_i / pi_j)` (default: 0, equal priors). Broadcasts with `delta`.

    Returns
    -------
    float, array or tensor
        `E[d_ij]`.

    Examples
    --------
    >>> round(expected_distance(2.0), 6)
    1.166631
    >>> expected_distance(torch.tensor([0.0, 4.0]), zeta=0.0)
    tensor([0.7979, 2.0170], dtype=torch.float64)
    """
    d, z, back = _delta_zeta(delta, zeta)
    a = d / 2 + _ratio(z, d)
    return back(math.sqrt(2 / math.pi) * torch.exp(-(a**2) / 2) + a * torch.erf(a / math.sqrt(2)))


def expected_distance_derivative(delta: Any, zeta: Any = 0.0) -> Any:
    r"""Derivative of `expected_distance` with respect to the distance of the classes (Corollary 1)::

        dE[d] / dDelta = [1 - 2 Phi(-a)] (1/2 - zeta/Delta^2),  a = Delta/2 + zeta/Delta.

    It is >= 0 exactly where `|zeta| <= Delta^2 / 2`: with unequal priors, moving the classes apart can bring
    the boundary closer. The paper's appendix flips the sign of zeta inside Phi and concludes that it is
    always >= 0. At `delta = 0` it is 0 for zeta = 0 and -inf otherwise.

    Parameters
    ----------
    delta
        Mahalanobis distance between the classes, >= 0.
    zeta
        Log prior ratio `log(pi_i / pi_j)` (default: 0, equal priors). Broadcasts with `delta`.

    Returns
    -------
    float, array or tensor
        The derivative.

    Examples
    --------
    >>> round(expected_distance_derivative(1.0, zeta=1.0), 3)
    -0.433
    """
    d, z, back = _delta_zeta(delta, zeta)
    ratio = _ratio(z, d)
    a = d / 2 + ratio
    return back(torch.erf(a / math.sqrt(2)) * (0.5 - _ratio(ratio, d)))


def _ratio(z: Tensor, d: Tensor) -> Tensor:
    """`z / d`, with 0 / 0 = 0 and no NaN in the gradient there."""
    zero = d == 0
    limit = torch.where(z > 0, math.inf, torch.where(z < 0, -math.inf, 0.0))
    return torch.where(zero, limit, z / torch.where(zero, 1.0, d))


# ---- Eq. 2-3 and Theorem 3: robustness -----------------------------------------------------------------------


def robustness(means: Any, priors: Any = None) -> Any:
    r"""Robustness `RB = min_{i != j} E[d_ij]` (Eq. 2) for unit covariance and `zeta_ij = log(pi_i / pi_j)`.

    Parameters
    ----------
    means
        Class means `[L, p]`.
    priors
        Class priors `[L]`, > 0 (default: uniform).

    Returns
    -------
    float, array or tensor
        A scalar.

    Examples
    --------
    >>> round(float(robustness([[1.0], [-1.0]])), 6)
    1.166631
    """
    mu, pi, back = mixture(means, priors, positive=True)
    expected = expected_distance(pairwise_distances(mu, mu), pi.log()[:, None] - pi.log())  # [L, L]
    return back(_off_diagonal(expected).min())


def approximate_robustness(means: Any) -> Any:
    r"""The paper's approximation of the robustness, `min_{i != j} Delta_ij / 2` (Eq. 3).

    Parameters
    ----------
    means
        Class means `[L, p]`.

    Returns
    -------
    float, array or tensor
        A scalar.

    Examples
    --------
    >>> float(approximate_robustness([[5.0], [-5.0]]))
    5.0
    """
    mu, _, back = mixture(means, None)
    return back(_off_diagonal(pairwise_distances(mu, mu)).min() / 2)


def robustness_bound(num_classes: Any, C: Any) -> Any:
    r"""Upper bound on `approximate_robustness`, `sqrt(L C / (2 (L - 1)))` (Theorem 3).

    It holds for means that sum to zero with `max |mu_i|^2 = C`; the simplex of `generate_opt_means`, and no other set,
    attains it.

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    C
        Squared norm of the means, > 0. Broadcasts with `num_classes`.

    Returns
    -------
    float, array or tensor
        The bound.

    Examples
    --------
    >>> round(robustness_bound(10, C=100.0), 4)
    7.4536
    """
    L, C_, back = _classes_and_scale(num_classes, C)
    return back(torch.sqrt(C_ * (L / (2 * (L - 1)))))


def soft_target_gap(num_classes: Any, C: Any, precision: float = 1.0) -> Any:
    r"""Distance of the posterior at a mean from the one-hot label, for equal priors (Appendix B.1)::

        |1_y - F(mu_y)|_inf = 1 / (1 + exp(precision L C / (L - 1)) / (L - 1))

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    C
        Squared norm of the means, > 0. Broadcasts with `num_classes`.
    precision
        1 (default) is N(z; mu, I), as in Eq. 5; Appendix B.1 computes with 2 (covariance I / 2).

    Returns
    -------
    float, array or tensor
        The gap, in (0, 1).

    Examples
    --------
    >>> soft_target_gap(10, 10.0, precision=2.0) < 1e-8 < soft_target_gap(10, 10.0)
    True
    """
    precision = check_positive("precision", precision)
    L, C_, back = _classes_and_scale(num_classes, C)
    return back(torch.sigmoid(torch.log(L - 1) - precision * C_ * (L / (L - 1))))


def _classes_and_scale(num_classes: Any, C: Any) -> tuple[Tensor, Tensor, Callable[[Tensor], Any]]:
    (L, C_), back = lift(broadcast=True, num_classes=num_classes, C=C)
    if (L < 2).any() or (L != L.round()).any():
        raise invalid("num_classes", "an integer >= 2", num_classes)
    if (C_ <= 0).any():
        raise invalid("C", "> 0", C)
    return L, C_, back


def _off_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)]


# ---- Bayes error ---------------------------------------------------------------------------------------------


def bayes_error(means: Any, priors: Any = None, *, samples: int = 1 << 17, seed: int = 0) -> Any:
    r"""Error of the best classifier, `1 - E[max_k P(k | x)]`, for classes N(mu_k, I).

    Exact for two classes, and for equal priors and equal pairwise distances (the simplex), where::

        P(correct) = \int phi(t) Phi(t + Delta / sqrt(2))^(L - 1) dt.

    Otherwise it is the value of `bayes_error_estimate`.

    Parameters
    ----------
    means
        Class means `[L, p]`.
    priors
        Class priors `[L]` (default: uniform).
    samples
        Number of samples of the estimate, >= 2.
    seed
        Seed of the samples.

    Returns
    -------
    float, array or tensor
        A scalar in [0, 1].

    Examples
    --------
    >>> round(float(bayes_error([[1.0], [-1.0]])), 6)  # Phi(-1)
    0.158655
    """
    mu, pi, back = mixture(means, priors)
    if len(mu) == 2:
        return back(two_class_error(torch.linalg.vector_norm(mu[0] - mu[1]), pi))
    delta = _off_diagonal(pairwise_distances(mu, mu))
    # The tolerance is the rounding error of the given means: the float32 means of a simplex count as a simplex.
    dtype = means.dtype if isinstance(means, Tensor) else torch.from_numpy(np.asarray(means)).dtype
    tolerance = max(1e-12, 16 * torch.finfo(dtype).eps) if dtype.is_floating_point else 1e-12
    if delta.max() - delta.min() <= tolerance * delta.max() and pi.max() - pi.min() <= 1e-12:
        return back(simplex_error(delta.mean(), len(mu)))
    return bayes_error_estimate(means, priors, samples=samples, seed=seed)[0]


def bayes_error_estimate(means: Any, priors: Any = None, *, samples: int = 1 << 17, seed: int = 0) -> tuple[Any, Any]:
    r"""Estimate of the Bayes error for any means and priors, with its standard error.

    Importance sampling from `q(x) = \sum_{i<j} sqrt(pi_i p_i(x) pi_j p_j(x)) / B`, a mixture of Gaussians at
    the midpoints of the means, whose normaliser B is the Bhattacharyya bound. The integrand
    `\sum_k pi_k p_k - max_k pi_k p_k` is at most `B q`, so no sample weighs more than B and the relative error
    stays small where plain sampling would see no error at all (10^-13 at C = 100).

    Parameters
    ----------
    means
        Class means `[L, p]`.
    priors
        Class priors `[L]` (default: uniform).
    samples
        Number of samples, >= 2.
    seed
        Seed of the samples.

    Returns
    -------
    tuple of float, array or tensor
        Bayes error and standard error. The same seed gives the same numbers on every device.

    Examples
    --------
    >>> error, standard_error = bayes_error_estimate([[1.0], [-1.0]])
    >>> bool(abs(error - 0.158655) < 4 * standard_error < 0.01)
    True
    """
    mu, pi, back = mixture(means, priors)
    error, standard_error = sampled_error(mu, pi, check_count("samples", samples, 2), check_count("seed", seed, 0))
    return back(error), back(standard_error)


# ---- All of them ---------------------------------------------------------------------------------------------


def evaluate_theorems(num_classes: int, C: float = 100.0) -> dict[str, float]:
    r"""Evaluate the theorems for the means of `generate_opt_means` and equal priors.

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    C
        Squared norm of the means, > 0.

    Returns
    -------
    dict of str to float
        The distance `delta` between two classes, and the functions of this module by name.

    Examples
    --------
    >>> round(evaluate_theorems(10)["robustness_bound"], 4)
    7.4536
    """
    mu = generate_opt_means(C=C, p=max(num_classes - 1, 1), L=num_classes)
    delta = float((mu[0] - mu[1]).norm())
    return {
        "delta": delta,
        "expected_distance": expected_distance(delta),
        "robustness": float(robustness(mu)),
        "approximate_robustness": float(approximate_robustness(mu)),
        "robustness_bound": robustness_bound(num_classes, C),
        "bayes_error": float(bayes_error(mu)),
        "soft_target_gap": soft_target_gap(num_classes, C),
    }
