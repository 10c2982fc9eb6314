"""Argument checks with one error grammar, `name must be <expected>, got <value>`, and warnings at the caller's line."""

from __future__ import annotations

import math
import numbers
import operator
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class AttackWarning(UserWarning):
    """The accuracy under an attack may not measure robustness: the attack was blind, or the model is random."""


class NoGradient(ValueError):
    """The model's logits have no gradient in its input."""


def invalid(name: str, expected: str, value: Any) -> ValueError:
    """The error for a bad argument, for the caller to raise. A tensor is described, not printed.

    >>> invalid("eps", "a number >= 0", -0.1)
    ValueError('eps must be a number >= 0, got -0.1')
    >>> invalid("y", "an integer tensor [2]", torch.zeros(3))
    ValueError('y must be an integer tensor [2], got a float32 tensor [3]')
    """
    if isinstance(value, Tensor):
        return ValueError(f"{name} must be {expected}, got {described(value)}")
    text = repr(value)
    return ValueError(f"{name} must be {expected}, got {text if len(text) <= 120 else text[:117] + '...'}")


def described(value: object) -> str:
    """A value in a few words, for error messages.

    >>> described(torch.zeros(2, 3).long()), described((1, 2))
    ('an int64 tensor [2, 3]', 'a tuple')
    """
    noun = type(value).__name__ + (" (return its .logits)" if hasattr(value, "logits") else "")
    if isinstance(value, Tensor):
        sparse = "" if value.layout == torch.strided else "sparse "
        noun = f"{sparse}{str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
    return f"{'an' if noun[0] in 'aeioAEIO' else 'a'} {noun}"


def check_count(name: str, value: Any, least: float = 1) -> None:
    """Raise unless `value` is an integer that is at least `least`."""
    try:
        enough = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        enough = False
    if not enough:
        raise invalid(name, "an integer" if least == -math.inf else f"an integer >= {least}", value)


def check_number(name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> None:
    """Raise unless `value` is a number that float32 can hold and that `fits`."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not abs(value) <= torch.finfo(torch.float32).max or not fits(value):
        raise invalid(name, expected, value)


def check_choice(name: str, value: Any, allowed: Sequence[str | None]) -> None:
    """Raise unless `value` is one of the allowed names, or None where that is allowed."""
    if not any(value is None if one is None else isinstance(value, str) and value == one for one in allowed):
        raise invalid(name, f"one of {', '.join(map(repr, allowed))}", value)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called the attack, so that Python shows the same warning once per such line."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("mmlda", "torch", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
