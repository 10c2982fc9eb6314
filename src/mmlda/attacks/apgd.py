"""APGD (Croce and Hein 2020): gradient ascent with momentum that sets its own step size.

The step starts at 2 eps and is halved at checkpoints where the loss has not risen often enough or has not
improved since the last one; the run then continues from the best point so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmlda.attacks.base import compact_before, record, survivors
from mmlda.attacks.checks import warn_caller
from mmlda.attacks.gradient import Ascent, Batch, Run, direction, limits, per_sample, project, random_start, tall
from mmlda.attacks.losses import Loss
from mmlda.attacks.surface import Surface

_MOMENTUM = 0.75  # of the new direction; the rest is the last move
_ENOUGH = 0.75  # share of the steps between checkpoints that must have raised the loss


def checkpoints(steps: int) -> list[int]:
    """The steps after which the step size is reconsidered: ceil(p_j steps), p_0 = 0, p_1 = 0.22,
    p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06).

    >>> checkpoints(100)
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    p, points = [0.0, 0.22], []
    while (at := math.ceil(round(p[-1] * steps, 9))) <= steps:
        points.append(at)
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    return points


@dataclass(frozen=True, kw_only=True)
class APGD(Ascent):
    """Auto-PGD: PGD without a step size to choose.

    A sample is finished when an iterate is misclassified (or, with a target, reaches it); that iterate is its final
    point. The final point of any other sample is the iterate with the highest loss.

    Parameters
    ----------
    eps
        Radius of the ball, on the scale of the images.
    norm
        "linf" or "l2".
    loss
        "ce", "dlr", "margin", "targeted", or a function (model, x, y) -> [N] to be maximised. With fewer classes than
        "dlr" needs (3, or 4 with a target), "margin" is used, with a warning.
    target
        None, "least-likely", "random", or "every": the `targets` other classes with the highest clean logits in turn,
        which with "dlr" is the targeted APGD of AutoAttack.
    targets
        How many classes target="every" tries.
    steps
        Steps per run; each run evaluates one more gradient than steps.
    restarts
        Runs per target, each from a random point.
    """

    steps: int = 100
    targets: int = 9

    def others(self, z: Tensor, y: Tensor) -> list[Tensor | None]:
        return super().others(z, y)[: self.targets]

    def usable_loss(self, surface: Surface, x: Tensor, aimed: bool) -> Loss:
        L = surface.count(x)
        if self.loss == "dlr" and L < (4 if aimed else 3):
            case = "with a target " if aimed else ""
            warn_caller(f'"dlr" {case}is undefined with {L} classes: APGD uses "margin" instead')
            return "margin"
        return self.loss

    def run(self, surface: Surface, loss: Loss, batch: Batch) -> Run:
        x, y, ids, draw, to, goal = batch
        aimed, sought = to is not None, goal is not None
        key = (self, loss, aimed, sought)

        def look(v: Tensor, y: Tensor, to: Tensor, goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """The loss at `v`, infinite where the attack has won; its gradient; the label."""
            f, z, g = surface.gradient(loss, v, y, to if aimed else None)
            label = (surface.logits(v) if z is None else z).argmax(1)
            return torch.where(label == goal if sought else label != y, torch.inf, f), g, label

        def step(*tensors: Tensor) -> _State:
            """x_{k+1} = P(x_k + a (P(x_k + eta d(g)) - x_k) + (1 - a) (x_k - x_{k-1})), and its worth."""
            old = _State(*tensors[: len(_State._fields)])
            eta, a, y, to, goal, *limit = tensors[len(_State._fields) :]
            ball = tuple(limit), self.eps, self.norm, self.bounds
            x_adv = old.x_adv
            v = project(x_adv + per_sample(eta, x_adv) * direction(old.g, self.norm), *ball)
            x_new = project(x_adv + a * (v - x_adv) + (1 - a) * (x_adv - old.x_last), *ball)
            f_new, g_new, label_new = look(x_new, y, to, goal)
            better = f_new > old.f_best
            wide = tall(better, x_adv)
            return _State(
                x_adv=x_new,
                x_last=x_adv,
                g=g_new,
                f=f_new,
                x_best=torch.where(wide, x_new, old.x_best),
                f_best=torch.where(better, f_new, old.f_best),
                g_best=torch.where(wide, g_new, old.g_best),
                label=torch.where(better, label_new, old.label),
                ups=old.ups + (f_new > old.f),
                spent=old.spent + (old.f_best < torch.inf),
            )

        start = random_start(x, self.eps, self.norm, self.bounds, self.noise(ids), draw)
        labels = y, y if to is None else to, y if goal is None else goal
        f, g, label = (t.clone() for t in surface.step((*key, "look"), look, start, *labels))
        one, who = torch.ones_like(y), torch.arange(len(y), device=y.device)
        state = _State(start, start, g, f, start, f, g, label, torch.zeros_like(y), one)
        zero, gap = (g == 0).flatten(1).all(1), torch.zeros_like(f)
        end = Run(start.clone(), label.clone(), f == torch.inf, one.clone(), zero, gap)
        ends = end.x_adv, end.prediction, end.success, end.steps
        pace = _Pace(torch.full_like(f, 2 * self.eps), f, torch.zeros_like(zero))
        fixed: tuple[Tensor, ...] = (*labels, *limits(x, self.eps, self.norm, self.bounds))
        first, later = (torch.tensor(a, dtype=x.dtype, device=x.device) for a in (1.0, _MOMENTUM))
        marks, last_mark = checkpoints(self.steps), 0
        for k in range(self.steps):
            if compact_before(k, state.f_best == torch.inf, marks):
                record(ends, who, state.standing())
                alive = survivors(state.f_best < torch.inf)
                if len(alive) == 0:
                    break
                if len(alive) < len(who):
                    state, pace = (part._make(t[alive] for t in part) for part in (state, pace))  # type: ignore
                    fixed, who = tuple(t[alive] for t in fixed), who[alive]
            state = _State(*surface.step((*key, "step"), step, *state, pace.eta, later if k else first, *fixed))
            if k + 1 in marks:
                state, pace = _adapt(state, pace, since=k + 1 - last_mark)
                last_mark = k + 1
        record(ends, who, state.standing())
        return end


class _State(NamedTuple):
    """What changes at every step, per sample."""

    x_adv: Tensor  # x_k
    x_last: Tensor  # x_{k-1}
    g: Tensor  # the gradient at x_k
    f: Tensor  # the loss at x_k
    x_best: Tensor
    f_best: Tensor  # infinite once the sample is broken, so that nothing replaces that point
    g_best: Tensor
    label: Tensor  # the model's class at x_best
    ups: Tensor  # how often the loss has risen since the last checkpoint
    spent: Tensor  # steps

    def standing(self) -> tuple[Tensor, ...]:
        """The best points so far, their classes, which of them are broken, and the steps spent."""
        return self.x_best, self.label, self.f_best == torch.inf, self.spent


class _Pace(NamedTuple):
    """What changes at checkpoints, per sample."""

    eta: Tensor  # the step size
    f_best: Tensor  # at the last checkpoint
    halved: Tensor  # bool: at the last checkpoint


def _adapt(state: _State, pace: _Pace, since: int) -> tuple[_State, _Pace]:
    """At a checkpoint, `since` steps after the last one: halve steps that are too long and return to the best point."""
    stuck = (state.ups < _ENOUGH * since) | (~pace.halved & (state.f_best <= pace.f_best))
    back = tall(stuck, state.x_adv)
    pace = _Pace(torch.where(stuck, pace.eta / 2, pace.eta), state.f_best.clone(), stuck)
    state = state._replace(
        x_adv=torch.where(back, state.x_best, state.x_adv),
        g=torch.where(back, state.g_best, state.g),
        f=torch.where(stuck, state.f_best, state.f),
        ups=torch.zeros_like(state.ups),
    )
    return state, pace
