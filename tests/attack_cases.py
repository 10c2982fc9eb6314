"""Every attack with settings that run in a second: the cases that tests of all attacks share.

To add an attack, add it to ATTACKS: a function of the width of the image range and of `Attack`'s own settings.
Every attack here must break most of the digits that a clean network gets right, so a do-nothing attack fails.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from attack_models import network
from torch import Tensor, nn

from mmlda.attacks import (
    APGD,
    BIM,
    FAB,
    FGSM,
    ILCM,
    JSMA,
    PGD,
    Attack,
    AttackResult,
    CarliniWagner,
    Square,
    WorstCase,
)

EPS = 0.25
EPS_L2 = 1.5


def _short_worst(eps: float, **kw: Any) -> WorstCase:
    lists = (APGD(eps=eps, steps=10, **kw), FAB(eps=eps, targets=2, steps=10, **kw))
    return WorstCase(eps=eps, attacks=(*lists, Square(eps=eps, queries=60, **kw)), **kw)


ATTACKS: dict[str, Callable[..., Attack]] = {
    "FGSM": lambda width=1.0, **kw: FGSM(eps=EPS * width, **kw),
    "FGSM-l2": lambda width=1.0, **kw: FGSM(eps=EPS_L2 * width, norm="l2", **kw),
    "BIM": lambda width=1.0, **kw: BIM(eps=EPS * width, **kw),
    "ILCM": lambda width=1.0, **kw: ILCM(eps=2 * EPS * width, **kw),
    "PGD": lambda width=1.0, **kw: PGD(eps=EPS * width, steps=10, restarts=2, **kw),
    "PGD-l2": lambda width=1.0, **kw: PGD(eps=EPS_L2 * width, norm="l2", steps=10, **kw),
    "PGD-every": lambda width=1.0, **kw: PGD(eps=EPS * width, loss="margin", target="every", steps=5, **kw),
    "APGD": lambda width=1.0, **kw: APGD(eps=EPS * width, steps=20, **kw),
    "APGD-l2": lambda width=1.0, **kw: APGD(eps=EPS_L2 * width, norm="l2", steps=20, **kw),
    "APGD-t": lambda width=1.0, **kw: APGD(eps=EPS * width, loss="dlr", target="every", targets=3, steps=15, **kw),
    "Square": lambda width=1.0, **kw: Square(eps=EPS * width, queries=200, **kw),
    "Square-l2": lambda width=1.0, **kw: Square(eps=EPS_L2 * width, norm="l2", queries=300, **kw),
    "FAB": lambda width=1.0, **kw: FAB(targets=3, steps=15, **kw),
    "FAB-l2": lambda width=1.0, **kw: FAB(norm="l2", targets=3, steps=15, restarts=2, **kw),
    "WorstCase": lambda width=1.0, **kw: _short_worst(EPS * width, **kw),
    "JSMA": lambda width=1.0, **kw: JSMA(eps=width, **kw),
    "JSMA-pairs": lambda width=1.0, **kw: JSMA(eps=0.5 * width, pairs=True, surface="softmax", target="random", **kw),
    "CW": lambda width=1.0, **kw: CarliniWagner(search_steps=3, steps=60, initial_c=0.1, rate=0.1, **kw),
}
# The radius an attack must keep to: (norm, eps); minimum-norm attacks have none.
BALLS: dict[str, tuple[str, float]] = {
    name: ("l2", EPS_L2) if name.endswith("-l2") else ("linf", 2 * EPS if name == "ILCM" else EPS) for name in ATTACKS
}
BALLS.update({name: ("linf", 1.0) for name in ATTACKS if name.startswith("JSMA")})  # the whole range
MINIMUM_NORM = {"FAB", "FAB-l2", "CW"}
GRADIENT = {name for name in ATTACKS if not name.startswith("Square")}
DETERMINISTIC = {"FGSM", "FGSM-l2", "BIM", "ILCM", "FAB", "JSMA", "CW"}

every_attack = pytest.mark.parametrize("name", ATTACKS)


def at_work(result: AttackResult, x: Tensor) -> None:
    """An attack that did nothing is none of whatever else is tested."""
    assert (result.x_adv.to(x) != x.detach()).flatten(1).any(1).double().mean() > 0.3
    assert result.success.double().mean() > 0.2


def double(head: str = "sr") -> nn.Module:
    return copy.deepcopy(network(head)).double()
