"""Checks of arguments and files with one error grammar: `name must be <expected>, got <value>`.

torch is imported where it is used: the command line checks its arguments without it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, device


class DamagedFile(ValueError):
    """A file that does not hold what it must."""


def invalid(name: str, expected: str, value: Any) -> ValueError:
    """The error for a bad argument, for the caller to raise.

    >>> invalid("C", "a finite number > 0", -1.0)
    ValueError('C must be a finite number > 0, got -1.0')
    """
    return ValueError(f"{name} must be {expected}, got {value!r}")


def damaged(file: object, expected: str, got: object) -> DamagedFile:
    """The error for a file or a part of one, for the caller to raise; `got` is in words.

    >>> damaged("run.json", "a JSON object", "a list")
    DamagedFile('run.json must be a JSON object, got a list')
    """
    return DamagedFile(f"{file} must be {expected}, got {got}")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise unless `value` is one of the allowed names."""
    names = list(allowed)
    if value not in names:
        raise invalid(name, f"one of {', '.join(names)}", value)


def check_count(name: str, value: Any, least: int) -> int:
    """An integer that is at least `least`, or a ValueError that names it."""
    try:
        count = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise invalid(name, f"an integer >= {least}", value)
    return count


def check_positive(name: str, value: Any) -> float:
    """A finite number above zero, or a ValueError that names it."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several numbers
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise invalid(name, "a finite number > 0", value)
    return number


def check_priors(priors: Any, num_classes: int, *, name: str = "priors", positive: bool = False) -> Tensor:
    """Class priors as a float64 tensor `[L]`: `None` is uniform; they must be >= 0 and sum to 1 (to 1e-6).

    With `positive`, a prior of 0 is rejected too (its logarithm is -inf).
    The result sums to 1 in float64, which removes the rounding of float32 priors.
    """
    import torch

    if priors is None:
        return torch.full((num_classes,), 1.0 / num_classes, dtype=torch.float64, device="cpu")
    pi = to_tensor(name, priors)
    if pi.shape != (num_classes,):
        raise ValueError(f"{name} must have shape [{num_classes}], one per class, got {list(pi.shape)}")
    lowest, total = pi.min().item(), pi.sum().item()
    if not (lowest > 0 if positive else lowest >= 0):
        raise ValueError(f"{name} must be {'> 0' if positive else '>= 0'}, got {lowest} for class {pi.argmin()}")
    if abs(total - 1.0) > 1e-6:
        raise ValueError(f"{name} must sum to 1, got a sum of {total}")
    return pi / total


def to_tensor(name: str, value: Any, device: device | None = None) -> Tensor:
    """`value` as a finite float64 tensor, still in the graph when it was a tensor."""
    import numpy as np
    import torch

    try:
        t = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value, dtype=np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, an array or a tensor of numbers, got {value!r}") from None
    if t.is_complex():
        raise ValueError(f"{name} must be real, got dtype {t.dtype}")
    t = t.to(device=device, dtype=torch.float64)
    if not torch.isfinite(t).all():
        raise ValueError(f"{name} must be finite, got {value!r}")
    return t
