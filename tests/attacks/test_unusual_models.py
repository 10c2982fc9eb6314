"""Models that break other attack libraries: infinite gradients, NaN, probabilities, shifted logits."""

from __future__ import annotations

import warnings

import pytest
import torch
from attack_cases import ATTACKS, BALLS, EPS, EPS_L2, MINIMUM_NORM, at_work, double, every_attack
from attack_models import images, network
from torch import Tensor, nn

from mmlda.attacks import APGD, BIM, Square


@every_attack
def test_shifting_the_logits_changes_nothing(name: str) -> None:
    model, (x, y) = double(), images(30)
    x = x.double()
    plain = ATTACKS[name]()(model, x, y)
    at_work(plain, x)
    for shift in (100.0, -100.0):
        shifted = ATTACKS[name]()(lambda v: model(v) + shift, x, y)  # noqa: B023
        assert (shifted.success == plain.success).float().mean() >= 0.95
        assert (shifted.x_adv - plain.x_adv).abs().flatten(1).amax(1).median() < 1e-6


class Fortress(nn.Module):
    """A linear model, except that bright images always have class 0, without any gradient."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
        self.register_buffer("w", w - w.mean(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        z = (x.flatten(1) - 0.5) @ self.w.T
        fixed = torch.tensor([1.0, 0.0, -1.0], dtype=x.dtype) + 0 * z
        return torch.where((x.flatten(1).mean(1) > 0.7)[:, None], fixed, z)


@every_attack
def test_one_sample_that_cannot_be_broken(name: str) -> None:
    model = Fortress().eval()
    x = 0.5 + 0.05 * torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    x[3] = 1.0 - 1e-3
    y = model(x).argmax(1)
    attack = ATTACKS[name]()
    if isinstance(attack, APGD) and attack.loss == "dlr":
        with pytest.warns(UserWarning, match="undefined with 3 classes"):
            result = attack(model, x, y)
    else:
        result = attack(model, x, y)
    others = torch.arange(8) != 3
    assert result.success[others].float().mean() > 0.8 and not result.success[3]
    assert result.x_adv.isfinite().all()
    if name in MINIMUM_NORM:
        assert result.linf[3] == result.l2[3] == result.distortion[3] == torch.inf
        assert torch.equal(result.x_adv[3], x[3])


@pytest.mark.filterwarnings("ignore:.dlr. with a target is undefined")
@pytest.mark.parametrize("name", ATTACKS)
def test_a_gradient_that_is_an_expanded_tensor(name: str) -> None:
    """Logits of the mean pixel: autograd hands back an expanded tensor, which can't be written to in place."""
    x = torch.full((6, 1, 4, 4), 0.45)
    y = torch.zeros(6, dtype=torch.int64)

    def model(t: Tensor) -> Tensor:
        mean = t.mean((1, 2, 3))
        return torch.stack([0.5 - mean, mean - 0.5], 1) * 10  # two classes, so that every target is in reach

    result = ATTACKS[name]()(model, x, y)
    assert result.success.all() and torch.equal(model(result.x_adv).argmax(1) != y, result.success)


@every_attack
def test_infinite_gradients_do_not_reach_the_images(name: str) -> None:
    """The square root of a pixel of 0: an infinite gradient there, and NaN where it is multiplied by 0.

    An attack breaks about as many as with the root smoothed there, which has the same labels and finite gradients.
    """
    inner, (x, y) = network("sr"), images(40)
    x = x.square()
    assert (x == 0).any()
    result = ATTACKS[name]()(lambda v: inner(v.sqrt()), x, y)
    smooth = ATTACKS[name]()(lambda v: inner((v + 1e-10).sqrt()), x, y)
    at_work(result, x)
    assert result.x_adv.isfinite().all() and result.x_adv.min() >= 0 and result.x_adv.max() <= 1
    with torch.no_grad():
        assert torch.equal(inner(result.x_adv.sqrt()).argmax(1), result.prediction)
    assert smooth.success.float().mean() > 0.6
    assert result.success.float().mean() >= smooth.success.float().mean() - 0.1
    if name not in MINIMUM_NORM:
        norm, eps = BALLS[name]
        assert ((result.linf if norm == "linf" else result.l2) <= eps * (1 + 1e-6) + 1e-7).all()
    else:
        norm = "linf" if name == "FAB" else "l2"
        assert getattr(result, norm).median() <= 1.05 * getattr(smooth, norm).median()


@every_attack
def test_probabilities_are_warned_about(name: str) -> None:
    model, (x, y) = network("sr"), images(10)
    with pytest.warns(UserWarning, match="probabilities"):
        ATTACKS[name]()(lambda v: model(v).softmax(1), x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ATTACKS[name]()(lambda v: model(v).log_softmax(1), x, y)


def test_sigmoids_are_warned_about() -> None:
    model, (x, y) = network("sr"), images(20)
    for attack in (BIM(eps=0.1), APGD(eps=0.1, steps=3), Square(eps=0.1, queries=5)):  # one image first, or all
        with pytest.warns(UserWarning, match=r"between 0 and 1.* look like probabilities \(sigmoid\)"):
            attack(lambda v: (2 * model(v)).sigmoid(), x, y)
    assert 0.1 < 0.02 * model(x).max() < 0.9
    with warnings.catch_warnings():  # between 0 and 1 by chance, or not between them
        warnings.simplefilter("error")
        for squeeze in (
            lambda z: (0.01 * z).sigmoid(),
            lambda z: 0.02 * z.relu(),
            lambda z: 2 * z.sigmoid(),
            lambda z: 0.5 + 0.5 * torch.tanh(z / 20),
        ):
            BIM(eps=0.1)(lambda v: squeeze(model(v)), x, y)  # noqa: B023


@every_attack
def test_nan_or_the_wrong_shape_is_refused(name: str) -> None:
    model, (x, y) = network("sr"), images(5)
    with pytest.raises(ValueError, match="NaN"):
        ATTACKS[name]()(lambda v: model(v) * torch.nan, x, y)
    with pytest.raises(ValueError, match=r"model must return logits .* got a"):
        ATTACKS[name]()(lambda v: model(v).sum(1), x, y)


@every_attack
def test_nan_in_a_later_batch_is_noticed(name: str) -> None:
    """Where the right half of an image is bright there is no answer; it has no gradient, so no attack darkens it."""
    model, (x, y) = network("sr"), images(24)
    x, y = torch.cat([x, torch.zeros_like(x)], 3), y.clone()
    lost = torch.tensor([9, 17, 18])
    x[lost, :, :, 8:] = 1.0
    y[9], y[17] = 0, 1  # argmax calls NaN class 0: unbroken, and broken without an attack

    def torn(v: Tensor) -> Tensor:
        bright = v[..., 8:].mean((1, 2, 3)) > 0.5
        return torch.where(bright[:, None], torch.nan, model(v[..., :8]))

    with pytest.raises(ValueError, match="finite logits, got NaN for 3 of 24 images"):
        ATTACKS[name](batch_size=8)(torn, x, y)
    at_work(ATTACKS[name](batch_size=8)(torn, x[:9], y[:9]), x[:9])


@pytest.mark.parametrize(("norm", "eps", "looks"), [("linf", EPS, 0), ("l2", EPS_L2, 1)])
def test_nan_at_an_intermediate_point_is_tolerated(norm: str, eps: float, looks: int) -> None:
    """Signs of a gradient are asked for without a look at the logits; the gradient itself is not."""
    model, (x, y) = network("sr"), images(20)
    calls = 0

    def hiccup(v: Tensor, at: int) -> Tensor:
        nonlocal calls
        calls += 1
        return model(v) * (torch.nan if calls == at else 1.0)

    attack = BIM(eps=eps, norm=norm, steps=10)
    plain = attack(lambda v: hiccup(v, 0), x, y)
    assert calls == 13  # ten gradients, the verdict, and two to see whether the model is random: no call to check
    calls = 0
    result = attack(lambda v: hiccup(v, 4), x, y)
    assert calls == 13 + looks and result.success.float().mean() > 0.6
    assert getattr(result, norm).max() <= getattr(plain, norm).max() * (1 + 1e-6)
    assert torch.equal(model(result.x_adv).argmax(1), result.prediction)


@every_attack
def test_models_and_labels_of_the_wrong_type_are_refused(name: str) -> None:
    model, (x, y) = network("sr"), images(4)
    for wrong, what in ((lambda v: (model(v), None), "a tuple"), (lambda v: model(v)[:, :1], "2 classes or more")):
        with pytest.raises(ValueError, match=what):
            ATTACKS[name]()(wrong, x, torch.zeros_like(y))
    with pytest.raises(ValueError, match=r"y must be an integer tensor \[4\], got \["):
        ATTACKS[name]()(model, x, y.tolist())
    for wrong_target in (y.tolist(), True):
        with pytest.raises(ValueError, match=r"target must be an integer tensor \[4\], got"):
            ATTACKS[name]()(model, x, y, target=wrong_target)


@every_attack
def test_a_later_answer_of_the_wrong_type_is_refused(name: str) -> None:
    model, (x, y) = network("sr"), images(4)
    calls = 0

    def changing(v: Tensor) -> object:
        nonlocal calls
        calls += 1
        return model(v) if calls <= 3 else model(v).tolist()

    with pytest.raises(ValueError, match=r"model must return logits \[\d, classes\], .*, got a list"):
        ATTACKS[name]()(changing, x, y)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(name for name in ATTACKS if not name.startswith("Square")))
def test_a_gradient_in_the_parameters_alone_is_none(name: str) -> None:
    model, (x, y), scale = network("sr"), images(4), torch.ones((), requires_grad=True)
    attack = ATTACKS[name]()
    if name == "WorstCase":
        assert attack(lambda v: scale * model(v.detach()), x, y).black_box
        return
    with pytest.raises(ValueError, match="model must be differentiable in x, got logits without a gradient in x"):
        attack(lambda v: scale * model(v.detach()), x, y)
