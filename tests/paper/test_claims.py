"""The rules by which the paper's claims are judged: pure functions of numbers."""

import numpy as np
import pytest
import torch

from mmlda.paper import Setup, claims, numbers
from mmlda.paper.figures import fig4_claim
from mmlda.paper.rows import ADAM, MMLDA, SAT, SR, SR_ADAM
from mmlda.paper.tables import table3_claims
from mmlda.paper.worst import robust_claims
from mmlda.results import Result


@pytest.fixture
def empty(tmp_path):
    return Setup(out=tmp_path, show=False)


def test_every_sentence_has_a_rule():
    assert claims.RULES.keys() == numbers.SENTENCES.keys()


@pytest.mark.parametrize(
    "interval, limit, holds",
    [((0.001, 0.02), 0.0, True), ((-0.02, -0.001), 0.0, False), ((-0.01, 0.01), 0.0, None), ((1.0, 1.19), 1.2, False)],
)
def test_an_interval_decides_where_it_lies_on_one_side(interval, limit, holds):
    assert claims.above(interval, limit) is holds


@pytest.mark.parametrize("interval, holds", [((-0.01, 0.01), True), ((0.005, 0.015), None), ((0.011, 0.02), False)])
def test_an_error_is_kept_within_a_point(interval, holds):
    assert claims.error_is_kept(interval) is holds


@pytest.mark.parametrize(
    "found, holds", [([(57.6, 64.0), (0.95, 1.0)], True), ([(57.0, 64.0), (0.95, 1.0)], False), ([(70.5, 64.0)], False)]
)
def test_features_are_normal_within_a_tenth(found, holds):
    assert claims.features_are_normal(found) is holds


@pytest.mark.parametrize("mean, p, holds", [(0.01, 0.04, True), (-0.01, 0.04, False), (0.01, 0.06, None)])
def test_sets_decide_beyond_chance(mean, p, holds):
    assert claims.better_on_sets(mean, p) is holds


@pytest.mark.parametrize("rate, holds", [(0.99, True), (0.98, False)])
def test_nearly_always_broken_is_99_percent_for_every_network(empty, rate, holds):
    results = [worst(SR_ADAM, None, 0.0, numbers={"success_rate": share}) for share in (1.0, rate)]
    assert table3_claims(empty, results)[-1].holds is holds


@pytest.mark.parametrize(
    "is_lowest, above, holds",
    [(True, (0.0, 0.0), True), (False, (0.001, 0.002), False), (False, (-0.001, 0.002), None), (None, (0, 0), None)],
)
def test_the_choice_of_c_is_judged_by_the_interval(is_lowest, above, holds):
    assert claims.lowest_at_100(is_lowest, above) is holds


def worst(row, eps, share, **fields):
    fields = {**row.fields("digits"), "kind": "worst", "attack": "WorstCase", "eps": eps, **fields}
    return Result(name="x", what="", value=share, n=200, **fields)


@pytest.mark.parametrize(
    "ours, base, tuned, holds",
    [
        ((0.9, 0.9, 0.9), (0.6, 0.05, 0.0), 0.3, True),
        ((0.9, 0.9, 0.9), (0.6, 0.05, 0.0), 0.88, None),  # above SR, and not above SR that was fine-tuned
        ((0.95, 0.08, 0.0), (0.95, 0.06, 0.0), 0.3, False),
        ((0.95, 0.9, 0.9), (0.95, 0.06, 0.0), 0.3, None),  # no room at the smallest perturbation
        ((0.4, 0.0, 0.0), (0.3, 0.0, 0.0), 0.0, False),
    ],
)
def test_more_robust_means_by_the_worst_case_and_beyond_chance(ours, base, tuned, holds, empty):
    rows = [worst(row, e, v) for row, values in ((MMLDA, ours), (SR, base)) for e, v in zip(numbers.EPS, values)]
    rows.append(worst(SAT, 0.12, tuned, recipe_settings={"adversary": {"attack": "bim", "eps": 0.12}}))
    (judged,) = robust_claims(empty, rows)
    assert judged.holds is holds and judged.numbers["comparisons"] == 4 and judged.recipe == "digits-mmlda"


def test_the_papers_own_recipe_is_judged_apart(empty, monkeypatch):
    kept = {SR: 0.1, MMLDA: 0.6, ADAM: 0.08}
    rows = [worst(row, e, share) for e in numbers.EPS for row, share in kept.items()]
    judged = {r.name: r for r in robust_claims(empty, rows)}
    assert {name: r.holds for name, r in judged.items()} == {
        "claim-digits-table2": True,
        "claim-digits-table2-adam": False,
    }
    assert "MM-LDA (Adam) keeps 8.0%" in judged["claim-digits-table2-adam"].what

    far = {"digits-sr": 1.0, "digits-mmlda": 3.0, "digits-mmlda-adam": 0.5}
    monkeypatch.setattr(Result, "read_outcomes", lambda self, out: self.recipe)
    monkeypatch.setattr("mmlda.paper.tables._distances", lambda setup, name: far[name] * np.linspace(0.9, 1.1, 100))
    fields = {"kind": "table3", "target": "random", "numbers": {"success_rate": 1.0}}
    found = {r.name: r for r in table3_claims(empty, [worst(row, None, 0.0, **fields) for row in kept])}
    ours, theirs = found["claim-digits-table3-random"], found["claim-digits-table3-random-adam"]
    assert (ours.value, ours.holds) == (pytest.approx(3.0), True) and ours.target == theirs.target == "random"
    assert (theirs.value, theirs.holds, theirs.recipe) == (pytest.approx(0.5), False, "digits-mmlda-adam")


@pytest.mark.parametrize(
    "ours, base, holds",
    [
        ((0.5, 0.30), (0.0, 0.30), True),
        ((0.0, 0.30), (0.0, 0.30), False),
        ((0.32, 0.25), (0.28, 0.27), False),  # all of both, by every limit
        ((0.32, 0.30), (0.28, 0.27), None),  # each by its own: no difference; by MM-LDA's limit for both: one
    ],
)
def test_semantic_noise_is_judged_by_each_limit(ours, base, holds, empty):
    found = [[(torch.full((600,), alike), limit)] for alike, limit in (ours, base)]
    judged = fig4_claim(empty, *found)
    assert judged.holds is holds and judged.value == float(ours[0] > ours[1])
    assert fig4_claim(empty, *[[(alike[:100], limit) for alike, limit in rows] for rows in found]).holds is None
