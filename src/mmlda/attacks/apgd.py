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
from mmlda.attacks.losses import Loss, check_loss, choose_target, other_classes
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
        goal, turns, clean = target, [target], None
        if target is None and self.target is not None:
            z = surface.replayed_logits(x) if self.target == "every" else surface.logits(x)
            clean = z.argmax(1)
            if self.target == "every":
                turns = list(other_classes(z, y).unbind(1)[: self.targets])
            else:
                goal = choose_target(self.target, z, y, self.noise(index))
                turns = [goal]
        loss = self._loss(surface, x, aimed=turns[0] is not None)
        end: _Run | None = None
        for number, to in enumerate(t for t in turns for _ in range(self.restarts)):
            batch = _Batch(x, y, to, goal, index)
            if end is None:
                end = self._run(surface, loss, batch, number)
                continue
            who = survivors(~end.success)
            if len(who) == 0:
                break
            end.improve(who, self._run(surface, loss, batch.take(who), number))
        assert end is not None
        return measure(
            x,
            end.x_adv,
            y=y,
            success=end.success,
            prediction=end.label,
            steps=end.steps,
            bounds=self.bounds,
            clean_prediction=clean,
            zero_at_start=end.zero,
            target=goal,
        )

    def _run(self, surface: Surface, loss: Loss, batch: _Batch, number: int) -> _Run:
        """One run for each sample of `batch`, from a random point."""
        x, y = batch.x, batch.y
        step = _Step(self, surface, loss, aimed=batch.to is not None, sought=batch.goal is not None)
        start = random_start(x, self.eps, self.norm, self.bounds, self.noise(batch.ids), number)
        labels = batch.labels()
        f, g, label = (t.clone() for t in surface.step((*step.key, "look"), step.look, start, *labels))
        one, who = torch.ones_like(y), torch.arange(len(y), device=y.device)
        state = _State(start, start, g, f, start, f, g, label, torch.zeros_like(y), one)
        end = _Run(start.clone(), f == torch.inf, label.clone(), one.clone(), zero=(g == 0).flatten(1).all(1))
        pace = _Pace(torch.full_like(f, 2 * self.eps), f, torch.zeros_like(end.zero))
        fixed: tuple[Tensor, ...] = (*labels, *limits(x, self.eps, self.norm, self.bounds))
        first, later = (torch.tensor(a, dtype=x.dtype, device=x.device) for a in (1.0, _MOMENTUM))
        marks = checkpoints(self.steps)
        for k in range(self.steps):
            if self._compact_before(k, marks, state.f_best):
                end.record(who, state)
                alive = survivors(state.f_best < torch.inf)
                if len(alive) == 0:
                    break
                if len(alive) < len(who):
                    state, pace = (part._make(t[alive] for t in part) for part in (state, pace))  # type: ignore
                    fixed, who = tuple(t[alive] for t in fixed), who[alive]
            state = _State(*surface.step((*step.key, "step"), step, *state, pace.eta, later if k else first, *fixed))
            if k + 1 in marks:
                since = k + 1 - max((m for m in marks if m <= k), default=0)
                state, pace = _adapt(state, pace, since)
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


class _Batch(NamedTuple):
    """The samples of a run; `to` is the target to climb towards, `goal` the class that ends the run, None for any."""

    x: Tensor
    y: Tensor
    to: Tensor | None
    goal: Tensor | None
    ids: Tensor  # of the samples, for random choices

    def take(self, who: Tensor) -> _Batch:
        return _Batch(*(None if t is None else t[who] for t in self))  # type: ignore[arg-type]

    def labels(self) -> tuple[Tensor, Tensor, Tensor]:
        """(y, to, goal) as tensors: y stands in for what there is none of."""
        return self.y, self.y if self.to is None else self.to, self.y if self.goal is None else self.goal


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


class _Pace(NamedTuple):
    """What changes at checkpoints, per sample."""

    eta: Tensor  # the step size
    f_best: Tensor  # at the last checkpoint
    halved: Tensor  # bool: at the last checkpoint


class _Step:
    """One step as a function of tensors, for `Surface.step`."""

    def __init__(self, attack: APGD, surface: Surface, loss: Loss, *, aimed: bool, sought: bool) -> None:
        self.attack, self.surface, self.loss, self.aimed, self.sought = attack, surface, loss, aimed, sought
        self.key = (attack, loss, aimed, sought)

    def look(self, v: Tensor, y: Tensor, to: Tensor, goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss at `v`, infinite where the attack has won; its gradient; the label."""
        f, z, g = self.surface.gradient(self.loss, v, y, to if self.aimed else None)
        label = (self.surface.logits(v) if z is None else z).argmax(1)
        won = label == goal if self.sought else label != y
        return torch.where(won, torch.inf, f), g, label

    def __call__(self, *tensors: Tensor) -> _State:
        """x_{k+1} = P(x_k + a (P(x_k + eta d(g)) - x_k) + (1 - a) (x_k - x_{k-1})), and its worth."""
        old = _State(*tensors[: len(_State._fields)])
        eta, a, y, to, goal, *limit = tensors[len(_State._fields) :]
        norm, x_adv = self.attack.norm, old.x_adv
        fixed = tuple(limit), self.attack.eps, norm, self.attack.bounds
        v = project(x_adv + per_sample(eta, x_adv) * direction(old.g, norm), *fixed)
        x_new = project(x_adv + a * (v - x_adv) + (1 - a) * (x_adv - old.x_last), *fixed)
        f_new, g_new, label_new = self.look(x_new, y, to, goal)
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


def _adapt(state: _State, pace: _Pace, since: int) -> tuple[_State, _Pace]:
    """At a checkpoint, `since` steps after the last: halve the step where it is too long, and go back to the best."""
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


@dataclass
class _Run:
    """Where a run ends."""

    x_adv: Tensor
    success: Tensor
    label: Tensor
    steps: Tensor
    zero: Tensor  # whether the first gradient was exactly 0

    def record(self, who: Tensor, state: _State) -> None:
        """The standing of the samples `who`: their best points so far."""
        self.x_adv.index_copy_(0, who, state.x_best)
        self.success.index_copy_(0, who, state.f_best == torch.inf)
        self.label.index_copy_(0, who, state.label)
        self.steps.index_copy_(0, who, state.spent)

    def improve(self, who: Tensor, again: _Run) -> None:
        """Take over what another run of the samples `who` has broken; a broken sample stays as it is."""
        fresh = ~self.success[who]
        self.steps.index_add_(0, who, again.steps * fresh)
        won = fresh & again.success
        for mine, its in ((self.x_adv, again.x_adv), (self.label, again.label), (self.success, again.success)):
            mine.index_copy_(0, who[won], its[won])
