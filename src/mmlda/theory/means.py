r"""Class means: Algorithm 1 in closed form, and the best known arrangements where it does not apply.

`generate_opt_means` is the paper's simplex, for `L <= p + 1`; `separated_means` takes any number of classes, and
`arrange_means` returns the same means with the construction they come from.
`max_cosine` measures how close two means are.
"""

import itertools
import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmlda._utils.checks import check_count, check_positive, invalid, to_tensor
from mmlda._utils.progress import progress
from mmlda.theory.arguments import check_means, check_range
from mmlda.theory.bounds import cosine_bound
from mmlda.theory.codes import BinaryCode, ChirpCode, binary_code, chirp_code
from mmlda.theory.optimiser import evaluations, largest_cosine, optimise

_MOST = 10_000  # classes for the optimiser: it needs [L, L] matrices
_CHIRPS = 1 << 24  # entries of a matrix of chirps, which have no fast transform here


def generate_opt_means(
    C: float, p: int, L: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> Tensor:
    r"""GenerateOptMeans (Algorithm 1) in closed form: `mu_i . mu_i = C`, `mu_i . mu_j = C / (1 - L)`.

    The recursion of the pseudo-code solves to::

        mu_i(j) = -sqrt(C L / ((L - 1) (L - j) (L - j + 1)))  for j < i,
        mu_i(i) =  sqrt(C L (L - i) / ((L - 1) (L - i + 1)))  for i < L,

    and zero elsewhere: entry (L, L), which the pseudo-code takes as the square root of a rounding error (NaN
    if that is negative; out of range at L = p + 1), is zero. The rows sum to zero.

    Parameters
    ----------
    C
        Squared norm of each mean, > 0.
    p
        Dimension, >= L - 1.
    L
        Number of classes, >= 2.
    dtype, device
        Of the result (default: float64 on the CPU). The construction is in float64.

    Returns
    -------
    Tensor
        Means `[L, p]`.

    Raises
    ------
    ValueError
        If `L > p + 1`, or if `dtype` cannot hold sqrt(C).

    Examples
    --------
    >>> generate_opt_means(C=1.0, p=2, L=3)
    tensor([[ 1.0000,  0.0000],
            [-0.5000,  0.8660],
            [-0.5000, -0.8660]], dtype=torch.float64)
    """
    L, p, C = check_count("L", L, 2), check_count("p", p, 1), check_positive("C", C)
    if L > p + 1:
        raise ValueError(f"L must be at most p + 1 = {p + 1} for Algorithm 1, got {L}; see separated_means")
    scale = _scale(C, dtype)
    # NumPy uses one thread and never touches pages that stay zero; starting threads would take longer.
    left = L - np.arange(1.0, L)  # L - j for column j = 1 .. L - 1
    diagonal = scale * np.sqrt(L * left / ((L - 1) * (left + 1)))
    mu = np.zeros((L, p))
    simplex = mu[:, : L - 1]
    np.copyto(simplex, -diagonal / left, where=np.tri(L, L - 1, -1, dtype=bool))
    np.fill_diagonal(simplex, diagonal)
    return torch.from_numpy(mu).to(device=device, dtype=dtype)


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Means with the construction they come from and how far they are from a bound: the result of `arrange_means`.

    Printing shows a summary.

    Parameters
    ----------
    means
        Class means `[L, p]`.
    construction
        "simplex", "cross-polytope", "polygon", "Kerdock", "Gold", "Delsarte-Goethals" (the last three also
        as "punctured Kerdock" and so on), "chirps" or "optimised".
    max_cosine
        Largest cosine between two means; an upper bound for very large punctured codes (`BinaryCode.max_cosine`).
    bound
        `cosine_bound(L, p)`, a lower bound for any means.
    """

    means: Tensor
    construction: str
    max_cosine: float
    bound: float

    def __str__(self) -> str:
        size = "{:,} means in {:,} dimensions".format(*self.means.shape)
        return f"{size} ({self.construction}): largest cosine {self.max_cosine:.6f}, lower bound {self.bound:.6f}"


def separated_means(
    num_classes: int,
    dim: int,
    C: float = 100.0,
    *,
    seed: int = 0,
    seconds: float = 60.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""Means of squared norm C, for any number of classes, with the smallest largest cosine that is known here.

    - `L <= p + 1`: the simplex of `generate_opt_means`, cosine `-1 / (L - 1)`. Optimal.
    - `p + 2 <= L <= 2p`: pairs `+-e_i`, largest cosine exactly 0; for odd L three of the classes share an
      equilateral triangle instead, so that the means still sum to zero. Optimal (Rankin).
    - `p = 2`: the regular polygon, cosine `cos(2 pi / L)`. Optimal.
    - otherwise the better of a code of `mmlda.theory.codes`, which takes less than a second, and an optimiser with
      several starts, deterministic from `seed` and limited by `seconds`. The optimiser wins while L is a small multiple
      of p; it reaches the icosahedron, the 24-cell, E8's 240 roots and the solved cases of Tammes' problem. It is not
      run where the code is near the bound (1.5 times, in 27 dimensions and more; 1.4 times for a punctured code), or
      where the time is too short for it: then it could be better by 4% (3,000 means in 128 dimensions: 0.120 against
      the code's 0.125).

    `arrange_means` also returns the construction and the bound.

    Parameters
    ----------
    num_classes
        Number of classes L, >= 2.
    dim
        Dimension p, >= 1.
    C
        Squared norm of each mean, > 0.
    seed
        Seed of the optimiser.
    seconds
        Budget of the optimiser, as work that takes one core about so long: the result depends on it, but not on the
        machine. With 0 the means are a code, or none.
    dtype, device
        Of the result (default: float64 on the CPU).

    Returns
    -------
    Tensor
        Means `[L, p]`.

    Raises
    ------
    ValueError
        If p dimensions are too few for so many classes, or a code is needed and there is none, or if `dtype` cannot
        hold sqrt(C).

    Examples
    --------
    >>> mu = separated_means(num_classes=100, dim=64, C=100.0)
    >>> mu.shape, max_cosine(mu), cosine_bound(100, 64)
    (torch.Size([100, 64]), 0.0, 0.0)
    """
    return arrange_means(num_classes, dim, C, seed=seed, seconds=seconds, dtype=dtype, device=device).means


def arrange_means(
    num_classes: int,
    dim: int,
    C: float = 100.0,
    *,
    seed: int = 0,
    seconds: float = 60.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Arrangement:
    """Arrange means as `separated_means` does, and report their construction and the bound.

    Parameters
    ----------
    num_classes, dim, C, seed, seconds, dtype, device
        As in `separated_means`.

    Returns
    -------
    Arrangement
        The means, their construction, their largest cosine and its lower bound.

    Raises
    ------
    ValueError
        As in `separated_means`.

    Examples
    --------
    >>> print(arrange_means(num_classes=4000, dim=64))
    4,000 means in 64 dimensions (Kerdock): largest cosine 0.125000, lower bound 0.122467
    """
    L, p, C = check_count("num_classes", num_classes, 2), check_count("dim", dim, 1), check_positive("C", C)
    check_count("seed", seed, 0)
    if not isinstance(seconds, numbers.Real) or not 0 <= seconds < math.inf:
        raise invalid("seconds", "a finite number >= 0", seconds)
    if p == 1 and L > 2:
        raise ValueError(f"num_classes must be at most 2 when dim is 1: a line has two directions, got {L}")
    bound = cosine_bound(L, p)
    if L <= p + 1:
        return Arrangement(generate_opt_means(C, p, L, dtype=dtype, device=device), "simplex", bound, bound)
    scale = _scale(C, dtype)
    if L <= 2 * p:
        name, cosine, mu = "cross-polytope", 0.0, scale * _pairs(L, p)
    elif p == 2:
        angle = torch.arange(L, dtype=torch.float64, device="cpu") * (2 * math.pi / L)
        name, cosine, mu = "polygon", bound, scale * torch.stack([angle.cos(), angle.sin()], 1)
    else:
        name, cosine, mu = _best(L, p, seed, seconds, scale, dtype)
    return Arrangement(mu.to(device=device, dtype=dtype), name, cosine, bound)


def settled_code(L: int, p: int, seconds: float = 60.0) -> BinaryCode | ChirpCode | None:
    """The code of `separated_means` where that is clear without the optimiser; None otherwise."""
    code = _code(L, p) if p > 2 and L > 2 * p else None
    if code is None or L > _MOST:
        return code
    # The optimiser reaches 1.2 times the bound in 8 dimensions, 1.35 times in 16 and 1.5 or more in 32 and beyond; less
    # for L above 32 p, and 1.45 for the larger L of punctured codes.
    steep = 0.25 if L > 32 * p else 0.3
    punctured = isinstance(code, BinaryCode) and code.dropped > 0
    near = 1 + min(0.4 if punctured else 0.5, steep * p / 16, steep * (p / 16) ** 2)
    # A poor code loses to it even with few evaluations, a good one does not.
    least = 1 if code.max_cosine >= 0.5 else 120 if code.max_cosine >= 0.2 else 400
    beaten = evaluations(L, p, seconds) >= least and code.max_cosine > near * cosine_bound(L, p) + 1e-9
    return None if beaten else code


def _code(L: int, p: int) -> BinaryCode | ChirpCode | None:
    codes = [binary_code(L, p), chirp_code(L, p) if L * p <= _CHIRPS else None]
    best = min((code for code in codes if code is not None), key=lambda code: code.max_cosine, default=None)
    return best if best is not None and best.max_cosine < _random_cosine(L, p) else None


def _random_cosine(L: int, p: int) -> float:
    """Median of the largest cosine between L random directions, taking the pairs as independent."""
    from scipy.special import betaincinv

    return math.sqrt(1 - betaincinv((p - 1) / 2, 0.5, min(1.0, 4 * math.log(2) / L / (L - 1))))


def _best(L: int, p: int, seed: int, seconds: float, scale: float, dtype: torch.dtype) -> tuple[str, float, Tensor]:
    """Construction, largest cosine and means of norm `scale` where 2p < L: a code or the optimiser's."""
    code = settled_code(L, p, seconds)
    if code is None:
        code = _code(L, p)
        if L > _MOST or (code is None and not evaluations(L, p, seconds)):
            least = next(d for d in itertools.count(p + 1) if _code(L, d) is not None)
            raise ValueError(f"dim must be at least {least} for {L} classes, got {p}")
        from threadpoolctl import threadpool_limits

        # One thread fixes the order of the sums, so a seed gives the same means on any number of cores. For such
        # small matrices it is also faster.
        total, long = evaluations(L, p, seconds), L * L * p > 1e7  # about 10 seconds and more
        bar = progress(f"means of {L:,} classes", total, unit="evaluations", show=long)
        with threadpool_limits(limits=1, user_api="blas"), bar as report:
            found = optimise(L, p, seed, cosine_bound(L, p), seconds, report)
            cosine = largest_cosine(found)
        if code is None or cosine < code.max_cosine:
            return "optimised", cosine, torch.from_numpy(scale * found)
    if isinstance(code, BinaryCode):
        mu = code.means(scale, p, np.float32 if dtype == torch.float32 else np.float64)
    else:
        mu = np.pad(code.means(scale), [(0, 0), (0, p - code.size)])
    return code.name, code.max_cosine, torch.from_numpy(mu)


def max_cosine(means: Any) -> float:
    """Largest cosine between two means.

    Parameters
    ----------
    means
        Class means `[L, p]`.

    Returns
    -------
    float
        Cosine in [-1, 1], computed in float64.

    Raises
    ------
    ValueError
        If a mean is zero.

    Examples
    --------
    >>> round(max_cosine(generate_opt_means(C=100.0, p=64, L=10)), 6)
    -0.111111
    """
    mu = check_means(to_tensor("means", means).detach())
    largest = mu.abs().amax(1, keepdim=True)
    zero = torch.nonzero(largest[:, 0] == 0)
    if len(zero):
        raise ValueError(f"means must each have a norm > 0, got 0 for class {zero[0].item()}")
    mu = mu / largest  # first, so that no square underflows or overflows
    mu = mu / torch.linalg.vector_norm(mu, dim=1, keepdim=True)
    cosines = mu @ mu.T
    return cosines.fill_diagonal_(-math.inf).max().item()


def pairwise_distances(z: Tensor, means: Tensor) -> Tensor:
    """Euclidean distances ||z_n - mu_k||: [..., N, p], [..., L, p] -> [..., N, L]. Once differentiable.

    Differences are taken before squaring: ||z||^2 - 2 z.mu + ||mu||^2 would lose all digits near a mean.
    """
    return torch.cdist(z, means, compute_mode="donot_use_mm_for_euclid_dist")


def _scale(C: float, dtype: torch.dtype) -> float:
    """sqrt(C); raises ValueError if the dtype cannot hold it."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    return check_range("sqrt(C)", math.sqrt(C), dtype)


def _pairs(L: int, p: int) -> Tensor:
    """`+e_i` and `-e_i` in turn; for odd L the last three rows are a triangle in the last two axes used."""
    mu = torch.zeros(L, p, dtype=torch.float64, device="cpu")
    pairs = L // 2 - L % 2
    axis = torch.arange(pairs, device="cpu")
    mu[2 * axis, axis] = 1.0
    mu[2 * axis + 1, axis] = -1.0
    if L % 2:
        mu[-3:, pairs : pairs + 2] = generate_opt_means(1.0, 2, 3)
    return mu
