"""How far features are from the Max-Mahalanobis distribution, which the theory assumes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmlda._utils.checks import check_positive
from mmlda.theory.arguments import check_floating, check_labels


@dataclass(frozen=True)
class LatentFit:
    """Features compared with the distribution that the theory assumes: the result of `latent_fit`.

    Each `*_expected` is the average for a sample of the distribution of the same size, so a small sample does not look
    like a misfit. Printing shows a table.

    Parameters
    ----------
    samples
        Number of features.
    squared_distance, squared_distance_expected
        Mean of ||z - mu_y||^2; p / precision.
    mean_offset, mean_offset_expected
        Root mean square over classes of ||class mean - mu_k||.
    mean_cosine, mean_cosine_expected
        Mean over classes of cos(class mean, mu_k).
    variance, variance_expected
        Trace of the within-class covariance divided by p; 1 / precision.
    covariance_error, covariance_error_expected
        ||precision * S - I||_F / sqrt(p), with S the pooled within-class covariance.

    Examples
    --------
    >>> from mmlda.theory import MaxMahalanobisDistribution
    >>> dist = MaxMahalanobisDistribution(num_classes=3, dim=2, C=4.0)
    >>> fit = latent_fit(*dist.sample_labeled((100,)), dist.means)
    >>> print(str(fit).splitlines()[0])
    latent fit of 100 features                    measured    expected
    """

    samples: int
    squared_distance: float
    squared_distance_expected: float
    mean_offset: float
    mean_offset_expected: float
    mean_cosine: float
    mean_cosine_expected: float
    variance: float
    variance_expected: float
    covariance_error: float
    covariance_error_expected: float

    def __str__(self) -> str:
        rows = (
            ("E||z - mu_y||^2", self.squared_distance, self.squared_distance_expected),
            ("||class mean - mu_k||, root mean square", self.mean_offset, self.mean_offset_expected),
            ("cos(class mean, mu_k), mean", self.mean_cosine, self.mean_cosine_expected),
            ("within-class variance", self.variance, self.variance_expected),
            ("||precision * S - I||_F / sqrt(p)", self.covariance_error, self.covariance_error_expected),
        )
        title = f"latent fit of {self.samples} features"
        lines = [f"{title:<42}{'measured':>12}{'expected':>12}"]
        return "\n".join(lines + [f"{name:<42}{measured:>12.4g}{wanted:>12.4g}" for name, measured, wanted in rows])


def latent_fit(z: Tensor, y: Tensor, means: Tensor, precision: float = 1.0) -> LatentFit:
    """Measure how far features are from the distribution N(mu_y, I / precision) that the theory assumes.

    Cross-entropy alone does not pull z to its mean, so the paper's theorems hold for a trained network only as far as
    this fit is good: E||z - mu_y||^2 against p / precision, class means against mu, and the within-class covariance
    against I / precision. Computed in float64; classes without features are left out.

    Parameters
    ----------
    z
        Features `[N, p]`.
    y
        Classes `[N]`, int64.
    means
        Class means `[L, p]`.
    precision
        Inverse variance of each class, > 0.

    Returns
    -------
    LatentFit
        Each measurement with its expected value.

    Raises
    ------
    ValueError
        If shapes or dtypes do not match, a value is NaN or infinite, or there are no more features than classes.

    Examples
    --------
    >>> from mmlda.theory import MaxMahalanobisDistribution
    >>> dist = MaxMahalanobisDistribution(num_classes=3, dim=2, C=4.0)
    >>> z, y = dist.sample_labeled((5000,), generator=torch.Generator().manual_seed(0))
    >>> fit = latent_fit(z, y, dist.means)
    >>> round(fit.squared_distance, 1), fit.squared_distance_expected
    (2.0, 2.0)
    >>> latent_fit(3 * z, y, dist.means).squared_distance > 30
    True
    """
    precision = check_positive("precision", precision)
    check_floating("means", means, "L", "p")
    check_floating("z", z, "N", means.shape[1])
    for name, values in (("means", means), ("z", z)):
        if not bool(values.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or infinity in {list(values.shape)}")
    L, p = means.shape
    y = check_labels("y", y, L).to(z.device)
    if len(y) != len(z):
        raise ValueError(f"y must have shape [{len(z)}], one label for each row of z, got {list(y.shape)}")
    z, mu = z.detach().double(), means.detach().to(z.device).double()
    counts = torch.bincount(y, minlength=L).double()  # [L]
    present = counts > 0
    freedom = len(z) - int(present.sum())
    if freedom < 1:
        raise ValueError(f"z must have more features than classes, got {len(z)} of {len(z) - freedom} classes")

    centres = torch.zeros_like(mu).index_add_(0, y, z) / counts.clamp(min=1).unsqueeze(1)  # [L, p]
    within = z - centres[y]  # [N, p]
    S = within.T @ within / freedom  # [p, p]
    deviation = precision * S - torch.eye(p, dtype=S.dtype, device=S.device)
    mu_seen, centres, noise = mu[present], centres[present], p / (precision * counts[present])
    cosine = torch.nn.functional.cosine_similarity(centres, mu_seen)
    return LatentFit(
        samples=len(z),
        squared_distance=(z - mu[y]).square().sum(1).mean().item(),
        squared_distance_expected=p / precision,
        mean_offset=(centres - mu_seen).square().sum(1).mean().sqrt().item(),
        mean_offset_expected=noise.mean().sqrt().item(),
        mean_cosine=cosine.mean().item(),
        mean_cosine_expected=(1 + noise / mu_seen.square().sum(1)).rsqrt().mean().item(),
        variance=S.trace().item() / p,
        variance_expected=1 / precision,
        covariance_error=deviation.norm().item() / math.sqrt(p),
        covariance_error_expected=math.sqrt((p + 1) / freedom),
    )
