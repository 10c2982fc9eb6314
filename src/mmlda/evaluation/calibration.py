"""How well confidence matches accuracy: the calibration error, and the temperature that reduces it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean over images of their bin's `|accuracy - confidence|`, in bins of confidence.

    Examples
    --------
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

    That is convex in 1 / T, so the slope is 0 there; the search is between e^-12 and e^12. Fit it on other images than
    those you evaluate on. Raises a ValueError if there is no best temperature, as when every prediction is right: the
    likelihood then grows as T falls to 0.

    Examples
    --------
    >>> z = torch.tensor([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    >>> round(fit_temperature(z, torch.tensor([0, 0, 0, 1])), 3)  # right 3 times of 4: a gap of log 3
    8.192
    """
    from scipy.optimize import brentq

    z = logits.double().clamp_min(-1e30)  # a class with prior 0 has -inf
    own = z.gather(1, labels[:, None])

    def slope(log_t: float) -> float:
        """The derivative of the negative log-likelihood in 1 / T, which grows with 1 / T."""
        return float(((z / math.exp(log_t)).softmax(1) * (z - own)).sum(1).mean())

    if slope(-12.0) <= 0 or slope(12.0) >= 0:
        where = "no better than chance" if slope(12.0) >= 0 else "that are all right"
        raise ValueError(f"logits must have a best temperature, got predictions {where}")
    return math.exp(brentq(slope, -12.0, 12.0, xtol=1e-12))
