"""Adversarial training makes networks robust."""

import copy
import dataclasses

import pytest
from training_cases import SMALL, break_off, robust, same, weights

import mmlda
from mmlda.models import build
from mmlda.training import RECIPES, Adversary, Recipe, fit
from mmlda.training.recipes import sat


@pytest.mark.parametrize("attack", ["pgd", "trades"])
def test_adversarial_training_from_scratch_makes_robust(digits, attack):
    adversary = Adversary(attack=attack, eps=0.15, steps=5, step=0.3, random_start=True, share=1.0)
    recipe = Recipe(steps=150, optimizer="adam", lr=3e-3, batch_size=64)
    config = dict(SMALL, head="softmax", width=16, dim=32)
    scores = []
    for value in (recipe, dataclasses.replace(recipe, adversary=adversary)):
        model = build(config, seed=0)
        fit(model, digits[0], value, show=False)
        scores.append(robust(model, digits[1], 0.15))
    assert scores[1] > scores[0] + 0.15


@pytest.mark.parametrize("how", ["once", "online"])
def test_fine_tuning_as_in_the_paper(digits, how, tmp_path):
    """SAT on a trained network: online training resists the attack on the network itself; crafting once, at least
    the examples it saw. Killed half-way, it goes on to the same weights, though the crafting network has changed."""
    start = build(dict(SMALL, head="softmax", width=16, dim=32), seed=0)
    fit(start, digits[0], RECIPES["digits-sr"].scaled(150), show=False)
    recipe = dataclasses.replace(sat("fgsm", 0.12, steps=100, craft=how), batch_size=64)
    x, y = digits[0].pixels(), digits[0].labels
    moved = mmlda.attacks.FGSM(eps=0.12)(start, x, y).x_adv
    before = (start(moved).argmax(1) == y).float().mean()
    a, b = copy.deepcopy(start), copy.deepcopy(start)
    fit(a, digits[0], recipe, show=False)
    if how == "once":
        assert (a(moved).argmax(1) == y).float().mean() > before + 0.2
    else:
        assert robust(a, digits[0], 0.12) > robust(start, digits[0], 0.12) + 0.05
    break_off(digits[0], recipe, tmp_path, 60, model=b, checkpoint_every=25)
    fresh = copy.deepcopy(start)
    fit(fresh, digits[0], recipe, out=tmp_path, show=False, checkpoint_every=25)
    assert same(weights(fresh), weights(a))
