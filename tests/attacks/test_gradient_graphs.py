"""BIM, PGD and APGD where a step is captured, and where a model or a loss meddles with autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_cases import ATTACKS
from attack_models import images, network
from torch import Tensor, nn

from mmlda.attacks import APGD, BIM
from mmlda.attacks.surface import Surface

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cuda
@pytest.mark.parametrize("batch_size", [None, 16])
def test_graphs_on_cuda_agree_with_the_cpu(batch_size: int | None) -> None:
    model, (x, y) = copy.deepcopy(network("sr")).double(), images(40)
    x, there = x.double(), copy.deepcopy(model).cuda()
    for name, attack in ATTACKS.items():
        here = attack(batch_size=batch_size)(model, x, y)
        far = attack(batch_size=batch_size)(there, x.cuda(), y.cuda())
        agree = (far.success.cpu() == here.success).double().mean()
        assert agree >= 0.95, name
        close = (far.x_adv.cpu() - here.x_adv).abs().flatten(1).amax(1) < 1e-6
        assert close.double().mean() >= 0.8, name


class _Listed(list):
    """A loss that is a list besides, and so has no hash."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")


@cuda
def test_a_loss_without_a_hash_on_cuda() -> None:
    model, (x, y) = copy.deepcopy(network("sr")).double().cuda(), images(40)
    x, y = x.double().cuda(), y.cuda()
    for kind in (BIM, APGD):
        plain, listed = (kind(eps=0.2, batch_size=16, loss=loss)(model, x, y) for loss in ("ce", _Listed()))
        assert plain.success.any() and torch.equal(listed.success, plain.success), kind
        torch.testing.assert_close(listed.x_adv, plain.x_adv)


class _Graphed(torch.autograd.Function):
    """The identity, with a gradient that is part of a graph: what layers that solve for their output may return."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            return g.detach().requires_grad_(True) * 1.0


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_gradient_that_is_part_of_a_graph_does_not_chain_the_steps(norm: str, monkeypatch: Any) -> None:
    model, (x, y) = network("sr"), images(8)
    seen, step = [], Surface.step

    def watched(self: Surface, *args: Any) -> tuple[Tensor, ...]:
        seen.extend(step(self, *args))
        return step(self, *args)

    monkeypatch.setattr(Surface, "step", watched)
    result = BIM(eps=0.2, norm=norm)(lambda v: model(_Graphed.apply(v)), x, y)
    assert len(seen) > 20 and not any(t.requires_grad for t in seen)
    assert torch.equal(result.x_adv, BIM(eps=0.2, norm=norm)(model, x, y).x_adv)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_loss_may_leave_autograd_off(norm: str) -> None:
    model, (x, y) = network("sr"), images(8)

    def loss(net: nn.Module, v: Tensor, label: Tensor) -> Tensor:
        value = F.cross_entropy(net(v), label, reduction="none")
        torch.set_grad_enabled(False)
        return value

    result = BIM(eps=0.2, norm=norm, loss=loss)(model, x, y)
    assert torch.equal(result.x_adv, BIM(eps=0.2, norm=norm)(model, x, y).x_adv) and torch.is_grad_enabled()


@cuda
def test_a_model_that_cannot_be_captured_still_runs() -> None:
    model, (x, y) = copy.deepcopy(network("sr")).cuda(), images(20)
    x, y = x.cuda(), y.cuda()

    def waits(v: Tensor) -> Tensor:
        return model(v) * (1.0 if float(v.sum().item()) > -1 else 2.0)

    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        result = BIM(eps=0.2)(waits, x, y)
    assert torch.equal(result.success, BIM(eps=0.2)(model, x, y).success)
