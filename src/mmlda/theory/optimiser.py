"""The optimiser: directions with a small largest cosine where no construction is known, by a soft maximum."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_SHARP = 1024.0
_WORK = 5e9  # per second; counted and not timed, so that a seed gives the same means on every machine


def optimise(L: int, p: int, seed: int, bound: float, seconds: float = 60.0, report: Any = None) -> np.ndarray:
    """Unit vectors `[L, p]` with a small largest cosine: the best of several starts, in about `seconds` at most.

    Each start anneals a soft maximum to sharpness 1024 and is then polished to the exact minimax. Starts
    differ in where the annealing begins: soft ones find the symmetric codes (E8), sharp ones those that are
    not energy minima at all (10, 13 or 15 points on a sphere). Small problems get many starts, most of them sharp.
    Where the budget is too small for one whole start, it is spent on three levels of sharpness and the polish.
    """
    work = L * L * p
    small = work <= 5_000
    starts = 64 if work <= 1_000 else min(32, max(2, 100_000 // work))
    steps = min(300, max(40, 200_000_000 // work))  # of L-BFGS, in each call
    budget = _Budget(evaluations(L, p, seconds), evaluations(L, p, seconds), report)
    short = budget.left < 15 * steps  # nine levels and the polish do not fit
    if short:
        starts, steps = 1, budget.left // 5
    rng = np.random.default_rng(seed)
    best, best_cosine = np.empty((L, p)), math.inf
    seen = set()
    for start in range(starts):
        U = _spiral(L) if p == 3 and short else _unit(rng.standard_normal((L, p)))
        sharpness = (4.0, 16.0, 64.0)[start] if start < 3 else (512.0, 64.0, 512.0)[start % 3]
        sharpness = 32.0 if short else sharpness
        while sharpness <= _SHARP:
            U = _descend(U, np.zeros((L, L)), sharpness, steps, budget)
            sharpness *= 4 if short else 2
        cosine = largest_cosine(U)
        if round(cosine, 7) not in seen:  # an arrangement that another start has not found
            seen.add(round(cosine, 7))
            U, cosine = _polish(U, steps, 20 if small else 5, budget)
        if cosine < best_cosine:
            best, best_cosine = U, cosine
        if best_cosine <= bound + 1e-9 or not budget.left:  # proved optimal, or out of time
            break
    return best


def evaluations(L: int, p: int, seconds: float = 60.0) -> int:
    """Evaluations of the loss that fit into the budget; below a few hundred the result is poor."""
    return int(seconds * _WORK / (L * L * (p + 64)))  # 64: the exponentials


@dataclass
class _Budget:
    """Evaluations of the loss that may still be made, and a function that is told how many were."""

    left: int
    total: int
    report: Any

    def spend(self, count: int) -> None:
        self.left = max(0, self.left - count)
        if self.report is not None:
            self.report(self.total - self.left)


def _polish(U: np.ndarray, steps: int, rounds: int, budget: _Budget) -> tuple[np.ndarray, float]:
    """From a soft maximum to the exact one, by the exponential method of multipliers.

    Weighting each pair by its multiplier moves the minimiser of the soft maximum onto the minimax without
    raising the sharpness, so the problem stays well conditioned. Where the weights let a free point drift
    into another (a pair that was never in contact has none), start them again with a sharper maximum.
    """
    best, sharpness = largest_cosine(U), _SHARP
    log_weight = np.zeros((len(U), len(U)))
    for _ in range(rounds):
        gram = U @ U.T
        np.fill_diagonal(gram, -1.0)
        trial_weight = log_weight + sharpness * gram
        trial_weight -= trial_weight.max()
        trial = _descend(U, trial_weight, sharpness, steps, budget)
        if largest_cosine(trial) < best:
            U, log_weight = trial, trial_weight
        else:
            sharpness *= 4
            log_weight = np.zeros_like(log_weight)
            trial = _descend(U, log_weight, sharpness, steps, budget)
            if largest_cosine(trial) < best:
                U = trial
        best = largest_cosine(U)
        if sharpness > 1e9:
            break
    return U, best


def _descend(U: np.ndarray, log_weight: np.ndarray, sharpness: float, steps: int, budget: _Budget) -> np.ndarray:
    """Minimise `log sum_{i != j} w_ij exp(s cos_ij) / s` over the directions of the rows, by L-BFGS."""
    from scipy.optimize import minimize

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        x = flat.reshape(U.shape)
        norm = np.linalg.norm(x, axis=1, keepdims=True)
        u = x / norm
        e = sharpness * (u @ u.T) + log_weight  # [L, L]
        np.fill_diagonal(e, -math.inf)
        top = e.max()
        np.exp(e - top, out=e)
        total = e.sum()
        g = 2 * (e @ u) / total
        g = (g - (g * u).sum(1, keepdims=True) * u) / norm  # tangent to the sphere
        return (top + math.log(total)) / sharpness, g.ravel()

    if not budget.left:
        return U
    options = {"maxiter": steps, "maxfun": min(10 * steps, budget.left), "maxcor": 20, "ftol": 1e-16, "gtol": 1e-13}
    found = minimize(loss, U.ravel(), jac=True, method="L-BFGS-B", options=options)
    budget.spend(found.nfev)
    return _unit(found.x.reshape(U.shape))


def _spiral(L: int) -> np.ndarray:
    """The Fibonacci spiral: L points on a sphere, each with the same area around it."""
    height = 1 - (2 * np.arange(L) + 1) / L
    angle = np.arange(L) * math.pi * (3 - math.sqrt(5))
    radius = np.sqrt(1 - height**2)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), height], 1)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def largest_cosine(U: np.ndarray) -> float:
    gram = U @ U.T
    np.fill_diagonal(gram, -math.inf)
    return float(gram.max())
