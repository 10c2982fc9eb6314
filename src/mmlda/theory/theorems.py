r"""The paper's theorems as functions: efficiency, distance to the boundary, robustness, standard form.

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

from mmlda._utils.checks import check_count, check_positive, check_priors, invalid, to_tensor
from mmlda.theory.integrals import efficiency, sampled_error, simplex_error, two_class_error
from mmlda.theory.means import broadcast_shape, check_means, pairwise_distances

# ---- Arguments ------------------------------------------------------------------------------------------


def _lift(broadcast: bool = False, **values: Any) -> tuple[list[Tensor], Callable[[Tensor], Any]]:
    """The values as float64 tensors on one device, and a function that converts tensors back to the values' type.

    With `broadcast`, raises if their shapes do not broadcast.
    """
    device = next((v.device for v in values.values() if isinstance(v, Tensor)), None)
    tensors = [to_tensor(name, v, device) for name, v in values.items()]
    if broadcast and broadcast_shape(*(t.shape for t in tensors)) is None:
        shapes = " and ".join(str(list(t.shape)) for t in tensors)
        raise ValueError(f"{' and '.join(values)} must have shapes that broadcast, got {shapes}")
    if any(isinstance(v, Tensor) for v in values.values()):
        return tensors, lambda t: t
    if any(isinstance(v, np.ndarray | list | tuple) for v in values.values()):
        return tensors, lambda t: t.numpy()[()]  # a 0-d result is a NumPy scalar, as from NumPy's own functions
    return tensors, lambda t: t.item()


def _mixture(means: Any, priors: Any, positive: bool = False) -> tuple[Tensor, Tensor, Callable[[Tensor], Any]]:
    """Means [L, p] and priors [L] as tensors, and `_lift`'s function."""
    (mu,), back = _lift(means=means)
    pi = check_priors(priors, len(check_means(mu)), positive=positive)
    return mu, pi.to(mu.device), back


def _delta_zeta(delta: Any, zeta: Any) -> tuple[Tensor, Tensor, Callable[[Tensor], Any]]:
    (d, z), back = _lift(broadcast=True, delta=delta, zeta=zeta)
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
    mu, pi, back = _mixture(means, priors, positive=True)
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
    mu, _, back = _mixture(means, None)
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
    (L, C_), back = _lift(broadcast=True, num_classes=num_classes, C=C)
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
    mu, pi, back = _mixture(means, priors)
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
    mu, pi, back = _mixture(means, priors)
    error, standard_error = sampled_error(mu, pi, check_count("samples", samples, 2), check_count("seed", seed, 0))
    return back(error), back(standard_error)


# ---- Assumptions 2-3: standard form, and the discriminants ---------------------------------------------------


def whiten(x: Any, means: Any, covariance: Any) -> Any:
    r"""Transform points so that classes of a shared covariance get unit covariance (Assumption 2 to Assumption 3)::

        Q^{-1} (x - mean of the means),  Sigma = Q Q^T,  Q lower triangular

    Parameters
    ----------
    x
        Points `[..., p]`.
    means
        Class means `[L, p]`.
    covariance
        Covariance `[p, p]` of every class, symmetric and positive definite.

    Returns
    -------
    array or tensor
        Transformed points `[..., p]`.

    Raises
    ------
    ValueError
        If the shapes do not match, or the covariance is not symmetric and positive definite.

    Examples
    --------
    >>> whiten([[3.0, 1.0]], [[1.0, 1.0], [-1.0, 1.0]], [[9.0, 0.0], [0.0, 1.0]])
    array([[1., 0.]])
    """
    (points, mu, sigma), back = _lift(x=x, means=means, covariance=covariance)
    p = check_means(mu).shape[1]
    if points.dim() < 1 or points.shape[-1] != p:
        raise ValueError(f"x must have shape [..., {p}] like the means, got {list(points.shape)}")
    if sigma.shape != (p, p):
        raise ValueError(f"covariance must have shape [{p}, {p}], got {list(sigma.shape)}")
    if not torch.allclose(sigma, sigma.T, rtol=1e-6, atol=1e-9 * sigma.abs().max().item()):
        raise ValueError(f"covariance must be symmetric, got {covariance!r}")
    Q, info = torch.linalg.cholesky_ex(sigma)
    if info.item() != 0:
        raise ValueError(f"covariance must be positive definite, got {covariance!r}")
    centred = (points - mu.mean(0)).reshape(-1, p)
    return back(torch.linalg.solve_triangular(Q, centred.T, upper=False).T.reshape(points.shape))


def standard_form(means: Any, covariance: Any) -> Any:
    r"""Means of Assumption 3: unit covariance, zero sum, the same Mahalanobis distances.

    `whiten(x, means, covariance)` transforms data in the same way.

    Parameters
    ----------
    means
        Class means `[L, p]`.
    covariance
        Covariance `[p, p]` of every class, symmetric and positive definite.

    Returns
    -------
    array or tensor
        Means `[L, p]`.

    Examples
    --------
    >>> standard_form([[1.0, 0.0], [3.0, 0.0]], [[4.0, 0.0], [0.0, 1.0]])
    array([[-0.5,  0. ],
           [ 0.5,  0. ]])
    """
    return whiten(means, means, covariance)


def discriminants(means: Any, priors: Any = None) -> tuple[Any, Any]:
    r"""Fisher's linear discriminants between pairs of classes, `lambda_ij(x) = beta_ij + alpha_ij . x`.

    `alpha_ij = mu_i - mu_j` and `beta_ij = log(pi_i / pi_j) + (|mu_j|^2 - |mu_i|^2) / 2`; class i is more probable
    than j where `lambda_ij(x) > 0`.

    Parameters
    ----------
    means
        Class means `[L, p]`.
    priors
        Class priors `[L]`, > 0 (default: uniform).

    Returns
    -------
    tuple of array or tensor
        `alpha` `[L, L, p]` and `beta` `[L, L]`.

    Examples
    --------
    >>> alpha, beta = discriminants([[1.0, 0.0], [0.0, 2.0]])
    >>> alpha[0, 1].tolist(), float(beta[0, 1])
    ([1.0, -2.0], 1.5)
    """
    mu, pi, back = _mixture(means, priors, positive=True)
    score = pi.log() - (mu**2).sum(1) / 2  # [L]
    return back(mu[:, None] - mu), back(score[:, None] - score)
