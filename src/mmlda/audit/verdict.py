"""The verdict: a pure function of the checks. The rule and the reasons for it are in docs/audit.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

from mmlda.audit.checks import Check

__all__ = ["Verdict", "close_calls", "decide", "possible"]

Verdict = Literal["real", "none", "masked", "mixed"]


def decide(checks: Sequence[Check], *, constant: bool = False) -> Verdict:
    """The verdict on a network whose answer is `constant` or not; a constant answer hides nothing from the gradient.

    >>> decide([Check(name="hidden", passed=True), Check(name="survivors", passed=True)])
    'real'
    >>> decide([Check(name="hidden", passed=False), Check(name="survivors", passed=None)])
    'masked'
    """
    failed = {check.name for check in checks if check.passed is False}
    if any(check.name == "survivors" and check.passed for check in checks):
        return "mixed" if failed else "real"
    return "masked" if "hidden" in failed and not constant else "none"


def possible(checks: Sequence[Check], *, constant: bool = False) -> frozenset[Verdict]:
    """Every verdict that comes out if each check near its limit may be on either side of it."""
    return frozenset(decide(case, constant=constant) for case in _cases(checks))


def close_calls(checks: Sequence[Check], *, constant: bool = False) -> tuple[Check, ...]:
    """The checks near their limits that the verdict depends on."""

    def matters(check: Check) -> bool:
        return any(
            decide(case, constant=constant)
            != decide([c.flipped() if c.name == check.name else c for c in case], constant=constant)
            for case in _cases(checks)
        )

    return tuple(check for check in checks if check.near and matters(check))


def _cases(checks: Sequence[Check]) -> Iterator[list[Check]]:
    """The checks with every combination of the sides that those near their limits may be on."""
    sides = [{check.passed, check.otherwise} if check.near else {check.passed} for check in checks]
    for passed in product(*sides):
        yield [
            replace(c, passed=p, otherwise=c.otherwise if p == c.passed else c.passed) for c, p in zip(checks, passed)
        ]
