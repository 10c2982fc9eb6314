"""What an audit recognises in a network: steps that cut the gradient, its output, and randomness.

All networks are one linear classifier of the digits behind something that changes hardly any answer.
"""

import random

import numpy as np
import pytest
import torch
from attack_models import Behind
from torch import nn

from mmlda.attacks import surface
from mmlda.audit import audit, profile, views

SMALL = {"eps": 0.3, "n": 60, "steps": 6, "queries": 20, "passes": 4, "show": False}


@pytest.fixture(scope="module")
def test(digits):
    return digits[1]


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
def test_a_cut_gradient_is_recognised_whatever_cuts_it(test, linear, cut):
    result = audit(Behind(linear, before=CUTS[cut]), test, **SMALL)
    assert result.verdict == "masked", result
    assert result.masks == ("no gradient",) and "Something in it cuts the gradient." in result.summary
    assert result.check("rounding").measured == 1 and result.check("rounding").passed is None
    assert "has no gradient at 100.0% of the right images" in str(result)


# rounding with the quotient's gradient to put in its place
DIVISIONS = {
    "//": lambda x: (x + 1 / 32) // 0.0625 * 0.0625,
    "floor_divide_": lambda x: (x * 1).floor_divide_(0.0625) * 0.0625,
    "div": lambda x: torch.div(x, 0.0625, rounding_mode="floor") * 0.0625,
    "divide": lambda x: x.divide(0.0625, rounding_mode="trunc") * 0.0625,
}


@pytest.mark.parametrize("step", DIVISIONS)
def test_floor_division_is_rounding(test, linear, step):
    """`x // c` has no derivative: torch refuses to differentiate it, and the audit takes the gradient for 0."""
    result = audit(Behind(linear, before=DIVISIONS[step]), test, **SMALL)
    assert result.verdict == "masked" and result.profile.number("zero_gradient") == 1
    assert result.masks == ("rounding",) and result.check("rounding").passed is False
    assert result.profile.steps == (step,)
    straight = [t.share for t in result.accuracies if t.view == "straight-through" and t.loss == "margin"]
    assert straight[0] < 0.1 and result.standard_accuracy > 0.9


def test_missing_derivatives_elsewhere_do_not_end_the_audit(test, linear):
    half = Behind(linear, before=lambda x: 0.5 * x + 0.5 * (x // 0.0625) * 0.0625)
    result = audit(linear, test, surrogate=half, **SMALL)
    assert [t.share < 0.5 for t in result.accuracies if t.kind == "transfer"] == [True]

    class Features(nn.Module):
        def forward(self, x):
            return linear(x)

        def features(self, x):
            return (x // 0.0625).flatten(1)

    assert audit(Features(), test, **SMALL).verdict == "none"

    def broken(x):
        if x.requires_grad:
            raise RuntimeError("something else")
        return linear(x)

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


def test_steps_that_do_not_lead_to_the_output_are_not_counted(test, linear):
    result = audit(Checked(linear), test, **SMALL)
    assert result.masks == () and result.verdict == "none", result
    assert result.check("rounding").passed is True and "steps without a gradient" not in result.summary
    rounded = audit(Checked(linear, lambda x: (x * 16).round() / 16), test, **SMALL)
    assert rounded.masks == ("rounding",) and rounded.profile.steps == ("round",)
    both = audit(Checked(linear, lambda x: (x * 16).detach().round() / 16), test, **SMALL)  # neither is enough alone
    assert both.masks == ("rounding",) and both.profile.steps == ("detach", "round")
    noisy = audit(Checked(linear, lambda x: x + 0.1 * torch.randn_like(x)), test, **SMALL)
    assert noisy.masks == ("random",)
    # all logits alike: no margin moves
    shifted = audit(Behind(linear, after=lambda z: z - z.detach().amax(1, keepdim=True)), test, **SMALL)
    assert shifted.masks == ()


def test_known_and_unknown_steps_together(test, linear):
    result = audit(Behind(linear, before=lambda x: CUTS["bucketize"](x.round())), test, **SMALL)
    assert result.masks == ("no gradient",)  # nothing is gained by the identity in place of `round`

    class Sides(nn.Module):  # one half rounded, the other out of reach: the margin moves by the one
        def forward(self, x):
            return linear(torch.cat([(16 * x[:, :, :4]).round() / 16, CUTS["bucketize"](x[:, :, 4:].contiguous())], 2))

    assert audit(Sides(), test, **SMALL).masks == ("rounding",)


def test_a_saturated_softmax_is_not_a_cut_gradient(test, linear):
    for scale in (100, 1e4):  # the second is too much for the logarithm of a float64
        model = Behind(linear, after=lambda z, scale=scale: (scale * z).softmax(1))
        assert audit(model, test, **SMALL).masks == ("saturated", "probabilities"), scale
        assert "no gradient" not in audit(lambda x, model=model: model(x), test, **SMALL).masks


def test_functions_are_examined_too(test, linear):
    assert all(p.requires_grad for p in linear.parameters())
    for before, mask in (
        (CUTS["numpy"], "no gradient"),
        (CUTS["bucketize"], "no gradient"),
        (torch.round, "rounding"),
        (lambda x: x.detach().double().float(), "rounding"),
    ):
        result = audit(lambda x, before=before: linear(before(x)), test, **SMALL)
        assert result.masks == (mask,), result
        assert result.profile.no_float64 == "not a module"
        assert ("in float32, and there is no float64 copy to ask" in str(result)) == (mask == "no gradient")


def test_sigmoids_are_recognised_and_do_not_pass_as_logits(test, linear, recwarn):
    result = audit(Behind(linear, after=lambda z: (2 * z).sigmoid()), test, **SMALL)
    assert profile.ENDS == surface._END  # what the attacks would warn of
    assert result.check("output").passed is None and result.profile.output == "sigmoids"
    assert result.masks == ("sigmoids",) and "sigmoids" in result.summary
    assert not [str(w.message) for w in recwarn if "look like" in str(w.message)]
    small = audit(Behind(linear, after=lambda z: 0.3 + 0.4 * z.sigmoid()), test, **SMALL)
    assert small.check("output").passed is True and small.masks == ()


@pytest.mark.parametrize("seed", range(3))
def test_randomness_that_fires_rarely_is_seen(test, linear, seed):
    def sometimes(z):
        return z + torch.randn_like(z) if torch.rand(()) < 0.05 else z

    x, y = test.pixels(slice(60)), test.labels[:60]
    with views.seeded(torch.device("cpu"), seed):
        rare, rest = Behind(linear, after=sometimes).eval(), {"eps": 0.1, "passes": 4, "batch_size": 128, "seed": 0}
        assert profile.examine(rare, rare, x, y, **rest)[1].random
        state, other = torch.get_rng_state(), random.getstate()
        assert not profile.examine(linear, linear, x, y, **rest)[1].random
        assert torch.equal(torch.get_rng_state(), state) and random.getstate() == other


def test_what_only_looks_like_a_mask_is_none(test, linear):
    for after in (lambda z: z - z.amin(1, keepdim=True) + 0.01, lambda z: z.log_softmax(1)):
        assert audit(Behind(linear, after=after), test, **SMALL).masks == ()
    constant = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    constant[1].weight.data.zero_()
    assert audit(constant, test, **SMALL).masks == ()


def test_networks_without_a_float64_copy(test, linear):
    class Narrow(nn.Module):
        def forward(self, x):
            return linear(x.float())

    for model in (lambda x: linear(x), Narrow()):
        result = audit(model, test, **SMALL)
        assert "No float64 copy" in " ".join(result.notes) and result.verdict == "none"
        assert "zero_gradient_float64" not in result.profile.numbers
        assert "float64" not in {check.name for check in result.checks}
    assert "float64" not in " ".join(audit(linear, test, **SMALL).notes)
