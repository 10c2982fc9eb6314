"""The rule of docs/audit.md, and verdicts that noise may decide."""

from itertools import product

import pytest
from audit_evidence import made_up

from mmlda.audit.checks import Check, all_checks
from mmlda.audit.verdict import close_calls, decide, possible


def judged(*args, **kwargs):
    return decide(all_checks(made_up(*args, **kwargs)))


def test_the_rule_on_counts():
    # chance is 10 of 100: 16 is the first count whose interval is above it; 10 the first above 5%
    assert judged(60, 60, 60) == "real" and judged(60, 51, 51) == "real"
    assert judged(60, 50, 50) == "mixed" and judged(60, 60, 50) == "mixed"
    assert judged(60, 60, 60, more_steps=10) == "mixed" and judged(60, 60, 60, more_steps=9) == "real"
    assert judged(16, 16, 16) == "real" and judged(15, 15, 15) == "none"
    assert judged(0, 0, 0) == "none" and judged(9, 0, 0) == "none"
    assert judged(10, 0, 0) == "masked" and judged(60, 60, 0) == "masked"


@pytest.mark.parametrize(
    ("hidden", "survivors", "other", "constant"),
    list(product((True, False), (True, None), (True, None, False), (0, 1))),
)
def test_the_rule_on_every_combination(hidden, survivors, other, constant):
    checks = [
        Check(name="hidden", passed=hidden),
        Check(name="survivors", passed=survivors),
        Check(name="losses", passed=other),
    ]
    failed = not hidden or other is False
    table = {
        (True, False): "real",
        (True, True): "mixed",
        (None, False): "none",
        (None, True): "masked" if not hidden and not constant else "none",
    }
    assert decide(checks, constant=bool(constant)) == table[survivors, failed]


def calls(*args, **kwargs):
    checks = all_checks(made_up(*args, **kwargs))
    return [check.name for check in close_calls(checks)], set(possible(checks))


def test_verdicts_near_a_limit_are_close_calls():
    assert calls(60, 60, 60) == ([], {"real"})
    assert calls(0, 0, 0) == ([], {"none"})
    assert calls(98, 0, 0) == ([], {"masked"})
    assert calls(16, 16, 16) == (["survivors"], {"real", "none"})
    assert calls(15, 15, 15) == (["survivors"], {"real", "none"})
    assert calls(60, 51, 51) == (["hidden", "float64", "losses"], {"real", "mixed"})
    assert calls(60, 60, 60, more_steps=9) == (["more steps"], {"real", "mixed"})


def test_checks_near_a_limit_that_cannot_change_the_verdict_are_no_close_calls():
    # 9 hidden of 100 is close to masked, but more steps do not matter where nothing survives
    assert calls(9, 0, 0) == (["hidden"], {"none", "masked"})
    assert calls(0, 0, 0, more_steps=9) == ([], {"none"})
    # far more is hidden than the limit: whether other losses are near it or not changes nothing
    assert calls(60, 51, 20) == ([], {"mixed"})


def test_two_checks_near_their_limits_are_combined():
    # both fail by little: only together do they keep the verdict from being real
    checks = [
        Check(name="hidden", limit=0.05, count=10, of=100, passed=False, otherwise=True),
        Check(name="survivors", limit=0.1, count=60, of=100, passed=True, otherwise=None),
        Check(name="losses", limit=0.05, count=10, of=100, passed=False, otherwise=True),
    ]
    assert decide(checks) == "mixed" and possible(checks) == {"mixed", "real"}
    assert [check.name for check in close_calls(checks)] == ["hidden", "losses"]
