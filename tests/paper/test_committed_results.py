"""The results in the repository: whole, drawn as they are, and true where the data is here."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

import mmlda
from mmlda.paper import numbers
from mmlda.paper.expected import Record, attack_of, faults_and_unchecked
from mmlda.paper.rows import ADAM, HAT, MMLDA, SAT, SR, SR_ADAM
from mmlda.paper.suspects import verdicts
from mmlda.paper.verification import verify
from mmlda.results import SCHEMA, Result, find_results, weights_digest, wilson

ROOT = Path(__file__).parents[2]
FOUND = find_results(ROOT / "results")
RESULTS = list(FOUND.values())
KINDS = ("table1", "table2", "table3", "worst")  # with every image's outcome
MODELS = {weights_digest((net := mmlda.load(name)).state_dict()): net for name in mmlda.zoo.names()}
SHIPPED = dict(zip(MODELS, mmlda.zoo.names()))
ROWS = (SR, SR_ADAM, SAT, HAT, MMLDA, ADAM)
UNITS = {"", "share", "share difference", "distortion", "times", "cells", "comparisons", "log10(C)"}


def outcomes(result):
    return load(result.read_outcomes(ROOT / "results"))


def ships(result):
    return result.network_sha256 in SHIPPED


def row_of(result):
    (row,) = (row for row in ROWS if row.has(result))
    return row


def test_every_result_is_whole_and_says_where_it_comes_from():
    assert len(RESULTS) > 1390
    for result in RESULTS:
        assert result.schema == SCHEMA and result.unit in UNITS, result.name
        assert result.versions["torch"] and result.device and re.fullmatch(r"[0-9a-f]{12}", result.commit), result.name
        assert result.kind in ("theory", "claim") or (result.recipe and result.recipe_settings), result.name
        assert result.kind == "theory" or result.dataset in numbers.DATASETS, result.name
        if result.unit == "share":
            assert 0 <= result.value <= 1 and (result.paper is None or result.kind == "claim" or 0 <= result.paper <= 1)
        if result.kind in ("table1", "table2"):
            assert len(outcomes(result)["clean"]) == result.n
            assert ships(result) or result.seed or row_of(result) not in (SR, MMLDA), result.name
            assert result.seed is not None and result.train_steps and result.data["sha256"]


def test_shares_have_the_interval_of_their_count():
    seen = 0
    for result in RESULTS:
        if result.unit == "share" and result.interval is not None and result.kind != "claim":
            count = result.value * result.n
            assert count == pytest.approx(round(count), abs=1e-6), result.name
            assert result.interval == pytest.approx(wilson(round(count), result.n), abs=1e-9), result.name
            seen += 1
    assert seen > 1300


def test_the_numbers_of_the_paper_beside_ours_are_the_papers():
    for result in RESULTS:
        if result.kind == "table2":
            assert result.paper == numbers.table2(result.dataset, row_of(result), result.attack, result.eps)
        if result.kind in ("table1", "table3"):
            table = {"table1": numbers.TABLE1, "table3": numbers.TABLE3}[result.kind]
            assert result.paper == table.get((result.dataset, row_of(result))), result.name
        if result.kind in ("table1", "table2", "table3"):
            holds, _ = numbers.reproduced(result.kind, result.dataset, result.value, result.paper)
            assert result.holds is holds, result.name


def test_the_figures_are_drawn_from_the_results(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    maker = importlib.import_module("make_result_figures")
    for name in ("robustness", "distortions"):
        getattr(maker, name)(tmp_path)
        drawn, there = ((folder / f"{name}.svg").read_text() for folder in (tmp_path, ROOT / "docs" / "figures"))
        if f"Matplotlib v{matplotlib.__version__}," not in there:
            pytest.skip("another matplotlib draws other paths")
        assert drawn == there, "run python tools/make_result_figures.py"


def test_what_was_counted_from_stored_outcomes_is_what_they_say():
    for result in RESULTS:
        if result.kind == "table2" and result.attack in ("FGSM", "BIM"):  # no target: a success is a wrong label
            broken = outcomes(result)["success"].double().mean().item()
            assert result.numbers["plain_accuracy"] == pytest.approx(1 - broken), result.name
        if result.kind == "fig4":
            alike = outcomes(result)["correlation"].abs()
            limit = torch.tensor(result.numbers["correlation_limit"]).half()  # as the correlations are stored
            assert int((alike > limit).sum()) == result.numbers["semantic"]
            assert result.value == pytest.approx(result.numbers["semantic"] / result.n)


@pytest.mark.parametrize("data", numbers.DATASETS)
@pytest.mark.parametrize("shipped", [False, True])
def test_the_verdicts_on_suspects_follow_from_their_results(data, shipped):
    here = [r for r in RESULTS if r.dataset == data]
    cells = [r for r in here if r.kind == "suspect" and bool(r.cell.get("shipped")) == shipped]
    if shipped:  # beside them the worst case of the same networks
        worst = [r for r in here if r.kind == "worst" and ships(r) and not r.recipe_settings["adversary"]]
        cell = {"view": "worst case", "shipped": True}
        cells += [dataclasses.replace(r, cell={**r.cell, **cell}) for r in worst if r.eps in numbers.EPS]
    (claim,) = (r for r in here if r.claim == "suspects" and bool(r.cell.get("shipped")) == shipped)

    def key(item):
        return sorted(item.items(), key=str)

    assert sorted(verdicts(cells), key=key) == sorted(claim.series["verdicts"], key=key)


def quick(result):
    """Whether images are attacked again in seconds on a CPU: one perturbation; not C&W; little JSMA and worst case."""
    if result.eps not in (None, 0.12) or result.kind == "table3":
        return False
    if result.attack == "JSMA":
        place = (result.dataset, result.head, result.cell["surface"], result.target)
        return place == ("mnist", "mmlda", "softmax", "least-likely")
    return result.kind != "worst" or (result.dataset, result.head) == ("mnist", "softmax")


@pytest.mark.long
@pytest.mark.parametrize("file", [file for file, r in FOUND.items() if r.kind in KINDS and ships(r) and quick(r)])
def test_a_number_is_true_where_the_data_is_here(file):
    result = FOUND[file]
    if mmlda.data.find(result.dataset) is None:
        pytest.skip(f"{result.dataset} is not here: mmlda data fetch {result.dataset}")
    assert verify(ROOT / "results" / file, n=20, seed=0).agrees


@pytest.mark.long
@pytest.mark.parametrize("data", numbers.DATASETS)
def test_every_field_that_follows_from_others_is_right_where_the_data_is_here(data):
    if mmlda.data.find(data) is None:
        pytest.skip(f"{data} is not here: mmlda data fetch {data}")
    test, seen = mmlda.data.load(data)[1], 0
    for result in RESULTS:
        if result.dataset == data and result.kind in (*KINDS, "suspect") and ships(result):
            images, key = test.subset(slice(result.n)), result.network_sha256
            record = Record(result, MODELS[key], SHIPPED[key], images, outcomes(result))
            assert faults_and_unchecked(record, attack_of(result))[0] == (), result.name
            seen += 1
    assert seen > 100


@pytest.mark.long
def test_a_forged_table_is_found_out_where_the_data_is_here(tmp_path):
    if mmlda.data.find("mnist") is None:
        pytest.skip("mnist is not here: mmlda data fetch mnist")
    labels = mmlda.data.load("mnist")[1].labels
    (true,) = (r for r in RESULTS if r.name == "table1-mnist-sr-0")
    made = Result.counted(0, 10_000, name="x", kind="", what="")
    forged = dataclasses.replace(
        true, value=made.value, interval=made.interval, numbers={"balanced_accuracy": 1.0}, holds=False
    ).save(tmp_path, save({"clean": labels.to(torch.uint8)}))
    found = verify(tmp_path / f"{forged.name}.json")
    assert not found.agrees and not found.faults and found.labels.lost == round(true.value * 10_000)


def recounted(result, columns, train, test):
    """The value that the outcomes of all images make."""
    labels = test.labels[: len(columns.get("clean", ()))]
    if result.kind == "fig3":
        _, alpha, seed = result.data["part"]
        return (columns["clean"] == mmlda.data.biased(test, alpha, seed).labels).double().mean()
    if result.kind == "fig4":
        return result.numbers["semantic"] / len(columns["correlation"])
    if result.kind == "fig5":
        return (columns["prediction"] != train.labels).double().mean()
    right = columns["clean"] == labels
    if result.kind == "table1":
        return (~right).double().mean()
    if result.kind == "table3":
        return columns["distortion"][right & columns["success"]].double().mean()
    held = columns["prediction"] == labels
    return (held if result.kind == "suspect" else held & right).double().mean()


# Table 3's distortions are stored in half precision.
# The committed values of Figure 5 are errors measured on the GPU at the end of training, with the weights in
# channels_last memory format. The stored predictions are of a second pass, with the same weights loaded in the default
# format, for which cuDNN may choose other TF32 kernels: near ties go the other way, and the counts differ by up to 6 of
# 50,000. The networks of the folds were not kept, so this cannot be measured again. New values are counted from the
# predictions.
TOLERANCES = {"table3": {"rel": 2e-3}, "fig5": {"abs": 6 / 50_000 + 1e-9}}


@pytest.mark.long
@pytest.mark.parametrize("data", numbers.DATASETS)
def test_every_value_with_outcomes_is_recounted_where_the_data_is_here(data):
    if mmlda.data.find(data) is None:
        pytest.skip(f"{data} is not here: mmlda data fetch {data}")
    (train, test), seen = mmlda.data.load(data), 0
    for result in RESULTS:
        if result.dataset == data and result.outcomes is not None:
            columns = outcomes(result)
            value = float(recounted(result, columns, train, test))
            assert result.value == pytest.approx(value, **TOLERANCES.get(result.kind, {"rel": 1e-9})), result.name
            if "plain_accuracy" in result.numbers and result.kind not in ("table3", "fig4"):
                plain = (columns["prediction"] == test.labels[: result.n]).double().mean().item()
                assert plain == pytest.approx(result.numbers["plain_accuracy"]), result.name
            seen += 1
    assert seen > 500
