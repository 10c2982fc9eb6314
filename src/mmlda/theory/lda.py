"""Linear discriminant analysis in standard form (Assumptions 2 and 3): whitening, and the discriminants."""

from __future__ import annotations

from typing import Any

import torch

from mmlda.theory.arguments import check_means, lift, mixture


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
    (points, mu, sigma), back = lift(x=x, means=means, covariance=covariance)
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
    mu, pi, back = mixture(means, priors, positive=True)
    score = pi.log() - (mu**2).sum(1) / 2  # [L]
    return back(mu[:, None] - mu), back(score[:, None] - score)
