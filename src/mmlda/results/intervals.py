"""95% confidence intervals of shares."""

from __future__ import annotations

import math


def wilson(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's confidence interval for a share.

    Parameters
    ----------
    successes, n
        `successes` of `n` trials; `n` is at least 1.
    z
        Quantile of the standard normal distribution (default: 95% confidence).

    Returns
    -------
    tuple of float
        Lower and upper end, in [0, 1].

    Raises
    ------
    ValueError
        If `successes` is outside 0 to `n`, or `n` is 0.

    Examples
    --------
    >>> low, high = wilson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)
    >>> wilson(0, 100)[0]
    0.0
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"successes must be 0 to n, and n at least 1, got {successes!r} of {n!r}")
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return (0.0 if successes == 0 else max(middle - half, 0.0), 1.0 if successes == n else min(middle + half, 1.0))


def difference_interval(k1: int, n1: int, k2: int, n2: int) -> tuple[float, float]:
    """95% confidence interval for the difference of two shares, k1 / n1 - k2 / n2.

    Newcombe's (1998), from Wilson's intervals.

    Parameters
    ----------
    k1, n1, k2, n2
        `k1` of `n1` and `k2` of `n2` independent trials.

    Returns
    -------
    tuple of float
        Lower and upper end, in [-1, 1].

    Examples
    --------
    >>> low, high = difference_interval(56, 70, 48, 80)
    >>> round(low, 4), round(high, 4)
    (0.0524, 0.3339)
    """
    p1, p2 = k1 / n1, k2 / n2
    (l1, u1), (l2, u2) = wilson(k1, n1), wilson(k2, n2)
    return p1 - p2 - math.hypot(p1 - l1, u2 - p2), p1 - p2 + math.hypot(u1 - p1, p2 - l2)
