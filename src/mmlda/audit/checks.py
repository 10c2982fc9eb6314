"""The checks of an audit: arithmetic on what was measured. The rule and its limits are in docs/audit.md."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mmlda.audit.profile import Profile
from mmlda.audit.trials import CE, Settings, Trial
from mmlda.results import wilson

__all__ = ["Check", "Evidence", "Name", "above", "all_checks", "first_above", "recognised"]

LIMIT = 0.05  # of a share that would be 0 if every search found what there is
UNBOUNDED_LIMIT = 0.01  # the same, where the whole range leaves nothing to search for
AGREEMENT = 0.5  # cosine of two averaged gradients: below it, an attack on a random network follows noise
COSINE_NOISE = 0.05  # of that cosine, from one run to the next

Name = Literal[
    "hidden",
    "survivors",
    "zero gradients",
    "tiny gradients",
    "float64",
    "losses",
    "output",
    "surface",
    "more steps",
    "larger perturbations",
    "unbounded",
    "black box",
    "transfer",
    "randomness",
    "averaging",
    "rounding",
    "gaps",
]
Mask = Literal["saturated", "probabilities", "sigmoids", "rounding", "no gradient", "random"]


def above(count: int, of: int, limit: float) -> bool:
    """Whether a share is above a limit with its whole 95% interval.

    >>> above(10, 100, LIMIT), above(9, 100, LIMIT)
    (True, False)
    """
    return wilson(count, of)[0] > limit


def first_above(of: int, limit: float) -> int:
    """The smallest count that is above the limit; `of + 1` if none is.

    >>> first_above(100, LIMIT), first_above(200, LIMIT), first_above(1000, LIMIT)
    (10, 17, 64)
    """
    return bisect.bisect_right(range(of + 1), limit, key=lambda count: wilson(count, of)[0])


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of an audit.

    Args:
        name: which one.
        measured: a share in [0, 1]; the cosine of "averaging", the nats of "gaps"; None if nothing is measured.
        limit: what `measured` is compared with; None for a check that only informs.
        passed: None if the check only informs, or finds something that is no fault.
        otherwise: `passed` on the other side of the limit.
        count: how many images `measured` is the share of...
        of: ... and of how many.
    """

    name: Name
    measured: float | None = None
    limit: float | None = None
    passed: bool | None = None
    otherwise: bool | None = None
    count: int | None = None
    of: int = 0

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
    """What an audit has measured, image by image. `reached` [n]: a gradient with the whole range breaks the image."""

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
        """Still right after every standard gradient attack."""
        return self.held("standard")

    @cached_property
    def left(self) -> Tensor:
        """Still right after all attacks of the audit within eps."""
        return self.held("standard", "white", "curve", "black", "transfer")

    @cached_property
    def proven(self) -> Tensor:
        """Left, and within reach of a gradient attack."""
        return self.left & self.reached

    @cached_property
    def hidden(self) -> Tensor:
        """Standard, but not proven."""
        return self.standard & ~self.proven

    def held(self, *kinds: str) -> Tensor:
        """Which images are right after every attack of these kinds within eps: bool [n]."""
        rows = [t.held for t in self.trials if t.kind in ("clean", *kinds) and t.eps <= self.settings.eps]
        return torch.stack(rows).all(0)

    def of_kind(self, kind: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.kind == kind]

    def of_view(self, view: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.view == view]

    def apgd(self, surface: str, view: str = "own") -> Trial:
        """APGD on the cross-entropy."""
        key = ("APGD", CE, surface, view)
        return next(t for t in self.trials if (t.attack, t.loss, t.surface, t.view) == key)


def all_checks(e: Evidence) -> tuple[Check, ...]:
    """Every check, in the order of docs/audit.md."""
    return (
        _few("hidden", e.hidden),
        _survivors(e),
        _few("zero gradients", e.profile.gradients.zero, of=e.profile.gradients.of),
        Check(name="tiny gradients", measured=_share(e.profile.gradients.tiny, e.profile.gradients.of)),
        *_float64(e),
        _losses(e),
        Check(name="output", passed=True if e.profile.output == "logits" else None),
        Check(name="surface", measured=e.apgd("probabilities").share - e.apgd("logits").share),
        _rises("more steps", sorted(_ladder(e), key=lambda trial: trial.steps), e.n),
        _rises("larger perturbations", e.of_kind("curve"), e.n),
        _few("unbounded", e.of_kind("unbounded")[0].held, limit=UNBOUNDED_LIMIT),
        _beyond_gradients("black box", "black", e),
        _beyond_gradients("transfer", "transfer", e) if e.of_kind("transfer") else Check(name="transfer"),
        *_randomness(e),
        _rounding(e),
        Check(name="gaps", measured=e.profile.gaps.median),
    )


def recognised(e: Evidence) -> tuple[Mask, ...]:
    """The kinds of mask that the network has, whether they hide anything or not.

    Zero gradients are due to a saturated softmax if the margin has a gradient, or if the gaps underflow in float32.
    """
    p, g = e.profile, e.profile.gradients
    lost = max(g.zero - g.zero_margin, p.gaps.above)
    there: dict[Mask, bool] = {
        "saturated": bool(g.of) and above(g.zero, g.of, LIMIT) and above(lost, e.n, LIMIT),
        "probabilities": p.probabilities,
        "sigmoids": p.output == "sigmoids",
        "rounding": bool(p.steps),
        "no gradient": is_cut(p),
        "random": p.random,
    }
    return tuple(mask for mask, seen in there.items() if seen)


def is_cut(profile: Profile) -> bool:
    """Whether something cuts the gradient, whatever it is; a constant answer has no gradient to cut."""
    g = profile.gradients
    return not profile.constant and bool(g.of) and above(g.cut, g.of, LIMIT)


def _share(count: int, of: int) -> float | None:
    return count / of if of else None


def _few(
    name: Name, images: Tensor | int, *, of: int | None = None, limit: float = LIMIT, fine: bool | None = True
) -> Check:
    """A check of a share that should be 0. `fine` is what `passed` is below the limit."""
    count = int(images.sum()) if isinstance(images, Tensor) else images
    of = len(images) if isinstance(images, Tensor) else of or 0
    many = bool(of) and above(count, of, limit)
    passed, otherwise = (False, fine) if many else (fine, False)
    measured = count / max(of, 1)
    return Check(name=name, measured=measured, limit=limit, passed=passed, otherwise=otherwise, count=count, of=of)


def _survivors(e: Evidence) -> Check:
    """Whether more survives than a constant answer gets right; if not, that is no fault."""
    count, chance = int(e.proven.sum()), e.profile.chance
    passed, otherwise = (True, None) if above(count, e.n, chance) else (None, True)
    return Check(
        name="survivors",
        measured=count / e.n,
        limit=chance,
        passed=passed,
        otherwise=otherwise,
        count=count,
        of=e.n,
    )


def _float64(e: Evidence) -> Iterable[Check]:
    """Images that the same attack breaks in float64 only. Two runs on a random network differ anyway: no limit."""
    if e.profile.no_float64:
        return ()
    own = e.profile.surface
    gained = e.apgd(own).held & ~e.apgd(own, "float64").held
    return (Check(name="float64", measured=_mean(gained)) if e.profile.random else _few("float64", gained),)


def _losses(e: Evidence) -> Check:
    others = [t.held for t in e.trials if t.attack == "APGD" and t.loss != CE]
    return _few("losses", e.standard & ~torch.stack(others).all(0))


def _ladder(e: Evidence) -> list[Trial]:
    """The standard attacks that differ in their steps alone."""
    return [trial for trial in e.of_kind("standard") if trial.attack in ("FGSM", "BIM")]


def _rises(name: Name, trials: list[Trial], n: int) -> Check:
    """The most images by which a later, stronger attack leaves more than an earlier one."""
    counts = [trial.right for trial in trials]
    rise = max([0, *(late - early for i, early in enumerate(counts) for late in counts[i:])])
    return _few(name, rise, of=n)


def _beyond_gradients(name: Name, kind: str, e: Evidence) -> Check:
    """What an attack without the network's gradient breaks beyond all gradient attacks."""
    return _few(name, e.held("standard", "white", "curve") & ~e.held(kind))


def _randomness(e: Evidence) -> Iterable[Check]:
    if not e.profile.random:
        return (Check(name="randomness", passed=True),)
    cosine = e.profile.gradients.agreement or 0.0
    good = cosine >= AGREEMENT
    return (
        _few("randomness", e.standard & ~_after(e.of_view("averaged")), fine=None),
        Check(name="averaging", measured=cosine, limit=AGREEMENT, passed=good, otherwise=not good),
    )


def _rounding(e: Evidence) -> Check:
    if e.profile.steps:
        return _few("rounding", e.standard & ~_after(e.of_view("straight-through")), fine=None)
    if is_cut(e.profile):
        return Check(name="rounding", measured=_share(e.profile.gradients.cut, e.profile.gradients.of))
    return Check(name="rounding", passed=True)


def _after(trials: list[Trial]) -> Tensor:
    return torch.stack([trial.held for trial in trials]).all(0)


def _mean(mask: Tensor) -> float:
    return int(mask.sum()) / len(mask)
