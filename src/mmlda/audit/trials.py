"""The attacks of an audit, and which images are still classified correctly after each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from mmlda._utils.progress import progress
from mmlda.attacks import APGD, BIM, FGSM, PGD, Attack, Square, WorstCase
from mmlda.attacks.surface import Model
from mmlda.audit.profile import Subject, Views
from mmlda.audit.views import View, derivable, feature_loss, with_gradient
from mmlda.results import wilson

__all__ = ["Plan", "Settings", "Trial", "plans", "run_trials"]

CE, MARGIN, DLR, TARGETED, FEATURES = "cross-entropy", "margin", "DLR", "targeted", "feature distance"
BOTH = "cross-entropy and margin"
LOSSES: dict[str, dict[str, Any]] = {
    CE: {},
    MARGIN: {"loss": "margin"},
    DLR: {"loss": "dlr"},
    TARGETED: {"loss": "targeted", "target": "every", "targets": 3},
}
ATTACKS: dict[str, Any] = {"BIM": BIM, "PGD": PGD, "APGD": APGD}
BIM_STEPS = 10  # of the paper's BIM

Kind = Literal["clean", "standard", "white", "black", "transfer", "curve", "unbounded"]
Seen = Literal["own", "float64", "straight-through", "averaged"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of an audit that its attacks depend on."""

    eps: float
    steps: int = 20
    queries: int = 300
    passes: int = 16
    batch_size: int = 128
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An attack to run.

    Args:
        attack: its class: "FGSM", "BIM", "PGD", "APGD", "Square"; "none" for the images as they are.
        loss: what it climbs; empty without a gradient.
        surface: "logits", "probabilities" or "features".
        eps: the L-infinity radius.
        kind: "standard" attacks are those a paper would report; "curve" and "unbounded" are at other radii too.
        steps: gradient steps, or queries of Square.
        view: what the attack sees: the network itself, its float64 copy, straight-through or averaged gradients.
    """

    attack: str
    loss: str = ""
    surface: str
    eps: float
    kind: Kind
    steps: int = 0
    view: Seen = "own"


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial(Plan):
    """An attack that was run. `held` [n] is True where an image is still classified correctly."""

    held: Tensor

    @property
    def n(self) -> int:
        return len(self.held)

    @property
    def right(self) -> int:
        """How many images are still classified correctly."""
        return int(self.held.sum())

    @property
    def share(self) -> float:
        return self.right / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """A 95% interval for the share."""
        return wilson(self.right, self.n)


def tried(plan: Plan, held: Tensor) -> Trial:
    return Trial(held=held.cpu(), **{field.name: getattr(plan, field.name) for field in fields(Plan)})


def plans(s: Settings, own: str, extras: Collection[str]) -> list[Plan]:
    """Every attack of the audit, in the order of its table.

    `own` is the surface of the network's own output. `extras` are those of "float64", "features", "straight-through",
    "averaged" and "surrogate" that the network has.
    """

    def white(attack: str, loss: str, surface: str, view: Seen = "own", steps: int = s.steps) -> Plan:
        kind: Kind = "standard" if (loss, surface, view) == (CE, own, "own") else "white"
        return Plan(attack=attack, loss=loss, surface=surface, eps=s.eps, kind=kind, steps=steps, view=view)

    def bim(kind: Kind, eps: float, steps: int) -> Plan:
        return Plan(attack="BIM", loss=BOTH, surface=own, eps=eps, kind=kind, steps=steps)

    made = [Plan(attack="none", surface=own, eps=0.0, kind="clean"), white("FGSM", CE, own, steps=1)]
    made += [white("BIM", CE, own, steps=steps) for steps in (BIM_STEPS, 2 * s.steps)]
    made.append(white("PGD", CE, own))
    if "float64" in extras:
        made.append(white("APGD", CE, own, "float64"))
    made += [white("APGD", loss, "probabilities") for loss in (MARGIN, CE)]
    made += [white("APGD", loss, "logits") for loss in (MARGIN, CE, DLR, TARGETED)]
    if "features" in extras:
        made.append(white("APGD", FEATURES, "features"))
    views: tuple[Seen, ...] = ("straight-through", "averaged")
    made += [white("BIM", loss, "logits", view) for view in views if view in extras for loss in (MARGIN, CE)]
    made.append(Plan(attack="Square", surface="logits", eps=s.eps, kind="black", steps=s.queries))
    if "surrogate" in extras:
        made.append(bim("transfer", s.eps, s.steps))
    made += [bim("curve", eps, BIM_STEPS) for eps in (s.eps / 2, s.eps, 2 * s.eps, 4 * s.eps) if eps < 1]
    return [*made, bim("unbounded", 1.0, s.steps)]


def run_trials(
    subject: Subject, own: str, settings: Settings, surrogate: Model | None = None, show: bool = False
) -> tuple[tuple[Trial, ...], Tensor]:
    """Run every attack. The second value [n] is True where a gradient attack with the whole range breaks the image."""
    views = subject.views
    loss = feature_loss(subject.model, subject.x, subject.y)
    there = {
        "float64": views.float64,
        "straight-through": views.straight,
        "averaged": views.averaged,
        "features": loss,
        "surrogate": surrogate,
    }
    planned = plans(settings, own, [name for name, value in there.items() if value is not None])
    other = None if surrogate is None else View(with_gradient(derivable(surrogate, subject.x[:2])))
    made, reached = [], subject.right
    with progress("audit", len(planned), unit="attacks", every=10.0, show=show) as report:
        for plan in planned:
            if plan.kind == "clean":
                held = subject.right
            elif plan.kind == "transfer" and other is not None:
                held = transfer(subject, other, plan, settings)
            elif plan.kind == "curve":
                held = attacked(subject, views.own, worst_case(plan, settings), subject.right)
            elif plan.kind == "unbounded":
                held, reached = unbounded(subject, plan, settings)
            else:
                held = attacked(subject, view_of(views, plan), attack_of(plan, settings, loss), subject.right)
            made.append(tried(plan, held))
            report(len(made), accuracy=made[-1].share)
    return tuple(made), reached.cpu()


def attacked(subject: Subject, view: View, attack: Attack, who: Tensor) -> Tensor:
    """Which images of `who` are still classified correctly after the attack: bool [n].

    The attack sees the view; the network itself decides whether it has succeeded.
    """
    rows, held = who.nonzero().flatten(), who.clone()
    if len(rows):
        moved = attack(view.model, view.images(subject.x[rows]), subject.y[rows], index=rows).x_adv
        held[rows] = subject.judge(moved.to(subject.x.dtype), rows)
    return held


def view_of(views: Views, plan: Plan) -> View:
    named = {"float64": views.float64, "straight-through": views.straight, "averaged": views.averaged}
    surfaces = {"logits": views.logits, "probabilities": views.probabilities, "features": views.own}
    return named.get(plan.view) or surfaces[plan.surface]


def attack_of(plan: Plan, s: Settings, loss: Any = None) -> Attack:
    """The attack of a plan; `loss` is the feature distance, where that is its loss."""
    common: dict[str, Any] = {"eps": plan.eps, "seed": s.seed, "batch_size": s.batch_size}
    if plan.attack == "FGSM":
        return FGSM(**common)
    if plan.attack == "Square":
        return Square(queries=plan.steps, **common)
    aim = {"loss": loss} if plan.loss == FEATURES else LOSSES[plan.loss]
    if plan.view in ("straight-through", "averaged"):
        return long_bim(plan, s, **aim)
    attack: Attack = ATTACKS[plan.attack](steps=plan.steps, **aim, **common)
    return attack


def long_bim(plan: Plan, s: Settings, **aim: Any) -> BIM:
    """BIM with steps long enough to cross the ball 2.5 times."""
    step_size = 2.5 * plan.eps / plan.steps
    return BIM(eps=plan.eps, steps=plan.steps, step_size=step_size, seed=s.seed, batch_size=s.batch_size, **aim)


def worst_case(plan: Plan, s: Settings) -> WorstCase:
    common: dict[str, Any] = {"eps": plan.eps, "seed": s.seed, "batch_size": s.batch_size}
    return WorstCase(attacks=[BIM(steps=plan.steps, **LOSSES[loss], **common) for loss in (CE, MARGIN)], **common)


def transfer(subject: Subject, other: View, plan: Plan, s: Settings) -> Tensor:
    """Which images survive the adversarial images of another network."""
    held = subject.right
    for loss in (MARGIN, CE):
        held = held & attacked(subject, other, long_bim(plan, s, **LOSSES[loss]), held)
    return held


def unbounded(subject: Subject, plan: Plan, s: Settings) -> tuple[Tensor, Tensor]:
    """Attacks with the whole range, from the image itself: what survives the network's own gradients; what any breaks.

    The own gradients are those of the cross-entropy, the margin, and the margin towards each class in turn.
    """
    views, held = subject.views, subject.right
    for loss in (CE, MARGIN):
        held = attacked(subject, views.own, long_bim(plan, s, **LOSSES[loss]), held)
    every = long_bim(plan, s, loss="targeted", target="every")
    held = held & (attacked(subject, views.own, every, held & subject.moving) | ~subject.moving)
    left = held
    for view in (views.logits if views.logits.model is not views.own.model else None, views.straight, views.averaged):
        if view is not None:
            left = attacked(subject, view, long_bim(plan, s, **LOSSES[MARGIN]), left)
    return held, ~left
