"""Half-precision images and logits: attacks that move, and verdicts that are true, where rounding is coarse."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from attack_models import images, network
from torch import Tensor, nn

from mmlda.attacks import APGD, BIM, FAB, FGSM, PGD, Attack, CarliniWagner, Square, WorstCase

HALF = [torch.float16, torch.bfloat16]


def shifted(model: nn.Module, shift: float) -> Callable[[Tensor], Tensor]:
    return lambda v: model(v.float()) + shift


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "attack",
    [
        BIM(eps=0.02, steps=40),
        BIM(eps=0.1, steps=100),
        PGD(eps=0.02),
        PGD(eps=0.3, norm="l2"),
    ],
)
def test_steps_smaller_than_the_images_rounding_count(attack: Attack, dtype: torch.dtype) -> None:
    model, (x, y) = network("sr"), images(100)
    x = x.to(dtype).float()
    exact, result = attack(model, x, y), attack(shifted(model, 0.0), x.to(dtype), y)
    assert 0.01 < float(exact.success.double().mean()) < 0.99 and result.x_adv.dtype == dtype
    assert abs(int(result.success.sum() - exact.success.sum())) <= 6  # of 100
    moved = [float((r.x_adv.float() - x).abs().mean()) for r in (result, exact)]
    assert 0.9 * moved[1] < moved[0] < 1.1 * moved[1]


@pytest.mark.parametrize(
    ("dtype", "shift"), [(torch.float16, -100.0), (torch.float16, 1e4), (torch.bfloat16, 0.0), (torch.bfloat16, 1e4)]
)
def test_carlini_and_a_constant_in_the_logits_of_half_images(dtype: torch.dtype, shift: float) -> None:
    model, x = network("sr"), images(20)[0].to(dtype)
    ours = shifted(model, shift)
    label = ours(x).argmax(1)
    attack = CarliniWagner(search_steps=6, steps=200)
    result, plain = attack(ours, x, label), attack(model, x.float(), label)
    assert result.success.all() and torch.equal(ours(result.x_adv).argmax(1), result.prediction)
    assert float(result.l2.mean()) < 1.1 * float(plain.l2.mean())
    second = ours(x).topk(2).indices[:, 1]  # the images are wrong for these labels to begin with
    wrong = CarliniWagner(search_steps=1, steps=10)(ours, x, second)
    assert wrong.success.all() and not wrong.l2.any() and torch.equal(wrong.x_adv, x)
    aimed = CarliniWagner(search_steps=1, steps=10)(ours, x, second, target=label)
    assert aimed.success.all() and not aimed.l2.any()


@pytest.mark.parametrize("shift", [0.0, -100.0])
def test_carlini_on_a_network_in_half_precision(shift: float) -> None:
    model, x = copy.deepcopy(network("sr")).half(), images(20)[0].half()
    label = (model(x) + shift).argmax(1)
    result = CarliniWagner(search_steps=6, steps=200)(lambda v: model(v) + shift, x, label)
    other = FAB(norm="l2", steps=30)(lambda v: model(v) + shift, x, label)
    assert result.success.all() and float(result.l2.mean()) < 1.25 * float(other.l2.mean())
    assert torch.equal((model(result.x_adv) + shift).argmax(1), result.prediction)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("attack", [PGD(eps=0.1, steps=2), Square(eps=0.1, queries=4), FGSM(eps=0.1)])
def test_probabilities_in_half_precision_are_noticed(attack: Attack, dtype: torch.dtype) -> None:
    model, (x, y) = network("sr"), images(60)
    with pytest.warns(UserWarning, match="probabilities"):
        attack(lambda v: (0.2 * model(v)).softmax(1).to(dtype), x, y)


def test_nan_is_counted_at_the_first_look_too() -> None:
    model, (x, y) = network("sr"), images(20)
    x = 0.1 + 0.5 * x

    def torn(v: Tensor) -> Tensor:
        return torch.where((v[:, 0, 0, 0] > 0.2)[:, None], torch.nan, model(v))

    with pytest.raises(ValueError, match=r"finite logits, got NaN for \d+ of the first 20 images it classified"):
        PGD(eps=0.2, steps=3)(torn, x, y)  # the images as given are fine, the random start is not


def test_a_method_of_a_network_in_train_mode() -> None:
    model, (x, y) = nn.Sequential(copy.deepcopy(network("sr")), nn.BatchNorm1d(10), nn.Dropout(0.5)), images(20)
    model.train()
    before, state = model[1].running_mean.clone(), torch.get_rng_state()
    with pytest.warns(UserWarning, match="train mode"):
        PGD(eps=0.1, steps=3)(model.forward, x, y)
    assert torch.equal(model[1].running_mean, before) and torch.equal(torch.get_rng_state(), state) and model.training


def test_what_a_worst_case_is_given_is_checked_and_a_blind_one_says_nothing_of_gradients() -> None:
    with pytest.raises(ValueError, match="losses must be a list of losses, got 'margin'"):
        WorstCase(eps=0.1, losses="margin")
    with pytest.raises(ValueError, match=r"losses must be one of .* got 'nonsense'"):
        WorstCase(eps=0.1, losses=["nonsense"])
    model, (x, y) = network("sr"), images(12)
    blind = WorstCase(eps=0.1, attacks=[Square(eps=0.1, queries=5)], batch_size=5)
    assert blind(model, x, y).zero_gradient is None
    wrong = torch.cat([(y[:6] + 1) % 10, y[6:]])  # a batch with nothing to attack
    assert blind(model, x, wrong).zero_gradient is None
    seeing = WorstCase(eps=0.1, attacks=[APGD(eps=0.1, steps=2)], batch_size=6)
    assert seeing(model, x, wrong).zero_gradient == 0.0


def test_labels_of_a_byte_and_a_loss_that_is_no_tensor() -> None:
    model, (x, y) = network("sr"), images(8)
    with pytest.raises(ValueError, match=r"target must be .* got labels 300 to 300"):
        PGD(eps=0.1)(model, x, y.to(torch.uint8), target=300)
    with pytest.raises(ValueError, match=r"loss must return .* got an int"):
        PGD(eps=0.1, loss=lambda model, x, y: 3)(model, x, y)
