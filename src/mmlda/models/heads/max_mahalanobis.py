"""The paper's head (Sec. 3.2): the posterior of the Max-Mahalanobis distribution, without learnable parameters.

||z||^2 is the same for every class, so it cancels in the posterior and the head is a fixed linear layer:

    log P(y = k | z) = z . (precision * mu_k) + log pi_k - log sum_i exp(z . (precision * mu_i) + log pi_i)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from mmlda._utils.checks import check_count, check_positive, check_priors
from mmlda.models import structured
from mmlda.models.heads.base import Head, Priors, autocast
from mmlda.theory.arguments import check_floating, check_range
from mmlda.theory.codes import BinaryCode
from mmlda.theory.latent import LatentFit, latent_fit
from mmlda.theory.means import pairwise_distances, separated_means, settled_code

PLAIN = 1 << 19  # largest number of entries in a matrix of means if a code can replace it
LARGEST = 1 << 26  # entries of a matrix of means whose dimension was not given


class MaxMahalanobisHead(Head):
    r"""The MM-LDA head (Eq. 5): logits_k = z . (precision * mu_k) + log pi_k, without learnable parameters.

    Means, log priors and precision are buffers: saved in `state_dict`, moved by `.to()`, and at least float32 whatever
    the network's dtype. Logits have the wider dtype of z and the means, also under autocast.

    Where `separated_means` are a code of many classes, no matrix of means is stored (`means` is None): logits come from
    fast transforms, and "ce", `predict` and `topk` go over the classes in blocks, without `[N, L]` logits.
    `class_means` returns the means of some classes. See `mmlda.models.structured`.

    Losses of features z with classes y:

    - "ce", Eq. 5's cross-entropy: -log P(y | z).
    - "soft", Appendix B.1's soft target: -sum_k P(k | mu_y) log P(k | z).
    - "centre", the centre loss: the objective that Appendix B.1 truncates, which does pull z to mu_y:
      -log P(z, y) = precision / 2 ||z - mu_y||^2 - log pi_y + p / 2 log(2 pi / precision).

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    dim
        Dimension p of z.
    C
        Squared norm of the means, > 0.
    priors
        Class priors `[L]` (default: uniform). A class with prior 0 has logit -inf and is never predicted.
    precision
        Inverse variance of each class. 1 (default) is the paper's Eq. 5; 2 is Appendix B.1, whose exp(2 mu.mu) belongs
        to a covariance of I / 2.
    means
        Directions `[L, p]` of the means, scaled to squared norm C (default: Algorithm 1's for L <= p + 1,
        `separated_means` otherwise).

    Raises
    ------
    ValueError
        If an argument is out of range, or the dtype cannot hold the logits.

    Examples
    --------
    >>> head = MaxMahalanobisHead(num_classes=10, dim=64, C=100.0)
    >>> z = head.means[:3]  # features exactly on their means
    >>> logits = head(z)
    >>> logits.shape, head.predict(z).tolist()
    (torch.Size([3, 10]), [0, 1, 2])
    >>> round((logits[0, 0] - logits[0, 1]).item(), 2)  # the gap is precision * C * L / (L - 1)
    111.11
    >>> y = torch.tensor([0, 1, 2])
    >>> head.loss(z, y).item(), head.loss(z, y, "centre", reduction="none").shape
    (0.0, torch.Size([3]))
    """

    losses = ("ce", "soft", "centre")
    means: Tensor  # None if the means are those of a code
    signs: Tensor  # int8 [bases, size]: the code; None where there are means
    scale: Tensor  # sqrt(C), beside the signs
    core: Tensor
    precision: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        C: float = 100.0,
        priors: Tensor | Sequence[float] | None = None,
        precision: float = 1.0,
        means: Tensor | None = None,
    ):
        super().__init__()
        self.num_classes, self.dim = check_count("num_classes", num_classes, 2), check_count("dim", dim, 1)
        self.C = check_positive("C", C)
        precision = check_positive("precision", precision)
        log_priors = check_priors(priors, self.num_classes).detach().log()
        mu = None if means is None else self._scaled(means)
        code = settled_code(self.num_classes, self.dim) if mu is None else None
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        check_range("precision", precision, dtype)
        check_range("C", self.C, dtype)
        check_range("precision * C", precision * self.C, dtype)  # the logit of a mean at itself
        device = torch.get_default_device() if means is None else means.device
        for name in ("means", "signs", "scale"):
            self.register_buffer(name, None)
        self.register_buffer("core", None, persistent=False)
        if isinstance(code, BinaryCode) and self.num_classes * self.dim > PLAIN:
            scale = torch.tensor(math.sqrt(self.C), dtype=dtype, device=device)
            self._store_code(torch.from_numpy(code.signs()).to(device), scale)
        else:
            mu = separated_means(self.num_classes, self.dim, C=self.C) if mu is None else mu
            self.means = mu.to(device, dtype)  # [L, p]
        self.register_buffer("log_priors", log_priors.to(device, dtype))  # [L]
        self.register_buffer("precision", torch.tensor(precision, dtype=dtype, device=device))
        self._put_none_last()

    def extra_repr(self) -> str:
        """Describe the settings."""
        precision = "" if self.precision.is_meta else f", precision={float(self.precision):g}"
        return f"num_classes={self.num_classes}, dim={self.dim}, C={self.C:g}{precision}"

    def forward(self, z: Tensor) -> Tensor:
        """Compute logits z . (precision * mu_k) + log pi_k.

        Parameters
        ----------
        z
            Features `[N, p]`.

        Returns
        -------
        Tensor
            Logits `[N, L]`, float32 at least.
        """
        self._check_features(z)
        if autocast(z):
            with torch.autocast(z.device.type, enabled=False):
                return self._logits(z)
        return self._logits(z)

    def _logits(self, z: Tensor) -> Tensor:
        if self.structured:
            return structured.logits(*self._coded(z))
        # Recomputed on every call: it is cheap next to the matmul, and a cached product would be stale after loading a
        # state_dict. DDP may also rewrite the buffers between forward and backward.
        weight, bias = self.means * self.precision, self.log_priors
        if z.dtype != weight.dtype:
            dtype = torch.promote_types(torch.promote_types(z.dtype, weight.dtype), torch.float32)
            z, weight, bias = z.to(dtype), weight.to(dtype), bias.to(dtype)
        return F.linear(z, weight, bias)  # [N, L]

    @property
    def structured(self) -> bool:
        """Whether the means are those of a code; `means` is then None."""
        return self.means is None

    def class_means(self, classes: Tensor) -> Tensor:
        """Means of some classes.

        Parameters
        ----------
        classes
            Classes `[n]`, int64.

        Returns
        -------
        Tensor
            Means `[n, p]`.

        Raises
        ------
        ValueError
            If `classes` are not int64 `[n]` from 0 to L - 1. Values are checked on the CPU only, where that needs no
            synchronisation; elsewhere, a head without a matrix returns NaN for what is not a class.

        Examples
        --------
        >>> head = MaxMahalanobisHead(num_classes=1_000_000, dim=1024)
        >>> head.means is None, head.predict(head.class_means(torch.tensor([7, 999_999]))).tolist()
        (True, [7, 999999])
        """
        self._check_labels("classes", classes)
        if not self.structured:
            return self.means.index_select(0, classes)
        inside = classes.clamp(0, self.num_classes - 1)
        mu = structured.rows(inside, self.signs, self._unpunctured(self.scale))
        mu = F.pad(mu, (0, self.dim - mu.shape[1]))  # or cut, if the code is punctured
        return torch.where((classes == inside)[:, None], mu, math.nan)

    def loss_and_hits(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy `[N]`, and whether y is the predicted class `[N]`, in one pass over the classes.

        Where several classes have the largest logit, each counts as predicted, unless all have: then class 0 does. The
        pass has no forward-mode derivative and no rule for `torch.func`; there, the logits of all classes are made.
        """
        self._check_features(z)
        self._check_labels("y", y, len(z))
        if not self.structured or _transformed(z):
            logits = self(z)
            return F.cross_entropy(logits, y, reduction="none"), logits.detach().argmax(1) == y
        with torch.autocast(z.device.type, enabled=False) if autocast(z) else nullcontext():
            x, *code = self._coded(z)
            losses, _, hits = structured.cross_entropy(x, y, *code, torch.is_grad_enabled() and x.requires_grad)
        return losses, hits

    def _ce_loss(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss_and_hits(z, y)[0]

    def predict(self, z: Tensor) -> Tensor:
        """Predict the most probable class.

        Parameters
        ----------
        z
            Features `[N, p]`.

        Returns
        -------
        Tensor
            Classes `[N]`, int64.
        """
        return self.topk(z, 1)[1][:, 0] if self.structured else super().predict(z)

    def _topk(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if not self.structured:
            return super()._topk(z, k)
        self._check_features(z)
        with torch.autocast(z.device.type, enabled=False) if autocast(z) else nullcontext():
            return structured.topk(*self._coded(z), k=k)

    def _coded(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `structured`'s functions. The products are copies, which DDP may not rewrite."""
        dtype = torch.promote_types(torch.promote_types(z.dtype, self.scale.dtype), torch.float32)
        weight = (self._unpunctured(self.scale) * self.precision).to(dtype)
        z = F.pad(z.to(dtype), (0, self.signs.shape[1] - self.dim))  # or cut, if dimensions are left over
        return z, self.signs, self.core, weight, self.log_priors.to(dtype, copy=True)

    def _unpunctured(self, scale: Tensor) -> Tensor:
        """The norm of the code's means before coordinates were dropped."""
        return scale * math.sqrt(max(1.0, self.signs.shape[1] / self.dim))

    def _soft_loss(self, z: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self(self.class_means(y)).softmax(1)  # [N, L], P(k | mu_y)
        log_posterior = self(z).log_softmax(1)
        # where: a class with prior 0 has log P = -inf, and 0 * -inf is not 0; but NaN, where y is no class, stays
        return -torch.where(target != 0, target * log_posterior, 0.0).sum(1)  # [N]

    def _centre_loss(self, z: Tensor, y: Tensor) -> Tensor:
        mu = self.class_means(y)  # [N, p]
        squared = (z.to(torch.promote_types(z.dtype, mu.dtype)) - mu).square().sum(1)  # [N]
        normaliser = self.dim / 2 * (2 * math.pi / self.precision).log()
        return self.precision / 2 * squared - self.log_priors.index_select(0, y) + normaliser

    def distances(self, z: Tensor) -> Tensor:
        """Mahalanobis distances sqrt(precision) ||z - mu_k||, differentiable once.

        Parameters
        ----------
        z
            Features `[N, p]`.

        Returns
        -------
        Tensor
            Distances `[N, L]`.
        """
        self._check_features(z)
        dtype = torch.promote_types(z.dtype, self.precision.dtype)
        if self.structured:
            classes = torch.arange(self.num_classes, device=z.device).split(structured.BLOCK)
            found = [pairwise_distances(z.to(dtype), self.class_means(part).to(dtype)) for part in classes]
            return torch.cat(found, 1) * self.precision.sqrt()
        return pairwise_distances(z.to(dtype), self.means.to(dtype)) * self.precision.sqrt()

    def latent_fit(self, z: Tensor, y: Tensor) -> LatentFit:
        """Measure how far features are from N(mu_y, I / precision); see `mmlda.theory.latent_fit`.

        Parameters
        ----------
        z
            Features `[N, p]`.
        y
            Classes `[N]`, int64.

        Returns
        -------
        LatentFit
            Each measurement with its expected value.
        """
        if self.structured:
            self._check_labels("y", y, len(z))
            classes, y = y.unique(return_inverse=True)
            return latent_fit(z, y, self.class_means(classes), float(self.precision))
        return latent_fit(z, y, self.means, float(self.precision))

    def with_priors(
        self, priors: Priors, labels: Tensor | Sequence[int] | None = None, *, old: Priors = None
    ) -> MaxMahalanobisHead:
        """A new head with other priors that shares these means: train with one prior, test with another.

        Parameters
        ----------
        priors
            Class priors `[L]`, None for uniform, or "empirical" for the shares of the classes among `labels`.
        labels
            Classes `[N]`, for "empirical" only.
        old
            Class shares `[L]`, > 0, of the data that the network was trained on, if they were not the head's priors
            then: the features have learned them. The new head's priors contain this correction, which its own
            `with_priors` would replace.

        Returns
        -------
        MaxMahalanobisHead
            The new head.

        Examples
        --------
        >>> head = MaxMahalanobisHead(num_classes=3, dim=2, C=1.0)
        >>> head.with_priors("empirical", labels=torch.tensor([0, 0, 1, 2])).priors.tolist()
        [0.5, 0.25, 0.25]
        """
        shared = (self.means, self.signs, self.scale, self.core, self.precision)
        head = copy.deepcopy(self, {id(buffer): buffer for buffer in shared})
        head.log_priors = self._resolve(priors, labels, old)
        return head

    def _scaled(self, means: Tensor) -> Tensor:
        check_floating("means", means, self.num_classes, self.dim)
        norm = means.detach().double().norm(dim=1, keepdim=True)  # [L, 1]
        bad = norm[~((norm > 0) & (norm < math.inf))]
        if bad.numel():
            raise ValueError(f"means must have rows of finite norm > 0, got {bad[0].item():g}")
        return means.detach().double() * (math.sqrt(self.C) / norm)

    def _put_none_last(self) -> None:
        """Order the buffers: torch.export finds those behind a None under wrong names."""
        ordered = sorted(self._buffers.items(), key=lambda item: item[1] is None)
        self._buffers.clear()
        self._buffers.update(ordered)

    def _store_code(self, signs: Tensor, scale: Tensor) -> None:
        self.means, self.signs, self.scale = None, signs, scale  # type: ignore[assignment]
        self.core = structured.core_matrix(signs.shape[1]).to(signs.device)

    def _widened(self, name: str, old: Tensor) -> Tensor:
        if name == "scale":
            exact = torch.tensor(math.sqrt(self.C), dtype=torch.float64, device=old.device)
            return exact if old.is_meta or torch.equal(exact.to(old.dtype), old) else old
        if name == "means" and self.num_classes <= self.dim + 1 and not old.is_meta:
            exact = separated_means(self.num_classes, self.dim, C=self.C).to(old.device)
            if torch.equal(exact.to(old.dtype), old):
                return exact
        return old

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        # A file may hold a matrix where this head has a code (made before there were codes), or the reverse.
        here = self.precision.device
        if self.structured and f"{prefix}means" in state_dict:
            self.means = torch.empty(self.num_classes, self.dim, dtype=self.scale.dtype, device=here)
            self.signs = self.scale = self.core = None  # type: ignore[assignment]
        elif not self.structured and f"{prefix}signs" in state_dict:
            self._store_code(torch.empty_like(state_dict[f"{prefix}signs"], device=here), self.precision.clone())
        self._put_none_last()
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        for name, buffer in self._buffers.items():  # load_state_dict(assign=True) takes the dtype of the file
            if buffer is not None and buffer.is_floating_point() and torch.finfo(buffer.dtype).bits < 32:
                self._buffers[name] = buffer.float()
        if self.precision.is_meta:
            return
        if self.structured:
            C = self.scale.double().square().item()
            self.core = structured.core_matrix(self.signs.shape[1]).to(self.signs.device)
        else:
            C = self.means.double().square().sum(1).mean().item()
        if not math.isfinite(C) or not 0 < self.precision < math.inf:
            errors.append(f"{prefix}means and {prefix}precision must be finite, and {prefix}precision > 0")
        elif abs(C - self.C) > 1e-5 * self.C:  # another C was loaded
            self.C = float(f"{C:.6g}")  # float32 means carry no more digits


def simplex_dim(num_classes: int) -> int:
    """Dimension of a simplex of means, the default where nothing else decides; a ValueError if it is impractical."""
    if num_classes * (num_classes - 1) > LARGEST:
        raise ValueError(f"dim must be given for {num_classes} classes, such as 512, got None")
    return num_classes - 1


def _transformed(z: Tensor) -> bool:
    """Whether z is differentiated in forward mode, or a transform of `torch.func` is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad.unpack_dual(z).tangent is not None
