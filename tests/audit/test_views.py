"""Wrappers around a network: straight-through gradients, missing derivatives, the loss on features."""

import pytest
import torch
from attack_models import Behind
from torch import nn

import mmlda
from mmlda.attacks import APGD
from mmlda.audit import views


@pytest.mark.parametrize(
    "step",
    [
        torch.round,
        torch.Tensor.floor,
        lambda v: (v * 1).round_(),
        lambda v: v.byte(),
        torch.Tensor.detach,
        lambda v: v.to(torch.int64),
        torch.sign,
    ],
)
def test_straight_through_has_the_gradient_of_the_identity(step):
    x = torch.tensor([[0.3, 1.7]])
    v = x.clone().requires_grad_(True)
    with views.StraightThrough() as mode:
        out = step(v)
    assert mode.found and torch.equal(out.detach(), step(x).float())
    (g,) = torch.autograd.grad(out.sum(), v)
    assert torch.equal(g, torch.ones_like(x))


def test_straight_through_leaves_other_functions_alone():
    x = torch.tensor([[0.3, 1.7]])
    with views.StraightThrough() as mode:
        x.clone().requires_grad_(True).double().float().exp()
        x.round()  # needs no gradient
    assert not mode.found


def test_a_missing_derivative_is_0_and_the_others_are_kept(digits, linear):
    half = Behind(linear, before=lambda x: 0.5 * x + 0.5 * (x // 0.0625) * 0.0625)
    x = digits[1].pixels(slice(3)).requires_grad_(True)
    model = views.derivable(half, x[:1])
    (g,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
    assert torch.allclose(g.flatten(1), 0.5 * linear[1].weight[0].expand(3, -1)) and torch.equal(model(x), half(x))
    assert views.derivable(linear, x[:1]) is linear


def test_the_feature_loss_is_the_distance_to_the_nearest_other_mean(digits, plain, other):
    x, y = digits[1].pixels(slice(50)), digits[1].labels[:50]
    for model in (plain, other):
        z = model.features(x).detach()
        loss = views.feature_loss(model, x, y)(model, x, y).detach()
        means = [other.head.means[k] if model is other else z[y == k].mean(0) for k in range(10)]
        for i in range(50):
            expected = -min(float((z[i] - means[k]).square().sum()) for k in range(10) if k != int(y[i]))
            assert float(loss[i]) == pytest.approx(expected, rel=1e-4)
        attacked = APGD(eps=0.2, steps=20, loss=views.feature_loss(model, x, y))(model, x, y)
        assert (attacked.prediction == y).float().mean() < 0.3
    assert views.feature_loss(nn.Linear(2, 2), x, y) is None


def test_torchscript_is_refused_with_the_way_out():
    net = torch.jit.trace(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)), torch.rand(1, 1, 2, 2))
    data, settings = (torch.rand(20, 1, 2, 2), torch.arange(20) % 2), {"steps": 2, "queries": 5, "show": False}
    with pytest.raises(ValueError, match=r"model must not be TorchScript, got a \w+; pass lambda x: model\(x\)$"):
        mmlda.audit(net, data, eps=0.1, **settings)
    assert mmlda.audit(lambda x: net(x), data, eps=0.1, **settings).verdict
