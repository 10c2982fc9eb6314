"""The integrals behind `mmlda.theory`: Efron's moments and the Bayes error, on float64 tensors.

`mmlda.theory` checks arguments and converts results; this module has only the numerics.
"""

import math

import numpy as np
import torch
from torch import Tensor

from mmlda.theory.means import pairwise_distances

# ---- Theorem 1 -----------------------------------------------------------------------------------------------

_RADIUS = 9.0  # the integrand is below exp(-RADIUS^2 / 2) = 3e-18 of its peak outside peak +- RADIUS
_KNEE = 40.0  # outside |Delta x + zeta| < KNEE, sech is an exponential to exp(-KNEE) = 4e-18


def efficiency(d: Tensor, z: Tensor, p: int | float) -> Tensor:
    """`Eff_p` for flat `d` and `z`.

    The 2x2 matrix in Q_3 is near singular where w is narrow. In terms of w's mass A_0, mean m = A_1 / A_0 and
    variance V it is well conditioned: A_0 A_2 - A_1^2 = A_0^2 V and Q_3 = (1 + (m + zeta/Delta)^2 / V) / A_0.
    Q_1..Q_4 are then multiplied through by u^2, (u, v) = (Delta, zeta) / |(Delta, zeta)|, so that zeta/Delta
    never appears.
    """
    A0, m, V = _moments(d, z)
    q = torch.exp(-z.abs()) / (1 + torch.exp(-z.abs())) ** 2  # pi_0 pi_1
    if p == math.inf:
        return A0 * (1 + q * d**2)
    both_zero = (d == 0) & (z == 0)  # kept out of hypot, whose gradient at 0 is NaN
    size = torch.hypot(torch.where(both_zero, 1.0, d), z)
    u = torch.where(both_zero, 1.0, d / size)
    v = z / size
    skew = -torch.tanh(z / 2)  # pi_0 - pi_1
    Q1 = u**2 * (1 + d**2 / 4) + u * v * skew * d + v**2 * (1 + 2 * q * d**2)
    Q2 = u**2 * (1 + q * d**2)
    Q3 = u**2 + (m * u + v) ** 2 / V  # times 1 / A_0, like Q_4
    Q4 = u**2
    return A0 * (Q1 + (p - 1) * Q2) / (Q3 + (p - 1) * Q4)


def _moments(d: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Mass A_0, mean and variance of w(x), `w(x) \propto phi(x) sech((Delta x + zeta) / 2)`.

    Composite Gauss-Legendre in three panels around the knee of sech, at -zeta/Delta: inside |Delta x + zeta|
    < 40 its poles (at distance pi/Delta) decide the number of nodes, outside it is an exponential.
    """

    def logw(x: Tensor) -> Tensor:  # [N, nodes]
        return -(x**2) / 2 - _log_cosh((d[:, None] * x + z[:, None]) / 2)

    with torch.no_grad():
        peak = _peak(d, z)
        lo, hi = peak - _RADIUS, peak + _RADIUS
        wide = d < 4  # one panel is enough, and the knee may be at infinity
        safe = torch.where(wide, 1.0, d)
        a = torch.where(wide, lo, torch.clamp((-z - _KNEE) / safe, lo, hi))
        b = torch.where(wide, hi, torch.clamp((-z + _KNEE) / safe, lo, hi))
        x, w = (torch.cat(parts, 1) for parts in zip(_panel(lo, a, 64), _panel(a, b, 240), _panel(b, hi, 64)))
    g = logw(x)  # [N, 368]
    top = logw(peak[:, None])  # [N, 1]
    f = w * torch.exp(g - top)
    mass = f.sum(1)
    m = (f * x).sum(1) / mass
    V = (f * (x - m[:, None]) ** 2).sum(1) / mass  # a second pass: A_2 / A_0 - m^2 would cancel
    # 2 sqrt(pi_0 pi_1) = sech(zeta / 2) is the constant between sech and the paper's denominator.
    A0 = mass * torch.exp(top[:, 0] + _log_cosh(z / 2) - d**2 / 8) / math.sqrt(2 * math.pi)
    return A0, m, V


def _log_cosh(t: Tensor) -> Tensor:
    t = t.abs()
    return t + torch.log1p(torch.exp(-2 * t)) - math.log(2)


def _peak(d: Tensor, z: Tensor) -> Tensor:
    """Where w is largest: the root of x + (Delta/2) tanh((Delta x + zeta)/2), which increases, by bisection."""
    lo, hi = -d / 2, d / 2
    for _ in range(60):
        x = (lo + hi) / 2
        high = x + d / 2 * torch.tanh((d * x + z) / 2) > 0
        lo, hi = torch.where(high, lo, x), torch.where(high, x, hi)
    return (lo + hi) / 2


def _panel(a: Tensor, b: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    t, w = (torch.from_numpy(c).to(a.device) for c in np.polynomial.legendre.leggauss(nodes))
    half = (b - a)[:, None] / 2
    return (a + b)[:, None] / 2 + half * t, half * w  # [N, nodes] each


# ---- Bayes error ---------------------------------------------------------------------------------------------


def two_class_error(delta: Tensor, pi: Tensor) -> Tensor:
    zeta = torch.log(pi[0]) - torch.log(pi[1])
    if delta == 0 or not torch.isfinite(zeta):
        return pi.min()
    ratio = zeta / delta
    return pi[0] * torch.special.ndtr(-delta / 2 - ratio) + pi[1] * torch.special.ndtr(ratio - delta / 2)


def simplex_error(delta: Tensor, L: int) -> Tensor:
    # In the simplex x.(mu_k - mu_0) is equicorrelated: (g_k - g_0) Delta / sqrt(2) - Delta^2 / 2 with
    # independent g, so class 0 wins where every g_k < g_0 + Delta / sqrt(2).
    shift = delta / math.sqrt(2)
    lo, hi = -shift.item() / 2 - 10, 10.0
    t = torch.linspace(lo, hi, math.ceil((hi - lo) / 0.02), dtype=torch.float64, device=delta.device)
    density = torch.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    miss = -torch.expm1((L - 1) * torch.special.log_ndtr(t + shift))  # 1 - Phi^(L-1), exact when tiny
    # The integrand vanishes with all its derivatives at both ends: the trapezoid rule converges exponentially.
    return (density * miss).sum() * ((hi - lo) / (len(t) - 1))


@torch.no_grad()
def sampled_error(mu: Tensor, pi: Tensor, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    L = len(mu)
    mu = mu - mu.mean(0)
    if mu.shape[1] > L:  # only the span of the means matters
        mu = mu @ torch.linalg.qr(mu.T).Q
    i, j = torch.triu_indices(L, L, 1, device=mu.device)
    log_pi = pi.log()
    log_pair = (log_pi[i] + log_pi[j]) / 2 - pairwise_distances(mu, mu)[i, j] ** 2 / 8
    log_B = torch.logsumexp(log_pair, 0)
    if log_B == -math.inf:  # one class has all the mass
        return log_B.exp(), log_B.exp()
    edges = torch.exp(log_pair - log_B).cumsum(0)
    midpoint_bias = log_pi - (mu**2).sum(1) / 2
    # Drawn on the CPU, so that a seed gives the same numbers on every device.
    rng = torch.Generator("cpu").manual_seed(seed)
    total, total_sq = mu.new_zeros(()), mu.new_zeros(())
    block = max(1, min(samples, (1 << 22) // L))
    for start in range(0, samples, block):
        n = min(block, samples - start)
        pair = torch.searchsorted(edges, torch.rand(n, generator=rng, dtype=torch.float64, device="cpu").to(mu.device))
        pair.clamp_(max=len(edges) - 1)
        noise = torch.randn(n, mu.shape[1], generator=rng, dtype=torch.float64, device="cpu").to(mu.device)
        x = (mu[i[pair]] + mu[j[pair]]) / 2 + noise  # [n, p]
        logit = x @ mu.T + midpoint_bias  # [n, L]: log pi_k p_k(x) up to a constant in k
        top = logit.max(1, keepdim=True)
        r = torch.exp((logit - top.values) / 2).scatter_(1, top.indices, 0.0)  # sqrt of the odds against the winner
        S, S2 = r.sum(1), (r**2).sum(1)
        weight = torch.where(S > 0, S2 / (S + (S**2 - S2) / 2), 0.0)  # (p - max) / (B q), in [0, 1]
        total += weight.sum()
        total_sq += (weight**2).sum()
    mean = total / samples
    spread = torch.sqrt(torch.clamp(total_sq / samples - mean**2, min=0) / (samples - 1))
    return mean * log_B.exp(), spread * log_B.exp()
