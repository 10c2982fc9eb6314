"""How well confidence matches accuracy: the calibration error, and the temperature that reduces it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["calibration_error", "fit_temperature"]


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean over images of their bin's |accuracy - confidence|, in bins of confidence.

    >>> p = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.75, 0.25], [0.75, 0.25]])
    >>> calibration_error(p, torch.tensor([0, 0, 0, 1])), calibration_error(p, torch.tensor([1, 1, 1, 1]))
    (0.0, 0.75)
    """
    confidence, guess = probabilities.double().max(1)
    right = (guess == labels).double()
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1  # (0, 1/bins], (1/bins, 2/bins], ...
    gaps = torch.bincount(which, right - confidence, minlength=bins)  # a bin's images times its gap
    return float(gaps.abs().sum() / len(labels))


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature T > 0 at which logits / T have the lowest negative log-likelihood.

    That is convex in 1 / T, so a golden-section search over log T finds it, between e^-12 and e^12. Fit it on other
    images than those you evaluate on. Raises a ValueError if there is no best temperature, as when every prediction is
    right: the likelihood then grows as T falls to 0.

    >>> z = torch.tensor([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    >>> round(fit_temperature(z, torch.tensor([0, 0, 0, 1])), 3)  # right 3 times of 4: a gap of log 3
    8.192
    """
    z = logits.double()

    def loss(log_t: float) -> float:
        return float(F.cross_entropy(z / math.exp(log_t), labels))

    ratio = (math.sqrt(5) - 1) / 2
    low, high = -12.0, 12.0
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = loss(a), loss(b)
    for _ in range(60):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = loss(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = loss(b)
    found = (low + high) / 2
    if not -11.9 < found < 11.9:
        where = "that are all right" if found < 0 else "no better than chance"
        raise ValueError(f"logits must have a best temperature, got predictions {where}")
    return math.exp(found)
