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
    """Adversarial examples in training.

    Parameters
    ----------
    attack
        "fgsm", "bim", "ilcm", "pgd", or "trades": clean cross-entropy plus `beta` times the divergence from the
        adversarial prediction.
    eps
        One perturbation, or a range from which each image draws its own.
    steps
        Gradient steps.
    step
        Size of a step as a share of eps (default: 1 / steps).
    random_start
        Whether to start at a random point within eps.
    craft
        "online" (default) attacks the current network, "once" the network before training, as the paper does.
    share
        Share of each batch that is adversarial; the rest is clean.
    beta
        Weight of the divergence of TRADES.
    pairing
        Weight of the mean squared difference of clean and adversarial logits (adversarial logit pairing).
    awp
        Size of an adversarial weight perturbation as a share of each layer's norm (Wu et al., 2020); 0 for none.

    Raises
    ------
    ValueError
        If a value is out of range, or two do not fit together.

    Examples
    --------
    >>> Adversary(attack="pgd", eps=8 / 255, random_start=True).steps
    10
    """

    attack: str
    eps: float | tuple[float, float]
    steps: int = 10
    step: float | None = None
    random_start: bool = False
    craft: str = "online"
    share: float = 0.5
    beta: float = 6.0
    pairing: float = 0.0
    awp: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.eps, list):  # as JSON writes a range
            object.__setattr__(self, "eps", tuple(self.eps))
        check_choice("attack", self.attack, ("fgsm", "bim", "ilcm", "pgd", "trades"))
        check_choice("craft", self.craft, ("once", "online"))
        if len(self.range) != 2 or not 0 <= self.range[0] <= self.range[1] < math.inf:
            raise invalid("eps", "a number >= 0 or a range (low, high) of such numbers", self.eps)
        for name in ("step", "beta", "pairing", "awp"):
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
    """Everything that determines how a network is trained, except the network and the data.

    Parameters
    ----------
    steps
        Training steps.
    optimizer
        "sgd" (with momentum) or "adam".
    lr, momentum, betas, weight_decay
        Settings of the optimizer; weight decay applies to every parameter.
    decoupled
        For Adam: weight decay outside the moments (AdamW).
    batch_size
        Images per step.
    schedule
        "steps" multiplies the rate by `gamma` at each of the `milestones`; "cosine" lowers it to 0 at the end.
    milestones, gamma
        Of the schedule "steps".
    warmup
        Steps over which the rate rises linearly.
    pad, flip
        Augmentation: pad by this many pixels and crop at random; mirror half of the images.
    loss
        "ce", or a loss of the Max-Mahalanobis head: "soft", "centre".
    distill
        Share of the teacher's probabilities in the labels.
    average
        Decay of the averaged weights, which become the network; 0 does not average.
    accumulate
        Number of parts of a batch whose gradients are added up.
    seed
        Seed of the order of the data, the augmentation and the noise.
    adversary
        Adversarial examples, or None.

    Raises
    ------
    ValueError
        If a value is out of range, or two do not fit together.

    Examples
    --------
    >>> recipe = dataclasses.replace(RECIPES["cifar10-mmlda"], steps=1000, milestones=())
    >>> recipe.optimizer, recipe.rate(999)
    ('adam', 0.001)
    """

    steps: int
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 2e-4
    decoupled: bool = False
    batch_size: int = 128
    schedule: str = "steps"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warmup: int = 0
    pad: int = 0
    flip: bool = False
    loss: str = "ce"
    distill: float = 0.0
    average: float = 0.0
    accumulate: int = 1
    seed: int = 0
    adversary: Adversary | None = None

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, ("sgd", "adam"))
        check_choice("loss", self.loss, ("ce", "soft", "centre"))
        for name, least in (("steps", 1), ("batch_size", 1), ("accumulate", 1), ("warmup", 0), ("pad", 0), ("seed", 0)):
            check_count(name, getattr(self, name), least)
        if self.seed >= 2**63:
            raise invalid("seed", "below 2**63", self.seed)
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
        """Learning rate of a step.

        Parameters
        ----------
        step
            Number of the step, from 0.

        Returns
        -------
        float
            Learning rate.
        """
        if self.schedule == "cosine":
            rate = self.lr * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        else:
            rate = self.lr * self.gamma ** sum(step >= milestone for milestone in self.milestones)
        return rate * min(1.0, (step + 1) / self.warmup) if self.warmup else rate

    def scaled(self, steps: int) -> Recipe:
        """Change the number of steps, with the schedule in proportion.

        Parameters
        ----------
        steps
            The new number of steps.

        Returns
        -------
        Recipe
            The scaled recipe.
        """
        milestones = tuple(sorted({round(m * steps / self.steps) for m in self.milestones}))
        warmup = round(self.warmup * steps / self.steps)
        return dataclasses.replace(self, steps=steps, milestones=milestones, warmup=warmup)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Make a recipe from the output of `dataclasses.asdict`, also after a round trip through JSON.

        Parameters
        ----------
        values
            The fields by name.

        Returns
        -------
        Recipe
            The recipe.

        Raises
        ------
        ValueError
            If a field is unknown, missing or of the wrong type.
        """

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
    """Specific adversarial training (Sec. 4.3, B.2): fine-tune on one attack at one perturbation; half is clean.

    Parameters
    ----------
    attack
        "fgsm", "bim", "ilcm" or "pgd".
    eps
        Perturbation, or a range from which each image draws its own.
    steps
        Training steps; the paper takes 10,000 on MNIST and 30,000 on CIFAR-10.
    craft
        "once" (default) attacks the network before fine-tuning, "online" the current network.

    Returns
    -------
    Recipe
        For fine-tuning a trained network.
    """
    adversary = Adversary(attack=attack, eps=eps, steps=1 if attack == "fgsm" else 10, craft=craft)
    return Recipe(steps=steps, lr=0.01, adversary=adversary)


def hat(attack: str, *, steps: int = 10_000, craft: str = "once") -> Recipe:
    """Hybrid adversarial training: like `sat`, with each image's perturbation uniform in [0.02, 0.20].

    Parameters
    ----------
    attack, steps, craft
        As in `sat`.

    Returns
    -------
    Recipe
        For fine-tuning a trained network.
    """
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
for _kind in ("sr", "mmlda"):  # each head's own recipe, on adversarial examples alone
    _adversary = Adversary(attack="pgd", eps=0.1, **_PGD)
    RECIPES[f"digits-{_kind}-robust"] = dataclasses.replace(RECIPES[f"digits-{_kind}"], adversary=_adversary)
# Chosen on held-out training images at up to 20,000 steps: results/search/cifar10-robust.jsonl.
_ROBUST: dict[str, Any] = {"steps": 78_000, "schedule": "cosine", "average": 0.9995, "pad": 4, "flip": True}
_FIVE: dict[str, Any] = _PGD | {"attack": "pgd", "eps": 8 / 255, "steps": 5, "step": 0.4}
RECIPES["cifar10-sr-robust"] = Recipe(**_ROBUST, weight_decay=5e-4, adversary=Adversary(**_FIVE, pairing=0.5))
RECIPES["cifar10-mmlda-robust"] = Recipe(
    **_ROBUST, **_ADAM, decoupled=True, weight_decay=0.5, adversary=Adversary(**_FIVE, pairing=0.2)
)
# The same for MNIST, results/search/mnist-robust.jsonl: 0.2 and 0.25 were as good up to 0.2, and worse at 0.3.
_ROBUST_MNIST: dict[str, Any] = {"steps": 20_000, "schedule": "cosine", "warmup": 500, "average": 0.999}
_ROBUST_MNIST |= {"adversary": Adversary(**_FIVE | {"eps": 0.3})}
RECIPES["mnist-sr-robust"] = Recipe(**_ROBUST_MNIST, lr=0.05, weight_decay=5e-4)
RECIPES["mnist-mmlda-robust"] = Recipe(**_ROBUST_MNIST, **_ADAM, decoupled=True, weight_decay=0.5)


def as_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe, or the one of this name in `RECIPES`."""
    if isinstance(recipe, str):
        check_choice("recipe", recipe, RECIPES)
        return RECIPES[recipe]
    if not isinstance(recipe, Recipe):
        raise invalid("recipe", "a Recipe or the name of one in mmlda.RECIPES", recipe)
    return recipe


def network_for(head: str, data: ImageData) -> dict[str, Any]:
    """A network for a training set as a config: the paper's for its size of images, an MLP for a table."""
    if data.is_table:
        return {"backbone": "mlp", "inputs": data.shape[0], "head": head, "num_classes": data.num_classes}
    config = network(head, "digits" if min(data.shape[1:]) < 16 else "mnist", num_classes=data.num_classes)
    return config | {"channels": data.shape[0]}


def network(head: str, data: str, *, C: float = 100.0, num_classes: int = 10, **settings: Any) -> dict[str, Any]:
    """The paper's network for a dataset, as a config for `mmlda.models.build`.

    Resnet-32 with 64 latent dimensions for images of 28 pixels and more; the small network for `digits`.

    Parameters
    ----------
    head
        "mmlda" or "softmax".
    data
        Name of the dataset.
    C
        Squared norm of the means.
    num_classes
        Number of classes.
    settings
        More entries of the config.

    Returns
    -------
    dict
        The config.

    Examples
    --------
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
