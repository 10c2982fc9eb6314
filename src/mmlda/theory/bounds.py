"""Lower bounds on the largest cosine between directions, for comparison with that of class means."""

import math

from mmlda._utils.checks import check_count


def cosine_bound(num_classes: int, dim: int) -> float:
    r"""Lower bound on the largest cosine between L directions in p dimensions.

    Rankin's: `-1 / (L - 1)` for `L <= p + 1` and 0 for `L <= 2p`, both attained. Beyond, Levenshtein's
    linear-programming bound (1979), attained by the polygons, the icosahedron, E8 and other sharp codes.

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    dim
        Dimension p, >= 1.

    Returns
    -------
    float
        A cosine in [-1, 1].

    Examples
    --------
    >>> round(cosine_bound(12, 3) ** 2, 9), round(cosine_bound(240, 8), 9)  # icosahedron, E8
    (0.2, 0.5)
    """
    L, p = check_count("num_classes", num_classes, 2), check_count("dim", dim, 1)
    if L <= p + 1:
        return -1.0 / (L - 1)
    if L <= 2 * p:
        return 0.0
    if p == 1:
        return 1.0  # a third point on a line coincides with another
    if p == 2:
        return math.cos(2 * math.pi / L)  # Levenshtein's bound too, but of degree L
    return _levenshtein(L, p)


def welch_bound(num_classes: int, dim: int) -> float:
    r"""Welch's lower bound on the largest absolute cosine, `sqrt((L - p) / (p (L - 1)))` (0 for `L <= p`).

    It applies to lines, not directions: means may have a largest cosine below it, because two opposite means
    are as far apart as possible but share a line. Compare means with `cosine_bound`.

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    dim
        Dimension p, >= 1.

    Returns
    -------
    float
        A cosine in [0, 1].

    Examples
    --------
    >>> round(welch_bound(100, 64), 4)
    0.0754
    """
    L, p = check_count("num_classes", num_classes, 2), check_count("dim", dim, 1)
    return math.sqrt(max(0, L - p) / (p * (L - 1)))


def _levenshtein(L: int, p: int) -> float:
    r"""The s at which Levenshtein's bound on the number of points with cosines <= s equals L.

    The bound is a chain of functions L_1, L_2, ..., each valid between two zeros of adjacent Jacobi polynomials
    and increasing in s; at the joints it is the Delsarte-Goethals-Seidel number D_m of a tight m-design. So L
    between D_m and D_{m+1} picks L_m, and s follows by bisection.
    """
    m = 1
    while _design_size(p, m + 1) < L:
        m += 1
    k = (m + 1) // 2
    if m % 2:  # L_{2k-1}: from t_{k-1}^{1,1} to t_k^{1,0}
        lo, hi = _jacobi_zero(p, k - 1, 1), _jacobi_zero(p, k, 0)
    else:  # L_{2k}: from t_k^{1,0} to t_k^{1,1}
        lo, hi = _jacobi_zero(p, k, 0), _jacobi_zero(p, k, 1)
    for _ in range(100):
        s = (lo + hi) / 2
        lo, hi = (s, hi) if _levenshtein_size(p, m, s) < L else (lo, s)
    return max(0.0, lo)


def _design_size(p: int, m: int) -> int:
    k = m // 2
    if m % 2:
        return 2 * math.comb(p + k - 1, p - 1)
    return math.comb(p + k - 1, p - 1) + math.comb(p + k - 2, p - 1)


def _levenshtein_size(p: int, m: int, s: float) -> float:
    k = (m + 1) // 2
    P = [1.0, s]  # Gegenbauer polynomials of dimension p, with P(1) = 1
    for n in range(1, k + 1):
        P.append(((2 * n + p - 2) * s * P[n] - n * P[n - 1]) / (n + p - 2))
    if m % 2:
        tail = (P[k - 1] - P[k]) / ((1 - s) * P[k])
        return math.comb(k + p - 3, k - 1) * ((2 * k + p - 3) / (p - 1) - tail)
    tail = (1 + s) * (P[k] - P[k + 1]) / ((1 - s) * (P[k] + P[k + 1]))
    return math.comb(k + p - 2, k) * ((2 * k + p - 1) / (p - 1) - tail)


def _jacobi_zero(p: int, k: int, b: int) -> float:
    """Largest zero of the Jacobi polynomial of degree k with parameters (1, b) + (p - 3) / 2; -1 for k = 0."""
    if k == 0:
        return -1.0
    from scipy.special import roots_jacobi

    return float(roots_jacobi(k, 1 + (p - 3) / 2, b + (p - 3) / 2)[0][-1])
