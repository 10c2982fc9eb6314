"""The L2 attack of Carlini and Wagner (2017).

    minimise  ||x' - x||^2 + c f(x'),   x' = mid + half tanh(w),   f = max(Z_y - max_{k != y} Z_k, -kappa)

in w by Adam, and the smallest c that ends across the boundary by bisection. Towards a target t,
f = max(max_{k != t} Z_k - Z_t, -kappa). Distances in the objective are in units of the range's width, so the
attack does the same on [0, 1] and on [0, 255].

Every sample has its own c, iteration count and Adam state. When one search of a sample ends, its next one begins at
once, independently of the other samples; after its last one, the sample leaves the batch. Nothing waits for the
device between two checks for finished samples.

Four things differ from the original, each because it finds smaller distortions sooner:

- c counts as large enough if the search *ends* across the boundary. Adam's first, long step can cross it in passing
  with any c; the original then lowers c, and never gets closer.
- The learning rate starts high and drops to a fifth when progress stalls. The search ends when progress stalls and
  the loss is steady; if the rate is too high, the loss oscillates instead.
- Progress is judged per sample, by the lowest loss so far; the original compares the sum over the batch at two
  moments.
- Pixels at the end of the range start 5e-5 of the width inside of it, not 5e-7, where tanh is so flat that
  they take 500 iterations to move. Distances are to the image as given, never to the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmlda.attacks.base import Attack
from mmlda.attacks.checks import invalid
from mmlda.attacks.gradient import tall
from mmlda.attacks.losses import choose_target, margin, moderate, other_classes
from mmlda.attacks.replay import tf32_allowed
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.surface import Surface, slope

_BETA_1, _BETA_2, _TINY = 0.9, 0.999, 1e-8  # Adam's
_SHRINK = 1e-4  # atanh is infinite at the end of the range
_PROGRESS = 3e-4  # a loss that has not fallen by this share within the patience has stalled
_PATIENCE = (30, 100)  # iterations: a thirtieth of the steps, within these limits
_DROP = 0.2  # of the rate when progress stalls
_ROUGH = 0.01  # a rate is too high if the loss is this share above its lowest on average
_MOST_DROPS = 6
_ROUNDINGS = 8  # a margin of fewer roundings than this may change its sign in another batch
_TF32 = 2.0**-9  # the share of the logits' spread that may be rounding where products have TF32's 10 bits
_FURTHER = 2e-3  # a point that the final check does not find across moves on by this share of its distance, then twice


@dataclass
class _Rows:
    """The current searches, one per row; tensors are [B] unless noted otherwise."""

    who: Tensor  # int64: the sample
    label: Tensor  # int64: its class y, or the target
    x: Tensor  # [B, ...] the image
    w: Tensor  # [B, ...] where Adam is, before tanh
    m: Tensor  # [B, ...] Adam's first moment
    v: Tensor  # [B, ...] Adam's second
    best: Tensor  # [B, ...] the nearest point across the boundary, in the dtype of the images
    best_sq: Tensor  # its squared distance in units of the width, inf for none
    c: Tensor
    lower: Tensor  # the largest c known to be too small
    upper: Tensor  # the smallest c known to be enough
    crossed: Tensor  # bool: across the boundary since the loss last fell
    total: Tensor  # the sum of the losses since the last look
    low: Tensor  # the lowest loss of this search
    anchor: Tensor  # the lowest loss when it last fell by a share that counts
    since: Tensor  # int64: the iteration at which it did
    rate: Tensor
    t: Tensor  # int64: the iteration of this search
    search: Tensor  # int64: its number
    spent: Tensor  # int64: the iterations of the searches before it

    def take(self, which: Tensor) -> _Rows:
        return _Rows(*(column[which] for column in vars(self).values()))

    def put(self, at: Tensor, rows: _Rows) -> None:
        for name, column in vars(rows).items():
            getattr(self, name)[at] = column


# The columns that an iteration changes, and those that it only reads.
_CHANGED = ("w", "m", "v", "best", "best_sq", "crossed", "total", "low", "t")
_READ = ("c", "rate", "x", "label")


class _Found(NamedTuple):
    """The best points found so far, per sample; updated in place."""

    best: Tensor  # [N, ...] the nearest point across the boundary
    best_sq: Tensor  # its squared distance in units of the width, inf for none
    spent: Tensor  # int64: iterations

    def record(self, rows: _Rows) -> None:
        """Record the points found by finished `rows`, several of which may belong to one sample."""
        self.spent.index_add_(0, rows.who, rows.spent)
        self.best_sq.scatter_reduce_(0, rows.who, rows.best_sq, "amin")
        won = (rows.best_sq == self.best_sq[rows.who]) & (rows.best_sq < torch.inf)
        self.best[rows.who[won]] = rows.best[won]


@dataclass(frozen=True, kw_only=True)
class CarliniWagner(Attack):
    """Minimum-norm L2 attack of Carlini and Wagner: the smallest distortion that changes the label.

    `x_adv` is the nearest point across the boundary over all searches. Where none was found it is the original,
    and the distances are infinite. A sample that is misclassified from the start, by at least kappa, is a success at
    distance 0, so average distances over the correctly classified samples only.

    Parameters
    ----------
    kappa
        Confidence: the logit of the new class must exceed the others by at least this.
    target
        None (any class but y), "least-likely" (by the clean logits), "random", or "every" (each class in turn; the
        nearest point counts).
    search_steps
        Number of searches, each with its own c.
    steps
        Largest number of iterations per search.
    rate
        Initial learning rate of Adam, in units of w.
    initial_c
        c of the first search; it grows tenfold per search until one crosses the boundary, and is then bisected.
    abort
        Whether to end a search when, after the rate has dropped, its loss is steady and has fallen by less than 0.03%
        in a thirtieth of `steps` (30 to 100 iterations). Otherwise every search takes all `steps`.
    batch_size
        Largest number of simultaneous searches (default: the number of images).

    Examples
    --------
    >>> x, y = torch.tensor([[0.6, 0.4]]), torch.tensor([0])
    >>> result = CarliniWagner(steps=500)(lambda x: 5 * x, x, y)
    >>> result.success.item(), round(result.l2.item(), 2)  # the boundary is the diagonal
    (True, 0.14)
    """

    minimal: ClassVar = True
    kappa: float = 0.0
    target: str | None = None
    search_steps: int = 9
    steps: int = 10_000
    rate: float = 0.05
    initial_c: float = 1e-3
    abort: bool = True

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        if self.width(min) <= 0:
            raise invalid("bounds", "low < high for every feature", "a feature with low = high")
        if target is None and self.target is not None and self.target != "every":
            target = choose_target(self.target, surface.logits(x), y, self.noise(index))
        aimed = target is not None
        label = y if target is None else target
        _, z, g = surface.gradient("margin", x, y, target)
        assert z is not None
        zero, clean = (g == 0).flatten(1).all(1), z.argmax(1)
        there = ((clean == label) == aimed) & (_gap(z, label, aimed) >= self.kappa)  # without any search
        best_sq = torch.full(y.shape, torch.inf, dtype=_wide(x), device=x.device).masked_fill_(there, 0.0)
        found = _Found(x.clone(), best_sq, torch.zeros_like(y))

        todo = best_sq.nonzero()[:, 0]  # int64 [M]: the samples to search, once for each class to go to
        goals = label[todo]
        if not aimed and self.target == "every":
            goals = other_classes(z, y)[todo].T.flatten()
            todo = todo.repeat(z.shape[1] - 1)
            aimed = True
        # Logits of an extreme scale would need a c that no bisection reaches, or make Adam's squares overflow.
        c = self.initial_c * moderate(_spread(z)).to(best_sq.dtype)
        self._search(surface, x, c, todo, goals, aimed, found)

        best, prediction = self._last_look(surface, x, label, target is not None, found)
        success = (prediction != y if target is None else prediction == target) & (best_sq < torch.inf)
        return measure(x, best, y, target, self.bounds, prediction, found.spent, clean=clean, zero=zero, found=success)

    def _search(
        self, surface: Surface, x: Tensor, c: Tensor, todo: Tensor, goals: Tensor, aimed: bool, found: _Found
    ) -> None:
        """Search for each of `todo` towards (or away from) its `goals`, starting with its first c; update `found`."""
        size, K = min(len(todo), len(x)), min(max(10, self.steps // 100), 50)
        step = partial(self._step, surface, aimed)
        rows, next_ = self._open(x, c, todo[:size], goals[:size]), size
        while len(rows.who):
            changed, read = (tuple(getattr(rows, name) for name in names) for names in (_CHANGED, _READ))
            for _ in range(K):
                changed = surface.step((self, aimed), step, *changed, *read)
            vars(rows).update(zip(_CHANGED, changed))
            # Searches that end record their points; rows that are finished already are not read.
            under_way = rows.search < self.search_steps
            self._settle(rows, K)
            left = (under_way & (rows.search >= self.search_steps)).nonzero()[:, 0]  # waits for the device
            if len(left) == 0:
                continue
            found.record(rows.take(left))
            fresh = slice(next_, next_ + len(left))
            if len(todo[fresh]):
                rows.put(left[: len(todo[fresh])], self._open(x, c, todo[fresh], goals[fresh]))
                next_ += len(left)
            busy = rows.search < self.search_steps
            n, size = int(busy.sum()), len(busy)
            # On CUDA a quarter must be idle to be worth a new graph.
            if n < size and not (busy.is_cuda and n > 0 and (n > 0.75 * size or size <= 32)):
                rows = rows.take(busy.nonzero()[:, 0])

    def _open(self, x: Tensor, c: Tensor, who: Tensor, label: Tensor) -> _Rows:
        x = x[who]
        w = self._start(x)
        real, whole = torch.zeros(len(x), dtype=w.dtype, device=x.device), torch.zeros_like(who)
        start = {
            "w": w,
            "m": torch.zeros_like(w),
            "v": torch.zeros_like(w),
            "c": c[who],
            "rate": real + self.rate,
            "crossed": whole > 0,
        }
        start |= {name: real + torch.inf for name in ("best_sq", "upper", "low", "anchor")}
        start |= {name: real.clone() for name in ("lower", "total")}
        start |= {name: whole.clone() for name in ("since", "t", "search", "spent")}
        return _Rows(who=who, label=label, x=x, best=x.clone(), **start)

    def _start(self, x: Tensor) -> Tensor:
        """w with mid + half tanh(w) = x, but for pixels at the ends of the range."""
        lo, hi = self.bounds
        u = (x.to(_wide(x)) - lo) * (2 / (hi - lo)) - 1
        return torch.atanh(u.clamp(_SHRINK - 1, 1 - _SHRINK))

    def _across(self, gap: Tensor, rounding: Tensor) -> Tensor:
        """Whether logits are across the boundary by kappa, and by more than rounding: bool [N]."""
        return (gap > rounding) & (gap >= self.kappa)

    def _last_look(
        self, surface: Surface, x: Tensor, label: Tensor, aimed: bool, found: _Found
    ) -> tuple[Tensor, Tensor]:
        """The best points and their labels, all in one batch of the images' size.

        A point was found in a batch of another size, and with other kernels, whose rounding differs. If it is not
        across the boundary in this batch, it moves further along its line from the image, in small steps, until it is.
        """
        best, share = found.best, _FURTHER
        moved = (found.best_sq > 0) & (found.best_sq < torch.inf)
        z = surface.replayed_logits(best)
        for _ in range(8):  # by at most three fifths of the distance
            short = moved & ~self._across(_gap(z, label, aimed), rounding_of(z, surface))
            if not bool(short.any()):
                break
            further = (x + (best - x) * (1 + share)).clamp(*self.bounds)
            best = torch.where(tall(short, x), further, best)
            share *= 2
            z = surface.replayed_logits(best)
        return best, z.argmax(1)

    def _settle(self, rows: _Rows, K: int) -> None:
        """Find the searches that have stalled or ended; give those a new c and a new start."""
        T = self.steps
        # f reaches down to -kappa, so the loss may be negative.
        fell = rows.anchor.isinf() | (rows.anchor - rows.low > _PROGRESS * rows.anchor.abs())
        rows.anchor = torch.where(fell, rows.low, rows.anchor)
        rows.since = torch.where(fell, rows.t, rows.since)
        still = rows.t - rows.since >= min(max(T // 30, _PATIENCE[0]), _PATIENCE[1])
        rough = rows.total / K - rows.low > _ROUGH * rows.low.abs()
        drop = still & ((rows.rate == self.rate) | rough) & (rows.rate > self.rate * _DROP**_MOST_DROPS)
        end = rows.t >= T
        if self.abort:
            end |= still & ~drop
        rows.rate = torch.where(drop, rows.rate * _DROP, rows.rate)
        rows.since = torch.where(drop, rows.t, rows.since)
        rows.total = torch.zeros_like(rows.total)

        enough, failed = end & rows.crossed, end & ~rows.crossed
        rows.upper = torch.where(enough, rows.c, rows.upper)
        rows.lower = torch.where(failed, rows.c, rows.lower)
        between = torch.where(rows.upper < torch.inf, (rows.lower + rows.upper) / 2, rows.c * 10)
        rows.c = torch.where(end, between, rows.c)
        rows.crossed = rows.crossed & ~(fell | drop | end)
        rows.search = rows.search + end.to(torch.int64)
        rows.spent = rows.spent + torch.where(end, rows.t.clamp_max(T), 0)
        for name, value in (("t", 0), ("since", 0), ("low", torch.inf), ("anchor", torch.inf)):
            setattr(rows, name, torch.where(end, value, getattr(rows, name)))
        rows.rate = torch.where(end, self.rate, rows.rate)
        again = end.nonzero()[:, 0]
        rows.w[again] = self._start(rows.x[again])
        rows.m[again] = 0
        rows.v[again] = 0

    def _step(self, surface: Surface, aimed: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One iteration, from `_CHANGED` and `_READ` to `_CHANGED`: forward, backward, the best so far, Adam."""
        w, m, v, best, best_sq, crossed, total, low, t, c, rate, x, label = tensors
        lo, hi = self.bounds
        width, half = hi - lo, (hi - lo) / 2
        u = torch.tanh(w)
        x_k = (u * half).add_((lo + hi) / 2).clamp_(lo, hi).to(x.dtype)
        f, g, across = self._slope(surface, x_k, c, label, aimed)
        d = (x_k.to(w.dtype) - x.to(w.dtype)).div_(width)
        sq = d.flatten(1).square().sum(1)
        across &= t < self.steps
        better = across & (sq < best_sq)
        loss = sq + c * f.to(c.dtype)
        # d loss / d w = (d sq / d x' + c d f / d x') d x' / d w, and d x' / d w = half (1 - tanh^2 w)
        slope = u.square_().neg_().add_(1).mul_(half)
        g = d.mul_(2 / width).add_(g.to(w.dtype)).mul_(slope)
        best = torch.where(tall(better, x), x_k, best)
        best_sq = torch.where(better, sq, best_sq)
        w, m, v, t = _adam(w, m, v, t, g, rate)
        return w, m, v, best, best_sq, crossed | across, total + loss, torch.minimum(low, loss), t

    def _slope(
        self, surface: Surface, x_k: Tensor, c: Tensor, label: Tensor, aimed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """f at `x_k` [B], the gradient of c f [like x], and whether the point counts as across: bool [B]."""
        x_k = x_k.detach().requires_grad_(True)
        with torch.enable_grad():
            z = surface.logits(x_k)  # [B, L]
            gap = _gap(z, label, aimed)
            rounding = rounding_of(z.detach(), surface)
            # Down to where a point counts as across.
            f = torch.maximum(-gap, -(1.5 * rounding).clamp_min(self.kappa))
            g = slope((f * c).sum(), x_k)
        return f.detach(), g, self._across(gap.detach(), rounding)


def _adam(w: Tensor, m: Tensor, v: Tensor, t: Tensor, g: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
    """w, m, v and t after a step along -g: m^ / (sqrt(v^) + eps) with m^ = m / b_1, v^ = v / b_2, in few passes."""
    t = t + 1
    m = torch.lerp(m, g, 1 - _BETA_1)
    v = (v * _BETA_2).addcmul_(g, g, value=1 - _BETA_2)
    time = t.to(g.dtype)
    b_1, b_2 = (-torch.expm1(time * math.log(b)) for b in (_BETA_1, _BETA_2))
    b_2 = b_2.sqrt_()
    below = v.sqrt().add_(tall(b_2 * _TINY, g))
    return w - (m * tall(rate * b_2 / b_1, g)).div_(below), m, v, t


def _gap(z: Tensor, label: Tensor, aimed: bool) -> Tensor:
    """How far logits `z` are across the boundary, [N]: towards `label`, or away from it."""
    return -margin(z, label) if aimed else margin(z, label)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def rounding_of(z: Tensor, surface: Surface) -> Tensor:
    """How much of a gap between the first two of logits `z` may be rounding, [N]: of the logits, and of TF32 products.

    The first is a share of the largest logit, the second of its distance from the middle one: a constant that is added
    after the products is not rounded to TF32, and a class that is masked (-inf, -1e9) says nothing of the others. Of
    three classes and fewer the middle one may be that of the gap, so there the second is a share of the largest too.
    """
    precision = surface.precision or z.dtype
    top, spread = z.amax(1).abs(), _spread(z)
    fine = torch.finfo(precision).eps * (_ROUNDINGS if precision.itemsize > 2 else 1)  # in half one is much already
    return torch.maximum(top, spread) * fine + spread * _coarse(z, precision)


def _spread(z: Tensor) -> Tensor:
    """The distance of the largest of logits `z` from the middle one, [N]; of few or masked classes, the largest."""
    sorted_ = z.topk(z.shape[1] // 2 + 1, dim=1).values
    top = sorted_[:, 0].abs()
    spread = top if z.shape[1] < 4 else sorted_[:, 0] - sorted_[:, -1]
    return torch.where(spread.isfinite(), spread, top)  # half of the classes are masked


def _coarse(z: Tensor, precision: torch.dtype) -> float:
    """The share of the logits' spread that the device may round away beyond the logits' own precision."""
    return _TF32 if z.is_cuda and precision == torch.float32 and tf32_allowed() else 0.0
