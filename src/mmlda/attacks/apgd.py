"""APGD (Croce and Hein 2020): gradient ascent with momentum that sets its own step size.

The step starts at 2 eps and is halved at checkpoints where the loss has not risen often enough or where
nothing was gained since the last one; the run then goes on from the best point so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmlda.attacks.base import Attack, survivors
from mmlda.attacks.checks import check_ball, check_choice, check_count, warn_caller
from mmlda.attacks.gradient import direction, limits, per_sample, project, random_start, tall
from mmlda.attacks.losses import Loss, check_loss, other_classes
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.surface import Surface

__all__ = ["APGD"]

_MOMENTUM = 0.75  # of the new direction; the rest is the last move
_ENOUGH = 0.75  # share of the steps between checkpoints that must have raised the loss


def checkpoints(steps: int) -> list[int]:
    """The steps after which the step size is looked at: ceil(p_j steps), p_0 = 0, p_1 = 0.22,
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
class APGD(Attack):
    """Auto-PGD: no step size to choose.

    A sample is done when an iterate is misclassified (or, with one target, takes it): it leaves, and that
    iterate is its final point. A sample that holds ends at the iterate with the highest loss.

    Args:
        eps: radius of the ball, on the scale of the images.
        norm: "linf" or "l2".
        loss: "ce", "dlr", "margin", "targeted", or a function (model, x, y) -> [N] to be maximised. With
            fewer classes than "dlr" is defined for (3, with a target 4) it says so and uses "margin".
        target: None, "least-likely", "random", or "every": the `targets` other classes with the highest clean
            logits in turn, which with "dlr" is the targeted APGD of AutoAttack.
        steps: of a run, which takes one gradient more.
        restarts: runs for each target, from random points.
    """

    eps: float
    norm: str = "linf"
    loss: Loss = "ce"
    target: str | None = None
    targets: int = 9
    steps: int = 100
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ball(self.eps, self.norm)
        check_loss(self.loss)
        check_choice("target", self.target, (None, "least-likely", "random", "every"))
        for name in ("steps", "restarts", "targets"):
            check_count(name, getattr(self, name))

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        goal, turns = target, [target]
        if target is None and self.target == "every":
            turns = list(other_classes(surface.replayed_logits(x), y).unbind(1)[: self.targets])
        elif target is None and self.target is not None:
            goal = self.target_for(self.target, surface, x, y, index)
            turns = [goal]
        loss = self._loss(surface, x, aimed=turns[0] is not None)
        end: _Run | None = None
        for number, to in enumerate(t for t in turns for _ in range(self.restarts)):
            if end is None:
                end = self._run(surface, loss, x, y, to, goal, index, number)
                continue
            who = survivors(~end.success)
            if len(who) == 0:
                break
            to, aim = (None if t is None else t[who] for t in (to, goal))
            run = self._run(surface, loss, x[who], y[who], to, aim, index[who], number)
            fresh = ~end.success[who]
            end.steps.index_add_(0, who, run.steps * fresh)
            won = fresh & run.success
            for mine, its in ((end.x_adv, run.x_adv), (end.label, run.label), (end.success, run.success)):
                mine.index_copy_(0, who[won], its[won])
        assert end is not None
        return measure(
            x,
            end.x_adv,
            success=end.success,
            prediction=end.label,
            steps=end.steps,
            bounds=self.bounds,
            zero_at_start=end.zero,
            target=goal,
        )

    def _run(
        self,
        surface: Surface,
        loss: Loss,
        x: Tensor,
        y: Tensor,
        to: Tensor | None,
        goal: Tensor | None,
        index: Tensor,
        number: int,
    ) -> _Run:
        """One run for each sample, towards `to` if there is one; done at `goal`, or at any class but y."""
        norm, bounds, aimed, sought = self.norm, self.bounds, to is not None, goal is not None
        key = (self, loss, aimed, sought)

        def look(v: Tensor, y: Tensor, to: Tensor, goal: Tensor) -> tuple[Tensor, ...]:
            """The loss, infinite where the attack has won; its gradient; the label."""
            f, z, g = surface.gradient(loss, v, y, to if aimed else None)
            label = (surface.logits(v) if z is None else z).argmax(1)
            won = label == goal if sought else label != y
            return torch.where(won, torch.inf, f), g, label

        def step(*tensors: Tensor) -> _State:
            """x_{k+1} = P(x_k + a (P(x_k + eta d(g)) - x_k) + (1 - a) (x_k - x_{k-1})), and its worth."""
            x_adv, x_last, g, f, x_best, f_best, g_best, label, ups, spent = tensors[: len(_State._fields)]
            eta, a, y, to, goal, *limit = tensors[len(_State._fields) :]
            fixed = tuple(limit), self.eps, norm, bounds
            v = project(x_adv + per_sample(eta, x_adv) * direction(g, norm), *fixed)
            x_new = project(x_adv + a * (v - x_adv) + (1 - a) * (x_adv - x_last), *fixed)
            f_new, g_new, label_new = look(x_new, y, to, goal)
            open_ = f_best < torch.inf
            better = f_new > f_best
            wide = tall(better, x_adv)
            return _State(
                x_new,
                x_adv,
                g_new,
                f_new,
                torch.where(wide, x_new, x_best),
                torch.where(better, f_new, f_best),
                torch.where(wide, g_new, g_best),
                torch.where(better, label_new, label),
                ups + (f_new > f),
                spent + open_,
            )

        labels = (y, y if to is None else to, y if goal is None else goal)
        start = random_start(x, self.eps, norm, bounds, self.noise(index), number)
        f, g, label = (t.clone() for t in surface.step((*key, "look"), look, start, *labels))
        zero = (g == 0).flatten(1).all(1)
        none, one = torch.zeros_like(y), torch.ones_like(y)
        end = _Run(start.clone(), f == torch.inf, label.clone(), one.clone(), zero)

        # What a sample carries along: `state` changes at every step, the rest at checkpoints or not at all.
        state = _State(start, start, g, f, start, f, g, label, none, one)
        fixed = (*labels, *limits(x, self.eps, norm, bounds))
        eta, f_mark = torch.full_like(f, 2 * self.eps), f
        halved, who = torch.zeros_like(zero), torch.arange(len(y), device=y.device)
        first, later = (torch.tensor(a, dtype=x.dtype, device=x.device) for a in (1.0, _MOMENTUM))
        marks = checkpoints(self.steps)
        for k in range(self.steps):
            if self._compact_before(k, marks, state.f_best):
                end.record(who, state)
                alive = survivors(state.f_best < torch.inf)
                if len(alive) == 0:
                    break
                if len(alive) < len(who):
                    state, fixed = _State(*(t[alive] for t in state)), tuple(t[alive] for t in fixed)
                    eta, f_mark, halved, who = (t[alive] for t in (eta, f_mark, halved, who))
            state = _State(*surface.step((*key, "step"), step, *state, eta, later if k else first, *fixed))
            if k + 1 in marks:
                since = k + 1 - max((m for m in marks if m <= k), default=0)
                stuck = (state.ups < _ENOUGH * since) | (~halved & (state.f_best <= f_mark))
                eta, f_mark, halved = torch.where(stuck, eta / 2, eta), state.f_best.clone(), stuck
                back = tall(stuck, x)
                state = state._replace(
                    x_adv=torch.where(back, state.x_best, state.x_adv),
                    g=torch.where(back, state.g_best, state.g),
                    f=torch.where(stuck, state.f_best, state.f),
                    ups=torch.zeros_like(state.ups),
                )
        end.record(who, state)
        return end

    def _compact_before(self, k: int, marks: list[int], f_best: Tensor) -> bool:
        """Whether to drop the samples that are done: seldom on CUDA, where asking waits for the device."""
        if f_best.is_cuda:
            return k in marks or k & (k - 1) == 0
        return bool((f_best == torch.inf).sum() * 20 >= len(f_best))

    def _loss(self, surface: Surface, x: Tensor, aimed: bool) -> Loss:
        L = surface.count(x)
        if self.loss == "dlr" and L < (4 if aimed else 3):
            case = "with a target " if aimed else ""
            warn_caller(f'"dlr" {case}is undefined with {L} classes: APGD uses "margin" instead')
            return "margin"
        return self.loss


class _State(NamedTuple):
    """Of each sample: x_k, x_{k-1}, gradient and loss at x_k, the best point with its loss, gradient and label,
    how often the loss has risen since the last checkpoint, and the steps spent."""

    x_adv: Tensor
    x_last: Tensor
    g: Tensor
    f: Tensor
    x_best: Tensor
    f_best: Tensor  # infinite once the sample is broken, so that nothing replaces that point
    g_best: Tensor
    label: Tensor
    ups: Tensor
    spent: Tensor


@dataclass
class _Run:
    """Where a run ends."""

    x_adv: Tensor
    success: Tensor
    label: Tensor
    steps: Tensor
    zero: Tensor

    def record(self, who: Tensor, state: _State) -> None:
        """The standing of the samples `who`: their best points so far."""
        self.x_adv.index_copy_(0, who, state.x_best)
        self.success.index_copy_(0, who, state.f_best == torch.inf)
        self.label.index_copy_(0, who, state.label)
        self.steps.index_copy_(0, who, state.spent)
