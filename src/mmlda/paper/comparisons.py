"""How far apart two networks are: differences and ratios with 95% intervals. No networks, no files."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mmlda.paper.rows import Row
from mmlda.results import Result, difference_interval


def paired_errors(first: np.ndarray, second: np.ndarray) -> tuple[float, tuple[float, float]]:
    """The first network's error minus the second's, and a 95% interval; from wrong answers, bool [seeds, images].

    The interval covers two kinds of chance: the choice of the images, on which the networks are compared one by one,
    and the seeds, if there are several (Welch).
    """
    from scipy.stats import t

    gaps = first.mean(0) - second.mean(0)
    half = 1.96 * float(gaps.std(ddof=1)) / len(gaps) ** 0.5
    runs = [table.mean(1) for table in (first, second) if len(table) > 1]
    parts = [(float(run.var(ddof=1)) / len(run), len(run) - 1) for run in runs]
    if spread := sum(part for part, _ in parts):
        freedom = spread**2 / sum(part**2 / n for part, n in parts)
        half = float(np.hypot(half, t.ppf(0.975, freedom) * spread**0.5))
    gap = float(gaps.mean())
    return gap, (gap - half, gap + half)


def difference(first: Sequence[Result], second: Sequence[Result]) -> tuple[float, float]:
    """A 95% interval for the first network's share minus the second's, over the images of all their runs."""
    counts = []
    for group in (first, second):
        runs = [(result.number, result.n) for result in group if result.n]
        counts += [round(sum(share * n for share, n in runs)), sum(n for _, n in runs)]
    return difference_interval(*counts)


def of_row(results: Sequence[Result], row: Row) -> list[Result]:
    """The results about one network."""
    return [result for result in results if row.has(result)]


def ratio_interval(a: np.ndarray, b: np.ndarray, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """A 95% bootstrap interval for mean(a) / mean(b), pair by pair."""
    rows = np.random.default_rng(seed).integers(len(a), size=(draws, len(a)))
    low, high = np.quantile(a[rows].mean(1) / b[rows].mean(1), [0.025, 0.975])
    return float(low), float(high)


def mean_interval(values: np.ndarray) -> tuple[float, tuple[float, float]]:
    """A mean, and its 95% interval."""
    mean = float(values.mean())
    half = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return mean, (mean - half, mean + half)


def wilcoxon_test(gaps: Sequence[float]) -> tuple[int, float, float]:
    """The number of positive differences, their mean, and the p-value of Wilcoxon's test."""
    from scipy.stats import wilcoxon

    return sum(gap > 0 for gap in gaps), float(np.mean(gaps)), float(wilcoxon(gaps).pvalue) if any(gaps) else 1.0


def fold_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """A 95% interval for the difference of two means, fold by fold."""
    from scipy.stats import t

    gaps = np.subtract(first, second)
    if len(gaps) < 2:
        return -math.inf, math.inf
    half = float(t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5)
    return float(gaps.mean()) - half, float(gaps.mean()) + half
