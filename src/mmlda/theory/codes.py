r"""Structured means: spherical codes in closed form for far more classes than dimensions.

In `p = 2^m` dimensions let `H` be Sylvester's Hadamard matrix and `Q` a quadratic form on GF(2)^m. The rows of
`H diag((-1)^Q) / sqrt(p)` are an orthonormal basis, and two such bases have cosines of absolute value 0 or
`2^(-r/2)`, where r is the rank of the difference of their forms. So a set of forms whose differences all have a high
rank gives a code: every basis with both signs, and the standard basis.

- m even: a Kerdock set, p / 2 forms with differences of full rank. p (p + 2) means, largest cosine 1 / sqrt(p).
- m odd: Gold's forms Tr(b x^3), p forms with differences of rank m - 1. 2p (p + 1) means, largest cosine sqrt(2 / p).
- Level r of both adds the forms Tr(b_j x^(2^j + 1)) for r more j (Delsarte and Goethals): p / 2 or p times as many
  means per level, at twice the cosine, up to 1/2.

For other p, a code in 2^m > p dimensions without the standard basis is punctured: its last 2^m - p coordinates are
dropped. Every entry has the same size, so the norms stay equal.

Class k has the basis `k // 2p`, the row `k % 2p // 2` and the sign `(-1)^k`; the standard basis is last. The code of
one level starts with that of the level before it.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

# Primitive polynomials over GF(2) of odd degree, as bits
_POLYNOMIALS = {1: 0b11, 3: 0b1011, 5: 0x25, 7: 0x83, 9: 0x211, 11: 0x805, 13: 0x201B, 15: 0x8003}


@dataclass(frozen=True)
class BinaryCode:
    """The first L means of a Kerdock, Gold or Delsarte-Goethals code; they are unit vectors in 2^m dimensions.

    Parameters
    ----------
    num_classes
        Number of means L, at most `capacity(m, level)`.
    m
        Logarithm of the dimension, 2 to 16.
    level
        Number of times the cosine was doubled to make room for more means.
    dropped
        Coordinates dropped from the end of each mean, which leaves no room for the standard basis.

    Examples
    --------
    >>> code = BinaryCode(num_classes=4224, m=6, level=0)
    >>> code.name, code.max_cosine, code.bases, code.signs().shape
    ('Kerdock', 0.125, 33, (32, 64))
    >>> means = code.means()
    >>> means.shape, sorted(set((means @ means[0]).tolist()))
    ((4224, 64), [-1.0, -0.125, 0.0, 0.125, 1.0])
    """

    num_classes: int
    m: int
    level: int = 0
    dropped: int = 0

    @property
    def size(self) -> int:
        """Dimension 2^m, before any are dropped."""
        return 1 << self.m

    @property
    def name(self) -> str:
        """Name of the construction."""
        name = "Delsarte-Goethals" if self.level else "Gold" if self.m % 2 else "Kerdock"
        return f"punctured {name}" if self.dropped else name

    @property
    def max_cosine(self) -> float:
        """Largest cosine; an upper bound for punctured codes with more than 2^14 sqrt(2^m) means."""
        if self.dropped:
            return _punctured_cosine(self.m, self.level, self.bases, self.dropped)
        return _cosine(self.m, self.level)

    @property
    def bases(self) -> int:
        """Number of bases; the last one may be incomplete."""
        return -(-self.num_classes // (2 * self.size))

    @property
    def standard(self) -> bool:
        """Whether the last basis is the standard one."""
        return self.bases > _forms(self.m, self.level)

    def signs(self) -> np.ndarray:
        """Compute the signs (-1)^Q of each basis except the standard one.

        Returns
        -------
        ndarray
            Signs `[bases, 2^m]`, int8.
        """
        return _signs(self.m, self.level, self.bases - self.standard)

    def means(self, norm: float = 1.0, dim: int = 0, dtype: type = np.float64) -> np.ndarray:
        """Compute the means.

        Parameters
        ----------
        norm
            Norm of each mean.
        dim
            Columns, the last of them 0 (default: 2^m - dropped).
        dtype
            Of the result.

        Returns
        -------
        ndarray
            Means `[L, dim]`.
        """
        size, used = self.size, self.size - self.dropped
        dim = dim or used
        out: np.ndarray = np.zeros((self.bases, size, 2, dim), dtype)
        basis: np.ndarray = (norm / math.sqrt(used) * hadamard(size)[:, :used]).astype(dtype)

        def fill(signs: np.ndarray, rows: np.ndarray) -> None:
            np.multiply(basis, signs, out=rows[:, 0, :used])
            np.negative(rows[:, 0, :used], out=rows[:, 1, :used])

        with ThreadPoolExecutor() as pool:  # most of the time goes into the system's new pages
            list(pool.map(fill, self.signs()[:, :used].astype(dtype), out))
        if self.standard:
            out[-1, :, 0, :size], out[-1, :, 1, :size] = norm * np.eye(size), -norm * np.eye(size)
        return out.reshape(-1, dim)[: self.num_classes]


def capacity(m: int, level: int = 0) -> int:
    """Number of means of the code in 2^m dimensions.

    Parameters
    ----------
    m, level
        As in `BinaryCode`.

    Returns
    -------
    int
        Number of means.

    Examples
    --------
    >>> [capacity(6, level) for level in (0, 1, 2)], capacity(10)
    ([4224, 131200, 4194432], 1050624)
    """
    return 2 * (_forms(m, level) + 1) << m


def binary_code(num_classes: int, dim: int) -> BinaryCode | None:
    """Choose the code with the smallest largest cosine for L means in at most p dimensions, or punctured to p.

    Among equal ones, the code in the most dimensions is chosen, and a punctured one last.

    Parameters
    ----------
    num_classes
        Number of means L.
    dim
        Largest dimension p.

    Returns
    -------
    BinaryCode or None
        None if no code has enough means.

    Examples
    --------
    >>> binary_code(1_000_000, 1024)
    BinaryCode(num_classes=1000000, m=10, level=0, dropped=0)
    >>> binary_code(10_000, 100).max_cosine, binary_code(1_000_000, 16)
    (0.25, None)
    """
    fitting = [
        BinaryCode(num_classes, m, level)
        for m in range(min(dim.bit_length() - 1, 16), 1, -1)
        for level in range(_levels(m))
        if capacity(m, level) >= num_classes
    ]
    best = min(fitting, key=lambda code: code.max_cosine, default=None)
    limit = best.max_cosine if best else 1.0
    m = dim.bit_length()
    level = next((level for level in range(_levels(m)) if _forms(m, level) << m + 1 >= num_classes), None)
    if level is not None and m <= 16:
        punctured = BinaryCode(num_classes, m, level, (1 << m) - dim)
        if punctured.dropped / dim < limit and punctured.max_cosine < limit:  # the first is the cosine within a basis
            return punctured
    return best


@dataclass(frozen=True)
class ChirpCode:
    """The first L means of d + 1 mutually unbiased bases of C^d, d an odd prime, as unit vectors in 2d dimensions.

    The vectors x -> exp(2 pi i (a x^2 + b x) / d) / sqrt(d) and the standard basis have inner products of absolute
    value 1 / sqrt(d) across bases; times 1, -1, i and -i they are 4d (d + 1) real vectors with that largest cosine,
    sqrt(2 / p) for p = 2d.

    Parameters
    ----------
    num_classes
        Number of means L, at most 4d (d + 1).
    d
        Odd prime.

    Examples
    --------
    >>> code = ChirpCode(num_classes=100, d=5)
    >>> round(code.max_cosine, 6), round(float((code.means() @ code.means().T - 2 * np.eye(100)).max()), 6)
    (0.447214, 0.447214)
    """

    num_classes: int
    d: int
    name = "chirps"

    @property
    def size(self) -> int:
        """Dimension 2d."""
        return 2 * self.d

    @property
    def max_cosine(self) -> float:
        """Largest cosine."""
        return 1 / math.sqrt(self.d)

    def means(self, norm: float = 1.0) -> np.ndarray:
        """Compute the means.

        Parameters
        ----------
        norm
            Norm of each mean.

        Returns
        -------
        ndarray
            Means `[L, 2d]`, float64.
        """
        d, bases = self.d, -(-self.num_classes // (4 * self.d))
        x = np.arange(d)
        a, b = np.arange(min(bases, d))[:, None, None], x[:, None]
        angle = (2 * math.pi / d) * ((a * x * x + b * x) % d)  # [bases, d, d]
        vectors = norm / math.sqrt(d) * np.exp(1j * angle).reshape(-1, d)
        if bases > d:
            vectors = np.concatenate([vectors, norm * np.eye(d)])
        vectors = vectors[: -(-self.num_classes // 4)]
        turned = np.stack([vectors, -vectors, 1j * vectors, -1j * vectors], 1).reshape(-1, d)
        return np.concatenate([turned.real, turned.imag], 1)[: self.num_classes]


def chirp_code(num_classes: int, dim: int) -> ChirpCode | None:
    """Choose the chirps of the largest odd prime d <= p / 2.

    Parameters
    ----------
    num_classes
        Number of means L.
    dim
        Largest dimension p.

    Returns
    -------
    ChirpCode or None
        None if it has too few means.

    Examples
    --------
    >>> chirp_code(10_000, 200), chirp_code(100_000, 200)
    (ChirpCode(num_classes=10000, d=97), None)
    """
    d = next((d for d in range(dim // 2, 2, -1) if all(d % q for q in range(2, math.isqrt(d) + 1))), 0)
    return ChirpCode(num_classes, d) if d and num_classes <= 4 * d * (d + 1) else None


def hadamard(size: int) -> np.ndarray:
    """Sylvester's Hadamard matrix.

    Parameters
    ----------
    size
        A power of two.

    Returns
    -------
    ndarray
        Matrix `[size, size]` of signs, int8.

    Examples
    --------
    >>> hadamard(2).tolist()
    [[1, 1], [1, -1]]
    """
    rows = np.arange(size)
    return (1 - 2 * (np.bitwise_count(rows[:, None] & rows) & 1).astype(np.int8)).astype(np.int8)


def _cosine(m: int, level: int) -> float:
    return 2.0 ** (level - m // 2)  # m even: 2^level / sqrt(p); m odd: 2^level sqrt(2 / p)


@functools.cache
def _punctured_cosine(m: int, level: int, bases: int, dropped: int) -> float:
    """Largest cosine of the first bases without their last coordinates, by transforms of every pair's product.

    It is attained by any number of means that needs so many bases. Where there are too many pairs, this is a bound.
    """
    dim, largest = (1 << m) - dropped, dropped  # within a basis: rows that differ in the last half only
    bound = round(2**m * _cosine(m, level)) + dropped
    if bases * bases << m > 1 << 26:
        return bound / dim
    signs = _signs(m, level, bases).astype(np.float32)  # every sum is a small integer, so exact
    signs[:, dim:] = 0
    a, b = (hadamard(1 << k).astype(np.float32) for k in (m // 2, m - m // 2))  # H = a (x) b
    for i in range(1, bases):
        if largest == bound:
            break
        half = (signs[:i] * signs[i]).reshape(-1, len(b)) @ b
        whole = half.reshape(i, len(a), len(b)).swapaxes(1, 2).reshape(-1, len(a)) @ a
        largest = max(largest, int(np.abs(whole).max()))
    return largest / dim


def _levels(m: int) -> int:
    """Number of levels; the last one has every quadratic form."""
    return m // 2


def _forms(m: int, level: int) -> int:
    return 1 << (m - 1 + m % 2) * (level + 1)


@functools.cache
def _field(k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Powers of a primitive element of GF(2^k) (twice over), logarithms (of 0: a place that `_times` masks), traces."""
    q, polynomial = 1 << k, _POLYNOMIALS[k]
    powers, logarithms = np.empty(2 * q, np.int64), np.zeros(q, np.int64)
    value = 1
    for exponent in range(2 * q):
        powers[exponent] = value
        if exponent < q - 1:
            logarithms[value] = exponent
        value <<= 1
        if value >= q:
            value ^= polynomial
    trace, conjugate = np.zeros(q, np.int64), np.arange(q)
    for _ in range(k):
        trace ^= conjugate
        conjugate = np.where(conjugate == 0, 0, powers[2 * logarithms[conjugate] % max(q - 1, 1)])
    return powers, logarithms, trace


def _times(k: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product in GF(2^k)."""
    powers, logarithms, _ = _field(k)
    return np.where((a == 0) | (b == 0), 0, powers[logarithms[a] + logarithms[b]])


def _signs(m: int, level: int, bases: int) -> np.ndarray:
    """(-1)^Q for the first forms, int8 [bases, 2^m]. A form's number has its coefficients as digits, the least first.

    For even m, GF(2)^m is F + GF(2) with F = GF(2^(m - 1)), and the Kerdock set consists of Kantor's forms
    Q_a(x, s) = sum_j Tr((a x)^(2^j + 1)) + s Tr(a x), j from 1 to m / 2 - 1.
    """
    k = m - 1 + m % 2
    q, trace = 1 << k, _field(k)[2]
    x = np.arange(q)
    cubes = [x]  # x^(2^j + 1) for j = 1, 2, ...; entry 0 is x^(2^0)
    conjugate = x
    for _ in range(max((k - 1) // 2, level + 1)):
        conjugate = _times(k, conjugate, conjugate)  # x^(2^j)
        cubes.append(_times(k, conjugate, x))
    number = np.arange(bases)
    digits = [(number >> (k * place) & (q - 1))[:, None] for place in range(level + 1)]  # [bases, 1] each
    form = np.zeros((bases, q), np.int64)
    if m % 2 == 0:
        a_times_x = _times(k, digits.pop(0), x)
        kerdock = np.bitwise_xor.reduce([np.zeros_like(x), *(trace[cube] for cube in cubes[1 : (k + 1) // 2])])
        form = kerdock[a_times_x]
    for digit, cube in zip(digits, cubes[1:]):
        if digit.any():
            form = form ^ trace[_times(k, digit, cube)]
    if m % 2 == 0:
        form = np.concatenate([form, form ^ trace[a_times_x]], 1)  # s = 0, s = 1
    return (1 - 2 * form).astype(np.int8)
