"""Tables 1 to 3 in miniature: numbers that agree with a plain computation, and nothing done twice."""

import dataclasses

import pytest
import torch
from safetensors.torch import load

import mmlda
from mmlda import paper
from mmlda.attacks import BIM
from mmlda.paper import Setup
from mmlda.paper.rows import ADAM, HAT, MMLDA, SAT, SR, SR_ADAM
from mmlda.paper.setup import networks, tuned_for
from mmlda.results import load_all
from mmlda.training import sweeps
from mmlda.training.recipes import RECIPES


def test_table1_is_the_networks_error(setup):
    rows = (SR, MMLDA, SR_ADAM)
    results = paper.table1(setup, rows)
    test = mmlda.data.load("digits")[1]
    of = {row: next(r for r in results if r.kind == "table1" and row.has(r)) for row in rows}
    errors = {}
    for net in networks(setup, rows):
        errors[net.row] = float((net.model(test.pixels()).argmax(1) != test.labels).double().mean())
        assert of[net.row].value == pytest.approx(errors[net.row]) and of[net.row].unit == "share"
    assert of[SR].recipe_settings["optimizer"] == "sgd" and of[SR_ADAM].recipe_settings["optimizer"] == "adam"
    assert of[MMLDA].train_steps == 60 and "60 training steps" in of[MMLDA].note and of[SR].n == 360
    claims = {r.claim: r for r in results if r.kind == "claim"}
    assert claims["table1"].value == pytest.approx(errors[MMLDA] - errors[SR])
    low, high = claims["table1"].interval
    assert low < claims["table1"].value < high and claims["adam"].recipe == "digits-sr-adam"
    for result in results:
        assert result.versions["torch"] and result.device and result.commit is not None


def test_table2_is_what_the_attack_leaves(setup, table2):
    x, y = (mmlda.data.load("digits")[1].pixels(slice(24)), mmlda.data.load("digits")[1].labels[:24])
    sr = networks(setup, (SR,))[0]
    held = int((BIM(eps=0.12)(sr.model, x, y).prediction == y).sum())
    of = {row: next(r for r in table2 if r.attack == "BIM" and row.has(r)) for row in (SR, SAT, HAT, MMLDA)}
    assert of[SR].value == held / 24 and (of[SR].attack_steps, of[SR].eps, of[SR].head) == (10, 0.12, "softmax")
    variants = {(r.recipe, r.cell["surface"], r.target) for r in table2 if r.attack == "JSMA"}
    assert len(variants) == 8  # two heads, two surfaces, two targets
    sat, hat = tuned_for(setup, sr, [(SAT, "BIM", 0.12), (HAT, "BIM", 0.12)]).values()
    assert sat.recipe.adversary.eps == 0.12 and hat.recipe.adversary.eps == (0.02, 0.20)
    assert sat.recipe.steps == 30 and sat.recipe.lr == 0.01 and sat.recipe.adversary.craft == "once"
    for net in (sat, hat):
        assert not all(torch.equal(a, b) for a, b in zip(net.model.parameters(), sr.model.parameters()))
        left = int((BIM(eps=0.12)(net.model, x, y).prediction == y).sum())
        assert of[net.row].value == left / 24 and of[net.row].fine_tuning == net.row.fine_tuning
    outcomes = load(of[SR].read_outcomes(setup.out))
    assert int(((outcomes["clean"] == y) & (outcomes["prediction"] == y)).sum()) == held
    assert of[SR].numbers["plain_accuracy"] == float((outcomes["prediction"] == y).double().mean())


def test_nothing_is_done_twice(setup, make_table2, table2, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("done already")

    monkeypatch.setattr(sweeps, "run_jobs", never)
    monkeypatch.setattr(mmlda.attacks.Attack, "__call__", never)
    assert [(r.name, r.value) for r in make_table2(setup)] == [(r.name, r.value) for r in table2]


def test_unfinished_work_is_not_counted_twice(setup, table2):
    names = [r.name for r in load_all(setup.out)]
    assert len(names) == len(set(names)) and "result" not in names and table2[0].name in names


def test_table3_and_figure4_share_their_images(setup):
    results = paper.table3(setup, ("untargeted",), search=(6, 60))
    of = {row: next(r for r in results if r.kind == "table3" and row.has(r)) for row in (SR, MMLDA)}
    outcomes = load(of[SR].read_outcomes(setup.out))
    labels = mmlda.data.load("digits")[1].labels[:24]
    broken = outcomes["success"] & (outcomes["clean"] == labels)
    assert of[SR].value == pytest.approx(float(outcomes["distortion"][broken].double().mean()))
    assert of[SR].numbers["success_rate"] > 0.9 and "6 x 60" in of[SR].note
    assert 0 <= of[SR].numbers["accuracy"] <= 1 and of[SR].unit == "distortion"
    ratio = next(r for r in results if r.name == "claim-digits-table3-untargeted")
    assert ratio.value == pytest.approx(of[MMLDA].value / of[SR].value)
    assert ratio.interval[0] < ratio.value < ratio.interval[1]
    figures = paper.fig4(setup, search=(6, 60))
    images = load(figures[0].read_outcomes(setup.out))
    assert images["x"].dtype == torch.uint8 and images["x_adv"].shape == images["x"].shape
    guess = networks(setup, (SR,))[0].model(images["x_adv"].float()).argmax(1)
    assert float((guess == images["prediction"]).double().mean()) > 0.8  # but for half precision's rounding
    assert 0 <= figures[0].value <= 1 and figures[0].unit == "share"
    assert figures[-1].holds is None  # 24 images decide nothing


def test_the_papers_own_recipe_of_mmlda_is_a_row_of_table_1_on_cifar10():
    setup = Setup(data="cifar10", seeds=(2,))
    ours, theirs = (setup.recipe(row, 2) for row in (MMLDA, ADAM))
    assert ours.optimizer == theirs.optimizer == "adam" and ours.decoupled and not theirs.decoupled
    assert theirs == dataclasses.replace(RECIPES["cifar10-mmlda-adam"], seed=2)


def test_fewer_steps_of_fine_tuning_are_taken_and_told(setup, tmp_path):
    networks(setup, (SR,))
    short = dataclasses.replace(setup, out=tmp_path, tuning=3)
    (tmp_path / "networks").symlink_to(setup.out / "networks")
    cells = [(SAT, "ILCM", 0.2)]
    (result,) = (r for r in paper.table2(short, kinds=("ILCM",), eps=(0.2,), cells=cells) if SAT.has(r))
    assert result.train_steps == 3 and "3 steps of fine-tuning, not 300" in result.note
    worst = paper.worst_case(short, eps=(0.2,), cells=cells)
    (tuned_one,), (plain,) = ([r for r in worst if row.has(r)] for row in (SAT, SR))
    assert "3 steps of fine-tuning" in tuned_one.note and tuned_one.name == "worst-digits-sr-sat-ilcm-0.2-0"
    assert "fine-tuning" not in plain.note and "60 training steps" in plain.note
