"""The Max-Mahalanobis distribution (Sec. 3.1), and how far given features are from it.

    P(y = k) = pi_k,    P(z | y = k) = N(z; mu_k, I / precision)

with the means of Algorithm 1 (or the best known ones where there are more than p + 1 classes). precision = 1 is the
paper's Eq. 5; precision = 2 is the covariance I / 2 that Appendix B.1 computes with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from mmlda._utils.checks import check_count, check_positive, check_priors
from mmlda.theory.means import pairwise_distances, separated_means

__all__ = ["LatentFit", "MaxMahalanobisDistribution", "empirical_priors", "latent_fit"]


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def check_range(name: str, value: float, dtype: torch.dtype) -> float:
    """A number > 0 that stays finite and > 0 in the dtype, or a ValueError that names it."""
    info = torch.finfo(dtype)
    if not info.tiny <= value <= info.max:
        raise ValueError(f"{name} must be from {info.tiny:.2g} to {info.max:.2g} in {dtype}, got {value!r}")
    return value


def check_labels(name: str, labels: Any, num_classes: int) -> Tensor:
    """Labels [N] as int64 in 0 .. L - 1, or a ValueError. Reads the values, so it waits for a GPU."""
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be int64 [N], got {labels!r}") from None
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{name} must be int64 [N], got {labels.dtype} {list(labels.shape)}")
    labels = labels.long()
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if outside.numel():
        raise ValueError(f"{name} must be classes from 0 to {num_classes - 1}, got {outside[0].item()}")
    return labels


def empirical_priors(labels: Tensor | Sequence[int], num_classes: int) -> Tensor:
    """The share of each class among the labels [N]: float64 [L]. A class without labels gets 0.

    >>> empirical_priors([0, 0, 2, 1], num_classes=3).tolist()
    [0.5, 0.25, 0.25]
    """
    count = check_count("num_classes", num_classes, 2)
    if not isinstance(labels, Tensor) and len(labels) == 0:
        labels = torch.empty(0, dtype=torch.int64)
    labels = check_labels("labels", labels, count)
    if not labels.numel():
        raise ValueError("labels must have at least one label, got none")
    return torch.bincount(labels, minlength=num_classes).double() / labels.numel()


class MaxMahalanobisDistribution(Distribution):
    r"""The mixture P(z) = sum_k pi_k N(z; mu_k, I / precision) around Max-Mahalanobis means, with its labels.

    Shapes: events are [p]. `C`, `precision` (any shape) and `priors` ([..., L]) broadcast to the batch shape, so one
    object can hold a whole grid of distributions. Tensors decide dtype and device, numbers take torch's defaults;
    float32 at least.

    A mixture has no reparameterised sample, so there is no `rsample`. A prior of 0 is allowed: that class is never
    drawn and has posterior 0. Values are checked as in any torch distribution, unless `validate_args=False`.

    >>> dist = MaxMahalanobisDistribution(num_classes=10, dim=64, C=100.0)
    >>> z, y = dist.sample_labeled((1000,), generator=torch.Generator().manual_seed(0))
    >>> z.shape, y.shape, dist.log_prob(z).shape, dist.posterior(z).shape
    (torch.Size([1000, 64]), torch.Size([1000]), torch.Size([1000]), torch.Size([1000, 10]))
    >>> bool((dist.posterior(z).argmax(-1) == y).all())  # at C = 100 the classes are 14.9 standard deviations apart
    True

    A batch: five values of C at once.

    >>> MaxMahalanobisDistribution(num_classes=3, dim=2, C=torch.logspace(-1, 3, 5)).sample((7,)).shape
    torch.Size([7, 5, 2])
    """

    arg_constraints = {  # noqa: RUF012 (torch declares it so)
        "C": constraints.positive,
        "priors": constraints.simplex,
        "precision": constraints.positive,
    }
    support = constraints.real_vector
    has_rsample = False

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        C: float | Tensor = 100.0,
        priors: Tensor | Sequence[float] | None = None,
        precision: float | Tensor = 1.0,
        validate_args: bool | None = None,
    ):
        self.num_classes, self.dim = check_count("num_classes", num_classes, 2), check_count("dim", dim, 1)
        validate = self._validate_args if validate_args is None else validate_args
        given = [a for a in (C, priors, precision) if isinstance(a, Tensor)]
        dtype = torch.float32  # at least: half has no room for squared distances at C = 100
        for other in [a.dtype for a in given if a.is_floating_point()] or [torch.get_default_dtype()]:
            dtype = torch.promote_types(dtype, other)
        device = given[0].device if given else torch.get_default_device()
        like: dict[str, Any] = {"dtype": dtype, "device": device}

        C, precision = _positive("C", C, validate, like), _positive("precision", precision, validate, like)
        pi = _batched_priors(priors, num_classes, validate).to(**like)
        try:
            batch = torch.broadcast_shapes(C.shape, precision.shape, pi.shape[:-1])
        except RuntimeError as error:
            raise ValueError(
                f"C, precision and priors (without its last dimension) must have shapes that broadcast, got "
                f"{list(C.shape)}, {list(precision.shape)} and {list(pi.shape[:-1])}"
            ) from error
        directions = separated_means(num_classes, dim, C=1.0).to(C.device)  # [L, p] float64
        means = (directions * C.double().sqrt()[..., None, None]).to(dtype)  # [..., L, p]
        self.C, self.precision = C.expand(batch), precision.expand(batch)
        self.priors = pi.expand((*batch, num_classes))
        self.means = means.expand((*batch, num_classes, dim))
        super().__init__(batch, torch.Size([dim]), validate_args=validate_args)

    def __repr__(self) -> str:
        batch = f", batch_shape={tuple(self.batch_shape)}" if self.batch_shape else f", C={self.C.item():g}"
        return f"MaxMahalanobisDistribution(num_classes={self.num_classes}, dim={self.dim}{batch})"

    def expand(self, batch_shape: Any, _instance: Any = None) -> MaxMahalanobisDistribution:
        new = self._get_checked_instance(MaxMahalanobisDistribution, _instance)
        batch = torch.Size(batch_shape)
        new.num_classes, new.dim = self.num_classes, self.dim
        new.C, new.precision = self.C.expand(batch), self.precision.expand(batch)
        new.priors = self.priors.expand((*batch, self.num_classes))
        new.means = self.means.expand((*batch, self.num_classes, self.dim))
        Distribution.__init__(new, batch, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """sum_k pi_k mu_k, [..., p]; zero for equal priors."""
        return (self.priors.unsqueeze(-1) * self.means).sum(-2)

    @property
    def variance(self) -> Tensor:
        """The variance of each coordinate of z, [..., p]."""
        spread = (self.means - self.mean.unsqueeze(-2)).square()  # [..., L, p]
        return 1 / self.precision.unsqueeze(-1) + (self.priors.unsqueeze(-1) * spread).sum(-2)

    @property
    def covariance_matrix(self) -> Tensor:
        """I / precision + sum_k pi_k (mu_k - mean)(mu_k - mean)^T, [..., p, p]."""
        spread = (self.means - self.mean.unsqueeze(-2)) * self.priors.sqrt().unsqueeze(-1)  # [..., L, p]
        eye = torch.eye(self.dim, dtype=spread.dtype, device=spread.device)
        return eye / self.precision[..., None, None] + spread.mT @ spread

    def sample_labeled(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw z [*sample_shape, *batch_shape, p] with its class y [*sample_shape, *batch_shape], int64."""
        shape = torch.Size(sample_shape) + self.batch_shape
        draws = math.prod(torch.Size(sample_shape))
        L, p, device = self.num_classes, self.dim, self.means.device
        with torch.no_grad():
            pi = self.priors.reshape(-1, L)  # [B, L]
            if draws:
                y = torch.multinomial(pi, draws, replacement=True, generator=generator)  # [B, n]
            else:  # multinomial refuses to draw nothing
                y = torch.empty(len(pi), 0, dtype=torch.int64, device=device)
            row = torch.arange(len(pi), device=device).unsqueeze(1)
            mu = self.means.reshape(-1, L, p)[row, y]  # [B, n, p]
            noise = torch.randn(mu.shape, dtype=mu.dtype, device=device, generator=generator)
            z = mu + noise / self.precision.reshape(-1, 1, 1).sqrt()
            return z.transpose(0, 1).reshape((*shape, p)), y.T.reshape(shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw z [*sample_shape, *batch_shape, p]."""
        return self.sample_labeled(sample_shape)[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """log P(z) = log sum_k pi_k N(z; mu_k, I / precision): [..., p] -> [...]."""
        return self._log_joint(value).logsumexp(-1)

    def posterior(self, value: Tensor) -> Tensor:
        """P(y = k | z) by Bayes' theorem (Eq. 5): [..., p] -> [..., L], rows that sum to 1."""
        return self._log_joint(value).softmax(-1)

    def _log_joint(self, value: Tensor) -> Tensor:
        """log pi_k + log N(z; mu_k, I / precision): [..., p] -> [..., L]."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"value must be a floating tensor [..., {self.dim}], got {found}")
        L, p, batch = self.num_classes, self.dim, self.batch_shape
        try:
            shape = torch.broadcast_shapes(value.shape[:-1], batch)
        except RuntimeError:
            shape = None
        if shape is None or value.dim() == 0 or value.shape[-1] != p:
            raise ValueError(f"value must have a shape that ends in {[*batch, p]}, got {list(value.shape)}")
        if self._validate_args and not bool(value.isfinite().all()):
            raise ValueError(f"value must be finite, got NaN or infinity in {list(value.shape)}")
        samples = math.prod(shape[: len(shape) - len(batch)])
        z = value.expand((*shape, p)).reshape((samples, *batch, p)).movedim(0, -2)  # [*batch, n, p]
        dtype = torch.promote_types(z.dtype, self.means.dtype)
        squared = pairwise_distances(z.to(dtype), self.means.to(dtype)).square()  # [*batch, n, L]
        squared = squared.movedim(-2, 0).reshape((*shape, L))  # [..., L]
        precision = self.precision.to(dtype).unsqueeze(-1)
        normaliser = p / 2 * (precision / (2 * math.pi)).log()
        return self.priors.to(dtype).log() + normaliser - precision / 2 * squared


def _batched_priors(priors: Any, num_classes: int, check_values: bool) -> Tensor:
    """Priors [..., L] whose rows sum to 1; with `check_values`, a wrong row is a ValueError."""
    if priors is None:
        return check_priors(None, num_classes)
    if not isinstance(priors, Tensor):
        try:
            priors = torch.from_numpy(np.array(priors, dtype=np.float64))
        except (TypeError, ValueError):
            raise ValueError(f"priors must be numbers [..., {num_classes}] or None, got {priors!r}") from None
    if priors.is_complex() or priors.dtype == torch.bool or priors.dim() == 0 or priors.shape[-1] != num_classes:
        raise ValueError(f"priors must be numbers [..., {num_classes}], got {priors.dtype} {list(priors.shape)}")
    pi = priors if priors.is_floating_point() else priors.double()
    if check_values:
        rows = pi.detach().double().reshape(-1, num_classes)
        good = (rows >= 0).all(1) & ((rows.sum(1) - 1).abs() <= 1e-6)
        for row in rows[~good]:
            check_priors(row, num_classes)  # raises
    return pi / pi.sum(-1, keepdim=True)  # what is left of rounding


def _positive(name: str, value: Any, check_values: bool, like: dict[str, Any]) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(check_range(name, check_positive(name, value), like["dtype"]), **like)
    if value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} must be real numbers, got {value.dtype}")
    if check_values:
        bad = value[~((value > 0) & (value < math.inf))]
        if bad.numel():
            raise ValueError(f"{name} must be finite numbers > 0, got {bad[0].item():g}")
    return value.to(**like)


@dataclass(frozen=True)
class LatentFit:
    """Features measured against the distribution that the theory assumes; see `latent_fit`.

    Each `*_expected` is what a sample of the distribution of the same size gives on average, so that a small sample
    is not taken for a misfit.
    """

    samples: int
    squared_distance: float  # mean of ||z - mu_y||^2
    squared_distance_expected: float  # p / precision
    mean_offset: float  # root mean square over classes of ||class mean - mu_k||
    mean_offset_expected: float
    mean_cosine: float  # mean over classes of cos(class mean, mu_k)
    mean_cosine_expected: float
    variance: float  # trace of the within-class covariance over p
    variance_expected: float  # 1 / precision
    covariance_error: float  # ||precision * S - I||_F / sqrt(p), S the pooled within-class covariance
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
    """How far features z [N, p] with classes y [N] are from N(mu_y, I / precision), means [L, p].

    Cross-entropy alone does not pull z to its mean, so the paper's theorems hold for a trained network only as far as
    this fit is good: E||z - mu_y||^2 against p / precision, class means against mu, and the within-class covariance
    against I / precision. Computed in float64; classes without features are left out.

    >>> dist = MaxMahalanobisDistribution(num_classes=3, dim=2, C=4.0)
    >>> z, y = dist.sample_labeled((5000,), generator=torch.Generator().manual_seed(0))
    >>> fit = latent_fit(z, y, dist.means)
    >>> round(fit.squared_distance, 1), fit.squared_distance_expected
    (2.0, 2.0)
    >>> latent_fit(3 * z, y, dist.means).squared_distance > 30
    True
    """
    precision = check_positive("precision", precision)
    check_tensor("means", means)
    check_tensor("z", z)
    if means.dim() != 2 or not means.is_floating_point():
        raise ValueError(f"means must be floating [L, p], got {means.dtype} {list(means.shape)}")
    L, p = means.shape
    if z.dim() != 2 or z.shape[1] != p or not z.is_floating_point():
        raise ValueError(f"z must be floating [N, {p}], got {z.dtype} {list(z.shape)}")
    y = check_labels("y", y, L).to(z.device)
    if len(y) != len(z):
        raise ValueError(f"y must have shape [{len(z)}], one label for each row of z, got {list(y.shape)}")
    z, mu = z.detach().double(), means.detach().to(z.device).double()
    for name, values in (("z", z), ("means", mu)):
        if not bool(values.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or infinity in {list(values.shape)}")
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
