"""The Max-Mahalanobis distribution (Sec. 3.1)::

    P(y = k) = pi_k,    P(z | y = k) = N(z; mu_k, I / precision)

with the means of Algorithm 1 (or the best known ones where there are more than p + 1 classes). precision = 1 is the
paper's Eq. 5; precision = 2 is the covariance I / 2 that Appendix B.1 computes with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from mmlda._utils.checks import check_count, check_positive, check_priors, invalid, to_tensor
from mmlda.theory.arguments import broadcast_shape, check_labels, check_range, described
from mmlda.theory.means import pairwise_distances, separated_means


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
