"""The audit: networks built to mask and honest ones are told apart, and the rule is the one in docs/audit.md.

The ground truth of every network here is known without the audit: it is a plain network, an adversarially trained
one, or one of these behind a mask that changes no answer, or hardly any.
"""

import copy
import importlib.util
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from attack_models import Behind
from torch import nn

import mmlda
from mmlda import report
from mmlda.attacks import APGD
from mmlda.audit import trials, views
from mmlda.audit import verdict as masking
from mmlda.audit.verdict import audit, lines, picture
from mmlda.data import ImageData
from mmlda.models import build
from mmlda.results import Result
from mmlda.training.recipes import RECIPES, Adversary, Recipe, network

EPS = 0.2  # plain networks on digits keep nothing here


@pytest.fixture(scope="module")
def digits():
    return mmlda.data.load("digits")


def trained(digits, head, seed=0, adversary=None, **settings):
    model = build(network(head, "digits", width=16, **settings), seed=seed)
    rate = {"lr": 0.03} if head == "softmax" else {"optimizer": "adam", "lr": 2e-3}
    recipe = Recipe(steps=400, milestones=(300,), batch_size=64, adversary=adversary, **rate)
    mmlda.fit(model, digits[0], recipe, show=False)
    return model.eval()


@pytest.fixture(scope="module")
def plain(digits):
    return trained(digits, "softmax")


@pytest.fixture(scope="module")
def other(digits):
    return trained(digits, "mmlda", seed=1)


@pytest.fixture(scope="module")
def robust(digits):
    adversary = Adversary(attack="pgd", eps=0.15, steps=4, step=0.4, random_start=True, share=1.0)
    return trained(digits, "softmax", seed=2, adversary=adversary)


class Jitter(nn.Module):
    """Adds waves of a few nats in fresh directions and phases to the logits: seldom another answer, no gradient."""

    def __init__(self, inner, frequency):
        super().__init__()
        self.inner, self.frequency = inner, frequency

    def forward(self, x):
        z, v = self.inner(x), x.flatten(1)
        across = torch.randn(v.shape[1], z.shape[1], dtype=x.dtype)
        phase = 2 * torch.pi * torch.rand(len(x), z.shape[1], dtype=x.dtype)
        return z + 2 * torch.sin(self.frequency * (v @ across) + phase)


class ZeroGradient(torch.autograd.Function):
    """The identity, without a gradient: nothing that the straight-through test could see."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g)


def large_C(model):
    model = copy.deepcopy(model)
    model.head = mmlda.MaxMahalanobisHead(num_classes=10, dim=model.head.dim, C=1e6)
    return model


MASKS = {
    "logits x 1e4": lambda net: Behind(net, after=lambda z: 1e4 * z),
    # sure of itself: softmax is exactly 0 in float32 only for gaps of 104 nats and more
    "probabilities": lambda net: Behind(net, after=lambda z: (40 * z).softmax(1)),
    "rounding": lambda net: Behind(net, before=lambda x: (x * 16).round() / 16),
    "rounding in place": lambda net: Behind(net, before=lambda x: x.mul(16).round_() / 16),
    "bytes": lambda net: Behind(net, before=lambda x: (x * 16 + 0.5).byte().float() / 16),
    "no gradient": lambda net: Behind(net, before=ZeroGradient.apply),
}


def test_plain_networks_are_none_where_nothing_survives(digits, plain, other):
    for model, surrogate in ((plain, other), (other, plain)):
        result = audit(model, digits[1], eps=EPS, n=80, surrogate=surrogate, show=False)
        assert result.value == "none" and result.numbers["worst_accuracy"] <= 0.05
        assert result.numbers["standard_accuracy"] <= 0.1 and result.what.startswith("None at eps = 0.2")


def test_what_a_plain_network_keeps_at_a_small_eps_is_real_there(digits, plain):
    result = audit(plain, digits[1], eps=0.02, n=80, show=False)
    assert result.value == "real" and result.numbers["worst_accuracy"] > 0.8


@pytest.mark.parametrize("kind", MASKS)
def test_masks_are_seen(digits, plain, kind):
    result = audit(MASKS[kind](plain), digits[1], eps=EPS, n=80, show=False)
    assert result.value == "masked", lines(result)
    assert result.numbers["standard_accuracy"] > 0.4 and result.numbers["worst_accuracy"] <= 0.1
    failed = {item["test"] for item in result.series["evidence"] if item["passed"] is False}
    assert {"hidden", "zero gradients"} <= failed
    assert ("rounding" in failed) == (kind in ("rounding", "rounding in place", "bytes"))
    assert ("black box" in failed) == (kind == "no gradient")
    assert ("unbounded" in failed) == (kind != "logits x 1e4")


def test_a_head_at_a_million_is_masked_and_its_features_give_it_away(digits, other):
    result = audit(large_C(other), digits[1], eps=EPS, n=80, show=False)
    assert result.value == "masked" and result.numbers["zero_gradient"] > 0.9
    by = {(row["name"], row["surface"]): row["accuracy"] for row in result.series["accuracies"]}
    assert by["APGD, feature distance", "features"] < 0.2 < by["APGD, cross-entropy", "logits"]
    assert result.numbers["gaps_above_104"] > 0.9


def test_noise_that_drowns_the_gradient_is_masked(digits, plain):
    result = audit(Jitter(plain, 10.0), digits[1], eps=EPS, n=80, show=False)
    assert result.value == "masked", lines(result)
    evidence = {item["test"]: item for item in result.series["evidence"]}
    assert evidence["randomness"]["passed"] is False and "averaging" in evidence


# the same kinds so mild that standard attacks see through them: nothing is hidden, and yet they are recognised
MILD = {
    "logits": (lambda net: net, set()),
    "probabilities": (lambda net: Behind(net, after=lambda z: z.softmax(1)), {"output"}),
    "noise": (lambda net: Behind(net, before=lambda x: x + 0.1 * torch.randn_like(x)), {"randomness"}),
    "both": (lambda net: Behind(net, before=lambda x: x + 0.1 * torch.randn_like(x), after=lambda z: z.softmax(1)),
             {"output", "randomness"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MILD)
def test_masks_that_hide_nothing_are_none_and_recognised(digits, plain, kind):
    """At a gap of some nats the sign of a probability's gradient is as good as a logit's; small noise averages out."""
    build, seen = MILD[kind]
    result = audit(build(plain), digits[1], eps=EPS, n=80, passes=6, show=False)
    assert result.value == "none" and result.numbers["standard_accuracy"] <= 0.1, lines(result)
    evidence = {item["test"]: item for item in result.series["evidence"]}
    assert {test for test in ("output", "randomness", "rounding") if evidence[test]["passed"] is not True} == seen
    said = " ".join(lines(result))
    assert ("The network returns probabilities, not logits." in said) == ("output" in seen)
    assert ("The network is random" in said) == ("randomness" in seen)
    assert all(evidence[test]["passed"] is None for test in seen)  # recognised, and no fault


# the kinds as they come, mild or not: the network each is made of, the verdict and the kinds it must be known by
BUILT = {
    "logits x 1e4": ("plain", MASKS["logits x 1e4"], "masked", ["saturated"]),
    "probabilities": ("plain", MILD["probabilities"][0], "none", ["probabilities"]),
    "a head at C = 1e6": ("other", large_C, "masked", ["saturated"]),
    "rounding": ("plain", MASKS["rounding"], "masked", ["rounding"]),
    "noise": ("plain", MILD["noise"][0], "none", ["random"]),
    "rounding, logits x 1e4": ("plain", lambda net: MASKS["logits x 1e4"](MASKS["rounding"](net)), "masked",
                               ["saturated", "rounding"]),
    "sure probabilities": ("plain", MASKS["probabilities"], "masked", ["saturated", "probabilities"]),
    "probabilities and noise": ("plain", MILD["both"][0], "none", ["probabilities", "random"]),
}  # fmt: skip
SAID = {"saturated": "softmax is saturated", "probabilities": "returns probabilities",
        "rounding": "has steps without a gradient (round)", "random": "answers are random"}  # fmt: skip


@pytest.mark.parametrize("kind", BUILT)
def test_networks_built_to_be_masked_are_told_from_honest_ones(digits, plain, other, kind, tmp_path):
    inner, mask, verdict, kinds = BUILT[kind]
    model = mask({"plain": plain, "other": other}[inner])
    result = audit(model, digits[1], eps=EPS, n=80, passes=6, show=False).save(tmp_path)
    assert result.value == verdict and result.series["kinds"] == kinds
    last = result.what.split(". ")[-1]
    assert [word for word, said in SAID.items() if said in last] == kinds
    assert ("nothing here" in last) == (verdict == "none") and result.what.count(last) == 1
    again = Result.load(tmp_path / f"{result.name}.json")
    assert again.series["kinds"] == kinds and lines(again)[0].endswith(last)
    # the picture's title has all of it, in lines that fit
    shown = re.findall(r"<!-- (.*?) -->", picture(tmp_path / "audit.svg", again).read_text())
    assert " ".join(shown).endswith(f"on digits. {result.what}") and max(map(len, shown)) <= 140


def test_honest_networks_are_of_no_kind(digits, plain, other, robust):
    for model, eps in ((plain, EPS), (plain, 0.02), (other, EPS), (robust, 0.1)):
        result = audit(model, digits[1], eps=eps, n=80, show=False)
        assert result.series["kinds"] == [] and result.value in ("none", "real"), lines(result)
        assert not any(said in result.what for said in SAID.values())


def test_what_only_looks_like_a_kind_is_none(digits, plain):
    small = {"eps": EPS, "n": 40, "steps": 6, "queries": 20, "show": False}
    for after in (lambda z: z - z.amin(1, keepdim=True) + 0.01, lambda z: z.log_softmax(1)):
        assert audit(Behind(plain, after=after), digits[1], **small).series["kinds"] == []
    cut = audit(MASKS["no gradient"](plain), digits[1], **small)  # zero gradients, and no softmax to blame
    assert cut.value == "masked" and cut.series["kinds"] == ["no gradient"]
    constant = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    constant[1].weight.data.zero_()
    assert audit(constant, digits[1], **small).series["kinds"] == []


def test_an_audit_from_before_kinds_is_shown(digits, plain, tmp_path):
    result = audit(plain, digits[1], eps=EPS, n=40, steps=4, queries=10, show=False)
    del result.series["kinds"]
    result.save(tmp_path)
    old = Result.load(tmp_path / f"{result.name}.json")
    assert lines(old)[0] == result.what and picture(tmp_path / "audit.png", old).exists()
    assert result.what in report.build(tmp_path, tmp_path / "page.html").read_text()


def test_eps_is_the_papers_unless_told(digits, plain):
    small = {"n": 20, "steps": 2, "queries": 5, "show": False}
    grey = audit(plain, digits[1], **small)
    assert grey.eps == grey.attack_settings["eps"] == 0.12 and " at eps = 0.12: " in grey.what
    assert grey.series == audit(plain, digits[1], eps=0.12, **small).series
    colour = ImageData(digits[1].images.expand(-1, 3, -1, -1), digits[1].labels, digits[1].classes, "colour digits")
    result = audit(Behind(plain, before=lambda x: x.mean(1, keepdim=True)), colour, **small)
    assert result.eps == 0.04 and " at eps = 0.04: " in result.what


def test_the_note_says_which_images(digits, plain):
    small = {"eps": EPS, "steps": 2, "queries": 5, "show": False}
    assert len(digits[1]) == 360
    assert audit(plain, digits[1], n=60, **small).note == "The first 60 of 360 images of digits."
    assert audit(plain, digits[1], n=20, **small).note == "The first 20 of 360 images of digits. Only 20 images."
    few = digits[1].subset(slice(60))
    assert audit(plain, few, n=200, **small).note == ""


def test_an_adversarially_trained_network_is_real(digits, robust):
    result = audit(robust, digits[1], eps=0.1, n=100, show=False)
    assert result.value == "real", lines(result)
    assert result.numbers["worst_accuracy"] > 0.5 and all(e["passed"] is not False for e in result.series["evidence"])


@pytest.mark.long
def test_a_mask_on_a_robust_network_is_mixed(digits, robust):
    for kind in ("logits x 1e4", "rounding", "no gradient"):
        result = audit(MASKS[kind](robust), digits[1], eps=0.12, n=100, show=False)
        assert result.value in ("mixed", "masked" if kind == "no gradient" else "mixed"), kind


@pytest.mark.long
def test_random_networks_that_hide_little_or_too_much(digits, plain, robust):
    noisy = [Behind(net, before=lambda x: x + 0.05 * torch.randn_like(x)) for net in (plain, robust)]
    assert audit(noisy[0], digits[1], eps=EPS, n=80, show=False).value == "none"
    assert audit(noisy[1], digits[1], eps=0.1, n=100, show=False).value == "real"
    loud = audit(Jitter(robust, 100.0), digits[1], eps=0.1, n=100, show=False)  # beyond what is averaged
    assert loud.value == "mixed" and "averaging" in loud.what


@pytest.mark.long
def test_the_demos_networks(digits):
    nets = {}
    for head, name in (("softmax", "digits-sr"), ("mmlda", "digits-mmlda")):
        nets[head] = build(network(head, "digits"), seed=0)
        mmlda.fit(nets[head], digits[0], RECIPES[name], show=False)
    for head, other in (("softmax", "mmlda"), ("mmlda", "softmax")):
        for eps in (0.12, 0.2):
            result = audit(nets[head], digits[1], eps=eps, surrogate=nets[other], show=False)
            assert result.value == "none", lines(result)


@pytest.fixture(scope="module")
def maker():
    path = Path(__file__).parents[2] / "tools" / "make_audit_table.py"
    spec = importlib.util.spec_from_file_location("make_audit_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(maker):
    """The lines of docs/audit.md's table by network."""
    between = maker.PAGE.read_text().split(maker.BEGIN)[1].split(maker.END)[0]
    rows = [line for line in between.splitlines() if line.startswith("| ") and not line.startswith("| *")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows[1:]}


def test_the_table_of_the_docs_has_the_networks_of_its_script(maker):
    page = maker.PAGE.read_text()
    assert list(shown(maker)) == [name for nets in maker.TABLE.values() for name in nets]
    assert maker.put(maker.put(page, "new\n"), page.split(maker.BEGIN)[1].split(maker.END)[0]) == page
    for nets in maker.TABLE.values():
        for name, (_, radii) in nets.items():
            cells = shown(maker)[name].strip("| ").split(" | ")
            assert cells[1] == " / ".join(f"{eps:g}" for eps in radii)
            verdicts = cells[-1].split(" / ")
            assert len(verdicts) == len(radii) and set(verdicts) <= {"real", "none", "masked", "mixed"}


@pytest.mark.long
def test_the_table_of_the_docs_is_what_its_script_finds(maker):
    """The verdicts; the numbers differ a little between machines."""
    for name in ("SR, probabilities", "SR, input rounded to 8 levels", "adversarially trained SR"):
        (found,) = (maker.row(name, *nets[name]) for nets in maker.TABLE.values() if name in nets)
        cells, line = ([cell.strip() for cell in text.split("|")] for text in (found, shown(maker)[name]))
        assert (cells[2], cells[4], cells[-2]) == (line[2], line[4], line[-2])


def judged(standard, left, proven, *, more_steps=0, n=100, words=False):
    """The verdict where so many of n images are standard, left and proven, and more steps raise the accuracy.

    Or the verdict's sentence, by `words`.
    """

    def first(count):
        return torch.arange(n) < count

    x, y = torch.rand(n, 1, 2, 2), torch.arange(n) % 10
    case = trials.Case(nn.Sequential(nn.Flatten(), nn.Linear(4, 10)).eval(), x, y, 0.1, 128, 4)
    case.constant, case.right, case.proven, case.moving = False, first(n), first(proven), first(n)
    case.numbers |= dict.fromkeys(("zero_gradient_float64", "tiny_gradient", "wrong_sign"), 0.0)
    for name in ("FGSM", "BIM", "more", "PGD"):
        extra = more_steps if name == "more" else 0
        case.add(name, "logits", 0.1, first(standard + extra), "standard")
    case.add("strict", "logits", 0.1, first(standard), "standard")
    for name in ("APGD, cross-entropy", "APGD, cross-entropy, float64", "APGD, margin"):
        case.add(name, "logits", 0.1, first(left), "white")
    case.add("APGD, cross-entropy", "probabilities", 0.1, first(n), "white")
    case.add("Square", "logits", 0.1, first(left), "black")
    case.add("BIM", "logits", 0.2, first(0), "curve")  # a larger eps counts for nothing at 0.1
    case.add("BIM", "logits", 1.0, ~first(n), "unbounded")
    verdict, what, _ = masking._judge(case)
    return what if words else verdict


def test_the_rule():
    # chance is 10 of 100: 16 is the first count whose interval is above it; 10 the first above 5%
    assert judged(60, 60, 60) == "real" and judged(60, 51, 51) == "real"
    assert judged(60, 50, 50) == "mixed" and judged(60, 60, 50) == "mixed"
    assert judged(60, 60, 60, more_steps=10) == "mixed" and judged(60, 60, 60, more_steps=9) == "real"
    assert judged(16, 16, 16) == "real" and judged(15, 15, 15) == "none"
    assert judged(0, 0, 0) == "none" and judged(9, 0, 0) == "none"
    assert judged(10, 0, 0) == "masked" and judged(60, 60, 0) == "masked"


def test_the_sentence_says_no_more_than_is_known():
    # chance is 10 of 100. What no gradient reaches may be robust or not, once it is more than a constant answer has
    for left, proven in ((88, 0), (88, 15), (11, 0)):
        what = judged(98, left, proven, words=True)
        assert what.startswith("Masked") and "not robust" not in what
        assert what.endswith("; no gradient reaches the rest. Whether the rest is robust cannot be told.")
    assert judged(98, 10, 0, words=True).endswith("together 10%; no gradient reaches the rest. It is not robust.")
    assert judged(98, 0, 0, words=True).endswith("together 0%. It is not robust.")
    assert judged(98, 15, 15, words=True).endswith("Whether the rest is robust cannot be told on so few images (100).")
    # nor is what is left above chance, within the noise, shown to be nothing
    assert judged(15, 15, 15, words=True).endswith("has 10%). Not shown to be robust on so few images (100).")
    assert judged(8, 8, 8, n=20, words=True).startswith("Real")
    assert judged(4, 4, 4, n=20, words=True).endswith("Not shown to be robust on so few images (20).")
    assert judged(10, 10, 10, words=True).endswith("has 10%). Not robust, and the gradient shows it.")
    assert judged(0, 0, 0, words=True).endswith("together 0%. Not robust, and the gradient shows it.")
    # robustness that is there, beside a test that failed
    mixed = judged(60, 60, 60, more_steps=10, words=True)
    assert mixed.endswith("; not all of it is shown to be robustness. Failed: more steps.")


def test_a_robust_network_whose_gradient_is_cut_is_not_called_not_robust(digits, robust):
    levels = (torch.arange(16) + 0.5) / 16
    model = Behind(robust, before=lambda x: torch.bucketize(x, levels.to(x.dtype)).to(x.dtype) / 16)
    result = audit(model, digits[1], eps=0.1, n=80, steps=10, queries=50, show=False)
    assert result.value == "masked" and result.numbers["worst_accuracy"] > 0.5
    assert "Whether the rest is robust cannot be told." in result.what and "not robust" not in result.what
    assert result.series["kinds"] == ["no gradient"]


def test_constant_and_useless_networks_are_none(digits):
    constant = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    constant[1].weight.data.zero_()
    assert audit(constant, digits[1], eps=0.1, n=60, show=False).value == "none"
    wrong = ImageData(digits[1].images[:40], torch.tensor([8, 9] * 20), tuple("0123456789"))
    constant[1].bias.data[3] = 5.0
    assert audit(constant, wrong, eps=0.1, n=40, show=False).value == "none"


def test_the_result_is_whole(digits, plain, other, tmp_path):
    result = audit(plain, digits[1], eps=EPS, n=40, surrogate=other, queries=30, steps=6, name="SR", show=False)
    assert result.kind == "audit" and (result.dataset, result.network, result.eps) == ("digits", "SR", EPS)
    assert result.n == 40 and result.seed == 0 and result.attack_steps == 6
    assert result.data["sha256"] == digits[1].subset(slice(40)).digest()
    names = {row["name"] for row in result.series["accuracies"]}
    for loss in ("cross-entropy", "margin", "DLR", "targeted", "feature distance"):
        assert f"APGD, {loss}" in names
    assert "transfer from the other network" in names
    for row in result.series["accuracies"]:
        assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1
        assert set(row["held"]) <= {"0", "1"} and len(row["held"]) == 40
        assert row["accuracy"] == pytest.approx(row["held"].count("1") / 40)
    right = plain(digits[1].pixels(slice(40))).argmax(1) == digits[1].labels[:40]
    held = [row["held"] for row in result.series["accuracies"]]
    assert held[0] == "".join("1" if hit else "0" for hit in right)
    within = [row["held"] for row in result.series["accuracies"] if row["eps"] <= EPS]
    left = sum(all(each[i] == "1" for each in within) for i in range(40))
    assert left == pytest.approx(40 * result.numbers["worst_accuracy"])
    assert f"all attacks of the audit together {2.5 * left:.0f}%" in result.what
    for item in result.series["evidence"]:
        assert set(item) == {"test", "words", "value", "limit", "passed", "unit"} and item["words"].endswith(".")
    curve = result.series["curve"]
    assert curve["eps"] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0] and curve["accuracy"][-1] == 0
    assert sum(result.series["gaps"]["counts"]) == 40 and len(result.series["gaps"]["edges"]) == 21
    result.save(tmp_path)
    again = Result.load(tmp_path / f"{result.name}.json")
    assert again.series == result.series and again.value == result.value
    assert lines(again)[0] == result.what and len(lines(result)) > 30
    from PIL import Image

    assert Image.open(picture(tmp_path / "audit.png", again)).size[0] > 1000
    assert b"<svg" in picture(tmp_path / "audit.svg", again).read_bytes()


def test_the_callers_things_are_untouched_and_the_seed_decides(digits, plain):
    model = Behind(copy.deepcopy(plain), before=lambda x: x + 0.3 * torch.randn_like(x) + 1e-3 * random.random())
    model.train()
    model.inner.backbone.layers[0].eval()
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    settings = {"eps": 0.1, "n": 30, "steps": 4, "queries": 20, "passes": 3, "show": False}
    first = audit(model, digits[1], **settings)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    torch.rand(5)
    again = audit(model, digits[1], **settings)
    assert again.series == first.series and again.numbers == first.numbers
    assert audit(model, digits[1], seed=1, **settings).series != first.series


def test_functions_and_networks_without_float64(digits, plain):
    class Narrow(nn.Module):
        def forward(self, x):
            return plain(x.float())

    small = {"eps": EPS, "n": 40, "steps": 6, "queries": 20, "show": False}
    for model in (lambda x: plain(x), Narrow()):
        result = audit(model, digits[1], **small)
        assert "No float64 copy" in result.note and result.value == "none"
        assert result.numbers["zero_gradient_float64"] is None
    assert "float64" not in audit(plain, digits[1], **small).note


def test_straight_through_has_the_identitys_gradient():
    x = torch.tensor([[0.3, 1.7]])
    for step in (torch.round, torch.Tensor.floor, lambda v: (v * 1).round_(), lambda v: v.byte(), torch.Tensor.detach,
                 lambda v: v.to(torch.int64), torch.sign):  # fmt: skip
        v = x.clone().requires_grad_(True)
        with views.StraightThrough() as mode:
            out = step(v)
        assert mode.found and torch.equal(out.detach(), step(x).float())
        (g,) = torch.autograd.grad(out.sum(), v)
        assert torch.equal(g, torch.ones_like(x))
    with views.StraightThrough() as mode:
        x.clone().requires_grad_(True).double().float().exp()
        x.round()  # not on the way from the image
    assert not mode.found


def test_the_feature_loss_is_the_distance_to_the_nearest_other_mean(digits, plain, other):
    x, y = digits[1].pixels(slice(50)), digits[1].labels[:50]
    for model in (plain, other):
        z = model.features(x).detach()
        loss = views.feature_loss(model, x, y)(model, x, y).detach()
        for i in range(50):
            mean = {k: other.head.means[k] if model is other else z[y == k].mean(0) for k in range(10)}
            expected = -min(float((z[i] - mean[k]).square().sum()) for k in range(10) if k != int(y[i]))
            assert float(loss[i]) == pytest.approx(expected, rel=1e-4)
        attacked = APGD(eps=EPS, steps=20, loss=views.feature_loss(model, x, y))(model, x, y)
        assert (attacked.prediction == y).float().mean() < 0.3
    assert views.feature_loss(nn.Linear(2, 2), x, y) is None


def test_bad_input(digits, plain):
    test = digits[1]
    for words, wrong in (
        ("eps = 0", {"eps": 0}), ("eps = 1.5", {"eps": 1.5}), ("eps = nan", {"eps": float("nan")}),
        ("n = 0", {"n": 0}), ("steps = 0", {"steps": 0}), ("queries = -1", {"queries": -1}),
        ("surrogate", {"surrogate": 3}), ("one class", {"n": 1}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            audit(plain, test, **({"eps": 0.1, "show": False} | wrong))
    with pytest.raises(ValueError, match="expected logits"):
        audit(nn.Flatten(0), test, eps=0.1, show=False)
    with pytest.raises(ValueError, match="labels up to 9"):
        audit(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), test, eps=0.1, show=False)
    with pytest.raises(ValueError, match="NaN or infinity"):
        audit(Behind(plain, after=lambda z: z / 0), test, eps=0.1, show=False)
