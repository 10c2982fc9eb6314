"""The checks of an audit: arithmetic on what was measured. The rule and its limits are in docs/audit.md."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from mmlda.audit.honesty import ALONE
from mmlda.audit.profile import Profile
from mmlda.audit.trials import CE, Settings, Trial
from mmlda.results import wilson

LIMIT = 0.05  # for shares that would be 0 if every attack found the adversarial images there are
UNBOUNDED_LIMIT = 0.01  # the same with the whole range as perturbation, where every image can be broken
HONEST = 0.1  # for the share of comparisons in which the gradient does not match the values
AGREEMENT = 0.5  # cosine of two averaged gradients, below which an attack on a random network follows noise
COSINE_NOISE = 0.05  # variation of that cosine between runs

Mask = Literal["saturated", "probabilities", "sigmoids", "rounding", "no gradient", "random"]


def above(count: int, of: int, limit: float) -> bool:
    """Whether the 95% interval of a share lies above a limit; False where there are no images.

    >>> above(10, 100, LIMIT), above(9, 100, LIMIT)
    (True, False)
    """
    return of > 0 and wilson(count, of)[0] > limit


def first_above(of: int, limit: float) -> int:
    """The smallest count whose share is above the limit; `of + 1` if there is none.

    >>> first_above(100, LIMIT), first_above(200, LIMIT), first_above(1000, LIMIT)
    (10, 17, 64)
    """
    return bisect.bisect_right(range(of + 1), limit, key=lambda count: wilson(count, of)[0])


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of an audit.

    Attributes
    ----------
    name
        Its name in the table.
    measured
        A share in [0, 1], the cosine of "averaging" or the nats of "gaps"; None if nothing is measured.
    limit
        What `measured` is compared with; None for a check that only informs.
    passed
        None if the check only informs, or if its finding is not a fault.
    otherwise
        The value of `passed` on the other side of the limit.
    count, of
        `measured` is the share `count / of` of images; `count` is None where it is not a share.
    unit
        "share", or "" for a cosine and for nats.
    """

    name: str
    measured: float | None = None
    limit: float | None = None
    passed: bool | None = None
    otherwise: bool | None = None
    count: int | None = None
    of: int = 0
    unit: str = "share"

    @property
    def margin(self) -> int | None:
        """How many images more, or fewer, would change `passed`; None if no number of images would."""
        if self.count is None or self.limit is None or not self.of:
            return None
        first = first_above(self.of, self.limit)
        if first > self.of:
            return None
        return first - self.count if self.count < first else self.count - first + 1

    @property
    def near(self) -> bool:
        """Whether noise may decide: `margin` is at most one standard error of the count, or one image."""
        if self.count is None and self.measured is not None and self.limit is not None:
            return abs(self.measured - self.limit) < COSINE_NOISE
        if self.margin is None or self.count is None:
            return False
        return self.margin <= max(1, round(math.sqrt(self.count * (1 - self.count / self.of))))

    def flipped(self) -> Check:
        """The check on the other side of its limit."""
        return replace(self, passed=self.otherwise, otherwise=self.passed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What an audit has measured, image by image.

    Attributes
    ----------
    settings
        The arguments of the audit.
    profile
        What was known before the attacks.
    trials
        The attacks, in the order of the table.
    reached
        True where a gradient attack with the whole range breaks the image: bool [n].
    """

    settings: Settings
    profile: Profile
    trials: tuple[Trial, ...]
    reached: Tensor

    @property
    def n(self) -> int:
        return self.profile.n

    @property
    def right(self) -> Tensor:
        """Classified correctly without an attack: bool [n]."""
        return self.held("clean")

    @cached_property
    def standard(self) -> Tensor:
        """Classified correctly after every standard gradient attack: bool [n]."""
        return self.held("standard")

    @cached_property
    def left(self) -> Tensor:
        """Classified correctly after all attacks of the audit within eps: bool [n]."""
        return self.held("standard", "white", "curve", "black", "transfer")

    @cached_property
    def proven(self) -> Tensor:
        """In `left`, and within reach of a gradient attack: bool [n]."""
        return self.left & self.reached

    @cached_property
    def hidden(self) -> Tensor:
        """In `standard`, but not in `proven`: bool [n]."""
        return self.standard & ~self.proven

    def held(self, *kinds: str) -> Tensor:
        """Which images are right after every attack of these kinds within eps: bool [n]."""
        return after(t for t in self.trials if t.kind in ("clean", *kinds) and t.eps <= self.settings.eps)

    def curve(self) -> dict[str, list[float]]:
        """The accuracy under BIM against eps."""
        rows = [trial for trial in self.trials if trial.kind in ("clean", "curve", "unbounded")]
        return {"eps": [trial.eps for trial in rows], "accuracy": [trial.share for trial in rows]}

    def apgd(self, surface: str, view: str = "own") -> Trial:
        """APGD on the cross-entropy."""
        key = ("APGD", CE, surface, view)
        return next(t for t in self.trials if (t.attack, t.loss, t.surface, t.view) == key)


def share(mask: Tensor) -> float:
    return int(mask.sum()) / len(mask)


def after(trials: Iterable[Trial]) -> Tensor:
    """Which images are right after all of these attacks: bool [n]."""
    return torch.stack([trial.held for trial in trials]).all(0)


def all_checks(e: Evidence) -> tuple[Check, ...]:
    """Every check, in the order of docs/audit.md."""
    return tuple(_checks(e))


def _checks(e: Evidence) -> Iterator[Check]:
    p, few = e.profile, partial(_counted, of=e.n)
    gradients = e.held("standard", "white", "curve")
    yield few("hidden", e.hidden.sum())
    # it is not a fault if nothing survives
    yield few("survivors", e.proven.sum(), limit=p.number("chance"), below=None, beyond=True)
    times, batch = round(p.number("compared")), min(e.settings.batch_size, e.n)
    yield _compared(p, "gradient", "gradient_off", times, limit=HONEST)
    yield _compared(p, "grad mode", "grad_mode", batch)
    yield _compared(p, "batches", "alone", min(ALONE, batch))
    yield _compared(p, "calls", "answers_changed", times)
    yield few("zero gradients", p.count("zero_gradient"), of=p.right)
    yield Check(name="tiny gradients", measured=p.numbers.get("tiny_gradient"))
    if not p.no_float64:
        gained = e.apgd(p.surface).held & ~e.apgd(p.surface, "float64").held
        # two runs on a random network differ anyway: no limit
        yield Check(name="float64", measured=share(gained)) if p.random else few("float64", gained.sum())
    yield few("losses", _broken(e, lambda t: t.attack == "APGD" and t.loss != CE))
    yield Check(name="output", passed=True if p.output == "logits" else None)
    yield Check(name="surface", measured=e.apgd("probabilities").share - e.apgd("logits").share)
    ladder = [t for t in e.trials if t.kind == "standard" and t.attack in ("FGSM", "BIM")]
    yield few("more steps", _rise(sorted(ladder, key=lambda trial: trial.steps)))
    yield few("larger perturbations", _rise([t for t in e.trials if t.kind == "curve"]))
    whole = next(t for t in e.trials if t.kind == "unbounded")
    yield few("unbounded", whole.right, limit=UNBOUNDED_LIMIT)
    yield few("black box", (gradients & ~e.held("black")).sum())
    given = any(t.kind == "transfer" for t in e.trials)
    yield few("transfer", (gradients & ~e.held("transfer")).sum()) if given else Check(name="transfer")
    if p.random:
        cosine = p.number("agreement")
        good = cosine >= AGREEMENT
        yield few("randomness", _broken(e, lambda t: t.view == "averaged"), below=None)
        yield Check(name="averaging", measured=cosine, limit=AGREEMENT, passed=good, otherwise=not good, unit="")
    else:
        yield Check(name="randomness", passed=True)
    if p.steps:
        yield few("rounding", _broken(e, lambda t: t.view == "straight-through"), below=None)
    elif is_cut(p):
        yield Check(name="rounding", measured=p.numbers.get("no_gradient"))
    else:
        yield Check(name="rounding", passed=True)
    yield Check(name="gaps", measured=p.number("median_gap"), unit="")


def _counted(
    name: str, count: int | Tensor, *, of: int, limit: float = LIMIT, below: bool | None = True, beyond: bool = False
) -> Check:
    """A check of a share of the images; `below` and `beyond` are what `passed` is on each side of the limit."""
    count = int(count)
    sides = (beyond, below) if above(count, of, limit) else (below, beyond)
    share = count / max(of, 1)
    return Check(name=name, measured=share, limit=limit, passed=sides[0], otherwise=sides[1], count=count, of=of)


def _compared(p: Profile, name: str, number: str, of: int, limit: float = LIMIT) -> Check:
    """A check of a share of comparisons; audits from before these comparisons have none."""
    measured = p.numbers.get(number)
    return Check(name=name) if measured is None else _counted(name, round(measured * of), of=of, limit=limit)


def _broken(e: Evidence, which: Callable[[Trial], bool]) -> Tensor:
    """How many images that every standard attack leaves are broken by these attacks."""
    return (e.standard & ~after(filter(which, e.trials))).sum()


def _rise(trials: list[Trial]) -> int:
    """The most images by which a later, stronger attack leaves more than an earlier one."""
    return max([0, *(late.right - early.right for early, late in combinations(trials, 2))])


def is_cut(p: Profile) -> bool:
    """Whether anything cuts the gradient; a constant answer has no gradient to cut."""
    return not p.constant and above(p.count("no_gradient"), p.right, LIMIT)


def recognised(e: Evidence) -> tuple[Mask, ...]:
    """The kinds of mask that the network has, whether they hide anything or not.

    Zero gradients are due to a saturated softmax if the margin has a gradient, or if the gaps underflow in float32.
    """
    p, zero = e.profile, e.profile.count("zero_gradient")
    lost = max(zero - p.count("zero_gradient_margin"), round(p.number("gaps_above_104") * e.n))
    seen: dict[Mask, bool] = {
        "saturated": above(zero, p.right, LIMIT) and above(lost, e.n, LIMIT),
        "probabilities": p.probabilities,
        "sigmoids": p.output == "sigmoids",
        "rounding": bool(p.steps),
        "no gradient": is_cut(p),
        "random": p.random,
    }
    return tuple(mask for mask in seen if seen[mask])
