"""Arguments of the theory's functions, checked and as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmlda._utils.checks import check_priors, to_tensor


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


def check_means(mu: Tensor) -> Tensor:
    """Return means [L, p]; raise ValueError for another shape."""
    if mu.dim() != 2 or mu.shape[0] < 2 or mu.shape[1] < 1:
        raise ValueError(f"means must have shape [L, p] with L >= 2 and p >= 1, got {list(mu.shape)}")
    return mu


def check_range(name: str, value: float, dtype: torch.dtype) -> float:
    """Return a number > 0; raise ValueError if the dtype cannot hold it."""
    info = torch.finfo(dtype)
    if not info.tiny <= value <= info.max:
        raise ValueError(f"{name} must be from {info.tiny:.2g} to {info.max:.2g} in {dtype}, got {value!r}")
    return value


def broadcast_shape(*shapes: torch.Size) -> torch.Size | None:
    """The shape that these broadcast to; None if they do not."""
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None


def lift(broadcast: bool = False, **values: Any) -> tuple[list[Tensor], Callable[[Tensor], Any]]:
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


def mixture(means: Any, priors: Any, positive: bool = False) -> tuple[Tensor, Tensor, Callable[[Tensor], Any]]:
    """Means [L, p] and priors [L] as tensors, and `lift`'s function."""
    (mu,), back = lift(means=means)
    pi = check_priors(priors, len(check_means(mu)), positive=positive)
    return mu, pi.to(mu.device), back
