"""FAB, the fast adaptive boundary attack (Croce and Hein 2020), towards one class at a time.

The boundary between y and a class t is linearised at an iterate; the iterate and the original are projected
onto it inside the image range, and the next iterate lies between the two projections, biased to the original.
Once across, it steps back towards the original and continues, so the distance of the best point shrinks.

One change: the linearisation is taken where the last iterate landed, not after the step back. The value after
that step follows from the linearisation, so an iteration costs one forward and one backward pass, one forward pass
less than the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmlda.attacks.base import Attack, compact_before, record, survivors
from mmlda.attacks.gradient import Bounds, in_ball, norm_of, random_start, tall
from mmlda.attacks.losses import moderate, other_classes
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.surface import Surface, may_be_infinite

_OVERSHOOT = 1.05  # eta: past the linearised boundary by this factor
_BIAS = 0.1  # alpha_max: the most weight the projection of the original gets
_BISECTIONS = 10
_BACK = 0.9  # beta: what is kept of a perturbation that has crossed


def to_plane(x: Tensor, w: Tensor, c: Tensor, norm: str, bounds: Bounds) -> Tensor:
    """The smallest r with w.r = -c and x + r in the range: [N, D]; if there is none, as far as the range allows.

    The solution moves pixel i by min(lambda b_i, room_i) against the sign of c w_i, where b = 1 for L-infinity
    and |w| for L2. What that gains, sum_i |w_i| min(lambda b_i, room_i), is concave and piecewise linear in
    lambda with kinks at room_i / b_i, so sorting them finds lambda.

    >>> x, w, c = torch.tensor([[0.5, 0.9]]), torch.tensor([[1.0, 2.0]]), torch.tensor([-0.5])
    >>> to_plane(x, w, c, "linf", (0.0, 1.0))
    tensor([[0.3000, 0.1000]])
    """
    lo, hi = bounds
    a = w.abs()
    sign = w.sign() * -torch.sign(c)[:, None]
    room = torch.where(sign > 0, hi - x, x - lo).clamp_min(0) * (a > 0)
    b = torch.ones_like(a) if norm == "linf" else a
    kink, order = torch.where(a > 0, room / torch.where(b > 0, b, 1.0), 0.0).sort(1)  # [N, D]
    full = (a * room).gather(1, order).cumsum(1)  # gained by the pixels that are at the range
    slope = (a * b).gather(1, order)
    slope = slope.flip(1).cumsum(1).flip(1)  # of the pixels from this kink on
    gained = torch.cat([torch.zeros_like(full[:, :1]), full[:, :-1]], 1) + kink * slope  # at the kink
    need = c.abs()[:, None]
    k = (gained < need).sum(1, keepdim=True)  # the segment that lambda is in
    last = x.shape[1] - 1
    before = torch.where(k > 0, full.gather(1, (k - 1).clamp_min(0)), 0.0)
    steep = slope.gather(1, k.clamp_max(last))
    scale = torch.where((k <= last) & (steep > 0), (need - before) / steep, torch.inf)  # lambda, [N, 1]
    return sign * torch.minimum(torch.where(scale < torch.inf, scale * b, room), room)


def levelled(w: Tensor) -> Tensor:
    """The gradient `w` with 0 for NaN and, for infinities, the largest finite slope of the sample, with their sign.

    With a very large slope the plane would pass next to the iterate, and hardly anything would move; with a slope of
    0 the pixel would stay where it is, which for the root of a pixel of 0 is where the slope is infinite. As steep as
    the steepest of the others it moves as they do, and the next linearisation is taken where its slope is a number.
    """
    if not may_be_infinite(w):
        return w
    largest = torch.where(w.isfinite(), w.abs(), 0.0).flatten(1).amax(1)  # [N]
    largest = tall(torch.where(largest > 0, largest, 1.0), w)
    return torch.where(w.isinf(), w.sign() * largest, torch.where(w.isnan(), 0.0, w))


class _State(NamedTuple):
    """What changes at every step, per sample."""

    at: Tensor  # where the boundary is linearised next
    x_k: Tensor  # the iterate
    x_best: Tensor  # the best point across the boundary
    best: Tensor  # its distance, infinite where there is none
    label: Tensor  # the model's class there
    spent: Tensor  # steps


@dataclass(frozen=True, kw_only=True)
class FAB(Attack):
    """Minimum-norm attack for L-infinity and L2: searches for the nearest point of another class.

    With a target it searches for that class only; without one it tries the `targets` other classes with the
    highest clean logits, and the nearest point counts.

    Parameters
    ----------
    norm
        The distance to minimise, "linf" or "l2".
    eps
        A sample is finished once it is broken within this distance (default: None, search for the smallest).
    targets
        How many classes to try.
    steps
        Gradient steps per class.
    restarts
        Runs per class; all but the first start at random points half way to the best so far.

    Examples
    --------
    >>> x, y = torch.tensor([[0.6, 0.4]]), torch.tensor([0])
    >>> FAB(norm="linf", steps=20)(lambda x: 5 * x, x, y).linf.round(decimals=3)
    tensor([0.1000])
    """

    minimal: ClassVar = True
    norm: str = "linf"
    eps: float | None = None
    targets: int = 9
    steps: int = 100
    restarts: int = 1

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        z = surface.replayed_logits(x).clone()
        clean = z.argmax(1)
        wide = torch.promote_types(x.dtype, torch.float32)
        here = clean != y if target is None else clean == target
        best = torch.full(y.shape, torch.inf, dtype=wide, device=x.device).masked_fill(here, 0.0)
        end = _State(x, x, x.clone(), best, clean.clone(), torch.zeros_like(y))
        turns = [target] if target is not None else list(other_classes(z, y).unbind(1)[: self.targets])
        zero = torch.zeros_like(here)
        for draw, (to, restart) in enumerate(product(turns, range(self.restarts))):
            who = survivors(end.best > self._enough)
            if len(who) == 0:
                break
            start = self._restart(x[who], end.best[who], index[who], draw) if restart else x[who]
            state = _State(start, start, *(t[who] for t in end[2:]))
            first = self._run(surface, (x[who], y[who], to[who]), state, end, who, sought=target is not None)
            if draw == 0:
                zero.index_copy_(0, who, first)
        x_best, label = self._tighten(surface, x, y, target, end)
        found = end.best < torch.inf
        if self.eps is not None:  # a point beyond eps does not count
            found &= in_ball(x, x_best, self.eps, self.norm, self.bounds)
        return measure(x, x_best, y, target, self.bounds, label, end.spent, clean=clean, zero=zero, found=found)

    @property
    def _enough(self) -> float:
        """A sample is finished within this distance."""
        return self.eps or 0.0

    def _restart(self, x: Tensor, best: Tensor, index: Tensor, draw: int) -> Tensor:
        """Random points half way to the best so far, or within eps."""
        radius = best / 2 if self.eps is None else best.clamp_max(self.eps)
        radius = torch.where(radius < torch.inf, radius, self.width())
        return random_start(x, radius.to(x.dtype), self.norm, self.bounds, self.noise(index), draw)

    def _run(
        self, surface: Surface, samples: tuple[Tensor, ...], state: _State, end: _State, who: Tensor, *, sought: bool
    ) -> Tensor:
        """Search from `state`, write what is found to `end` at `who`; whose first gradient was zero: bool [N].

        `samples` are the images, their classes, and the classes whose boundary is approached; `sought` if only these
        count.
        """

        def found(old: _State, x: Tensor, y: Tensor, to: Tensor, label: Tensor) -> tuple[Tensor, _State]:
            """Whether `old.at`, of class `label`, is across the boundary; and the best points with it."""
            crossed = label == to if sought else label != y
            distance = self._length(old.at - x).to(old.best.dtype)
            # A finished sample does not change, whatever its batch.
            better = crossed & (distance < old.best) & (old.best > self._enough)
            return crossed, old._replace(
                x_best=torch.where(tall(better, x), old.at, old.x_best),
                best=torch.where(better, distance, old.best),
                label=torch.where(better, label, old.label),
            )

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            """The next state, and the gradient."""
            old, (x, y, to) = _State(*tensors[:-3]), tensors[-3:]
            c, z, w = surface.gradient("targeted", old.at, y, to, clean=False)  # [N], [N, L], like x
            assert z is not None
            w = levelled(w)
            crossed, new = found(old, x, y, to, z.argmax(1))
            x_k = torch.where(tall(crossed, x), x + _BACK * (old.at - x), old.at)
            at = self._nearer(x, x_k, old.at, c.to(x.dtype), w)
            return *new._replace(at=at, x_k=x_k, spent=old.spent + (old.best > self._enough)), w

        def last(*tensors: Tensor) -> _State:
            """The state after also judging the final iterate."""
            old, (x, y, to) = _State(*tensors[:-3]), tensors[-3:]
            return found(old, x, y, to, surface.logits(old.at).argmax(1))[1]

        *new, w = surface.step((self, sought, "step"), step, *state, *samples)
        state, zero = _State(*new), (w == 0).flatten(1).all(1)
        for k in range(1, self.steps):
            if self.eps is not None and compact_before(k, state.best <= self._enough):
                record(end[2:], who, state[2:])
                alive = survivors(state.best > self._enough)
                if len(alive) == 0:
                    break
                if len(alive) < len(who):
                    state, samples = _State(*(t[alive] for t in state)), tuple(t[alive] for t in samples)
                    who = who[alive]
            state = _State(*surface.step((self, sought, "step"), step, *state, *samples)[:-1])
        record(end[2:], who, surface.step((self, sought, "last"), last, *state, *samples)[2:])
        return zero

    def _nearer(self, x: Tensor, x_k: Tensor, at: Tensor, c: Tensor, w: Tensor) -> Tensor:
        """The next point: between the projections of `x_k` and of `x` onto the plane c + w.(v - at) = 0."""
        flat_w = w.flatten(1)
        # Squares of extreme slopes overflow or vanish. The plane is the same for a multiple of w and c.
        factor = moderate(flat_w.abs().amax(1))
        flat_w, c = flat_w * factor[:, None], c * factor
        value = c - (flat_w * (at - x_k).flatten(1)).sum(1)  # of the linearisation, at x_k
        value_0 = c - (flat_w * (at - x).flatten(1)).sum(1)  # and at the original
        both = torch.cat([x_k, x]).flatten(1)
        r = to_plane(both, flat_w.repeat(2, 1), torch.cat([value, value_0]), self.norm, self.bounds)
        r_k, r_0 = r.view(2, *x.shape)
        size_k, size_0 = self._length(r_k), self._length(r_0)
        total = size_k + size_0
        alpha = tall((size_k / torch.where(total > 0, total, 1.0)).clamp_max(_BIAS), x)
        nearer = (1 - alpha) * (x_k + _OVERSHOOT * r_k) + alpha * (x + _OVERSHOOT * r_0)
        return nearer.clamp(*self.bounds)

    def _tighten(
        self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, end: _State
    ) -> tuple[Tensor, Tensor]:
        """Bisect between each best point, overshot by design, and its original; points and labels."""
        whole = end.x_best - x
        good, bad = torch.ones_like(end.best), torch.zeros_like(end.best)
        x_best, best_label = end.x_best, end.label
        for _ in range(_BISECTIONS):
            t = (good + bad) / 2
            v = (x + tall(t, x).to(x.dtype) * whole).clamp(*self.bounds)
            label = surface.replayed_logits(v).argmax(1)
            crossed = (label != y if target is None else label == target) & (end.best > 0)
            good, bad = torch.where(crossed, t, good), torch.where(crossed, bad, t)
            x_best = torch.where(tall(crossed, x), v, x_best)
            best_label = torch.where(crossed, label, best_label)
        return x_best, best_label

    def _length(self, r: Tensor) -> Tensor:
        return r.flatten(1).abs().amax(1) if self.norm == "linf" else norm_of(r).flatten()
