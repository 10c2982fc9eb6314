"""Audits as results, and stored results put through the rule again."""

import dataclasses
from pathlib import Path

import pytest
import torch
from attack_models import Behind

from mmlda import report
from mmlda.audit import audit, replay
from mmlda.audit.text import attack_name
from mmlda.data import stratified
from mmlda.results import Result, load_all

SMALL = {"eps": 0.2, "n": 40, "steps": 6, "queries": 30, "passes": 3, "show": False}
COMMITTED = [r for r in load_all(Path(__file__).parents[2] / "results") if r.kind == "audit"]


@pytest.mark.parametrize("result", COMMITTED, ids=lambda result: result.name)
def test_committed_audits_have_the_verdict_of_the_rule(result):
    again = replay(result)
    assert again.verdict == result.value
    assert again.summary == result.what and list(again.masks) == result.series["kinds"]
    stored = {item["test"]: item["passed"] for item in result.series["evidence"]}
    assert list(stored) == [check.name for check in again.checks if check.name in stored]
    assert {check.name: check.passed for check in again.checks} == {
        **dict.fromkeys(("gradient", "grad mode", "batches", "calls")),  # not measured in earlier audits
        **stored,
    }


def test_there_are_committed_audits():
    assert len(COMMITTED) >= 34 and {r.value for r in COMMITTED} == {"none", "masked", "real"}


NETWORKS = {
    "plain": lambda net: net,
    "saturated": lambda net: Behind(net, after=lambda z: 1e4 * z),
    "probabilities": lambda net: Behind(net, after=lambda z: (40 * z).softmax(1)),
    "rounded": lambda net: Behind(net, before=lambda x: (x * 16).round() / 16),
    "rounded probabilities": lambda net: Behind(net, lambda x: (x * 16).round() / 16, lambda z: z.softmax(1)),
    "random": lambda net: Behind(net, before=lambda x: x + 0.1 * torch.randn_like(x)),
    "cut": lambda net: Behind(net, before=lambda x: x - x % 0.0625),
    "function": lambda net: lambda x: net(x),
    "constant": lambda net: lambda x: 0 * net(x) + torch.eye(10)[3],
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_new_audit_comes_back_from_its_file(digits, linear, name, tmp_path):
    first = audit(NETWORKS[name](linear), digits[1], name=name, **SMALL)
    first.to_result().save(tmp_path)
    again = replay(Result.load(next(tmp_path.glob("*.json"))))
    assert again.verdict == first.verdict and again.masks == first.masks
    for one, two in zip(again.checks, first.checks, strict=True):
        assert (one.name, one.passed, one.count, one.of) == (two.name, two.passed, two.count, two.of)
    for one, two in zip(again.accuracies, first.accuracies, strict=True):
        assert torch.equal(one.held, two.held)
        assert dataclasses.replace(one, held=None).__dict__ == dataclasses.replace(two, held=None).__dict__


def test_attacks_of_a_file_are_known_by_their_fields(digits, linear):
    first = audit(linear, digits[1], **SMALL)
    result = first.to_result()
    for row in result.series["accuracies"]:
        row["name"] = "in other words"
    again = replay(result)
    assert again.verdict == first.verdict
    assert [trial.attack for trial in again.accuracies] == [trial.attack for trial in first.accuracies]


def test_the_result_is_whole(digits, linear, tmp_path):
    made = audit(linear, digits[1], surrogate=Behind(linear), name="linear", **SMALL)
    result = made.to_result()
    assert (result.kind, result.dataset, result.network, result.eps) == ("audit", "digits", "linear", 0.2)
    assert result.n == 40 and result.seed == 0 and result.attack_steps == 6 and result.value == made.verdict
    assert result.data["sha256"] == stratified(digits[1], 40).digest() and result.attack_settings["surrogate"] is True
    assert len(result.network_sha256) == 64 and result.versions and result.seconds > 0
    assert result.note == "40 of 360 images of digits, of 10 classes. Only 40 images." and result.what == made.summary
    for row, trial in zip(result.series["accuracies"], made.accuracies, strict=True):
        assert row["name"] == attack_name(trial) and row["accuracy"] == trial.share
        assert row["held"] == "".join("1" if held else "0" for held in trial.held)
    for item, check in zip(result.series["evidence"], made.checks, strict=True):
        assert item["value"] == check.measured
        assert item["passed"] is check.passed and item["words"].endswith(".")
    assert result.numbers["worst_accuracy"] == made.worst_accuracy
    curve = result.series["curve"]
    assert curve["eps"] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0] and len(curve["accuracy"]) == 6
    result.save(tmp_path)
    assert Result.load(tmp_path / f"{result.name}.json").series == result.series
    assert result.what in report.build(tmp_path, tmp_path / "page.html").read_text()


def test_an_audit_from_before_kinds_is_shown_in_the_report(digits, linear, tmp_path):
    result = audit(linear, digits[1], **SMALL).to_result()
    del result.series["kinds"]
    result.save(tmp_path)
    assert result.what in report.build(tmp_path, tmp_path / "page.html").read_text()
