"""The integrals behind `mmlda.theory`: Efron's moments and the Bayes error, on float64 tensors.

`mmlda.theory` checks arguments and converts results; this module has only the numerics.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmlda.theory.means import pairwise_distances

# ---- Theorem 1 -----------------------------------------------------------------------------------------------

_RADIUS = 9.0  # the integrand is below exp(-RADIUS^2 / 2) = 3e-18 of its peak outside peak +- RADIUS
_KNEE = 40.0  # outside |s| < KNEE, the sigmoid is an exponential or 1 to exp(-KNEE) = 4e-18
_STEEP = 1e8  # a sigmoid of this slope is a step
_FAR = 100.0  # the integral is 0 in float64 for a knee beyond 40


def efficiency(d: Tensor, z: Tensor, p: int | float) -> Tensor:
    """`Eff_p` for flat `d` and `z`; it is symmetric in `z`.

    With t = x + Delta/2 and far = Delta/2 - zeta/Delta, w = (1 + exp(-zeta)) phi(t) sigmoid(Delta (t - far)) for
    zeta >= 0, in which nothing cancels. The 2x2 matrix in Q_3 is near singular where w is narrow. In terms of w's mass
    A_0, mean m and variance V in t it is well conditioned: Q_3 = (1 + (m - far)^2 / V) / A_0. For Delta < 1, where far
    may be infinite, Q_1..Q_4 are multiplied through by u^2, u = Delta / |(Delta, zeta)|.
    """
    z = z.abs()
    # Where the knee is below all of phi, w is normal and the efficiency 1.
    normal = (z >= _KNEE) & (z / d.clamp_min(1.0) - d / 2 >= _RADIUS + _KNEE / d.clamp_min(1.0))
    d, z = torch.where(normal, 0.0, d), torch.where(normal, 0.0, z)
    small, steep = d.clamp(max=1.0), d.clamp(max=_STEEP)
    far = (d / 2 - z / d.clamp_min(1.0)).clamp(max=_FAR)  # for d >= 1
    A0, m, V = _moments(d, z, far)
    q = torch.exp(-z) / (1 + torch.exp(-z)) ** 2  # pi_0 pi_1
    Q2 = 1 + q * steep**2  # where d is larger, q or A_0 is 0
    if p == math.inf:
        return (A0 * Q2).clamp(max=1.0)
    both_zero = (d == 0) & (z == 0)  # kept out of hypot, whose gradient at 0 is NaN
    size = torch.hypot(torch.where(both_zero, 1.0, small), z)
    u = torch.where((d >= 1) | both_zero, 1.0, small / size)
    uf = torch.where(d >= 1, far, u * small / 2 - z / size)
    Q1 = u**2 + uf**2 + 2 * u**2 * (z * torch.sigmoid(-z) + q * z * z)  # q z first, which cannot overflow
    Q3 = u**2 + (m * u - uf) ** 2 / V  # times 1 / A_0, like Q_4 = u^2
    return (A0 * (Q1 + (p - 1) * u**2 * Q2) / (Q3 + (p - 1) * u**2)).clamp(max=1.0)


def _moments(d: Tensor, z: Tensor, far: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mass A_0 of w, and mean and variance of t.

    Composite Gauss-Legendre in three panels around the knee of the sigmoid, at far: inside |s| < 40 its poles (at
    distance pi/Delta) decide the number of nodes, outside it is an exponential or 1.
    """
    small, steep = d.clamp(max=1.0)[:, None], d.clamp(max=_STEEP)[:, None]

    def slope(t: Tensor) -> Tensor:  # s, [N, nodes]
        return torch.where(d[:, None] < 1, small * (t - small / 2) + z[:, None], steep * (t - far[:, None]))

    def logw(t: Tensor) -> Tensor:
        return -(t**2) / 2 + F.logsigmoid(slope(t))

    with torch.no_grad():
        lo, hi = torch.zeros_like(steep), torch.minimum(steep, far[:, None].clamp_min(0) + 1)
        for _ in range(60):  # the peak: the root of t - Delta sigmoid(-s), which increases, by bisection
            peak = (lo + hi) / 2
            high = peak > steep * torch.sigmoid(-slope(peak))
            lo, hi = torch.where(high, lo, peak), torch.where(high, peak, hi)
        lo, hi = (peak - _RADIUS)[:, 0], (peak + _RADIUS)[:, 0]
        wide = d < 4  # one panel is enough, and the knee may be at infinity
        reach = _KNEE / steep[:, 0].clamp_min(4.0)
        a = torch.where(wide, lo, torch.clamp(far - reach, lo, hi))
        b = torch.where(wide, hi, torch.clamp(far + reach, lo, hi))
        t, weights = (torch.cat(parts, 1) for parts in zip(_panel(lo, a, 64), _panel(a, b, 240), _panel(b, hi, 64)))
    top = logw(peak)  # [N, 1]
    f = weights * torch.exp(logw(t) - top)  # [N, 368]
    mass = f.sum(1)
    m = (f * t).sum(1) / mass
    V = (f * (t - m[:, None]) ** 2).sum(1) / mass  # a second pass: the mean of t^2 minus m^2 would cancel
    return mass * torch.exp(top[:, 0]) * (1 + torch.exp(-z)) / math.sqrt(2 * math.pi), m, V


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
