"""How much of a difference between logits may be rounding, on this device and with its settings."""

from __future__ import annotations

import torch
from torch import Tensor

from mmlda.attacks.surface import Surface

__all__ = ["rounding_of", "tf32_allowed"]

_ROUNDINGS = 8  # a margin of fewer roundings than this may be the other way round in another batch
_TF32 = 2.0**-9  # the share of the logits' spread that may be rounding where products have TF32's 10 bits


def rounding_of(z: Tensor, x: Tensor, surface: Surface) -> Tensor:
    """How much of a gap between the first two of logits `z` may be rounding, [N]: of the logits, and of TF32 products.

    The first is a share of the largest logit, the second of its distance from the middle one: a constant that is added
    after the products is not rounded to TF32, and a class that is masked (-inf, -1e9) says nothing of the others. Of
    three classes and fewer the middle one may be that of the gap, so there the second is a share of the largest too.
    """
    L, precision = z.shape[1], surface.precision or z.dtype
    sorted_ = z.topk(L // 2 + 1, dim=1).values
    top = sorted_[:, 0].abs()
    spread = top if L < 4 else sorted_[:, 0] - sorted_[:, -1]
    spread = torch.where(spread.isfinite(), spread, top)  # half of the classes are masked
    fine = torch.finfo(precision).eps * (_ROUNDINGS if precision.itemsize > 2 else 1)  # in half one is much already
    return torch.maximum(top, spread) * fine + spread * _coarse(x, precision)


def _coarse(x: Tensor, precision: torch.dtype) -> float:
    """The share of the logits' spread that the device may round away beyond the logits' own precision."""
    return _TF32 if x.is_cuda and precision == torch.float32 and tf32_allowed() else 0.0


def tf32_allowed() -> bool:
    """Whether convolutions of float32 on CUDA may use TF32."""
    # The same as `_tf32_allowed` of models/convolutions.py: neither package may import the other.
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # torch's newer setting is in use, and the older one can't be read beside it
        allowed = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return allowed and torch.backends.cudnn.enabled
