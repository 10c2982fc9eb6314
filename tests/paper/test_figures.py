"""Figures 2 to 5 and the theory's, in miniature."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load

import mmlda
from mmlda import paper
from mmlda.paper import Setup
from mmlda.paper.biased import MODELS
from mmlda.paper.figures import fig5_claim, semantic
from mmlda.paper.rows import MMLDA, SR
from mmlda.paper.setup import networks
from mmlda.results import Result

SETS = ["BP1-1", "BP2-3"]


@pytest.fixture(scope="module")
def biased(setup):
    return paper.fig3(setup, SETS)


@pytest.fixture(scope="module")
def by_set(biased):
    """The results of Figure 3 by set and network."""
    return {(r.cell["set"], row): r for r in biased if r.kind == "fig3" for row in MODELS if row.has(r)}


def test_figure_2_has_the_silhouettes_of_the_features(setup):
    one, two, claim = paper.fig2(setup, n=100)
    assert len(one.series["x"]) == len(one.series["label"]) == 100 and len(one.series["centres"]) == 10
    assert claim.value == pytest.approx(two.value - one.value, abs=1e-4)
    assert claim.interval[0] < claim.value < claim.interval[1]


def test_the_latent_fit_is_that_of_the_test_images(setup):
    result, claimed = paper.latent(setup)
    (net,), test = networks(setup, (MMLDA,)), mmlda.data.load("digits")[1]
    fit = net.model.head.latent_fit(net.model.features(test.pixels()), test.labels)
    assert result.value == pytest.approx(fit.squared_distance) and result.n == fit.samples == 360
    assert result.numbers["variance"] == pytest.approx(fit.variance)
    assert claimed.holds is False and f"{fit.squared_distance:.1f} where" in claimed.what  # cross-entropy makes no MMD


def test_figure_3_is_the_accuracy_on_class_biased_sets(setup, biased, by_set):
    assert len(by_set) == 6 and by_set["BP2-3", SR].n == by_set["BP2-3", MMLDA].n < 360
    test = mmlda.data.biased(mmlda.data.load("digits")[1], mmlda.data.bp2()[2], seed=0)
    guess = load(by_set["BP2-3", SR].read_outcomes(setup.out))["clean"]
    assert by_set["BP2-3", SR].value == float((guess == test.labels).double().mean())
    assert (by_set["BP2-3", SR].cell["family"], by_set["BP2-3", SR].cell["index"]) == ("BP2", 3)
    claim = next(r for r in biased if r.claim == "fig3")
    gaps = [by_set[name, MMLDA].value - by_set[name, SR].value for name in SETS]
    assert claim.value == pytest.approx(np.mean(gaps)) and claim.holds is None  # two sets are too few for p < 0.05
    assert 0.9 < next(r for r in biased if r.claim == "priors").numbers["agreement"] <= 1
    with pytest.raises(ValueError, match="BP3-1"):
        paper.fig3(setup, ["BP3-1"])


def test_the_control_differs_from_mmlda_in_the_head_alone(setup, by_set):
    *same, claim = paper.fig3_control(setup, SETS)
    for r in same:
        there = by_set[r.cell["set"], MMLDA]
        assert r.recipe_settings == there.recipe_settings != by_set[r.cell["set"], SR].recipe_settings
        assert (r.data, r.n, r.train_steps, r.recipe) == (there.data, there.n, there.train_steps, there.recipe)
        assert r.head == "softmax" and r.network_sha256 not in {one.network_sha256 for one in by_set.values()}
    assert claim.value == pytest.approx(np.mean([by_set[r.cell["set"], MMLDA].value - r.value for r in same]))
    assert (claim.claim, claim.name) == ("fig3-recipe", "claim-digits-fig3-recipe")
    with pytest.raises(ValueError, match=r"out must have fig3-digits-BP1-2-mm-lda-0, a result of fig3"):
        paper.fig3_control(setup, ["BP1-2"])
    with pytest.raises(ValueError, match="must have the recipe and the images of"):
        paper.fig3_control(dataclasses.replace(setup, steps=61), ["BP1-1"])


def test_figure_5_is_the_error_of_the_folds(setup):
    *folds, claim = paper.fig5(setup, (1.0, 2.0), 2)
    guess = load(folds[0].read_outcomes(setup.out))["prediction"]
    wrong = float((guess != mmlda.data.load("digits")[0].labels).double().mean())
    assert folds[0].value == wrong  # by definition, whatever the training process had measured
    assert "2 folds" in folds[0].note and folds[0].seconds > 0 and len(folds[0].series["networks"]) == 2
    assert [r.value for r in folds] == pytest.approx([np.mean(r.series["errors"]) for r in folds], abs=5e-4)
    assert claim.value == min(folds, key=lambda r: r.value).cell["log10_C"]


@pytest.mark.parametrize(
    "at_two, holds",
    [((0.09, 0.091, 0.092), True), ((0.104, 0.103, 0.106), False), ((0.102, 0.099, 0.104), None)],
)
def test_the_choice_of_c_is_judged_fold_by_fold(at_two, holds, tmp_path):
    folds = {1.0: (0.1, 0.101, 0.102), 2.0: at_two}
    results = [
        Result(name="x", kind="fig5", what="", value=np.mean(e), cell={"log10_C": c}, series={"errors": list(e)})
        for c, e in folds.items()
    ]
    assert fig5_claim(Setup(out=tmp_path, show=False), results).holds is holds


def test_the_theory_holds_where_the_paper_says_so(setup):
    (found,) = paper.theory_figure(setup)
    assert found.holds and 0 < found.value < 1e-7
    curves = {curve["name"]: curve for curve in found.series["curves"]}
    bound = curves["bound at C = 100"]
    at_ten = bound["x"].index(10.0)
    assert bound["y"][at_ten] == pytest.approx(math.sqrt(1000 / 18), abs=1e-5)
    assert curves["RB at C = 100"]["y"][at_ten] == pytest.approx(bound["y"][at_ten], rel=1e-4)  # Theorem 3's equality


def test_semantic_noise_is_told_from_noise():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(500, 1, 8, 8, generator=generator)
    noise = torch.randn(500, 1, 8, 8, generator=generator)
    assert float(semantic(noise, images)[0].double().mean()) < 0.01
    own = torch.stack([torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] for a, b in zip(noise, images)])
    torch.testing.assert_close(semantic(noise, images)[1].float(), own, atol=1e-4, rtol=0)
    sign = torch.randn(500, 1, 1, 1, generator=generator).sign()
    mixed = torch.where(torch.arange(500)[:, None, None, None] < 100, noise * 0.01 + sign * images, noise)
    flags = semantic(mixed, images)[0]
    assert flags[:100].all() and float(flags[100:].double().mean()) < 0.01
    with pytest.raises(ValueError, match="at least 2"):
        semantic(noise[:1], images[:1])
