"""`train`: one run from names."""

import inspect

import pytest
import torch
from training_cases import SMALL, same, weights

import mmlda
from mmlda.models import SoftmaxHead, build
from mmlda.training import RECIPES
from mmlda.training.run import _with_priors, choose_recipe, train


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


@pytest.mark.parametrize("head", ["mmlda", "softmax"])
def test_priors_of_a_network_to_start_from(digits, tmp_path, head):
    rest, _ = digits
    start = build(dict(SMALL, head=head, latent=True, priors=[0.55] + [0.05] * 9), seed=0)
    kept, _ = train("digits", start=start, steps=1, show=False)
    assert float(kept.model.head.priors[0]) == pytest.approx(0.55)
    given = {"priors": "empirical", "start": start, "steps": 2}
    run, _ = train("digits", out=tmp_path, show=False, **given)
    assert torch.allclose(run.model.head.priors.double(), rest.priors, atol=1e-6)
    assert train(out=tmp_path, start=start, show=False)[0].step == 2  # the run's priors, given or not
    uniform, _ = train("digits", **{**given, "priors": "uniform"}, show=False)
    assert torch.allclose(uniform.model.head.priors, torch.full((10,), 0.1))


def test_priors_of_a_start_follow_its_classes():
    start = build({**SMALL, "num_classes": 3}, seed=0)
    start.classes = ("ant", "bee", "cat")
    data = mmlda.data.as_images((torch.rand(4, 1, 8, 8), ["cat", "bee", "cat", "cat"]))
    assert _with_priors(start, "empirical", data).head.priors.tolist() == pytest.approx([0, 0.25, 0.75])


def test_a_run_that_was_fine_tuned_on_fewer_classes_resumes(tmp_path):
    start = build({**SMALL, "num_classes": 12}, seed=0)
    start.classes = tuple(map(str, range(12)))
    train("digits", start=start, steps=2, out=tmp_path, show=False)
    run, _ = train(out=tmp_path, steps=4, show=False)
    assert run.step == 4 and run.model.classes == start.classes


@pytest.mark.parametrize("more", [{"priors": "empirical"}, {"head": "softmax"}, {"recipe": "digits-sr", "steps": 4}])
def test_what_matches_a_run_resumes_it(tmp_path, more):
    given = {"head": "softmax", "priors": "empirical", "recipe": "digits-sr", "model": {"width": 4}}
    train("digits", **given, steps=4, out=tmp_path, show=False)
    assert train(out=tmp_path, show=False, **more)[0].step == 4


def test_the_reason_is_what_differs(tmp_path):
    train("digits", priors="empirical", steps=4, model={"width": 4}, out=tmp_path, show=False)
    for more, message in (
        ({"priors": "uniform", "steps": 6}, r"model\.priors is \[.*\] there, but None was requested"),
        ({"head": "softmax"}, r"model\.C is 100\.0 there, but None was requested"),
    ):
        with pytest.raises(ValueError, match=message):
            train("digits", out=tmp_path, show=False, **more)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"head": "svm"}, "head must be one of mmlda, softmax, got 'svm'"),
        ({"recipe": "nope"}, "recipe must be one of .*, got 'nope'"),
        ({"model": {"depht": 3}}, "config must be settings of conv_net with a mmlda head, got"),
        ({"start": build(SMALL, seed=0), "model": {"width": 8}}, "model must be None where a network to start from"),
        ({"start": build(SMALL, seed=0), "head": "softmax"}, "head must be 'mmlda', that of the network"),
        ({"start": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))}, "data must have the 3 classes"),
        ({"start": torch.nn.Linear(64, 10), "priors": "uniform"}, "priors must be None for a network to start from"),
    ],
)
def test_train_refuses_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        train("digits", **options, steps=1, show=False)


@pytest.mark.parametrize(
    "function", [mmlda.fit, mmlda.fit_many, mmlda.sweep, mmlda.cross_validate, mmlda.evaluate, mmlda.audit, train]
)
def test_options_are_named_in_the_signature(function):
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_choose_recipe_by_data_and_head():
    assert choose_recipe("digits", "softmax") == RECIPES["digits-sr"]
    assert choose_recipe("some/folder", "mmlda") == RECIPES["mnist-mmlda"]
    assert choose_recipe("cifar10", "mmlda", name="cifar10-sr", lr=0.5).lr == 0.5


def test_a_line_says_whether_a_run_is_new_resumed_or_finished(tmp_path, capsys):
    given = {"steps": 4, "model": {"width": 4}, "n": 30, "out": tmp_path / "x"}
    train("digits", **given)
    assert f"{tmp_path / 'x'}: new run, 4 steps on 30 images of digits, 10 of 10 classes\n" in capsys.readouterr().err
    train(out=tmp_path / "x")
    assert "x: finished before, 4 steps on 30 images of digits" in capsys.readouterr().err
    train(out=tmp_path / "x", steps=6)
    assert "x: resumed after step 4 of 6, on 30 images of digits" in capsys.readouterr().err
    train("digits", **{**given, "out": tmp_path / "silent"}, show=False)
    assert capsys.readouterr().err == ""


def test_fewer_images_than_classes_are_refused():
    with pytest.raises(ValueError, match="n must be at least 10, one image per class, got 5"):
        train("digits", n=5, steps=1, show=False)


def test_a_run_prints_as_a_few_lines(digits, tmp_path):
    model, recipe = build(SMALL, seed=0), mmlda.Recipe(steps=4, optimizer="adam", lr=1e-3)
    run = mmlda.fit(model, digits[0], recipe, validation=digits[0][:50], out=tmp_path, show=False)
    first, *lines = str(run).splitlines()
    assert first.startswith("Classifier trained: 4 of 4 steps in ") and len(lines) == 3
    assert "training batches" in lines[0] and "best validation accuracy" in lines[1] and str(tmp_path) in lines[2]


def test_recipes_by_name(digits, monkeypatch):
    monkeypatch.setitem(RECIPES, "quick", mmlda.Recipe(steps=3, optimizer="adam", lr=1e-3))
    assert mmlda.fit(build(SMALL, seed=0), digits[0], "quick", show=False).recipe is RECIPES["quick"]
    assert mmlda.fit_many([build(SMALL, seed=0)], digits[0], "quick", show=False)[0].step == 3
    (row,) = mmlda.cross_validate(digits[0], "quick", C=10.0, folds=2, model=SMALL, show=False)  # one C, not a list
    assert row["C"] == 10.0 and row["steps"] == 3
    with pytest.raises(ValueError, match=r"recipe must be one of .*mnist-sr.*, got 'nope'"):
        mmlda.fit(build(SMALL, seed=0), digits[0], "nope", show=False)
    with pytest.raises(ValueError, match=r"recipe must be a Recipe or the name of one in mmlda.RECIPES, got 3"):
        mmlda.fit(build(SMALL, seed=0), digits[0], 3, show=False)
    for C in (-1, [10, "a"], "10"):
        with pytest.raises(ValueError, match="C must be a finite number > 0, got"):
            mmlda.cross_validate(digits[0], "quick", C=C, folds=2, show=False)


def test_mistakes_are_one_sentence(digits, tmp_path):
    (tmp_path / "file").touch()
    recipe, wide = mmlda.Recipe(steps=1), (torch.rand(20, 3, 8, 8), torch.arange(20) % 10)
    for call, message in (
        (lambda: mmlda.fit("mnist-sr", digits[0], recipe), "model must be a torch.nn.Module, got 'mnist-sr'"),
        (
            lambda: mmlda.fit(build(SMALL), wide, recipe, show=False),
            "data must fit the network, got images of 3 x 8 x 8",
        ),
        (
            lambda: mmlda.fit(build(SMALL), wide, recipe, out=tmp_path / "new", show=False),
            "data must fit the network, got images of 3 x 8 x 8",
        ),
        (
            lambda: mmlda.fit(build(SMALL), digits[0], recipe, teacher=torch.nn.Linear(3, 10), out=tmp_path / "new"),
            "data must fit the teacher, got images of 1 x 8 x 8",
        ),
        (lambda: train("digits", keep_best=True, out=tmp_path / "new"), "validation must be given with keep_best"),
        (lambda: train("digits", seed=2**63), "seed must be below"),
        (lambda: mmlda.accuracy(build(SMALL), wide), r"model must take inputs \[16, 3, 8, 8\]"),
        (lambda: mmlda.fit(build(SMALL), digits[0], recipe, out=tmp_path / "file"), "out must be a folder, got"),
        (lambda: mmlda.fit_many(build(SMALL), digits[0], recipe), "models must be a list of networks, got a Class"),
        (
            lambda: train("digits", validation=5000, show=False),
            "validation must be an integer from 1 to 1436, got 5000",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not (tmp_path / "new").exists()
