"""`train`: one run from names."""

import pytest
import torch
from training_cases import SMALL, same, weights

import mmlda
from mmlda.models import SoftmaxHead, build
from mmlda.training import RECIPES
from mmlda.training.run import choose_recipe, train


def test_train_is_fit_with_the_papers_recipe_and_measures_on_the_test_set(digits, tmp_path):
    run, test = train("digits", steps=30, seed=3, model={"width": 8}, out=tmp_path, show=False)
    model = build({**mmlda.training.recipes.network("mmlda", "digits"), "width": 8}, seed=3)
    mmlda.fit(model, digits[0], choose_recipe("digits", "mmlda", steps=30, seed=3), show=False)
    assert run.step == 30 and same(weights(run.model), weights(model))
    assert test.accuracy == mmlda.accuracy(model, digits[1]).accuracy > 0.2
    assert same(weights(mmlda.load(tmp_path)), weights(model))


def test_train_fine_tunes_a_given_network(digits):
    start = build(dict(SMALL, head="softmax", latent=True), seed=0)
    before = weights(start)
    run, _ = train("digits", start=start, steps=2, changes={"batch_size": 16}, show=False)
    assert run.model is start and isinstance(start.head, SoftmaxHead) and not same(weights(start), before)
    assert run.recipe.batch_size == 16 and run.recipe.lr == RECIPES["digits-sr"].lr


@pytest.mark.parametrize(
    "options, message",
    [
        ({"head": "svm"}, "head must be one of mmlda, softmax, got 'svm'"),
        ({"recipe": "nope"}, "recipe must be one of .*, got 'nope'"),
        ({"model": {"depht": 3}}, "config must be settings of conv_net with a mmlda head, got"),
        ({"start": build(SMALL, seed=0), "model": {"width": 8}}, "model must be None where a network to start from"),
        ({"start": build(SMALL, seed=0), "head": "softmax"}, "head must be 'mmlda', that of the network"),
        ({"start": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))}, "data must have the 3 classes"),
    ],
)
def test_train_refuses_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        train("digits", **options, steps=1, show=False)


def test_choose_recipe_by_data_and_head():
    assert choose_recipe("digits", "softmax") == RECIPES["digits-sr"]
    assert choose_recipe("some/folder", "mmlda") == RECIPES["mnist-mmlda"]
    assert choose_recipe("cifar10", "mmlda", name="cifar10-sr", lr=0.5).lr == 0.5
