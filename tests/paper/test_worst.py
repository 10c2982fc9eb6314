"""The worst case and the audits beside Table 2, and robust networks."""

import dataclasses
import shutil

import pytest
import torch

import mmlda
from mmlda import data as datasets
from mmlda import paper
from mmlda.paper import Setup, numbers
from mmlda.paper.rows import MMLDA_ROBUST, SAT, SR, SR_ROBUST
from mmlda.paper.setup import Net, networks
from mmlda.paper.worst import robust
from mmlda.results import Result
from mmlda.training.recipes import RECIPES


@pytest.mark.parametrize("data, sizes", [("mnist", 6), ("cifar10", 6), ("digits", 3)])
def test_the_worst_case_is_taken_at_the_usual_perturbations_too(data, sizes, tmp_path, monkeypatch):
    seen, made = [], []

    def attacked(setup, net, attack, **more):
        seen.append((attack.eps, more["name"]))
        return Result(name=more["name"], kind="worst", what="", value=1.0, n=1), None, None

    net = Net(torch.nn.Linear(2, 2), "n", SR, 0, RECIPES["mnist-sr"])
    monkeypatch.setattr("mmlda.paper.worst.attacked", attacked)
    monkeypatch.setattr("mmlda.paper.worst.networks", lambda setup, rows: [net])
    monkeypatch.setattr("mmlda.paper.setup._sets", lambda data, root: datasets.load("digits"))
    monkeypatch.setattr("mmlda.paper.setup._tune", lambda setup, nets: made.extend(nets))
    monkeypatch.setattr("mmlda.paper.worst.robust_claims", lambda setup, results: [])
    setup = Setup(data=data, out=tmp_path, show=False)
    paper.worst_case(setup)
    eps = [eps for eps, _ in seen]
    assert len(set(seen)) == len(seen) == sizes and set(eps) >= set(numbers.EPS)
    assert sorted(eps)[:3] == ([2 / 255, 4 / 255, 8 / 255] if sizes == 6 else [*numbers.EPS])

    seen.clear()
    robust(setup)  # of the fine-tuned networks too; SAT has one for each perturbation
    names = [f"sr-{kind}-{attack}" for kind in ("sat", "hat") for attack in ("fgsm", "bim", "ilcm")]
    assert sorted(seen[sizes:]) == sorted((e, f"worst-{data}-{name}-{e:.4g}-0") for name in names for e in eps)
    assert len(made) == 3 * sizes + 3 and {tuned.recipe.adversary.eps for tuned in made if tuned.row == SAT} == set(eps)


def test_a_worst_case_is_not_taken_again_unless_of_another_network(setup, tmp_path, monkeypatch):
    first = paper.worst_case(setup, eps=(0.12,))
    for r in first:
        for end in ("json", "safetensors"):
            shutil.copy(setup.out / f"{r.name}.{end}", tmp_path)
    taken, attack = [], mmlda.attacks.WorstCase.__call__
    monkeypatch.setattr(mmlda.attacks.WorstCase, "__call__", lambda *a, **k: (taken.append(1), attack(*a, **k))[1])
    other = dataclasses.replace(setup, out=tmp_path)  # the results alone, without the images
    monkeypatch.setattr("mmlda.paper.worst.networks", lambda _, rows: networks(setup, rows))
    again = paper.worst_case(other, eps=(0.12,))
    assert not taken and [(r.name, r.value) for r in again] == [(r.name, r.value) for r in first]
    sr, ours = networks(setup)
    changed = dataclasses.replace(sr, model=ours.model)
    monkeypatch.setattr("mmlda.paper.worst.networks", lambda _, rows: [changed, ours])
    paper.worst_case(other, eps=(0.12,))
    assert len(taken) == 1


def test_networks_trained_on_adversarial_examples_are_under_the_worst_case_and_audited(tmp_path):
    setup = Setup(data="digits", out=tmp_path, steps=30, n=4, show=False)
    less = {"sizes": (0.05, 0.1), "kinds": ("BIM",), "eps": (0.12,), "targets": ("untargeted",), "search": (1, 20)}
    found = paper.hardened(setup, **less)
    worst, judged, tables = found[:4], found[4:6], found[6:]
    for row in (SR_ROBUST, MMLDA_ROBUST):
        assert [r.eps for r in worst if row.has(r)] == [0.05, 0.1]
    assert all(r.kind == "worst" and r.recipe_settings["adversary"]["eps"] == 0.1 for r in worst)
    assert all(r.train_steps == 30 for r in worst)
    assert {r.recipe_settings["optimizer"] for r in worst} == {"sgd", "adam"}  # each head by its own recipe
    assert [(r.kind, r.eps) for r in judged] == [("audit", 0.1)] * 2
    assert all(0 <= r.numbers["worst_accuracy"] <= r.numbers["clean_accuracy"] <= 1 for r in judged)
    assert len({r.network_sha256 for r in found}) == 2
    for row in (SR_ROBUST, MMLDA_ROBUST):
        assert [(r.kind, r.attack) for r in tables if row.has(r)] == [("table2", "BIM"), ("table3", "CarliniWagner")]
    assert all(r.paper is None for r in tables)  # a row of ours
    again = paper.hardened(setup, **less)
    assert [r.seconds for r in again] == [r.seconds for r in found]  # and nothing twice
