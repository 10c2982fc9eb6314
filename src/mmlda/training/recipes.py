"""How to train: frozen values. The paper's recipes by name; a variant is `dataclasses.replace(recipe, ...)`.

What the paper leaves open (batch size, rates, weight decay, schedule, augmentation) is settled here and recorded
with every run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmlda._utils.checks import check_choice, check_count, invalid
from mmlda._utils.settings import checked, typed
from mmlda.data import ImageData

__all__ = ["RECIPES", "Adversary", "Recipe", "hat", "network", "sat"]


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Adversarial examples in training. `eps` is one perturbation or a range drawn from anew for each image.

    `share` of each batch is adversarial, the rest clean. `craft="once"` attacks the network as it was before
    training (what the paper does), `"online"` the current one. `attack="trades"` is TRADES: clean cross-entropy
    plus `beta` times the divergence from the adversarial prediction. Each step moves `step` x eps. `pairing` adds
    that many times the mean squared difference of clean and adversarial logits (adversarial logit pairing).
    """

    attack: str
    eps: float | tuple[float, float]
    steps: int = 10
    step: float | None = None  # as a share of eps; None: 1 / steps
    random_start: bool = False
    craft: str = "online"
    share: float = 0.5
    beta: float = 6.0
    pairing: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.eps, list):  # as JSON writes a range
            object.__setattr__(self, "eps", tuple(self.eps))
        check_choice("attack", self.attack, ("fgsm", "bim", "ilcm", "pgd", "trades"))
        check_choice("craft", self.craft, ("once", "online"))
        if len(self.range) != 2 or not 0 <= self.range[0] <= self.range[1] < math.inf:
            raise invalid("eps", "a number >= 0 or a range (low, high) of such numbers", self.eps)
        for name in ("step", "beta", "pairing"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), "a finite number >= 0", lambda v: 0 <= v < math.inf)
        check_count("steps", self.steps, 1)
        _check_number("share", self.share, "a number in (0, 1]", lambda v: 0 < v <= 1)
        if self.paired and (self.craft, self.share) != ("online", 1.0):
            expected = "'online' and 1.0 with attack='trades' or pairing"
            raise ValueError(f"craft and share must be {expected}, got {self.craft!r} and {self.share}")
        if self.pairing and self.attack == "trades":
            raise invalid("pairing", "0 with attack='trades'", self.pairing)

    @property
    def paired(self) -> bool:
        """Whether the loss compares each adversarial image with its clean one: TRADES and logit pairing."""
        return self.attack == "trades" or self.pairing > 0

    @property
    def range(self) -> tuple[float, float]:
        return self.eps if isinstance(self.eps, tuple) else (self.eps, self.eps)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides how a network is trained, but for the network and the data.

    >>> recipe = dataclasses.replace(RECIPES["cifar10-mmlda"], steps=1000, milestones=())
    >>> recipe.optimizer, recipe.rate(999)
    ('adam', 0.001)
    """

    steps: int
    optimizer: str = "sgd"  # "sgd" (with momentum) or "adam"
    lr: float = 0.1
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 2e-4  # of every parameter
    decoupled: bool = False  # Adam: weight decay outside the moments (AdamW)
    batch_size: int = 128
    schedule: str = "steps"  # "steps" (drops at the milestones) or "cosine" (to 0 at the end)
    milestones: tuple[int, ...] = ()  # the rate is multiplied by gamma at these steps
    gamma: float = 0.1
    warmup: int = 0  # steps over which the rate rises linearly
    pad: int = 0  # augmentation: pad by this much and crop at random
    flip: bool = False  # augmentation: mirror half of the images
    loss: str = "ce"  # or "soft", "centre": the head's losses by name
    distill: float = 0.0  # share of the teacher's probabilities in the labels; the rest is the label itself
    average: float = 0.0  # decay of the averaged weights, which are then the network; 0: no averaging
    accumulate: int = 1  # gradients of this many parts of a batch are added up
    seed: int = 0  # of the order of the data, the augmentation and the noise
    adversary: Adversary | None = None

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, ("sgd", "adam"))
        check_choice("loss", self.loss, ("ce", "soft", "centre"))
        for name, least in (("steps", 1), ("batch_size", 1), ("accumulate", 1), ("warmup", 0), ("pad", 0), ("seed", 0)):
            check_count(name, getattr(self, name), least)
        check_choice("schedule", self.schedule, ("steps", "cosine"))
        if self.schedule == "cosine" and self.milestones:
            raise invalid("milestones", "empty with schedule='cosine'", self.milestones)
        _check_number("distill", self.distill, "a number in [0, 1]", lambda v: 0 <= v <= 1)
        for name in ("average", "momentum"):
            _check_number(name, getattr(self, name), "a number in [0, 1)", lambda v: 0 <= v < 1)
        for name in ("lr", "weight_decay", "gamma"):
            _check_number(name, getattr(self, name), "a finite number >= 0", lambda v: 0 <= v < math.inf)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise invalid("betas", "two numbers in [0, 1)", self.betas)
        for milestone in self.milestones:
            check_count("milestones", milestone, 0)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise invalid("milestones", "rising steps", self.milestones)
        if self.decoupled and self.optimizer != "adam":
            raise invalid("optimizer", "'adam' where decoupled=True", self.optimizer)
        paired = self.adversary is not None and self.adversary.paired
        if self.loss != "ce" and (self.distill or paired):
            raise invalid("loss", "'ce' with TRADES, logit pairing or distillation", self.loss)

    def rate(self, step: int) -> float:
        """The learning rate of a step (the first is 0)."""
        if self.schedule == "cosine":
            rate = self.lr * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        else:
            rate = self.lr * self.gamma ** sum(step >= milestone for milestone in self.milestones)
        return rate * min(1.0, (step + 1) / self.warmup) if self.warmup else rate

    def scaled(self, steps: int) -> Recipe:
        """The same recipe with another number of steps, its schedule in proportion."""
        milestones = tuple(sorted({round(m * steps / self.steps) for m in self.milestones}))
        warmup = round(self.warmup * steps / self.steps)
        return dataclasses.replace(self, steps=steps, milestones=milestones, warmup=warmup)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """The inverse of `dataclasses.asdict`, also after a trip through JSON; a ValueError for any other values."""

        def known(given: Any, kind: Any, what: str) -> dict[str, Any]:
            typed({what: dict[str, Any]}, {what: given})
            unused = [name for name in ("label_smoothing", "ramp") if not given.get(name)]  # fields of older versions
            kept = {name: value for name, value in given.items() if name not in unused}
            if kept.get("loss") == "joint":  # its name in older files
                kept["loss"] = "centre"
            if kept.get("adversary") is not None:
                kept["adversary"] = Adversary(**known(kept["adversary"], Adversary, "adversary"))
            required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
            if missing := [name for name in required if name not in kept]:
                raise invalid(what, f"given with {', '.join(missing)}", sorted(kept))
            return checked(kind, kept, what)

        return cls(**known(values, cls, "recipe"))


def _check_number(name: str, value: Any, expected: str, fits: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise invalid(name, expected, value)


_MNIST = Recipe(steps=20_000, milestones=(10_000, 15_000))
_CIFAR10 = Recipe(steps=90_000, milestones=(40_000, 60_000, 80_000), pad=4, flip=True)
_ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 1e-3}


def sat(attack: str, eps: float | tuple[float, float], *, steps: int = 10_000, craft: str = "once") -> Recipe:
    """Specific adversarial training (Sec. 4.3, B.2): fine-tune on one attack at one perturbation, half clean.

    The paper's number of steps is 10,000 on MNIST and 30,000 on CIFAR-10.
    """
    adversary = Adversary(attack=attack, eps=eps, steps=1 if attack == "fgsm" else 10, craft=craft)
    return Recipe(steps=steps, lr=0.01, adversary=adversary)


def hat(attack: str, *, steps: int = 10_000, craft: str = "once") -> Recipe:
    """Hybrid adversarial training: as `sat`, each image's perturbation uniform in [0.02, 0.20]."""
    return sat(attack, (0.02, 0.20), steps=steps, craft=craft)


_PGD: dict[str, Any] = {"steps": 10, "step": 0.25, "random_start": True, "share": 1.0}

RECIPES: dict[str, Recipe] = {
    "mnist-sr": _MNIST,
    "mnist-mmlda": dataclasses.replace(_MNIST, **_ADAM),
    "cifar10-sr": _CIFAR10,
    # Adam as the paper names it; decoupled, it was 1.1 points better on held-out training images: docs/training.md
    "cifar10-mmlda-adam": dataclasses.replace(_CIFAR10, **_ADAM),
    "cifar10-mmlda": dataclasses.replace(_CIFAR10, **_ADAM, decoupled=True, weight_decay=0.5),
    "mnist-sat": sat("bim", 0.12),
    "mnist-hat": hat("bim"),
    "cifar10-sat": dataclasses.replace(sat("bim", 0.04, steps=30_000), pad=4, flip=True),
    "cifar10-hat": dataclasses.replace(hat("bim", steps=30_000), pad=4, flip=True),
    "mnist-trades": dataclasses.replace(_MNIST, adversary=Adversary(attack="trades", eps=0.3, **_PGD)),
    "cifar10-trades": dataclasses.replace(_CIFAR10, adversary=Adversary(attack="trades", eps=8 / 255, **_PGD)),
    "digits-sr": Recipe(steps=600, milestones=(400,), batch_size=64),
    "digits-mmlda": Recipe(steps=600, milestones=(400,), batch_size=64, **_ADAM),
}
for _data, _eps in (("mnist", 0.3), ("cifar10", 8 / 255), ("digits", 0.1)):
    for _kind in ("sr", "mmlda"):  # each head's own recipe, on adversarial examples alone
        _adversary = Adversary(attack="pgd", eps=_eps, **_PGD)
        RECIPES[f"{_data}-{_kind}-pgd"] = dataclasses.replace(RECIPES[f"{_data}-{_kind}"], adversary=_adversary)


def network_for(head: str, data: ImageData) -> dict[str, Any]:
    """A network for a training set as a config: the paper's for its size of images, an MLP for a table."""
    if data.is_table:
        return {"backbone": "mlp", "inputs": data.shape[0], "head": head, "num_classes": data.num_classes}
    config = network(head, "digits" if min(data.shape[1:]) < 16 else "mnist", num_classes=data.num_classes)
    return config | {"channels": data.shape[0]}


def network(head: str, data: str, *, C: float = 100.0, num_classes: int = 10, **settings: Any) -> dict[str, Any]:
    """The paper's network for a dataset, as a config for `mmlda.models.build`.

    Resnet-32 with 64 latent dimensions for images of 28 pixels and more; the small network for `digits`.

    >>> network("mmlda", "cifar10")["depth"]
    32
    """
    check_choice("head", head, ("mmlda", "softmax"))
    channels = 3 if data == "cifar10" else 1
    if data == "digits":
        config: dict[str, Any] = {"backbone": "conv_net", "channels": channels}
    else:
        config = {"backbone": "resnet", "depth": 32, "channels": channels}
    config |= {"head": head, "num_classes": num_classes, **({"C": C} if head == "mmlda" else {})}
    return config | settings
