"""Networks whose gradient does not match their values, or whose answers depend on more than the image, are not real."""

import sys
from pathlib import Path

import pytest
import torch
from attack_models import Behind, network
from torch import nn

from mmlda.audit import audit
from mmlda.audit.honesty import Witness
from mmlda.audit.views import View, with_gradient

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import soak_networks as soak

QUICK = {"eps": 0.1, "n": 40, "steps": 4, "queries": 10, "passes": 3, "show": False}
NAMES = ("gradient", "grad mode", "batches", "calls")


def failed(model, digits, **changes):
    result = audit(model, digits[1], **{**QUICK, **changes})
    return {name for name in NAMES if result.check(name).passed is False}, result


class Lie(torch.autograd.Function):
    """One-hot answers of a network with one fixed gradient within eps of the images, and the honest one outside."""

    @staticmethod
    def forward(ctx, x, net, known):
        with torch.enable_grad():
            ctx.v = x.detach().clone().requires_grad_(True)
            ctx.z = net(ctx.v)
        ctx.near = torch.cdist(x.flatten(1), known.to(x), p=torch.inf).amin(1) < 0.101
        return soak.one_hot(ctx.z.detach())

    @staticmethod
    def backward(ctx, g):
        (h,) = torch.autograd.grad(ctx.z, ctx.v, g, retain_graph=True)
        return torch.where(ctx.near[:, None, None, None], torch.linspace(1, -1, 64).view(8, 8).to(h), h), None, None


def test_a_backward_pass_that_lies_is_not_real(digits, plain):
    known = digits[1].pixels().flatten(1)
    names, result = failed(lambda x: Lie.apply(x, plain, known), digits, n=100, steps=10)
    assert "gradient" in names and result.verdict in ("mixed", "masked"), result
    assert result.worst_accuracy > 0.3  # though a BIM on the network itself leaves hardly any
    assert "gradient" in result.summary and "does not match the values" in str(result)


@pytest.mark.parametrize("head", ["sr", "mm"])
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_honest_networks_pass(digits, head, eps, precision):
    net = network(head, eps)

    def half(x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float()

    names, result = failed(net if precision == "float32" else half, digits)
    assert names == set() and result.check("gradient").of > 300, result
    assert result.check("gradient").measured < (0.05 if precision == "float32" else 0.1)


@pytest.mark.parametrize("name", ["batch norm", "noise", "x 1e4", "x 1e-6", "probabilities"])
def test_honest_networks_of_other_kinds_pass(digits, linear, name):
    torch.manual_seed(0)
    made = {
        "batch norm": lambda: nn.Sequential(nn.BatchNorm2d(1), linear).eval(),
        "noise": lambda: Behind(linear, before=lambda x: x + 0.1 * torch.randn_like(x)),
        "x 1e4": lambda: Behind(linear, after=lambda z: 1e4 * z),
        "x 1e-6": lambda: Behind(linear, after=lambda z: 1e-6 * z),
        "probabilities": lambda: Behind(linear, after=lambda z: z.softmax(1)),
    }[name]()
    names, result = failed(made, digits)
    assert names == set(), result
    assert (result.check("calls").measured is None) == (name == "noise")  # its answers differ anyway


LIARS = {
    "gradient": ("gradient flipped inside eps", "one-hot, softmax's gradient", "rounded", "gradient tiny and fixed"),
    "grad mode": ("detour: autograd",),
    "batches": ("batch's mean", "detour: large batch"),
    "calls": ("memory",),
}


@pytest.mark.parametrize(("check", "trick"), [(check, trick) for check in LIARS for trick in LIARS[check]])
def test_lies_are_found(digits, linear, check, trick):
    made = next(tricks[trick] for tricks in soak.TRICKS.values() if trick in tricks)(linear)
    assert check in failed(made, digits)[0]


def test_a_change_after_many_calls_is_found(digits, linear):
    late = soak.Detour(linear, "later")
    names, result = failed(late, digits, steps=20)
    assert "gradient" in names and 0.1 < result.check("gradient").measured < 1, result


def test_a_linear_gradient_is_exact(digits, linear):
    x, y = digits[1].pixels(slice(20)), digits[1].labels[:20]
    for sign, share in ((1, 0.0), (-1, 1.0)):
        net = soak.lying("flipped", near=False)(linear) if sign < 0 else linear
        view = View(with_gradient(net))
        witness = Witness(view=view, model=net, unused=net, first=net(x).detach(), eps=0.1, batch_size=128, seed=0)
        for _ in range(3):
            witness.look(x, y, torch.arange(20), (x + 0.1 * torch.rand_like(x)).clamp(0, 1))
        found = witness.numbers()
        assert found["compared"] == 60 and found["answers_changed"] == 0
        # where the change is next to nothing beside the gradient, its sign is not asked for
        assert found["gradient_off"] == 0 if share == 0 else found["gradient_off"] > 0.7


@pytest.mark.long
def test_generated_networks(monkeypatch):
    names = [name for tricks in soak.TRICKS.values() for name in tricks]
    chosen = [
        0,
        3,
        names.index("gradient fixed inside eps"),
        names.index("x 1e4"),
        names.index("one-hot, logits' gradient"),
    ]
    chosen += [names.index("waves"), names.index("detour: autograd"), names.index("memory"), 100, 101]
    recipe_of = soak.recipe_of
    monkeypatch.setattr(soak, "recipe_of", lambda i, seed: recipe_of(chosen[i] if i < 10 else i, seed))
    found = soak.main(10, 0, None)["verdicts"]
    assert sum(found["masked"].values()) == 10 and "real" not in found["masked"], found
    for i in range(2, 4):
        assert soak.honest(i, 0)["verdict"] != "masked"
    assert "masked" not in found["honest"], found
