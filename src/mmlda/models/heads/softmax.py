"""Softmax regression, the paper's baseline: a learned linear layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda._utils.checks import check_count, check_priors
from mmlda.models.heads.base import Head, Priors, autocast, true


class SoftmaxHead(Head, nn.Linear):
    """Softmax regression, the paper's baseline: logits_k = w_k . z + b_k + log pi_k, with W and b learned.

    Used like `MaxMahalanobisHead`. Training with priors is logit adjustment (Menon et al., 2021). Uniform ones are left
    out of the logits. The matmul runs in the autocast dtype as in any linear layer; the logits are float32 at least.
    The only loss is "ce". There are no means, so there are no distances.

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    dim
        Dimension p of z.
    priors
        Class priors `[L]` (default: uniform). A class with prior 0 has logit -inf and is never predicted.

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
    offset: Tensor | None  # log priors less the largest; None if they are uniform

    def __init__(self, num_classes: int, dim: int, *, priors: Tensor | Sequence[float] | None = None):
        num_classes, dim = check_count("num_classes", num_classes, 2), check_count("dim", dim, 1)
        log_priors = check_priors(priors, num_classes).detach().log()
        nn.Linear.__init__(self, dim, num_classes)
        self.num_classes, self.dim = num_classes, dim
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self.register_buffer("log_priors", log_priors.to(self.weight.device, dtype))  # [L]
        self.register_buffer("offset", None, persistent=False)
        self._set_offset()

    def _set_offset(self) -> None:
        uniform = self.log_priors.is_meta or true((self.log_priors == self.log_priors[0]).all())
        self.offset = None if uniform else self.log_priors - self.log_priors.amax()

    def forward(self, z: Tensor) -> Tensor:
        """Compute logits W z + b + log priors.

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
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.offset is None else logits + self.offset

    def with_priors(
        self, priors: Priors, labels: Tensor | Sequence[int] | None = None, *, old: Priors = None
    ) -> SoftmaxHead:
        """A new head with other priors that shares weight and bias: train with one prior, test with another.

        This is Bayes' theorem for an unchanged P(z | y).

        Parameters
        ----------
        priors
            Class priors `[L]`, None for uniform, or "empirical" for the shares of the classes among `labels`.
        labels
            Classes `[N]`, for "empirical" only.
        old
            Class shares `[L]`, > 0, of the data that the network was trained on, if they were not the head's priors
            then: weight and bias have learned them. The new head's priors contain this correction, which its own
            `with_priors` would replace.

        Returns
        -------
        SoftmaxHead
            The new head.

        Examples
        --------
        >>> head = SoftmaxHead(num_classes=2, dim=3).with_priors([0.25, 0.75])
        >>> [round(prior, 2) for prior in head.priors.tolist()]
        [0.25, 0.75]
        """
        head = copy.deepcopy(self, {id(self.weight): self.weight, id(self.bias): self.bias})
        head.log_priors = self._resolve(priors, labels, old)
        head._set_offset()
        return head

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *others)
        if torch.finfo(self.log_priors.dtype).bits < 32:  # load_state_dict(assign=True) takes the dtype of the file
            self.log_priors = self.log_priors.float()
        self._set_offset()
