"""What every attack returns, and what it leaves as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from attack_cases import ATTACKS, BALLS, DETERMINISTIC, GRADIENT, MINIMUM_NORM, at_work, every_attack
from attack_models import images, network
from torch import Tensor

from mmlda.attacks import BIM, FAB, JSMA, CarliniWagner


@every_attack
@pytest.mark.parametrize("head", ["sr", "mm"])  # the logits of "mm", -||z - mu||^2 / 2, are all negative
def test_breaks_most_images_and_reports_them_correctly(name: str, head: str) -> None:
    model, (x, y) = network(head), images(60)
    result = ATTACKS[name]()(model, x, y)
    with torch.no_grad():
        clean, label = model(x).argmax(1), model(result.x_adv).argmax(1)
    assert (clean == y).float().mean() > 0.9
    assert torch.equal(result.prediction, label)
    hit = label != y if result.target is None else label == result.target
    assert torch.equal(result.success, hit)
    # "mm" masks the gradient of cross-entropy: the attacks that use it are weaker there, and that is its point.
    least = 0.3 if head == "mm" or name == "ILCM" else 0.6
    assert result.success[clean == y].float().mean() > least


@every_attack
def test_stays_in_the_ball_and_measures_distances(name: str) -> None:
    model, (x, y) = network("sr"), images(60)
    result = ATTACKS[name]()(model, x, y)
    at_work(result, x)
    assert result.x_adv.shape == x.shape and result.x_adv.dtype == x.dtype
    assert result.x_adv.min() >= 0 and result.x_adv.max() <= 1
    delta = (result.x_adv.double() - x.double()).flatten(1)
    linf, l2 = delta.abs().amax(1), delta.norm(dim=1)
    if name not in MINIMUM_NORM:
        norm, eps = BALLS[name]
        assert ((linf if norm == "linf" else l2) <= eps * (1 + 1e-6) + 1e-7).all()
    else:
        linf, l2 = (torch.where(result.success, d, torch.inf) for d in (linf, l2))
    torch.testing.assert_close(result.linf.double(), linf, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(result.l2.double(), l2, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(result.distortion.double(), l2 * 255 / 8, rtol=1e-5, atol=1e-5)
    assert result.steps.dtype == torch.int64 and (result.steps[result.success & (linf > 0)] > 0).all()
    assert (result.zero_gradient is None) == (name not in GRADIENT)


@every_attack
def test_a_target_given_in_the_call_decides_success(name: str) -> None:
    model, (x, y) = network("sr"), images(40)
    target = (y + 1) % 10
    result = ATTACKS[name]()(model, x, y, target=target)
    with torch.no_grad():
        label = model(result.x_adv).argmax(1)
    assert torch.equal(result.success, label == target) and result.target is not None
    assert torch.equal(result.target, target)
    assert result.success.float().mean() > (model(x).argmax(1) == target).float().mean() + 0.15
    by_number = ATTACKS[name]()(model, x, y, target=3)
    assert torch.equal(by_number.x_adv, ATTACKS[name]()(model, x, y, target=torch.full_like(y, 3)).x_adv)


@every_attack
def test_model_inputs_and_generators_stay_as_they_were(name: str) -> None:
    model, (x, y) = copy.deepcopy(network("sr")), images(20)
    model.train()
    model.body[0].eval()
    modes = [m.training for m in model.modules()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    weights = [p.clone() for p in model.parameters()]
    x.requires_grad_(True)
    x_copy, y_copy, state = x.detach().clone(), y.clone(), torch.get_rng_state()
    with pytest.warns(UserWarning, match="train mode"):
        result = ATTACKS[name]()(model, x, y)
    at_work(result, x)
    assert [m.training for m in model.modules()] == modes
    assert all((p.grad == 0.5).all() and p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))
    assert x.grad is None and x.requires_grad and torch.equal(x.detach(), x_copy) and torch.equal(y, y_copy)
    assert torch.equal(torch.get_rng_state(), state)
    assert not result.x_adv.requires_grad and result.x_adv.data_ptr() != x.data_ptr()
    assert torch.is_grad_enabled()


@every_attack
def test_works_where_autograd_is_off(name: str) -> None:
    model, (x, y) = network("sr"), images(10)
    expected = ATTACKS[name]()(model, x, y)
    at_work(expected, x)
    with torch.no_grad():
        assert torch.equal(ATTACKS[name]()(model, x, y).x_adv, expected.x_adv)
    with torch.inference_mode():
        assert torch.equal(ATTACKS[name]()(model, x.clone(), y.clone()).x_adv, expected.x_adv)


@every_attack
def test_the_seed_decides_the_result(name: str) -> None:
    model, (x, y) = network("sr"), images(30)
    first, again, other = (ATTACKS[name](seed=s)(model, x, y) for s in (1, 1, 2))
    assert torch.equal(first.x_adv, again.x_adv) and torch.equal(first.steps, again.steps)
    assert torch.equal(first.x_adv, other.x_adv) == (name in DETERMINISTIC)


@every_attack
def test_an_empty_batch_has_an_empty_result(name: str) -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("the model was asked about nothing")

    result = ATTACKS[name]()(never, torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    assert len(result) == 0 and result.x_adv.shape == (0, 1, 8, 8)
    assert result.success.dtype == torch.bool and result.linf.shape == (0,)


@every_attack
def test_reports_who_was_right_before_and_after(name: str) -> None:
    model, (x, y) = network("sr"), images(60)
    y[:6] = (y[:6] + 1) % 10  # wrong from the start
    result = ATTACKS[name](batch_size=25)(model, x, y)
    with torch.no_grad():
        before, after = (model(v).argmax(1) == y for v in (x, result.x_adv))
    assert 0 < before.sum() < 60 and torch.equal(result.y, y)
    assert torch.equal(result.right_after, after) and result.robust_accuracy == after.double().mean().item()
    assert torch.equal(result.right_before, before)
    assert result.clean_accuracy == before.double().mean().item() > result.robust_accuracy
    y.zero_()  # the caller's tensor, not the result's
    assert torch.equal(result.right_after, after)


def test_a_target_given_in_the_call_does_not_hide_the_clean_prediction() -> None:
    model, (x, y) = network("sr"), images(20)
    for attack in (BIM(eps=0.1), JSMA(eps=1.0), CarliniWagner(search_steps=1, steps=20), FAB(steps=3)):
        result = attack(model, x, y, target=3)
        assert result.clean_prediction is not None and torch.equal(result.clean_prediction, model(x).argmax(1)), attack


def test_printing_a_result_shows_a_summary() -> None:
    model, (x, y) = network("sr"), images(50)
    result = BIM(eps=0.2)(model, x, y)
    text = str(result)
    assert text.startswith("AttackResult: 50 images, 10 classes\n") and len(text.splitlines()) == 6
    for name, share in (("right before", result.clean_accuracy), ("right after", result.robust_accuracy)):
        (row,) = [line for line in text.splitlines() if name in line]
        assert row.endswith(f"{share:.1%}")
    assert "linf 0.2, " in text and "zero gradient   0.0%" in text
    assert "0 images" in str(BIM(eps=0.2)(model, x[:0], y[:0]))
    assert "linf 8/255, " in str(BIM(eps=8 / 255)(model, x, y))
