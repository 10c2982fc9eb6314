"""The paper's recipes, their learning rates, and the values a recipe refuses."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from mmlda.training.recipes import RECIPES, Adversary, Recipe, hat, sat


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 3.5},
        {"steps": "3"},
        {"batch_size": 2.5},
        {"accumulate": 1.5},
        {"accumulate": 0},
        {"warmup": 0.5},
        {"warmup": -1},
        {"pad": 1.5},
        {"seed": 1.5},
        {"seed": -1},
        {"momentum": 1.5},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"momentum": float("nan")},
        {"milestones": (-1,)},
        {"milestones": (1.5,)},
    ],
)
def test_numbers_out_of_range_are_refused(change):
    ((name, value),) = change.items()
    wrong = value[0] if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {re.escape(repr(wrong))}$"):
        Recipe(**{"steps": 10, **change})


def test_the_steps_of_an_adversary_are_an_integer():
    with pytest.raises(ValueError, match=r"steps must be an integer >= 1, got 2\.5"):
        Adversary(attack="pgd", eps=0.1, steps=2.5)


def test_the_ends_of_the_ranges_are_accepted():
    recipe = Recipe(steps=np.int64(1), batch_size=1, momentum=0, milestones=(0,), warmup=0, pad=0)
    assert recipe.rate(0) == pytest.approx(recipe.lr * recipe.gamma)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"steps": 0}, "steps"),
        ({"lr": float("nan")}, "lr"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"milestones": (5, 5)}, "milestones"),
        ({"loss": "hinge"}, "loss"),
        ({"batch_size": 0}, "batch_size"),
        ({"decoupled": True}, "decoupled"),
    ],
)
def test_bad_recipes_are_refused(change, word):
    with pytest.raises(ValueError, match=word):
        Recipe(**{"steps": 10, **change})


@pytest.mark.parametrize(
    "change, word",
    [
        ({"attack": "jsma"}, "attack"),
        ({"eps": -1.0}, "eps"),
        ({"eps": (0.3, 0.2)}, "eps"),
        ({"craft": "twice"}, "craft"),
        ({"share": 0.0}, "share"),
        ({"steps": 0}, "steps"),
        ({"attack": "trades"}, "share"),
        ({"eps": (0.1,)}, "eps"),
        ({"step": -1.0}, "step"),
        ({"beta": float("nan")}, "beta"),
    ],
)
def test_bad_adversaries_are_refused(change, word):
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


def test_the_cosine_schedule_falls_from_the_rate_to_zero():
    recipe = Recipe(steps=100, lr=0.2, schedule="cosine")
    assert recipe.rate(0) == 0.2 and recipe.rate(50) == pytest.approx(0.1)
    assert recipe.rate(25) == pytest.approx(0.1 * (1 + math.sqrt(0.5)))
    assert recipe.rate(99) == pytest.approx(0.2 * math.sin(math.pi / 200) ** 2)
    assert dataclasses.replace(recipe, warmup=10).rate(4) == pytest.approx(recipe.rate(4) / 2)
    short = recipe.scaled(10)
    assert (short.steps, short.schedule) == (10, "cosine") and short.rate(5) == pytest.approx(0.1)


def test_scaling_the_steps_scales_the_warmup():
    assert Recipe(steps=100, warmup=20).scaled(10).warmup == 2


PGD = {"attack": "pgd", "eps": 0.1, "share": 1.0}


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: Adversary(**{**PGD, "attack": "trades"}, pairing=1.0),
            "pairing must be 0 with attack='trades', got 1.0",
        ),
        (lambda: Adversary(**{**PGD, "share": 0.5}, pairing=1.0), "craft and share must be .*, got 'online' and 0.5"),
        (lambda: Adversary(**PGD, craft="once", pairing=1.0), "craft and share must be .*, got 'once' and 1.0"),
        (lambda: Adversary(**PGD, pairing=-1.0), "pairing must be a finite number >= 0, got -1.0"),
        (lambda: Adversary(**PGD, awp=True), "awp must be a finite number >= 0, got True"),
        (lambda: Recipe(steps=9, schedule="linear"), "schedule must be one of steps, cosine, got 'linear'"),
        (
            lambda: Recipe(steps=9, schedule="cosine", milestones=(5,)),
            "milestones must be empty with",
        ),
        (lambda: Recipe(steps=9, average=1.0), r"average must be a number in \[0, 1\), got 1.0"),
        (lambda: Recipe(steps=9, average=-0.1), r"average must be a number in \[0, 1\), got -0.1"),
        (
            lambda: Recipe(steps=9, loss="centre", adversary=Adversary(**PGD, pairing=0.5)),
            "loss must be 'ce' with TRADES, logit pairing or distillation, got 'centre'",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_recipes_with_every_option_survive_json():
    adversary = Adversary(attack="pgd", eps=(0.1, 0.2), share=1.0, pairing=0.5)
    recipe = Recipe(steps=9, schedule="cosine", average=0.99, adversary=adversary)
    assert Recipe.from_dict(json.loads(json.dumps(dataclasses.asdict(recipe)))) == recipe
    older = dataclasses.asdict(recipe) | {"label_smoothing": 0.0}
    assert Recipe.from_dict(older | {"adversary": {**older["adversary"], "ramp": 0}}) == recipe
