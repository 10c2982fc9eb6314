"""The attacks of an audit, and which images are still classified correctly after each."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mmlda import attacks
from mmlda._utils.checks import check_count, invalid
from mmlda._utils.progress import progress
from mmlda.attacks import AttackWarning
from mmlda.attacks.surface import Model
from mmlda.audit.profile import Subject
from mmlda.audit.views import View, derivable, feature_loss, with_gradient
from mmlda.results import wilson

CE, MARGIN, DLR, TARGETED, FEATURES = "cross-entropy", "margin", "DLR", "targeted", "feature distance"
BOTH, EVERY = "cross-entropy and margin", "targeted at every class"
LOSSES: dict[str, dict[str, Any]] = {
    CE: {},
    MARGIN: {"loss": "margin"},
    DLR: {"loss": "dlr"},
    TARGETED: {"loss": "targeted", "target": "every", "targets": 3},
    EVERY: {"loss": "targeted", "target": "every"},
}
BIM_STEPS = 10  # of the paper's BIM

Kind = Literal["clean", "standard", "white", "black", "transfer", "curve", "unbounded"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of an audit that its attacks depend on."""

    eps: float
    steps: int = 20
    queries: int = 300
    passes: int = 16
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if check_count("seed", self.seed, 0) >= 2**63:
            raise invalid("seed", "below 2**63", self.seed)
        real = isinstance(self.eps, numbers.Real)
        if real and 1 < self.eps < 255:
            raise invalid("eps", f"a radius between 0 and 1: did you mean {self.eps:g}/255?", self.eps)
        if not real or not 0 < self.eps < 1:
            raise invalid("eps", "a radius between 0 and 1, the range of the images", self.eps)
        for name in ("steps", "queries", "passes", "batch_size"):
            check_count(name, getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One attack of an audit.

    Attributes
    ----------
    attack
        Its class: "FGSM", "BIM", "PGD", "APGD", "Square"; "none" for the clean images.
    loss
        What it climbs; empty without a gradient.
    surface
        "logits", "probabilities" or "features".
    eps
        The L-infinity radius.
    kind
        "standard" attacks are those a paper would report; "curve" and "unbounded" are at other radii too.
    steps
        Gradient steps, or queries of Square.
    view
        What the attack sees: "own" (the network itself), "float64", "straight-through" or "averaged".
    held
        True where an image is still classified correctly [n]; empty before the attack is run.
    """

    attack: str
    loss: str = ""
    surface: str
    eps: float
    kind: Kind
    steps: int = 0
    view: str = "own"
    held: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def right(self) -> int:
        """How many images are still classified correctly."""
        return int(self.held.sum())

    @property
    def share(self) -> float:
        return self.right / len(self.held)

    @property
    def interval(self) -> tuple[float, float]:
        """A 95% interval for the share."""
        return wilson(self.right, len(self.held))


def plans(s: Settings, own: str, extras: Collection[str]) -> list[Trial]:
    """Every attack of the audit, in the order of its table.

    `own` is the surface of the network's own output. `extras` has those of "float64", "features", "straight-through",
    "averaged" and "surrogate" that the network has.
    """

    def white(attack: str, loss: str, surface: str, view: str = "own", steps: int = s.steps) -> Trial:
        kind: Kind = "standard" if (loss, surface, view) == (CE, own, "own") else "white"
        return Trial(attack=attack, loss=loss, surface=surface, eps=s.eps, kind=kind, steps=steps, view=view)

    def bim(kind: Kind, eps: float, steps: int) -> Trial:
        return Trial(attack="BIM", loss=BOTH, surface=own, eps=eps, kind=kind, steps=steps)

    made = [Trial(attack="none", surface=own, eps=0.0, kind="clean"), white("FGSM", CE, own, steps=1)]
    made += [white("BIM", CE, own, steps=steps) for steps in (BIM_STEPS, 2 * s.steps)]
    made.append(white("PGD", CE, own))
    if "float64" in extras:
        made.append(white("APGD", CE, own, "float64"))
    made += [white("APGD", loss, "probabilities") for loss in (MARGIN, CE)]
    made += [white("APGD", loss, "logits") for loss in (MARGIN, CE, DLR, TARGETED)]
    if "features" in extras:
        made.append(white("APGD", FEATURES, "features"))
    for view in ("straight-through", "averaged"):
        made += [white("BIM", loss, "logits", view) for loss in (MARGIN, CE) if view in extras]
    made.append(Trial(attack="Square", surface="logits", eps=s.eps, kind="black", steps=s.queries))
    if "surrogate" in extras:
        made.append(bim("transfer", s.eps, s.steps))
    made += [bim("curve", eps, BIM_STEPS) for eps in (s.eps / 2, s.eps, 2 * s.eps, 4 * s.eps) if eps < 1]
    return [*made, bim("unbounded", 1.0, s.steps)]


def run_trials(
    subject: Subject, own: str, settings: Settings, surrogate: Model | None = None, show: bool = False
) -> tuple[tuple[Trial, ...], Tensor]:
    """Run every attack. The second value [n] is True where a gradient attack with the whole range breaks the image."""
    views, right = dict(subject.views), subject.right
    loss = feature_loss(subject.model, subject.x, subject.y)
    if loss is not None:
        views["features"] = views["own"]
    if surrogate is not None:
        views["surrogate"] = View(with_gradient(derivable(surrogate, subject.x[:2])))
    made, reached, planned = [], right, plans(settings, own, views)
    with progress("audit", len(planned), unit="attacks", every=10.0, show=show) as report:
        for trial in planned:
            if trial.kind == "clean":
                held = right
            elif trial.kind == "unbounded":
                held, reached = unbounded(subject, trial, settings)
            elif trial.kind == "transfer":
                held = attacked(subject, views["surrogate"], on_losses(trial, settings, MARGIN, CE), right)
            else:
                view = views[trial.surface if trial.view == "own" else trial.view]
                held = attacked(subject, view, [attack_of(trial, settings, loss)], right)
            made.append(replace(trial, held=held.cpu()))
            report(len(made), accuracy=made[-1].share)
    return tuple(made), reached.cpu()


def attacked(subject: Subject, view: View, in_turn: Iterable[attacks.Attack], who: Tensor) -> Tensor:
    """Which images of `who` are still classified correctly after the attacks, one after the other: bool [n].

    The attacks see the view; the network itself decides whether they have succeeded.
    """
    held = who.clone()
    for attack in in_turn:
        rows = held.nonzero().flatten()
        if len(rows):
            x, y = subject.x[rows], subject.y[rows]
            with warnings.catch_warnings(action="ignore", category=AttackWarning):  # what the audit is about
                moved = attack(view.model, view.images(x), y, index=rows, show=False).x_adv.to(x.dtype)
            subject.witness.look(x, y, rows, moved)
            held[rows] = subject.judge(moved, y)
    return held


def attack_of(trial: Trial, s: Settings, feature_distance: Any = None) -> attacks.Attack:
    """The attack of a trial. Where gradients are unreliable, BIM's steps are long: together 2.5 times the radius."""
    common: dict[str, Any] = {"eps": trial.eps, "seed": s.seed, "batch_size": s.batch_size}
    if trial.attack == "FGSM":
        return attacks.FGSM(**common)
    if trial.attack == "Square":
        return attacks.Square(queries=trial.steps, **common)
    if trial.loss == BOTH:
        return attacks.WorstCase(attacks=on_losses(trial, s, CE, MARGIN), **common)
    common |= {"loss": feature_distance} if trial.loss == FEATURES else LOSSES[trial.loss]
    if trial.kind in ("transfer", "unbounded") or trial.view in ("straight-through", "averaged"):
        common["step_size"] = 2.5 * trial.eps / trial.steps
    return getattr(attacks, trial.attack)(steps=trial.steps, **common)


def on_losses(trial: Trial, s: Settings, *losses: str) -> list[attacks.Attack]:
    """The attack of a trial on each loss."""
    return [attack_of(replace(trial, loss=loss), s) for loss in losses]


def unbounded(subject: Subject, trial: Trial, s: Settings) -> tuple[Tensor, Tensor]:
    """Attacks with the whole range, from the image itself: what survives the network's own gradients; what any breaks.

    The own gradients are those of the cross-entropy, the margin, and the margin towards each class in turn.
    """
    views, moving = subject.views, subject.moving
    held = attacked(subject, views["own"], on_losses(trial, s, CE, MARGIN), subject.right)
    held = held & ~moving | attacked(subject, views["own"], on_losses(trial, s, EVERY), held & moving)
    left = held
    for name in ("logits", "straight-through", "averaged"):
        if name in views and views[name] is not views["own"]:
            left = attacked(subject, views[name], on_losses(trial, s, MARGIN), left)
    return held, ~left
