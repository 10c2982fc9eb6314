"""The worst of several attacks, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmlda.attacks.apgd import APGD
from mmlda.attacks.base import Attack, survivors
from mmlda.attacks.checks import NoGradient, invalid
from mmlda.attacks.fab import FAB
from mmlda.attacks.gradient import in_ball
from mmlda.attacks.losses import Loss, check_loss
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.square import Square
from mmlda.attacks.surface import Surface


@dataclass(frozen=True, kw_only=True)
class WorstCase(Attack):
    """The worst case over several attacks, sample by sample: each attack runs on the samples that the others left.

    The standard list, each with the `eps` and `norm` given here:

    1. APGD on the cross-entropy, 100 steps;
    2. APGD on the margin, 3 runs of 100 steps: it does not stand still where the cross-entropy is saturated;
    3. APGD on the targeted DLR loss (on the targeted margin with 2 or 3 classes), 9 targets of 100 steps;
    4. FAB, 9 targets of 20 steps;
    5. Square, 1,000 queries, which uses no gradient;

    and, after the first two, APGD on each of `losses`. A broken sample's `x_adv` is where it broke; one that
    holds ends at the first attack's final point. `winner` is the position in `attack_list()` of the attack that broke
    it: -1 for none, -2 for a sample that was misclassified from the start, which does not change. More queries and
    steps rarely break more; for a longer search, pass your own list.

    Parameters
    ----------
    eps
        Radius of the ball, on the scale of the images.
    norm
        "linf" or "l2".
    losses
        More losses, such as one on the model's features: functions (model, x, y) -> [N] or names.
    attacks
        Attacks to run instead of the standard list. Points that a minimum-norm attack finds count within eps.
    """

    eps: float
    norm: str = "linf"
    losses: Sequence[Loss] = ()
    attacks: Sequence[Attack] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.losses, str) or not isinstance(self.losses, Iterable):
            raise invalid("losses", "a list of losses", self.losses)
        object.__setattr__(self, "losses", tuple(self.losses))
        for loss in self.losses:
            check_loss("losses", loss)
        if self.attacks is not None:
            listed = tuple(self.attacks) if isinstance(self.attacks, Iterable) else ()
            if not listed or not all(isinstance(attack, Attack) for attack in listed):
                raise invalid("attacks", "a list of one attack or more, such as PGD(eps=0.1)", self.attacks)
            if any(attack.bounds != self.bounds for attack in listed):
                raise invalid("attacks", f"attacks with bounds={self.bounds}", self.attacks)
            object.__setattr__(self, "attacks", listed)

    def attack_list(self) -> tuple[Attack, ...]:
        """List the attacks in the order in which they run.

        Returns
        -------
        tuple of Attack
            The attacks.
        """
        if self.attacks is not None:
            return tuple(self.attacks)
        makers: list[tuple[type[Attack], dict[str, Any]]] = [
            (APGD, {}),
            (APGD, {"loss": "margin", "restarts": 3}),
            *((APGD, {"loss": loss}) for loss in self.losses),
            (APGD, {"loss": "dlr", "target": "every"}),
            (FAB, {"steps": 20}),
            (Square, {"queries": 1000}),
        ]
        ball: dict[str, Any] = {"eps": self.eps, "norm": self.norm, "bounds": self.bounds}
        # One seed per attack, so that a sample does not start from the same random point again.
        return tuple(kind(seed=self.seed + i, **ball, **own) for i, (kind, own) in enumerate(makers))

    def most_steps(self) -> int:
        return sum(attack.most_steps() for attack in self.attack_list())

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        label = clean = surface.classify(x)
        wrong = label != y if target is None else label == target
        steps, winner = torch.zeros_like(y), torch.where(wrong, -2, -1)
        x_adv = x.clone()
        zero: Tensor | None = torch.zeros_like(wrong)
        blind, first, attacks = ~wrong, True, self.attack_list()
        for number, attack in enumerate(attacks):
            who = survivors(winner == -1)
            if len(who) == 0:
                break
            to = None if target is None else target[who]
            try:
                result, _ = attack.in_batches(surface, x[who], y[who], to, index[who])
            except NoGradient:
                if first and number == len(attacks) - 1:
                    raise
                surface.black_box = True
                surface.note("the model has no gradient: only the attacks that need none, such as Square, were run")
                continue
            open_ = winner[who] == -1
            steps = steps.index_add(0, who, result.steps * open_)
            # A fixed-budget attack is in the ball by construction, up to rounding in its images' dtype.
            near = in_ball(x[who], result.x_adv, self.eps, self.norm, self.bounds)
            # An attack with its own target may miss it and still break the sample.
            reached = result.prediction != y[who] if target is None else result.success
            won = open_ & reached & near
            take = open_ & near if first else won
            x_adv = x_adv.index_copy(0, who[take], result.x_adv[take])
            label = label.index_copy(0, who[take], result.prediction[take])
            winner = winner.index_copy(0, who[won], torch.full_like(who[won], number))
            if first:
                still = result.zero_at_start
                zero = None if still is None else torch.zeros_like(wrong).index_copy(0, who, still)
            blind = blind.index_copy(0, who, blind[who] & result.blind) if result.blind is not None else blind & False
            first = False
        return measure(
            x, x_adv, y, target, self.bounds, label, steps, clean=clean, zero=zero, winner=winner, blind=blind
        )
