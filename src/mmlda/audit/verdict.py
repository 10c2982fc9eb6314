"""The verdict: a pure function of the checks. The rule and the reasons for it are in docs/audit.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Literal

from mmlda.audit.checks import Check

Verdict = Literal["real", "none", "masked", "mixed"]


def decide(checks: Sequence[Check], *, constant: bool = False) -> Verdict:
    """Apply the rule of docs/audit.md.

    Parameters
    ----------
    checks
        Every check of the audit; "hidden" and "survivors" must be among them.
    constant
        Whether the network gives every image the same answer, which hides nothing from the gradient.

    Examples
    --------
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
    """The verdicts for every combination of outcomes of the checks that are near their limits."""
    return frozenset(decide(case, constant=constant) for case in _cases(checks))


def close_calls(checks: Sequence[Check], *, constant: bool = False) -> tuple[Check, ...]:
    """The checks near their limits that decide the verdict for some combination of the others' outcomes."""
    verdict = partial(decide, constant=constant)

    def matters(name: str, case: Sequence[Check]) -> bool:
        return verdict(case) != verdict([check.flipped() if check.name == name else check for check in case])

    return tuple(check for check in checks if check.near and any(matters(check.name, case) for case in _cases(checks)))


def _cases(checks: Sequence[Check]) -> Iterator[tuple[Check, ...]]:
    """The checks with every combination of the sides that those near their limits may be on."""
    return product(*((check, check.flipped()) if check.near else (check,) for check in checks))
