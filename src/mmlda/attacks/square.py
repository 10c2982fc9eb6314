"""Square attack (Andriushchenko et al. 2020): random search with squares, no gradients.

Each query changes a window of the perturbation and keeps the change if the margin max_{k != y} Z_k - Z_y has grown.
The windows shrink on a fixed schedule. If it breaks images that gradient attacks did not, gradients were masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmlda.attacks.base import Attack, record, survivors
from mmlda.attacks.gradient import tall
from mmlda.attacks.losses import margin
from mmlda.attacks.noise import Noise
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.surface import Surface

_BLOCK = 50  # queries drawn at once; samples leave between blocks


def share(query: int, queries: int, p: float) -> float:
    """The share of the image a window covers: p, halved at 10, 50, 200, 1000, ... of 10,000 queries."""
    at = query / queries * 10_000
    return p / 2 ** sum(at > mark for mark in (10, 50, 200, 1000, 2000, 4000, 6000, 8000))


def window(p: float, H: int, W: int, least: int) -> tuple[int, int]:
    """Height and width of a window with the share `p` of an H x W image, as square as fits, `least` or more."""
    side = max(round(math.sqrt(p * H * W)), least)
    short = min(side, H, W)
    long = min(max(round(p * H * W / short), least), max(H, W))
    return (short, long) if H <= W else (long, short)


def bump(h: int, w: int) -> Tensor:
    """The L2 update of the paper on an h x w window: two pyramids of opposite sign, norm 1."""

    def pyramid(h: int, w: int) -> Tensor:
        i, j = (torch.arange(n, dtype=torch.float64) for n in (h, w))
        away = torch.maximum((i - h // 2).abs()[:, None], (j - w // 2).abs()[None])  # [h, w]
        rings = max(h, w) // 2 + 1
        return sum(((away <= k) / (k + 1.0) ** 2 for k in range(rings)), torch.zeros(h, w))

    if h * w == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if w >= h:
        patch = torch.cat([pyramid(h, w // 2), -pyramid(h, w - w // 2)], 1)
    else:
        patch = torch.cat([pyramid(h // 2, w), -pyramid(h - h // 2, w)], 0)
    return patch / patch.norm()


class _State(NamedTuple):
    """What changes at every query, per sample."""

    x_best: Tensor
    f_best: Tensor  # its margin, infinite once the sample is broken
    label: Tensor  # the model's class at x_best
    spent: Tensor  # queries


# What a query changes: the corner of its window, int64 [N, 2] (for L2 of two windows, [N, 4]); a sign [N, C]; the
# window's size, int64 [2]; the bump of L2 on a canvas [H, W], the size again otherwise.
_Patch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Square(Attack):
    """Black-box attack by random search. A sample is finished when it is misclassified, or reaches its target.

    Parameters
    ----------
    eps
        Radius of the ball, on the scale of the images.
    norm
        "linf" or "l2".
    queries
        Largest number of forward passes per sample, not counting the one at its start.
    p
        Share of the image that the first windows cover.

    Examples
    --------
    >>> model = torch.nn.Linear(16, 3).eval()
    >>> x, y = torch.full((2, 16), 0.5), torch.tensor([0, 1])
    >>> bool((Square(eps=0.25, queries=20)(model, x, y).linf <= 0.25).all())
    True
    """

    eps: float
    norm: str = "linf"
    queries: int = 5000
    p: float = 0.8

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        shape, sought = x.shape[1:], target is not None
        C, H, W = shape if x.ndim == 4 else (1, 1, x[0].numel())
        change = self._change_linf if self.norm == "linf" else self._change_l2

        def look(v: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
            """The margin at `v`, infinite where the attack has won, and the model's class."""
            z = surface.logits(v.reshape(-1, *shape))
            seen = z.argmax(1)
            f, won = (-margin(z, label), seen == label) if sought else (margin(z, label), seen != label)
            return torch.where(won, torch.inf, f), seen

        def query(*tensors: Tensor) -> _State:
            old, (x, label), patch = _State(*tensors[:4]), tensors[4:6], tensors[6:]
            v = change(x, old.x_best, *patch)
            f, seen = look(v, label)
            better = f > old.f_best
            return _State(
                x_best=torch.where(tall(better, x), v, old.x_best),
                f_best=torch.where(better, f, old.f_best),
                label=torch.where(better, seen, old.label),
                spent=old.spent + (old.f_best < torch.inf),
            )

        images, label, noise = x.reshape(-1, C, H, W), y if target is None else target, self.noise(index)
        # The image itself comes first, so that a misclassified one does not change; then stripes or a grid of bumps.
        f, clean = look(images, label)
        start = self._start(images, noise.bits((C * H * W,), -2))
        f_start, seen = look(start, label)
        done = f == torch.inf
        state = _State(
            x_best=torch.where(tall(done, images), images, start),
            f_best=torch.where(done, f, f_start),
            label=torch.where(done, clean, seen),
            spent=(~done).long(),
        )
        end = _State(*(t.clone() for t in state))
        who = torch.arange(len(y), device=y.device)
        for block in range(0, self.queries - 1, _BLOCK):
            record(end, who, state)
            alive = survivors(state.f_best < torch.inf)
            if len(alive) == 0:
                break
            if len(alive) < len(who):
                state = _State(*(t[alive] for t in state))
                images, label, who = images[alive], label[alive], who[alive]
                noise = self.noise(index[who])
            for patch in self._patches(noise, images, block):
                state = _State(*surface.step((self, sought), query, *state, images, label, *patch))
        record(end, who, state)
        x_adv = end.x_best.reshape(x.shape)
        return measure(x, x_adv, y, target, self.bounds, end.label, end.spent, clean=clean)

    def _patches(self, noise: Noise, x: Tensor, block: int) -> Iterator[_Patch]:
        """The changes of all queries of a block, drawn together."""
        C, H, W = x.shape[1:]
        l2 = self.norm == "l2"
        sizes = [
            window(share(q, self.queries, self.p), H, W, 3 if l2 else 1)
            for q in range(block + 1, min(block + _BLOCK, self.queries - 1) + 1)
        ]
        size = torch.tensor(sizes, device=x.device)  # [T, 2]
        room = torch.tensor([H + 1, W + 1], device=x.device) - size  # [T, 2]
        T, windows = len(sizes), 2 if l2 else 1
        corners = noise.integers(room.repeat(1, windows), (T, 2 * windows), draw=2 * block)  # [n, T, 2 windows]
        signs = noise.integers(2, (T, C), draw=2 * block + 1).to(x.dtype) * 2 - 1  # [n, T, C]
        canvas = size
        for t, (h, w) in enumerate(sizes):
            if l2 and (t == 0 or sizes[t - 1] != (h, w)):
                canvas = torch.zeros(H, W, device=x.device, dtype=x.dtype)
                canvas[:h, :w] = bump(h, w)
            yield corners[:, t], signs[:, t], size[t], canvas if l2 else size[t]

    def _start(self, x: Tensor, bits: Tensor) -> Tensor:
        """Vertical stripes of +-eps, or for L2 a grid of bumps of +-1, of norm eps."""
        N, C, H, W = x.shape
        if self.norm == "linf":
            sign = (bits[:, : C * W] & 1).view(N, C, 1, W).to(x.dtype) * 2 - 1
            return self._clip(x, x + self.eps * sign)
        h, w = window(0.04, H, W, 1)  # a fifth of each side
        tile = bump(h, w).repeat(-(-H // h), -(-W // w))[:H, :W].to(x)  # [H, W]
        rows, columns = (torch.arange(n, device=x.device) for n in (H, W))
        cell = (rows // h)[:, None] * W + (columns // w)[None]  # [H, W], less than H W
        sign = (bits.view(N, C, -1)[:, :, cell.flatten()] & 1).view(N, C, H, W).to(x.dtype) * 2 - 1
        delta = sign * tile
        delta = delta * (self.eps / tall(delta.flatten(1).norm(dim=1), x))
        return self._clip(x, x + delta)

    def _clip(self, x: Tensor, v: Tensor) -> Tensor:
        if self.norm == "linf":
            v = torch.clamp(v, x - self.eps, x + self.eps)
        return v.clamp(*self.bounds)

    def _change_linf(self, x: Tensor, x_best: Tensor, corner: Tensor, sign: Tensor, size: Tensor, _: Tensor) -> Tensor:
        """A window moved to +-eps, one sign for each channel."""
        inside = _inside(corner, size, x)  # [N, 1, H, W]
        return self._clip(x, torch.where(inside, x + self.eps * sign[:, :, None, None], x_best))

    def _change_l2(
        self, x: Tensor, x_best: Tensor, corner: Tensor, sign: Tensor, size: Tensor, canvas: Tensor
    ) -> Tensor:
        """A bump added in one window; its norm comes from another window, emptied, and from what is unused."""
        given, (C, H, W) = x.dtype, x.shape[1:]
        if given.itemsize < 4:  # the sum of squares of 0..255 is too large for half precision
            x, x_best, canvas = x.float(), x_best.float(), canvas.float()
        delta = x_best - x
        here, there = _inside(corner[:, :2], size, x), _inside(corner[:, 2:], size, x)

        def energy(part: Tensor) -> Tensor:
            return (delta * part).square().sum((2, 3), keepdim=True)  # [N, C, 1, 1]

        rows, columns = (
            (torch.arange(n, device=x.device) - corner[:, axis, None]).clamp_min(0) for axis, n in ((0, H), (1, W))
        )
        placed = canvas[rows[:, :, None], columns[:, None, :]][:, None] * here  # [N, 1, H, W]
        old = energy(here).sqrt()
        new = sign[:, :, None, None] * placed + delta * here / torch.where(old > 0, old, 1.0)
        unused = (self.eps**2 - delta.square().sum((1, 2, 3), keepdim=True)).clamp_min(0)
        available = (energy(here | there) + unused / C).sqrt()
        length = new.square().sum((2, 3), keepdim=True).sqrt()
        new = new * (available / torch.where(length > 0, length, 1.0))
        delta = torch.where(here, new, torch.where(there, 0.0, delta))
        # The clip moves towards x and can only shorten; rounding can lengthen, by an ulp per query, so trim.
        norm = tall(delta.flatten(1).norm(dim=1), x)
        return self._clip(x, x + delta * torch.where(norm > self.eps, self.eps / norm, 1.0)).to(given)


def _inside(corner: Tensor, size: Tensor, x: Tensor) -> Tensor:
    """Which pixels are in the window of `size` [2] at `corner` [N, 2]: bool [N, 1, H, W]."""
    H, W = x.shape[2:]
    row = torch.arange(H, device=x.device) - corner[:, :1]  # [N, H]
    column = torch.arange(W, device=x.device) - corner[:, 1:]  # [N, W]
    return ((row >= 0) & (row < size[0]))[:, None, :, None] & ((column >= 0) & (column < size[1]))[:, None, None]
