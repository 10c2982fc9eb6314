"""How an audit looks at a network: which steps cut the gradient, what it returns, and whether it is random.

All networks are one linear classifier of the digits behind something that changes no answer, or hardly any.
"""

import random

import numpy as np
import pytest
import torch
from attack_models import Behind
from torch import nn

import mmlda
from mmlda.attacks import surface
from mmlda.audit import trials, views
from mmlda.audit.verdict import audit, lines

SMALL = {"eps": 0.3, "n": 60, "steps": 6, "queries": 20, "passes": 4, "show": False}


@pytest.fixture(scope="module")
def test():
    return mmlda.data.load("digits")[1]


@pytest.fixture(scope="module")
def plain():
    train = mmlda.data.load("digits")[0]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(train.pixels(slice(None))), train.labels).backward()
        optimizer.step()
    return net.eval()


def evidence(result):
    return {item["test"]: item for item in result.series["evidence"]}


def without_grad(x):
    with torch.no_grad():
        return (x * 16).round() / 16


def inferred(x):
    with torch.inference_mode():
        return (x * 16).round() / 16


def staircase(x):
    for level in range(1, 17):
        x = torch.where((x > (level - 0.5) / 16) & (x < (level + 0.5) / 16), level / 16, x)
    return torch.where(x < 0.5 / 16, 0.0, x)


# rounding that no list of functions names: the gradient is 0, or there is none
CUTS = {
    "comparison": lambda x: sum((x > (i + 0.5) / 16).to(x.dtype) for i in range(16)) / 16,
    "remainder": lambda x: x - x % 0.0625,
    "bucketize": lambda x: torch.bucketize(x, (torch.arange(16, dtype=x.dtype) + 0.5) / 16).to(x.dtype) / 16,
    "where": staircase,
    "no_grad": without_grad,
    "inference_mode": inferred,
    "numpy": lambda x: torch.from_numpy(np.round(x.detach().numpy() * 16) / 16).to(x.dtype),
    "list": lambda x: torch.tensor((x * 16 + 0.5).int().tolist()).to(x.dtype) / 16,
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_gradient_that_is_cut_is_named_whatever_cuts_it(test, plain, cut):
    result = audit(Behind(plain, before=CUTS[cut]), test, **SMALL)
    assert result.value == "masked", lines(result)
    assert result.series["kinds"] == ["no gradient"] and "Something in it cuts the gradient." in result.what
    assert result.numbers["no_gradient"] == 100 and evidence(result)["rounding"]["passed"] is None
    assert "has no gradient at 100.0% of the right images" in evidence(result)["rounding"]["words"]


# rounding with the quotient's gradient to put in its place
DIVISIONS = {
    "//": lambda x: (x + 1 / 32) // 0.0625 * 0.0625,
    "in place": lambda x: (x * 1).floor_divide_(0.0625) * 0.0625,
    "div": lambda x: torch.div(x, 0.0625, rounding_mode="floor") * 0.0625,
    "divide": lambda x: x.divide(0.0625, rounding_mode="trunc") * 0.0625,
}


@pytest.mark.parametrize("kind", DIVISIONS)
def test_floor_division_ends_in_a_verdict_and_is_rounding(test, plain, kind):
    """`x // c` has no derivative: torch refuses to go through it, and for the audit that is a gradient of 0."""
    result = audit(Behind(plain, before=DIVISIONS[kind]), test, **SMALL)
    assert result.value == "masked" and result.numbers["zero_gradient"] == 100, lines(result)
    assert result.series["kinds"] == ["rounding"] and evidence(result)["rounding"]["passed"] is False
    word = {"//": "//", "in place": "floor_divide_"}.get(kind, kind)
    assert f"steps without a gradient ({word})." in result.what
    by = {row["name"]: row["accuracy"] for row in result.series["accuracies"] if row["eps"] == SMALL["eps"]}
    assert by["BIM, margin, straight-through"] < 10 and by["FGSM, cross-entropy"] > 90


def test_a_derivative_that_is_missing_is_0_and_the_others_are_kept(test, plain):
    half = Behind(plain, before=lambda x: 0.5 * x + 0.5 * (x // 0.0625) * 0.0625)
    x = test.pixels(slice(3)).requires_grad_(True)
    model = views.derivable(half, x[:1])
    (g,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    assert torch.allclose(g.flatten(1), 0.5 * plain[1].weight[0].expand(3, -1)) and torch.equal(model(x), half(x))
    assert views.derivable(plain, x[:1]) is plain
    result = audit(plain, test, surrogate=half, **SMALL)
    assert [row["accuracy"] < 50 for row in result.series["accuracies"] if row["name"].startswith("transfer")] == [True]

    class Features(nn.Module):
        def forward(self, x):
            return plain(x)

        def features(self, x):
            return (x // 0.0625).flatten(1)

    assert audit(Features(), test, **SMALL).value == "none"

    def broken(x):
        if x.requires_grad:
            raise RuntimeError("something else")
        return plain(x)

    with pytest.raises(RuntimeError, match="something else"):
        audit(broken, test, **SMALL)


class Checked(nn.Module):
    """Looks at the images, and answers as ever."""

    def __init__(self, inner, step=lambda x: x):
        super().__init__()
        self.inner, self.step = inner, step

    def forward(self, x):
        assert x.detach().min() >= 0 and x.floor().max() <= 1 and x.sign().max() <= 1
        return self.inner(self.step(x))


def test_steps_beside_the_way_to_the_output_are_not_counted(test, plain):
    result = audit(Checked(plain), test, **SMALL)
    assert result.series["kinds"] == [] and result.value == "none", lines(result)
    assert evidence(result)["rounding"]["passed"] is True and "steps without a gradient" not in result.what
    rounded = audit(Checked(plain, lambda x: (x * 16).round() / 16), test, **SMALL)
    assert rounded.series["kinds"] == ["rounding"] and "steps without a gradient (round)." in rounded.what
    both = audit(Checked(plain, lambda x: ((x * 16).detach().round() / 16)), test, **SMALL)  # neither is enough alone
    assert both.series["kinds"] == ["rounding"] and "(detach, round)" in both.what
    noisy = audit(Checked(plain, lambda x: x + 0.1 * torch.randn_like(x)), test, **SMALL)
    assert noisy.series["kinds"] == ["random"]
    # all logits alike: no margin moves
    shifted = audit(Behind(plain, after=lambda z: z - z.detach().amax(1, keepdim=True)), test, **SMALL)
    assert shifted.series["kinds"] == []


def test_a_step_that_is_known_and_one_that_is_not(test, plain):
    result = audit(Behind(plain, before=lambda x: CUTS["bucketize"](x.round())), test, **SMALL)
    assert result.series["kinds"] == ["no gradient"]  # nothing is gained by the identity in place of `round`

    class Sides(nn.Module):  # one half rounded, the other out of reach: the margin moves by the one
        def forward(self, x):
            return plain(torch.cat([(16 * x[:, :, :4]).round() / 16, CUTS["bucketize"](x[:, :, 4:].contiguous())], 2))

    assert audit(Sides(), test, **SMALL).series["kinds"] == ["rounding"]


def test_what_is_saturated_is_not_cut(test, plain):
    for scale in (100, 1e4):  # the second is too much for the logarithm of a float64
        model = Behind(plain, after=lambda z, scale=scale: (scale * z).softmax(1))
        assert audit(model, test, **SMALL).series["kinds"] == ["saturated", "probabilities"], scale
        assert "no gradient" not in audit(lambda x, model=model: model(x), test, **SMALL).series["kinds"]


def test_functions_are_cut_too_though_their_parameters_have_gradients(test, plain):
    assert all(p.requires_grad for p in plain.parameters())
    for before, kind in ((CUTS["numpy"], "no gradient"), (CUTS["bucketize"], "no gradient"), (torch.round, "rounding"),
                         (lambda x: x.detach().double().float(), "rounding")):  # fmt: skip
        result = audit(lambda x, before=before: plain(before(x)), test, **SMALL)
        assert result.series["kinds"] == [kind], lines(result)
        if kind == "no gradient":
            assert "in float32, and there is no float64 copy to ask" in evidence(result)["rounding"]["words"]


def test_sigmoids_are_named_and_do_not_pass_as_logits(test, plain, recwarn):
    result = audit(Behind(plain, after=lambda z: (2 * z).sigmoid()), test, **SMALL)
    item = evidence(result)["output"]
    assert trials.ENDS == surface._END  # what the attacks would warn of
    assert item["passed"] is None and "between 0 and 1" in item["words"] and "sigmoids" in item["words"]
    assert result.series["kinds"] == ["sigmoids"] and "sigmoids" in result.what
    assert not [str(w.message) for w in recwarn if "look like" in str(w.message)]  # it is in the evidence
    small = audit(Behind(plain, after=lambda z: 0.3 + 0.4 * z.sigmoid()), test, **SMALL)
    assert evidence(small)["output"]["passed"] is True and small.series["kinds"] == []


def test_probabilities_in_percent_are_probabilities(test, plain):
    result = audit(Behind(plain, after=lambda z: 100 * z.softmax(1)), test, **SMALL)
    assert "probabilities" in result.series["kinds"]
    assert evidence(result)["output"]["words"] == "The network returns probabilities in percent, not logits."
    one = audit(Behind(plain, after=lambda z: z.softmax(1)), test, **SMALL)
    assert result.numbers["median_gap"] == pytest.approx(one.numbers["median_gap"], rel=1e-6)
    assert result.numbers["worst_accuracy"] <= 10


@pytest.mark.parametrize("seed", range(3))
def test_randomness_that_fires_rarely_is_seen(test, plain, seed):
    def sometimes(z):
        return z + torch.randn_like(z) if torch.rand(()) < 0.05 else z

    x, y = test.pixels(slice(60)), test.labels[:60]
    with views.undisturbed(torch.device("cpu"), seed):
        assert trials.Case(Behind(plain, after=sometimes).eval(), x, y, 0.3, 128, 4).random
        state, other = torch.get_rng_state(), random.getstate()
        assert not trials.Case(plain, x, y, 0.3, 128, 4).random
        assert torch.equal(torch.get_rng_state(), state) and random.getstate() == other
