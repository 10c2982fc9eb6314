"""The paper's recipes, their rates, and what a recipe refuses."""

import dataclasses
import json

import numpy as np
import pytest

from mmlda.training.recipes import RECIPES, Adversary, Recipe, hat, sat


@pytest.mark.parametrize(
    "change",
    [{"steps": 3.5}, {"steps": "3"}, {"batch_size": 2.5}, {"accumulate": 1.5}, {"accumulate": 0}, {"warmup": 0.5},
     {"warmup": -1}, {"pad": 1.5}, {"seed": 1.5}, {"seed": -1}, {"momentum": 1.5}, {"momentum": 1.0},
     {"momentum": -0.1},
     {"momentum": float("nan")}, {"milestones": (-1,)}, {"milestones": (1.5,)}],
)  # fmt: skip
def test_what_is_no_number_of_its_kind_is_named(change):
    ((name, value),) = change.items()
    wrong = value[0] if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=f"^{name} = {wrong!r}: expected"):
        Recipe(**{"steps": 10, **change})


def test_steps_of_an_adversary_are_whole():
    with pytest.raises(ValueError, match=r"steps = 2\.5: expected a whole number, at least 1"):
        Adversary(attack="pgd", eps=0.1, steps=2.5)


def test_the_ends_of_the_ranges_are_taken():
    recipe = Recipe(steps=np.int64(1), batch_size=1, momentum=0, milestones=(0,), warmup=0, pad=0)
    assert recipe.rate(0) == pytest.approx(recipe.lr * recipe.gamma)


@pytest.mark.parametrize(
    "change, word",
    [({"steps": 0}, "steps"), ({"lr": float("nan")}, "lr"), ({"optimizer": "lion"}, "optimizer"),
     ({"milestones": (5, 5)}, "milestones"), ({"loss": "hinge"}, "loss"), ({"batch_size": 0}, "batch_size"),
     ({"decoupled": True}, "decoupled")],
)  # fmt: skip
def test_bad_recipes_are_named(change, word):
    with pytest.raises(ValueError, match=word):
        Recipe(**{"steps": 10, **change})


@pytest.mark.parametrize(
    "change, word",
    [({"attack": "jsma"}, "attack"), ({"eps": -1.0}, "eps"), ({"eps": (0.3, 0.2)}, "eps"),
     ({"craft": "twice"}, "craft"), ({"share": 0.0}, "share"), ({"steps": 0}, "steps"),
     ({"attack": "trades"}, "share"), ({"eps": (0.1,)}, "eps"), ({"step": -1.0}, "step"),
     ({"beta": float("nan")}, "beta")],
)  # fmt: skip
def test_bad_adversaries_are_named(change, word):
    with pytest.raises(ValueError, match=word):
        Adversary(**{"attack": "pgd", "eps": 0.1, **change})


def test_the_papers_recipes():
    """Spec: steps, optimizers and schedules of the paper's four, and its fine-tuning."""
    sr, mm = RECIPES["cifar10-sr"], RECIPES["cifar10-mmlda"]
    assert (sr.steps, sr.optimizer, sr.lr, sr.momentum, sr.weight_decay) == (90_000, "sgd", 0.1, 0.9, 2e-4)
    assert sr.milestones == (40_000, 60_000, 80_000) and (sr.pad, sr.flip, sr.batch_size) == (4, True, 128)
    assert (mm.optimizer, mm.lr) == ("adam", 1e-3) and mm.steps == 90_000
    assert RECIPES["mnist-sr"].milestones == (10_000, 15_000) and RECIPES["mnist-mmlda"].steps == 20_000
    tuned = sat("bim", 0.12)
    assert (tuned.lr, tuned.steps, tuned.milestones) == (0.01, 10_000, ()) and tuned.adversary.craft == "once"
    assert tuned.adversary.share == 0.5 and hat("ilcm").adversary.range == (0.02, 0.20)
    for recipe in RECIPES.values():
        assert Recipe.from_dict(json.loads(json.dumps(dataclasses.asdict(recipe)))) == recipe


def test_rates_follow_the_schedule():
    recipe = Recipe(steps=100, lr=0.1, milestones=(50, 80), warmup=10)
    assert [round(recipe.rate(s), 6) for s in (0, 4, 10, 49, 50, 79, 80)] == [0.01, 0.05, 0.1, 0.1, 0.01, 0.01, 0.001]
    assert recipe.scaled(10).milestones == (5, 8)
