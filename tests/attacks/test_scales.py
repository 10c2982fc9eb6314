"""Minimum-norm attacks at extreme scales of the logits, and every attack on logits without a gradient."""

import pytest
import torch
from attack_cases import ATTACKS
from attack_models import linear_case

from mmlda import attacks


@pytest.mark.parametrize("scale", [1e30, 1e20, 1e-4, 1e-12, 1e-30])
@pytest.mark.parametrize(
    "attack",
    [attacks.CarliniWagner(steps=200, search_steps=6), attacks.FAB(norm="l2", steps=10), attacks.FAB(steps=10)],
    ids=["C&W", "FAB l2", "FAB linf"],
)
def test_the_scale_of_the_logits_does_not_matter(attack, scale):
    model, x, y = linear_case(5, n=10)
    model, x = model.float(), x.float()
    norm = getattr(attack, "norm", "l2")
    result = attack(lambda v: scale * model(v), x, y, show=False)
    assert result.success.all()
    distance, exact = getattr(result, norm).double(), model.distance(x, y, norm).double()
    assert torch.all(distance < 1.1 * exact) and torch.all(distance > 0.99 * exact)


@pytest.mark.parametrize("name", [name for name in ATTACKS if not name.startswith(("Square", "WorstCase"))])
def test_logits_without_a_gradient_are_refused_by_every_gradient_attack(name):
    model, x, y = linear_case(5, n=4)
    bias = torch.zeros(5, requires_grad=True)  # has a gradient, while x has none
    model.requires_grad_(False)
    for cut in (
        lambda v: model(v).detach(),
        lambda v: torch.from_numpy(model(v).numpy()),
        lambda v: model(v).detach() + bias.to(v.dtype),
    ):
        with pytest.raises(ValueError, match="model must be differentiable in x"):
            ATTACKS[name]()(cut, x, y, show=False)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_fab_at_logits_below_the_normal_numbers(norm):
    model, x, y = linear_case(5, n=10)
    model, x = model.float(), x.float()
    assert attacks.FAB(norm=norm, steps=10)(lambda v: 1e-40 * model(v), x, y, show=False).success.all()


def test_logits_too_small_for_float32_are_warned_about():
    model, x, y = linear_case(5, n=4)
    model, x = model.float(), x.float()
    with pytest.warns(attacks.AttackWarning, match="too little for gradients in float32"):
        attacks.CarliniWagner(steps=5, search_steps=1)(lambda v: 1e-40 * model(v), x, y, show=False)
