"""Does the gradient match the values, and do the answers depend on the image alone?

Attacks follow the gradient that autograd returns, and a backward pass can return anything. What the gradient promises
along a short segment is therefore compared with what the values do there: at the images, at the attacks' final points
and between the two, along the attack's direction and along random signs, between one attack and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mmlda.attacks.losses import margin
from mmlda.attacks.surface import Model
from mmlda.audit.views import View, seeded

RANDOM = 1e-3  # two passes differ by more than this share of the spread of an image's logits
PICKED = 32  # images that are compared after each attack
ALONE = 16  # images that are classified one by one
LENGTHS = (1 / 64, 1 / 4)  # of a segment, in eps: short for the curvature of a network, longer for its rounding
OFF = 0.4  # the gradient is off by more than this share of the change
SIDEWAYS = 0.3  # of a typical change in a random direction: smaller changes need not match to this precision


def apart(one: Tensor, two: Tensor) -> Tensor:
    """Which rows of two passes, or of two gradients, differ by more than the rounding of float32 kernels: bool [N]."""
    far = (one - two).abs().amax(1)
    return far > RANDOM * torch.maximum(one.amax(1) - one.amin(1), two.amax(1) - two.amin(1))


@dataclass(frozen=True, kw_only=True)
class Witness:
    """Compares a network under attack with its gradient, with its first answers and with an unused copy.

    Attributes
    ----------
    view
        The network's logits, as the attacks see them.
    model, unused
        The network itself, and a copy that is used only here; the network again if it is a function.
    first
        The first answers to the images [n, L]; None for a random network, whose answers differ anyway.
    eps, batch_size, seed
        The settings of the audit.
    off, changed
        What `look` has found: bool, one entry per comparison.
    """

    view: View
    model: Model
    unused: Model
    first: Tensor | None
    eps: float
    batch_size: int
    seed: int
    off: list[Tensor] = field(default_factory=list)
    changed: list[Tensor] = field(default_factory=list)

    def look(self, x: Tensor, y: Tensor, rows: Tensor, moved: Tensor) -> None:
        """Compare at a few of the images x [N] of the data's `rows`, which an attack has moved."""
        draws = torch.Generator().manual_seed(self.seed + 7919 * len(self.off))
        pick = torch.randperm(len(x), generator=draws)[: min(PICKED, max(1, self.batch_size // 2))].to(x.device)
        x, y, moved = x[pick], y[pick], moved[pick].to(x.dtype)
        if self.first is not None:
            with torch.no_grad():
                later, after = self.model(torch.cat([x, moved])).chunk(2)
                self.changed.append(apart(later, self.first[rows[pick]]) | apart(after, self.unused(moved)))

        def share(low: float = 0.0, high: float = 1.0) -> Tensor:
            drawn = torch.rand(len(x), generator=draws) * (high - low) + low
            return drawn.clamp(0, 1).to(x).view(-1, *[1] * (x.ndim - 1))

        start, way = x + share(-0.25, 1.25) * (moved - x), (moved - x) / self.eps
        size = way.abs().flatten(1).amax(1).view_as(share())
        signs = (torch.randint(0, 2, x.shape, generator=draws) * 2 - 1).to(x)
        way = torch.where((size > 0) & (share() < 0.5), way / size.clamp_min(1e-12), signs)
        seed = int(torch.randint(2**31, (), generator=draws))
        jitter, off = share(), torch.ones_like(y, dtype=torch.bool)
        for length in LENGTHS:
            if off.any():
                half = way[off] * self.eps * length / 2
                off[off.clone()] = self._off(start[off], y[off], half, jitter[off], seed)
        self.off.append(off)

    def _off(self, start: Tensor, y: Tensor, half: Tensor, jitter: Tensor, seed: int) -> Tensor:
        """Whether the gradient misses the change of the margin from start - half to start + half: bool [N]."""
        begin, end = (start - half).clamp(0, 1), (start + half).clamp(0, 1)
        step = (end - begin).flatten(1).double()
        before, after = self._each(self._margin, (begin, end), y, seed)
        points = (start, begin + jitter * (end - begin))  # a lie at the attacks' own points counts too
        g = torch.stack(self._each(partial(self.view.gradient, "margin"), points, y, seed)).double()  # [2, N, D]
        promised = (g * step).sum(2).mean(0)
        typical = (g.norm(dim=2) * step.norm(dim=1)).mean(0) / step.shape[1] ** 0.5
        scale = torch.stack([(after - before).abs(), promised.abs(), SIDEWAYS * typical]).amax(0)
        return ~((after - before - promised).abs() <= OFF * scale)

    @torch.no_grad()
    def _margin(self, x: Tensor, y: Tensor) -> Tensor:
        return margin(self.view.model(self.view.images(x)).double(), y)

    def _each(
        self, function: Callable[[Tensor, Tensor], Tensor], points: Sequence[Tensor], y: Tensor, seed: int
    ) -> list[Tensor]:
        """The function at each of the points, with the same random numbers: a random network becomes one function."""
        if self.first is not None:
            return list(function(torch.cat([*points]), y.repeat(len(points))).chunk(len(points)))
        found = []
        for x in points:
            with seeded(x.device, seed):
                found.append(function(x, y))
        return found

    def numbers(self) -> dict[str, float | None]:
        """The shares of comparisons where the gradient is off and where an answer has changed, and their number."""
        found: dict[str, float | None] = {}
        for name, parts in (("gradient_off", self.off), ("answers_changed", self.changed)):
            if parts:
                found |= {name: float(torch.cat(parts).double().mean()), "compared": float(len(torch.cat(parts)))}
        return found


def settings_matter(view: View, model: Model, x: Tensor, y: Tensor, z: Tensor) -> dict[str, float | None]:
    """How many answers of a network that is not random change with autograd, and how many in a batch of one.

    `z` [N, L] are the answers to the batch x without autograd. In a batch of one, gradients are compared too.
    """
    with torch.enable_grad():
        watched = model(x.clone().requires_grad_(True)).detach()
    few, slopes = range(min(ALONE, len(x))), view.gradient("margin", x, y)
    with torch.no_grad():
        alone = [bool(apart(model(x[i : i + 1]), z[i : i + 1])) for i in few]
    steep = [bool(apart(view.gradient("margin", x[i : i + 1], y[i : i + 1]), slopes[i : i + 1])) for i in few]
    return {
        "grad_mode": int(apart(watched, z).sum()) / len(x),
        "alone": sum(map(max, alone, steep)) / len(few),
    }
