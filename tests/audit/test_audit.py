"""Networks built to mask their gradients are told from honest ones, and an audit disturbs nothing.

The ground truth of every network is known without the audit: it is a plain network, an adversarially trained one, or
one of these behind a mask that changes hardly any answer. Verdicts are compared with all that noise may lead to.
"""

import copy
import random
import re

import numpy as np
import pytest
import torch
from attack_models import Behind
from audit_evidence import made_up
from torch import nn
from torch.utils.data import TensorDataset

import mmlda
from mmlda.audit import Audit, audit
from mmlda.data import ImageData, stratified

EPS = 0.2  # plain networks on digits keep nothing here
QUICK = {"eps": EPS, "n": 60, "steps": 10, "queries": 60, "passes": 6, "show": False}
TINY = {"eps": EPS, "n": 20, "steps": 2, "queries": 5, "passes": 2, "show": False}


class ZeroGradient(torch.autograd.Function):
    """The identity, with a gradient of 0: a step that the straight-through attack does not know."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g)


def noisy(net, size=0.1):
    return Behind(net, before=lambda x: x + size * torch.randn_like(x))


def times(net, factor):
    return Behind(net, after=lambda z: factor * z)


def rounded(net):
    return Behind(net, before=lambda x: (x * 16).round() / 16)


# the masks, the kinds each is recognised by, and the checks that it fails
MASKS = {
    "logits x 1e4": (lambda net: times(net, 1e4), ("saturated",), {"losses"}),
    # softmax is exactly 0 in float32 only for gaps of 104 nats and more
    "sure probabilities": (
        lambda net: Behind(net, after=lambda z: (40 * z).softmax(1)),
        ("saturated", "probabilities"),
        {"losses", "unbounded"},
    ),
    "rounding": (rounded, ("rounding",), {"rounding", "unbounded"}),
    "rounding in place": (
        lambda net: Behind(net, before=lambda x: x.mul(16).round_() / 16),
        ("rounding",),
        {"rounding", "unbounded"},
    ),
    "bytes": (
        lambda net: Behind(net, before=lambda x: (x * 16 + 0.5).byte().float() / 16),
        ("rounding",),
        {"rounding", "unbounded"},
    ),
    "rounding, logits x 1e4": (lambda net: times(rounded(net), 1e4), ("saturated", "rounding"), {"rounding"}),
    "no gradient": (
        lambda net: Behind(net, before=ZeroGradient.apply),
        ("no gradient",),
        {"black box", "unbounded"},
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_seen(digits, plain, name):
    mask, kinds, fails = MASKS[name]
    result = audit(mask(plain), digits[1], **{**QUICK, "queries": 300})
    assert result.verdict == "masked" and result.possible == {"masked"}, result
    assert result.standard_accuracy > 0.4 and result.worst_accuracy <= 0.1
    assert result.masks == kinds and "hides" not in result.summary
    failed = {check.name for check in result.checks if check.passed is False}
    assert {"hidden", "zero gradients", *fails} <= failed


def test_a_head_at_a_million_is_masked_and_its_features_give_it_away(digits, maker, other):
    result = audit(maker.steep(other), digits[1], **QUICK)
    assert result.verdict == "masked" and result.masks == ("saturated",)
    share = {(t.loss, t.surface): t.share for t in result.accuracies if t.attack == "APGD" and t.view == "own"}
    assert share["feature distance", "features"] < 0.2 < share["cross-entropy", "logits"]
    profile = result.profile
    assert profile.number("gaps_above_104") > 50 / 60 and profile.count("zero_gradient") > 50


def test_noise_that_drowns_the_gradient_is_masked(digits, maker, plain):
    result = audit(maker.Waves(plain, 10.0), digits[1], **{**QUICK, "passes": 16, "steps": 20})
    assert "masked" in result.possible, result
    assert result.check("randomness").count > 0 and result.check("averaging").limit == 0.5


# the same kinds in forms so mild that standard attacks see through them
MILD = {
    "probabilities": (lambda net: Behind(net, after=lambda z: z.softmax(1)), ("probabilities",)),
    "noise": (noisy, ("random",)),
    "both": (lambda net: Behind(noisy(net), after=lambda z: z.softmax(1)), ("probabilities", "random")),
}


@pytest.mark.parametrize("name", MILD)
def test_masks_that_hide_nothing_are_none_and_recognised(digits, plain, name):
    build, kinds = MILD[name]
    result = audit(build(plain), digits[1], **QUICK)
    assert result.verdict == "none" and result.standard_accuracy <= 0.1, result
    assert result.masks == kinds and "nothing here." in result.summary
    for check, kind in (("output", "probabilities"), ("randomness", "random")):
        assert result.check(check).passed is (None if kind in kinds else True)


def test_plain_networks_are_none_where_nothing_survives(digits, plain, other):
    for model, surrogate in ((plain, other), (other, plain)):
        result = audit(model, digits[1], surrogate=surrogate, **QUICK)
        assert result.worst_accuracy <= 0.05 and result.standard_accuracy <= 0.1
        assert "none" in result.possible and result.masks == (), result


def test_what_a_plain_network_keeps_at_a_small_eps_is_real_there(digits, plain):
    result = audit(plain, digits[1], **{**QUICK, "eps": 0.02})
    assert "real" in result.possible and result.worst_accuracy > 0.7 and result.masks == (), result


def test_an_adversarially_trained_network_is_real(digits, robust):
    result = audit(robust, digits[1], **{**QUICK, "eps": 0.1})
    assert "real" in result.possible and result.worst_accuracy > 0.5 and result.masks == (), result


@pytest.mark.parametrize("name", ["logits x 1e4", "rounding", "no gradient"])
def test_a_mask_on_a_robust_network_is_not_real(digits, robust, name):
    result = audit(MASKS[name][0](robust), digits[1], **{**QUICK, "eps": 0.12, "n": 40})
    assert result.worst_accuracy > 0.5  # it is robust, and the mask keeps the audit from saying so
    assert result.possible <= {"mixed", "masked"}, result
    if name == "no gradient":
        assert "Whether the rest is robust cannot be told." in result.summary and "not robust" not in result.summary


def test_noise_on_a_robust_network(digits, maker, robust):
    mild = audit(noisy(robust, 0.05), digits[1], **{**QUICK, "eps": 0.1, "n": 40})
    assert "real" in mild.possible and mild.check("averaging").measured > 0.7, mild
    loud = audit(maker.Waves(robust, 100.0), digits[1], **{**QUICK, "eps": 0.1, "n": 40})  # too loud to average
    assert loud.verdict == "mixed" and loud.check("averaging").measured < 0.3, loud
    assert "averaging" in loud.summary


def test_constant_and_useless_networks_are_none(digits):
    constant = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    constant[1].weight.data.zero_()
    assert audit(constant, digits[1], **QUICK).verdict == "none"
    wrong = ImageData(digits[1].images[:40], torch.tensor([8, 9] * 20), tuple("0123456789"))
    constant[1].bias.data[3] = 5.0
    result = audit(constant, wrong, **QUICK)
    assert result.verdict == "none" and result.clean_accuracy == 0


def test_printing_an_audit_shows_the_verdict_the_checks_and_the_attacks(digits, plain):
    result = audit(plain, digits[1], **TINY)
    text = str(result)
    assert text.startswith(result.summary) and "20 of 360 images of digits, of 10 classes. Only 20 images." in text
    for check in result.checks:
        assert re.search(rf"^(ok    |FAILED|      ) {check.name} ", text, re.M), check.name
    lines = text.split("95% interval\n")[1].splitlines()
    assert len(lines) == len(result.accuracies)
    for line, trial in zip(lines, result.accuracies):
        assert f" {trial.surface} " in line and f" {100 * trial.share:.1f}%" in line
    assert repr(result) == f"Audit({result.verdict!r}, eps=0.2, n=20)"


def test_a_close_call_is_printed():
    near = Audit(**vars(made_up(16, 16, 16)), about={})
    assert [check.name for check in near.near] == ["survivors"] and near.possible == {"real", "none"}
    assert "\nClose call: survivors is 16 of 100, 1 image from the limit of 10%.\n" in str(near)
    clear = Audit(**vars(made_up(60, 60, 60)), about={})
    assert clear.near == () and clear.possible == {"real"} and "Close call" not in str(clear)


def test_accuracies_are_counts_of_images(digits, plain, other):
    result = audit(plain, digits[1], surrogate=other, **{**TINY, "n": 40})
    right = plain(digits[1].pixels(slice(40))).argmax(1) == digits[1].labels[:40]
    assert result.accuracies[0].kind == "clean" and torch.equal(result.accuracies[0].held, right)
    for trial in result.accuracies:
        assert len(trial.held) == 40 and trial.right == int(trial.held.sum()) and trial.share == trial.right / 40
        assert trial.interval[0] <= trial.share <= trial.interval[1]
    within = torch.stack([trial.held for trial in result.accuracies if trial.eps <= EPS]).all(0)
    assert result.worst_accuracy == int(within.sum()) / 40
    assert [t.eps for t in result.accuracies if t.kind in ("curve", "unbounded")] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert [t.right for t in result.accuracies if t.kind == "transfer"] and result.check("transfer").count is not None
    assert sum(result.profile.gaps["counts"]) == 40


def test_the_figure_has_the_summary_as_its_title(digits, plain, tmp_path):
    result = audit(plain, digits[1], name="a long name " * 12, **TINY)
    figure = result.plot(tmp_path / "audit.svg")
    title = figure.get_suptitle()
    assert " ".join(title.split()) == " ".join(f"{'a long name ' * 12} on digits. {result.summary}".split())
    assert max(map(len, title.splitlines())) <= 140 and b"<svg" in (tmp_path / "audit.svg").read_bytes()
    result.plot(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes()[:4] == b"\x89PNG"


def test_data_may_be_tensors_or_a_dataset(digits, plain):
    part = stratified(digits[1], 20)
    x, y = part.pixels(), part.labels
    held = [t.held for t in audit(plain, digits[1], **TINY).accuracies]
    for data in ((x, y), (x.numpy(), y.numpy()), TensorDataset(x, y)):
        result = audit(plain, data, **TINY)
        assert all(torch.equal(t.held, expected) for t, expected in zip(result.accuracies, held))
        assert result.notes == ("Only 20 images.",)


def test_more_images_than_there_are_means_all(digits, plain):
    few = digits[1].subset(slice(60))
    for n in (60, 1000, None):
        result = audit(plain, few, **{**TINY, "n": n})
        assert result.n == 60 and result.notes == ()


def test_eps_is_the_papers_by_default(digits, plain):
    small = {**TINY, "eps": None}
    assert audit(plain, digits[1], **small).settings.eps == 0.12
    colour = ImageData(digits[1].images.expand(-1, 3, -1, -1), digits[1].labels, digits[1].classes, "colour digits")
    result = audit(Behind(plain, before=lambda x: x.mean(1, keepdim=True)), colour, **small)
    assert result.settings.eps == 0.04 and " at eps = 0.04: " in result.summary


def test_thorough_has_more_steps_and_queries(digits, linear):
    result = audit(linear, digits[1], **{**TINY, "thorough": True})
    assert {t.steps for t in result.accuracies if t.attack == "APGD"} == {10}
    assert {t.steps for t in result.accuracies if t.attack == "Square"} == {50}


def test_the_model_and_the_generators_are_left_alone_and_the_seed_decides(digits, plain):
    model = Behind(copy.deepcopy(plain), before=lambda x: x + 0.3 * torch.randn_like(x) + 1e-3 * random.random())
    model.train()
    model.inner.backbone.layers[0].eval()
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    settings = {**TINY, "eps": 0.1, "n": 30, "passes": 3}
    first = audit(model, digits[1], **settings)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    torch.rand(5)
    again = audit(model, digits[1], **settings)
    assert again.to_result().series == first.to_result().series
    assert audit(model, digits[1], seed=1, **settings).to_result().series != first.to_result().series


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("eps must be a radius between 0 and 1, the range of the images, got 0", {"eps": 0}),
        ("eps must be .*, got 1.5", {"eps": 1.5}),
        ("eps must be .*, got nan", {"eps": float("nan")}),
        ("n must be an integer >= 1, got 0", {"n": 0}),
        ("steps must be an integer >= 1, got 0", {"steps": 0}),
        ("queries must be an integer >= 1, got -1", {"queries": -1}),
        ("passes must be an integer >= 1, got 0", {"passes": 0}),
        ("batch_size must be an integer >= 1, got 0", {"batch_size": 0}),
        ("surrogate must be a module or a function from images to logits, got 3", {"surrogate": 3}),
        ("data must have at least 2 classes among its 1 images, got 1", {"n": 1}),
    ],
)
def test_bad_arguments(digits, linear, message, wrong):
    with pytest.raises(ValueError, match=message):
        audit(linear, digits[1], **{**TINY, **wrong})


def test_bad_models(digits, linear):
    with pytest.raises(ValueError, match="model must be a module or a function from images to logits, got 3"):
        audit(3, digits[1], **TINY)
    with pytest.raises(ValueError, match=r"model must return logits .*, got a ndarray"):
        audit(lambda v: v.flatten(1).numpy(), digits[1], **TINY)
    with pytest.raises(ValueError, match=r"eps must be a radius between 0 and 1, .*, got 'a'"):
        audit(linear, digits[1], **{**TINY, "eps": "a"})
    with pytest.raises(ValueError, match=r"must return logits \[20, classes\]"):
        audit(nn.Flatten(0), digits[1], **TINY)
    with pytest.raises(ValueError, match="for labels up to 9, got shape"):
        audit(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), digits[1], **TINY)
    with pytest.raises(ValueError, match="got NaN or infinity"):
        audit(Behind(linear, after=lambda z: z / 0), digits[1], **TINY)
    with pytest.raises(ValueError, match=r"^surrogate must return logits .*, got a ndarray"):
        audit(linear, digits[1], surrogate=lambda v: v.flatten(1).numpy(), **TINY)
    with pytest.raises(ValueError, match=r"^surrogate must take inputs \[20, 1, 8, 8\], got RuntimeError"):
        audit(linear, digits[1], surrogate=nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), **TINY)


@pytest.mark.parametrize("good", [1, 2, 20, 100])
def test_a_model_that_changes_its_return_type_is_refused(digits, linear, good):
    calls = iter(range(10_000))

    def changing(v):
        return linear(v) if next(calls) < good else linear(v).detach().numpy()

    for batch_size in (8, 128):
        with pytest.raises(ValueError, match=r"^model must return logits .*, got a ndarray"):
            audit(changing, digits[1], batch_size=batch_size, **TINY)


def test_a_module_that_squeezes_a_single_image_is_refused(digits, linear):
    with pytest.raises(ValueError, match=r"^model must return logits \[1, classes\], .*, got a float32 tensor \[10\]"):
        audit(Behind(linear, after=torch.squeeze), digits[1], **TINY)


def test_the_audit_is_a_public_name():
    assert mmlda.audit is audit
