"""JSMA, the Jacobian-based saliency map attack (Papernot et al. 2016), one pixel or a pair at a time.

With t the target and S the surface (logits or softmax), a step that raises pixels looks at

    a_p = dS_t / dx_p,   b_p = sum_{k != t} dS_k / dx_p,   saliency(p) = a_p |b_p|  where a_p > 0 and b_p < 0,

and adds eps to the pixel of the highest saliency, clipped to the range; for a pair, a = a_p + a_q and
b = b_p + b_q. A step that lowers pixels (eps < 0) requires the opposite signs. Two vector-Jacobian products give a
and b, whatever the number of classes (one for softmax, whose outputs sum to 1, so that b = -a).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mmlda.attacks.base import RULES, Attack, survivors
from mmlda.attacks.checks import check_choice, check_number
from mmlda.attacks.losses import choose_target
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.surface import Surface, finite, slope

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of r: each rules out pixels that the others cannot
_SHORTLISTS = (16, 64, 256)
_TILE = 1 << 22  # largest number of pairs tried at a time
_COMPACT_EVERY = 10  # steps, on CUDA


def best_pixel(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The pixel of the largest u v with u > 0 and v > 0: int64 [N, 1], and whether there is one: bool [N].

    Ties go to the first. `u` and `v` [N, D] are -inf for pixels that may not be chosen.

    >>> best_pixel(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[9.0, -1.0, 2.0]]))
    (tensor([[0]]), tensor([True]))
    """
    saliency = torch.where((u > 0) & (v > 0), u * v, -1.0)
    best = saliency.argmax(1, keepdim=True)
    return best, saliency.gather(1, best).squeeze(1) >= 0


def best_pair(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The pair p < q of the largest F = (u_p + u_q)(v_p + v_q) with both sums positive: int64 [N, 2], bool [N].

    Ties go to the first in the order of (p, q). `u` and `v` [N, D] are -inf for pixels that may not be chosen,
    and finite otherwise, as are their products: the bound below does not cover an infinite sum.

    It is the maximum over all D (D - 1) / 2 pairs, found from a short list. For every r > 0 the inequality of the
    means says 2 sqrt(F) <= g_p + g_q with g = r u + v / r. So if some pair has the value F*, a pixel with
    g_p < 2 sqrt(F*) - max g is in no pair that is as good. A good F* is cheap: take the best pixel's best partner,
    that one's best partner, and so on; with r around sqrt(s_v / s_u) of that pair, a handful of pixels remain.
    Where more than 256 do, all pairs are tried, tile by tile.

    >>> best_pair(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[9.0, -1.0, 2.0]]))
    (tensor([[0, 2]]), tensor([True]))
    """
    N, D = u.shape
    pair = torch.zeros(N, 2, dtype=torch.int64, device=u.device)
    if D < 2:
        return pair, pair[:, 0] > 0
    possible = (u.amax(1) > 0) & (v.amax(1) > 0)  # [N]
    good = _good_pair(u, v)
    s_u, s_v = u.gather(1, good).sum(1), v.gather(1, good).sum(1)
    positive = (s_u > 0) & (s_v > 0)
    value = torch.where(positive, s_u * s_v, 0.0)  # F*
    r_0 = torch.where(positive, (s_v / s_u).sqrt(), 1.0)[:, None]
    matters = u > -torch.inf  # [N, D]
    for factor in _FACTORS:
        r = r_0 * factor
        g = u * r + v / r
        size = torch.where(g > -torch.inf, u.abs() * r + v.abs() / r, 0.0).amax(1)
        slack = 32 * torch.finfo(u.dtype).eps * size  # more than g and F* can be off by rounding
        matters &= g >= (2 * value.sqrt() - g.amax(1) - slack)[:, None]
    count = matters.sum(1)
    F, rest = torch.full_like(value, -1.0), possible.nonzero()[:, 0]
    for K in _SHORTLISTS:
        short = rest[count[rest] <= K]
        if len(short):
            # K pixels that include those that matter; sorted, because the order of pairs decides between equal ones.
            list_ = matters[short].to(u.dtype).topk(min(K, D), dim=1).indices.sort(1).values  # [n, K]
            F[short], pairs = _try_all_pairs(u[short].gather(1, list_), v[short].gather(1, list_))
            pair[short] = list_.gather(1, pairs)
        rest = rest[count[rest] > K]
    if len(rest):
        F[rest], pair[rest] = _try_all_pairs(u[rest], v[rest])
    return pair, F >= 0


def _good_pair(u: Tensor, v: Tensor, rounds: int = 4) -> Tensor:
    """A pair that no change of one of its two pixels improves, or nearly: int64 [N, 2]."""
    p, _ = best_pixel(u, v)  # [N, 1]
    for _ in range(rounds):
        s_u, s_v = u + u.gather(1, p), v + v.gather(1, p)
        F = torch.where((s_u > 0) & (s_v > 0), s_u * s_v, -1.0).scatter(1, p, -2.0)
        q = F.argmax(1, keepdim=True)
        pair, p = torch.cat([p, q], 1), q
    return pair


def _try_pairs(u: Tensor, v: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The largest F of the pairs with p in first .. last - 1, -1 for none: [N], and the pair: int64 [N, 2]."""
    D = u.shape[1]
    p, q = torch.arange(first, last, device=u.device), torch.arange(D, device=u.device)
    s_u, s_v = u[:, p, None] + u[:, None], v[:, p, None] + v[:, None]  # [N, P, D]
    F = torch.where((s_u > 0) & (s_v > 0) & (p[:, None] < q), s_u * s_v, -1.0).flatten(1)
    at = F.argmax(1)  # the first of equal ones
    return F.gather(1, at[:, None]).squeeze(1), torch.stack([first + at // D, at % D], 1)


def _try_all_pairs(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`_try_pairs` of all pairs, `_TILE` at a time."""
    D = u.shape[1]
    samples, rows = max(1, _TILE // (D * D)), max(1, min(D, _TILE // D))
    done = []
    for u_s, v_s in zip(u.split(samples), v.split(samples)):
        best, pair = _try_pairs(u_s, v_s, 0, rows)
        for first in range(rows, D, rows):
            F, other = _try_pairs(u_s, v_s, first, min(D, first + rows))
            better = F > best  # not >=: of equal pairs the first
            best, pair = torch.where(better, F, best), torch.where(better[:, None], other, pair)
        done.append((best, pair))
    return torch.cat([best for best, _ in done]), torch.cat([pair for _, pair in done])


@dataclass(frozen=True, kw_only=True)
class JSMA(Attack):
    """Move the most salient pixels towards a target class until it is reached.

    A pixel is one channel at one position. A sample stops when its label is the target, after `steps` steps, or when
    no pixel (or pair) is left that has the right signs, can still move and is within `max_share`.

    Parameters
    ----------
    eps
        Amount added to a pixel per step, clipped to the range; negative to lower pixels. It is not an L-infinity
        bound: a pixel that is chosen again moves again.
    pairs
        Whether to move two pixels per step.
    surface
        What is differentiated, "logits" or "softmax". The two choose different pixels, so report which one you used.
        Softmax slopes are computed such that a saturated network does not make them 0.
    target
        "least-likely" (by the clean logits) or "random".
    steps
        Largest number of steps.
    max_share
        Largest share of pixels that may change. If only one is left and a step takes two, both must have changed
        already (`reuse`).
    reuse
        Whether a pixel may be chosen again while it is inside the range (default: yes for single pixels, no for
        pairs, since Papernot et al. remove every used pixel from the search).

    Examples
    --------
    >>> x, y = torch.tensor([[0.75, 0.125, 0.5]]), torch.tensor([0])
    >>> JSMA(eps=0.25)(lambda x: x[:, :2] * torch.tensor([1.0, 3.0]) - x[:, 1:], x, y).x_adv
    tensor([[0.7500, 0.3750, 0.5000]])
    """

    rules: ClassVar = RULES | {
        "eps": partial(check_number, expected="a finite number other than 0", fits=lambda v: v != 0),
        "surface": partial(check_choice, allowed=("logits", "softmax")),
        "target": partial(check_choice, allowed=("least-likely", "random")),
    }
    eps: float
    pairs: bool = False
    surface: str = "logits"
    target: str = "least-likely"
    steps: int = 100
    max_share: float = 1.0
    reuse: bool | None = None

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        if target is None:
            target = choose_target(self.target, surface.logits(x), y, self.noise(index))
        x_adv, spent = x.clone(), torch.zeros_like(y)
        clean, zero = y, torch.zeros_like(y, dtype=torch.bool)

        who = torch.arange(len(x), device=x.device)
        x_k, to, slopes = x, target, partial(self._slopes, surface)
        changed = torch.zeros(x.shape, dtype=torch.bool, device=x.device).flatten(1)  # [N, D]
        for k in range(self.steps):
            label, a, b = surface.step((self, "slopes"), slopes, x_k, to)
            if k == 0:
                clean, zero = label.clone(), ((a == 0) & (b == 0)).all(1)
            x_k, changed, moved = self._move(x_k, a, b, changed, label != to)
            spent[who] += moved
            # A stopped sample does not move: the same step stops it again, until it leaves the batch.
            if not x.is_cuda or k % _COMPACT_EVERY == _COMPACT_EVERY - 1:
                stay = survivors(moved)
                if len(stay) < len(who):
                    x_adv[who] = x_k
                    who, x_k, to, changed = who[stay], x_k[stay], to[stay], changed[stay]
                if len(who) == 0:
                    break
        x_adv[who] = x_k
        prediction = surface.replayed_logits(x_adv).argmax(1)
        return measure(x, x_adv, y, target, self.bounds, prediction, spent, clean=clean, zero=zero)

    def _slopes(self, surface: Surface, x: Tensor, to: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The label [N]; a and b [N, D], finite, up to a positive factor, in at least float32."""
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            z = surface.watched(x)  # [N, L]
            if self.surface == "softmax":
                # dP_t = P_t d(log P_t). The factor is positive and the same for all pixels of a sample, so it
                # changes no choice; it is left out because it underflows.
                a = slope(z.log_softmax(1).gather(1, to[:, None]).sum(), x)
                b = -a
            else:
                a = slope(z.gather(1, to[:, None]).sum(), x, retain_graph=True)
                b = slope(z.scatter(1, to[:, None], 0.0).sum(), x)
        wide = torch.promote_types(x.dtype, torch.float32)
        # Widened first: in half precision, the stand-in for infinity would be an ordinary slope.
        return z.detach().argmax(1), finite(a.flatten(1).to(wide)), finite(b.flatten(1).to(wide))

    def _move(self, x_k: Tensor, a: Tensor, b: Tensor, changed: Tensor, going: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step: the images, the pixels changed so far, and who moved."""
        lo, hi = self.bounds
        flat = x_k.flatten(1)  # [N, D]
        room = flat < hi if self.eps > 0 else flat > lo
        reuse = not self.pairs if self.reuse is None else self.reuse
        if not reuse:
            room = room & ~changed
        # With fewer new pixels left than a step may take, only those that have changed may be chosen.
        most = int(self.max_share * flat.shape[1] + 1e-6) - (2 if self.pairs else 1)
        room = room & (changed | (changed.sum(1, keepdim=True) <= most))
        sign = 1.0 if self.eps > 0 else -1.0
        u, v = (torch.where(room, _scaled(t), -torch.inf) for t in (sign * a, -sign * b))
        pixels, valid = best_pair(u, v) if self.pairs else best_pixel(u, v)  # [N, 2 or 1], [N]
        moved = going & valid
        old = flat.gather(1, pixels)
        low, high = (end[pixels] if isinstance(end, Tensor) else end for end in (lo, hi))  # of those features
        new = torch.where(moved[:, None], (old + self.eps).clamp(low, high), old)
        chosen = moved[:, None].expand_as(pixels)
        changed = changed.scatter(1, pixels, changed.gather(1, pixels) | chosen)
        return flat.scatter(1, pixels, new).view_as(x_k), changed, moved


def _scaled(t: Tensor) -> Tensor:
    """`t` [N, D] times a power of two for each sample, so that products of small slopes do not underflow.

    A power of two changes no mantissa, so what was equal stays equal and what was larger stays larger.
    """
    _, exponent = torch.frexp(t.abs().amax(1, keepdim=True))
    return torch.ldexp(t, (-exponent).clamp(-100, 100))
