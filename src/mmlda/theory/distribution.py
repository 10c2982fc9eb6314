"""The Max-Mahalanobis distribution (Sec. 3.1), and how far given features are from it::

    P(y = k) = pi_k,    P(z | y = k) = N(z; mu_k, I / precision)

with the means of Algorithm 1 (or the best known ones where there are more than p + 1 classes). precision = 1 is the
paper's Eq. 5; precision = 2 is the covariance I / 2 that Appendix B.1 computes with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from mmlda._utils.checks import check_count, check_positive, check_priors, invalid, to_tensor
from mmlda.theory.means import broadcast_shape, check_range, pairwise_distances, separated_means


def described(value: Any) -> str:
    """Dtype and shape of a tensor, or the type of another value, for error messages."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_floating(name: str, value: Any, *shape: int | str) -> None:
    """Raise ValueError unless `value` is a floating tensor of this shape; strings stand for any size."""
    right = isinstance(value, Tensor) and value.is_floating_point() and value.dim() == len(shape)
    if not right or any(size != wanted for size, wanted in zip(value.shape, shape) if isinstance(wanted, int)):
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} must be a floating tensor [{wanted}], got {described(value)}")


def check_labels(name: str, labels: Any, num_classes: int) -> Tensor:
    """Return labels [N] as int64; raise ValueError unless they are in 0 .. L - 1. Synchronises with a GPU."""
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be int64 [N], got {labels!r}") from None
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{name} must be int64 [N], got {described(labels)}")
    labels = labels.long()
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if outside.numel():
        raise ValueError(f"{name} must be classes from 0 to {num_classes - 1}, got {outside[0].item()}")
    return labels


def empirical_priors(labels: Tensor | Sequence[int], num_classes: int) -> Tensor:
    """Share of each class among the labels.

    Parameters
    ----------
    labels
        Classes `[N]`, integers in 0 .. L - 1; at least one.
    num_classes
        Number of classes L, >= 2.

    Returns
    -------
    Tensor
        Shares `[L]` in float64; 0 for a class without labels.

    Raises
    ------
    ValueError
        If there are no labels, or one of them is not a class.

    Examples
    --------
    >>> empirical_priors([0, 0, 2, 1], num_classes=3).tolist()
    [0.5, 0.25, 0.25]
    """
    count = check_count("num_classes", num_classes, 2)
    if not len(labels):
        raise ValueError("labels must have at least one label, got none")
    labels = check_labels("labels", labels, count)
    return torch.bincount(labels, minlength=num_classes).double() / labels.numel()


class MaxMahalanobisDistribution(Distribution):
    r"""The mixture P(z) = sum_k pi_k N(z; mu_k, I / precision) around Max-Mahalanobis means, with its labels.

    Events have shape `[p]`. `C`, `precision` and `priors` broadcast to the batch shape, so one object can hold a grid
    of distributions. Tensors determine dtype and device, numbers take torch's defaults; float32 at least. A mixture has
    no reparameterised sample, so there is no `rsample`.

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    dim
        Dimension p of z.
    C
        Squared norm of the means, > 0; a number or a tensor of any shape.
    priors
        Class priors `[..., L]` (default: uniform). A class with prior 0 is never drawn and has posterior 0.
    precision
        Inverse variance of each class, > 0; a number or a tensor of any shape.
    validate_args
        Whether to check the values of tensors (default: torch's setting, normally True).

    Raises
    ------
    ValueError
        If a parameter is out of range, or if the batch shapes do not broadcast.

    Examples
    --------
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

    arg_constraints = dict.fromkeys(("C", "precision"), constraints.positive) | {"priors": constraints.simplex}
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
        dtype = torch.float32  # at least: half precision is too coarse for squared distances at C = 100
        for other in [a.dtype for a in given if a.is_floating_point()] or [torch.get_default_dtype()]:
            dtype = torch.promote_types(dtype, other)
        device = given[0].device if given else torch.get_default_device()
        like: dict[str, Any] = {"dtype": dtype, "device": device}

        C, precision = _positive("C", C, validate, like), _positive("precision", precision, validate, like)
        pi = _batched_priors(priors, num_classes, validate).to(**like)
        if (batch := broadcast_shape(C.shape, precision.shape, pi.shape[:-1])) is None:
            shapes = f"{list(C.shape)}, {list(precision.shape)} and {list(pi.shape[:-1])}"
            raise ValueError(f"C, precision and priors must have batch shapes that broadcast, got {shapes}")
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
        """Expand the batch shape, as `torch.distributions.Distribution.expand` does.

        Parameters
        ----------
        batch_shape
            The new batch shape.

        Returns
        -------
        MaxMahalanobisDistribution
            The expanded distribution.
        """
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
        """Mean sum_k pi_k mu_k, `[..., p]`; zero for equal priors and at most 2p classes."""
        return (self.priors.unsqueeze(-1) * self.means).sum(-2)

    @property
    def variance(self) -> Tensor:
        """Variance of each coordinate of z, `[..., p]`."""
        return self.covariance_matrix.diagonal(dim1=-2, dim2=-1)

    @property
    def covariance_matrix(self) -> Tensor:
        """Covariance I / precision + sum_k pi_k (mu_k - mean)(mu_k - mean)^T, `[..., p, p]`."""
        spread = (self.means - self.mean.unsqueeze(-2)) * self.priors.sqrt().unsqueeze(-1)  # [..., L, p]
        eye = torch.eye(self.dim, dtype=spread.dtype, device=spread.device)
        return eye / self.precision[..., None, None] + spread.mT @ spread

    def sample_labeled(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw features with their classes.

        Parameters
        ----------
        sample_shape
            Shape of the sample (default: one draw).
        generator
            Random generator on the distribution's device (default: torch's global one).

        Returns
        -------
        tuple of Tensor
            z `[*sample_shape, *batch_shape, p]` and y `[*sample_shape, *batch_shape]`, int64.
        """
        shape = torch.Size(sample_shape) + self.batch_shape
        draws = math.prod(torch.Size(sample_shape))
        L, p, device = self.num_classes, self.dim, self.means.device
        with torch.no_grad():
            pi = self.priors.reshape(-1, L)  # [B, L]
            # multinomial draws at least one
            y = torch.multinomial(pi, max(draws, 1), replacement=True, generator=generator)[:, :draws]  # [B, n]
            row = torch.arange(len(pi), device=device).unsqueeze(1)
            mu = self.means.reshape(-1, L, p)[row, y]  # [B, n, p]
            noise = torch.randn(mu.shape, dtype=mu.dtype, device=device, generator=generator)
            z = mu + noise / self.precision.reshape(-1, 1, 1).sqrt()
            return z.transpose(0, 1).reshape((*shape, p)), y.T.reshape(shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw features.

        Parameters
        ----------
        sample_shape
            Shape of the sample (default: one draw).

        Returns
        -------
        Tensor
            z `[*sample_shape, *batch_shape, p]`.
        """
        return self.sample_labeled(sample_shape)[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density log sum_k pi_k N(z; mu_k, I / precision).

        Parameters
        ----------
        value
            Features `[..., p]`.

        Returns
        -------
        Tensor
            Log densities `[...]`.
        """
        return self._log_joint(value).logsumexp(-1)

    def posterior(self, value: Tensor) -> Tensor:
        """Class probabilities P(y = k | z) (Eq. 5).

        Parameters
        ----------
        value
            Features `[..., p]`.

        Returns
        -------
        Tensor
            Probabilities `[..., L]`.
        """
        return self._log_joint(value).softmax(-1)

    def _log_joint(self, value: Tensor) -> Tensor:
        """log pi_k + log N(z; mu_k, I / precision): [..., p] -> [..., L]."""
        L, p, batch = self.num_classes, self.dim, self.batch_shape
        floating = isinstance(value, Tensor) and value.is_floating_point()
        shape = broadcast_shape(value.shape[:-1], batch) if floating else None
        if shape is None or value.shape[-1:] != (p,):
            raise ValueError(f"value must be a floating tensor [..., {str([*batch, p])[1:]}, got {described(value)}")
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
    """Priors [..., L] in float64 whose rows sum to 1; with `check_values`, raise ValueError for a wrong row."""
    if priors is None:
        return check_priors(None, num_classes)
    pi = to_tensor("priors", priors)
    if pi.dim() == 0 or pi.shape[-1] != num_classes:
        raise ValueError(f"priors must have shape [..., {num_classes}], got {list(pi.shape)}")
    if check_values:
        rows = pi.detach().reshape(-1, num_classes)
        wrong = (rows < 0).any(1) | ((rows.sum(1) - 1).abs() > 1e-6)
        for row in rows[wrong]:
            check_priors(row, num_classes)  # raises
    return pi / pi.sum(-1, keepdim=True)  # removes rounding errors


def _positive(name: str, value: Any, check_values: bool, like: dict[str, Any]) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(check_range(name, check_positive(name, value), like["dtype"]), **like)
    if check_values and not bool((to_tensor(name, value) > 0).all()):
        raise invalid(name, "> 0", value)
    return value.to(**like)


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
