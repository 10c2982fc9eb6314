"""What attacks inside a training step are built from: frozen, input_gradient, kl_divergence, least_likely."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from attack_models import images, network
from torch import nn

from mmlda.attacks import BIM, ILCM, ascend, frozen, input_gradient, kl_divergence, least_likely, score


def test_frozen_restores_every_module_and_parameter_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    model[1].eval()
    model[3].bias.requires_grad_(False)
    modes, learned = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    with pytest.raises(RuntimeError), frozen(model):
        assert not any(m.training for m in model.modules()) and not any(p.requires_grad for p in model.parameters())
        raise RuntimeError
    assert [m.training for m in model.modules()] == modes and any(modes) and not all(modes)
    assert [p.requires_grad for p in model.parameters()] == learned and any(learned) and not all(learned)


@pytest.mark.parametrize("autograd", [True, False])
def test_an_attack_built_by_hand_equals_the_class(autograd: bool) -> None:
    model, (x, y) = copy.deepcopy(network("sr")).train(), images(30)
    with frozen(model), torch.set_grad_enabled(autograd):
        target = least_likely(model(x).detach(), y)
        losses = {BIM: lambda z: score("ce", z, y), ILCM: lambda z: score("ce", z, y, target)}
        for kind, loss in losses.items():
            by_hand = ascend(
                lambda v, loss=loss: input_gradient(model, loss, v), x, x, eps=0.1, step_size=0.01, steps=10
            )
            assert torch.equal(by_hand, kind(eps=0.1)(model, x, y).x_adv)
            assert not torch.equal(by_hand, x)
    assert all(p.grad is None for p in model.parameters())


def test_the_divergence_is_that_of_trades() -> None:
    g = torch.Generator().manual_seed(0)
    z, clean = (5 * torch.randn(8, 5, generator=g, dtype=torch.float64) for _ in range(2))
    p, q = clean.softmax(1), z.softmax(1)
    torch.testing.assert_close(kl_divergence(z, clean), (p * (p / q).log()).sum(1))
    summed = F.kl_div(z.log_softmax(1), clean.log_softmax(1), reduction="sum", log_target=True)
    torch.testing.assert_close(kl_divergence(z, clean).sum(), summed)
