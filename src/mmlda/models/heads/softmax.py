"""Softmax regression, the paper's baseline: a learned linear layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda._utils.checks import check_count, check_priors
from mmlda.models.heads.base import Head, Priors, autocast


class SoftmaxHead(Head, nn.Linear):
    """Softmax regression, the paper's baseline: logits = W z + b, both learned. Used like `MaxMahalanobisHead`.

    The matmul runs in the autocast dtype as in any linear layer; the logits are float32 at least. The only loss is
    "ce". There are no means, so there are no distances.

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    dim
        Dimension p of z.
    priors
        Class shares `[L]` of the training data, > 0 (default: equal). Training ignores them, since b learns them;
        `with_priors` removes them.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> head = SoftmaxHead(num_classes=10, dim=64)
    >>> z = torch.randn(3, 64)
    >>> head(z).shape, head.loss(z, torch.tensor([0, 1, 2])).shape
    (torch.Size([3, 10]), torch.Size([]))
    """

    losses = ("ce",)

    def __init__(self, num_classes: int, dim: int, *, priors: Tensor | Sequence[float] | None = None):
        num_classes, dim = check_count("num_classes", num_classes, 2), check_count("dim", dim, 1)
        log_priors = check_priors(priors, num_classes, positive=True).detach().log()
        nn.Linear.__init__(self, dim, num_classes)
        self.num_classes, self.dim = num_classes, dim
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self.register_buffer("log_priors", log_priors.to(self.weight.device, dtype))  # [L]

    def forward(self, z: Tensor) -> Tensor:
        """Compute logits W z + b.

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
        weight, bias = self.weight, self.bias
        if z.dtype != weight.dtype and not autocast(z):
            dtype = torch.promote_types(z.dtype, weight.dtype)
            logits = F.linear(z.to(dtype), weight.to(dtype), bias.to(dtype))
        else:
            logits = F.linear(z, weight, bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def with_priors(self, priors: Priors, labels: Tensor | Sequence[int] | None = None) -> SoftmaxHead:
        """A new head for other class shares, with the same (shared) weight and the bias b_k + log(new_k / old_k).

        This is Bayes' theorem for an unchanged P(z | y). The old shares are the constructor's `priors`, so pass them
        if the training data is not balanced.

        Parameters
        ----------
        priors
            Class shares `[L]`, > 0; None for equal ones; or "empirical" for the shares among `labels`.
        labels
            Classes `[N]`, for "empirical" only.

        Returns
        -------
        SoftmaxHead
            The new head.

        Raises
        ------
        ValueError
            If a prior is 0.

        Examples
        --------
        >>> head = SoftmaxHead(num_classes=2, dim=3).with_priors([0.25, 0.75])
        >>> [round(prior, 2) for prior in head.priors.tolist()]
        [0.25, 0.75]
        """
        log_priors = self._resolve(priors, labels)
        if not bool(log_priors.isfinite().all()):
            raise ValueError("priors must be > 0 for a softmax head, which divides by them, got 0")
        head = copy.deepcopy(self, {id(self.weight): self.weight})
        shift = (log_priors - self.log_priors).to(self.bias.dtype)
        head.bias = nn.Parameter(self.bias.detach() + shift, requires_grad=self.bias.requires_grad)
        head.log_priors = log_priors
        return head
