"""Carlini and Wagner's attack against closed forms on linear models, and against foolbox's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attack_models import images, network
from torch import Tensor

from mmlda.attacks import CarliniWagner, carlini


def linear(classes: int, dim: int, scale: float = 1.0) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
    """Weights [L, D], the model, and images in the middle of the range, so that only the boundary limits."""
    g = torch.Generator().manual_seed(0)
    W = scale * torch.randn(classes, dim, generator=g, dtype=torch.float64)
    x = (0.5 + 0.05 * torch.randn(25, dim, generator=g, dtype=torch.float64)).clamp(0.2, 0.8)
    return W, lambda v: (v - 0.5) @ W.T, x


def distances(W: Tensor, z: Tensor, y: Tensor) -> Tensor:
    """To the boundary between y and each class: [N, L], inf for y itself."""
    gap = z.gather(1, y[:, None]) - z
    norm = (W[y][:, None] - W).norm(dim=2)
    return (gap / norm.clamp_min(1e-30)).scatter(1, y[:, None], torch.inf)


@pytest.mark.parametrize(("dim", "scale"), [(20, 1.0), (300, 1.0), (100, 0.05), (100, 30.0)])
def test_two_classes_within_one_percent(dim: int, scale: float) -> None:
    W, model, x = linear(2, dim, scale)
    z = model(x)
    y = z.argmax(1)
    d = distances(W, z, y).amin(1)
    for target in (None, 1 - y):
        result = CarliniWagner(steps=500)(model, x, y, target=target)
        assert result.success.all()
        assert (result.l2 >= d * (1 - 1e-9)).all() and (result.l2 <= 1.01 * d).all()


def test_the_nearest_of_every_class_within_one_percent() -> None:
    W, model, x = linear(5, 30)
    z = model(x)
    y = z.argmax(1)
    d = distances(W, z, y)
    result = CarliniWagner(steps=300, target="every")(model, x, y)
    ratio = result.l2 / d.amin(1)
    assert result.success.all() and ratio.min() >= 1 - 1e-9 and ratio.max() <= 1.01
    assert result.target is None


def test_kappa_is_the_gap() -> None:
    W, model, x = linear(2, 40)
    z = model(x)
    y, w = z.argmax(1), (W[0] - W[1]).norm()
    for kappa in (0.5, 2.0):
        result = CarliniWagner(steps=500, kappa=kappa)(model, x, y)
        z_adv = model(result.x_adv)
        gap = z_adv.gather(1, 1 - y[:, None]) - z_adv.gather(1, y[:, None])
        assert result.success.all() and (gap >= kappa).all()
        d = (z.gather(1, y[:, None]) - z.gather(1, 1 - y[:, None]) + kappa).squeeze(1) / w
        assert (result.l2 >= d * (1 - 1e-9)).all() and (result.l2 <= 1.01 * d).all()


def test_a_range_of_any_width_gives_the_same() -> None:
    model, (x, y) = copy.deepcopy(network("sr")).double(), images(10)
    x = x.double()
    settings: dict[str, Any] = {"steps": 100, "search_steps": 4, "initial_c": 0.01}
    plain = CarliniWagner(**settings)(model, x, y)
    wide = CarliniWagner(bounds=(0.0, 255.0), **settings)(lambda v: model(v / 255), 255 * x, y)
    assert plain.success.float().mean() > 0.8 and torch.equal(plain.success, wide.success)
    torch.testing.assert_close(wide.distortion, plain.distortion, rtol=1e-3, atol=0)


def test_every_is_the_best_of_the_targets() -> None:
    """36 searches on 4 places: each must be as if it ran alone."""
    model, (x, y) = copy.deepcopy(network("mm")).double(), images(4)
    x, attack = x.double(), {"steps": 60, "search_steps": 3, "initial_c": 0.1, "rate": 0.1}
    every = CarliniWagner(target="every", **attack)(model, x, y)
    single = [CarliniWagner(**attack)(model, x, y, target=(y + k) % 10) for k in range(1, 10)]
    best = torch.stack([r.l2 for r in single]).amin(0)
    assert every.success.all() and (torch.stack([r.success.sum() for r in single]) > 0).sum() > 4
    torch.testing.assert_close(every.l2, best, rtol=1e-6, atol=0)
    assert torch.equal(every.steps, torch.stack([r.steps for r in single]).sum(0))


def test_targets() -> None:
    model, (x, y) = network("sr"), images(20)
    with torch.no_grad():
        least = model(x).scatter(1, y[:, None], torch.inf).argmin(1)
    settings: dict[str, Any] = {"steps": 100, "search_steps": 4, "initial_c": 0.1, "rate": 0.1}
    result = CarliniWagner(target="least-likely", **settings)(model, x, y)
    assert result.target is not None and torch.equal(result.target, least)
    assert torch.equal(result.success, model(result.x_adv).argmax(1) == least)
    assert result.success.float().mean() > 0.8
    plain = CarliniWagner(**settings)(model, x, y)
    assert (plain.l2 <= result.l2 * 1.05).float().mean() > 0.9  # a target costs more


def test_misclassified_from_the_start() -> None:
    model, (x, y) = network("sr"), images(12)
    with torch.no_grad():
        y = model(x).argmax(1)
    y[::2] = (y[::2] + 1) % 10
    result = CarliniWagner(steps=100, search_steps=4, initial_c=0.01)(model, x, y)
    assert result.success[::2].all() and (result.l2[::2] == 0).all() and (result.steps[::2] == 0).all()
    assert torch.equal(result.x_adv[::2], x[::2])
    assert result.success[1::2].float().mean() > 0.7 and (result.l2[1::2] > 0).all()


def test_distances_are_to_the_image_as_given() -> None:
    """Images of nothing but 0 and 1: atanh is infinite there, the start is inside, the distance must not be."""
    model, (x, y) = copy.deepcopy(network("sr")).double(), images(12)
    x = x.round().double()
    with torch.no_grad():
        y = model(x).argmax(1)
    result = CarliniWagner(steps=300, search_steps=6)(model, x, y)
    delta = (result.x_adv - x).flatten(1).norm(dim=1)
    assert result.success.all() and (delta < 8).all()
    torch.testing.assert_close(result.l2, delta)
    assert torch.equal(result.success, model(result.x_adv).argmax(1) != y)


def test_a_saturated_network() -> None:
    model, (x, y) = network("sr"), images(20)
    plain = CarliniWagner(steps=100, search_steps=6)(model, x, y)
    sharp = CarliniWagner(steps=100, search_steps=6, initial_c=1e-6)(lambda v: 1000 * model(v), x, y)
    assert plain.success.float().mean() > 0.8 and torch.equal(plain.success, sharp.success)
    assert sharp.zero_gradient == 0.0
    torch.testing.assert_close(sharp.l2, plain.l2, rtol=0.05, atol=0)


def test_steps_are_counted_and_bounded() -> None:
    model, (x, y) = network("sr"), images(20)
    with torch.no_grad():
        right = model(x).argmax(1) == y
    for steps in (25, 30):  # 25 is not a multiple of how often the attack looks
        full = CarliniWagner(steps=steps, search_steps=2, abort=False)(model, x, y)
        assert (full.steps[right] == 2 * steps).all()
    assert (CarliniWagner(steps=400, search_steps=2)(model, x, y).steps[right] < 2 * 400).any()


def test_more_searches_find_less() -> None:
    model, (x, y) = copy.deepcopy(network("sr")).double(), images(20)
    x, few = x.double(), CarliniWagner(steps=100, search_steps=3, initial_c=0.1)(model, x.double(), y)
    more = CarliniWagner(steps=100, search_steps=6, initial_c=0.1)(model, x, y)
    assert (more.l2 <= few.l2).all() and more.l2.mean() < few.l2.mean()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kappa", -1.0),
        ("target", "all"),
        ("steps", 0),
        ("search_steps", 0),
        ("rate", 0.0),
        ("initial_c", -1.0),
        ("bounds", (1.0, 0.0)),
    ],
)
def test_settings_are_checked(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        CarliniWagner(**{name: value})  # type: ignore[arg-type]


@pytest.mark.long
def test_abort_costs_less_than_one_percent() -> None:
    """On 100 images, at 500 iterations a search: fewer iterations, the same distortion."""
    model, (x, y) = network("sr"), images(110)
    with torch.no_grad():
        right = model(x).argmax(1) == y
    x, y = x[right][:100], y[right][:100]
    assert len(x) == 100
    abort, full = (CarliniWagner(steps=500, abort=a)(model, x, y) for a in (True, False))
    assert torch.equal(abort.success, full.success) and full.success.all()
    assert abort.l2.mean() <= 1.01 * full.l2.mean() and full.l2.mean() <= 1.01 * abort.l2.mean()
    assert abort.steps.sum() < 0.6 * full.steps.sum()


@pytest.mark.long
@pytest.mark.parametrize(("head", "eps"), [("sr", 0.0), ("mm", 0.0), ("sr", 0.15), ("mm", 0.15)])
def test_no_weaker_than_foolbox(head: str, eps: float) -> None:
    """Success no lower, mean L2 over the common successes no larger, at the same searches and iterations.

    And so the accuracy within an L2 budget is no higher, at budgets where foolbox leaves 80, 50 and 20%.
    """
    foolbox = pytest.importorskip("foolbox")
    model, (x, y) = network(head, eps), images(110)
    with torch.no_grad():
        right = model(x).argmax(1) == y
    x, y = x[right][:80], y[right][:80]
    ours = CarliniWagner(steps=200)(model, x, y)
    peer = foolbox.attacks.L2CarliniWagnerAttack(steps=200)
    _, points, broken = peer(foolbox.PyTorchModel(copy.deepcopy(model), bounds=(0, 1)), x, y, epsilons=None)
    l2 = torch.where(broken, (points - x).flatten(1).norm(dim=1), torch.inf)
    assert broken.float().mean() > 0.8
    assert ours.success.sum() >= broken.sum()
    common = broken & ours.success
    assert ours.l2[common].mean() <= l2[common].mean()
    for share in (0.2, 0.5, 0.8):
        budget = l2.quantile(share)
        left = (l2 > budget).float().mean()
        assert 0.15 < left < 0.85
        assert (ours.l2 > budget).float().mean() <= left


class Rounded(torch.nn.Module):
    """Logits that differ with the size of the batch, as other kernels' rounding makes them, but much more so."""

    def __init__(self, inner, most):
        super().__init__()
        self.inner, self.most = inner, most

    def forward(self, x):
        z = self.inner(x)
        return z + self.most * torch.sin(1e4 * z.detach() + len(x))


def test_rounding_that_differs_from_batch_to_batch_loses_nothing():
    model = network("sr")
    x, y = images(60)
    right = model(x).argmax(1) == y
    x, y = x[right], y[right]
    attack = CarliniWagner(search_steps=5, steps=200)
    plain, noisy = attack(model, x, y), attack(Rounded(model, 0.05).eval(), x, y)
    assert plain.success.all() and noisy.success.all()
    assert (Rounded(model, 0.05)(noisy.x_adv).argmax(1) != y).all()
    assert float(noisy.l2.mean()) == pytest.approx(float(plain.l2.mean()), rel=0.02)
    delta = (noisy.x_adv - x).flatten(1).norm(dim=1)
    assert torch.allclose(noisy.l2, delta, rtol=1e-4)  # the distance is that of the point that is given back


@pytest.mark.parametrize("coarse", [0.0, 2.0**-9])
def test_a_masked_class_and_a_constant_change_nothing(coarse: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class at -inf or -1e9 is none, and a constant in the logits is none of the network's: TF32's margin too."""
    monkeypatch.setattr(carlini, "_coarse", lambda x, precision: coarse)
    model, (x, y) = network("sr"), images(24)
    attack = CarliniWagner(steps=60, search_steps=4, initial_c=0.1)
    plain = attack(model, x, y)
    assert plain.success.all()
    for low in (-torch.inf, -1e9):
        masked = attack(lambda v: torch.cat([z := model(v), z[:, :1] * 0 + low], 1), x, y)  # noqa: B023
        assert masked.success.all()
        assert masked.l2.mean() <= 1.01 * plain.l2.mean()
    every = dataclasses.replace(attack, target="every")(
        lambda v: torch.cat([z := model(v), z[:, :1] * 0 - torch.inf], 1), x[:4], y[:4]
    )
    assert every.success.all() and every.l2.mean() <= 1.01 * plain.l2[:4].mean()
    shifted = attack(lambda v: model(v) + 1000.0, x, y)
    assert shifted.success.all() and shifted.l2.mean() <= 1.02 * plain.l2.mean()
    wrong = attack(lambda v: torch.cat([z := model(v), z[:, :1] * 0 - torch.inf], 1), x, (y + 1) % 10)
    assert wrong.success[plain.l2 > 0].all() and (wrong.l2[plain.l2 > 0] == 0).all()


def test_a_failure_has_the_label_of_the_image_it_went_back_to() -> None:
    model, (x, y) = network("sr"), images(24)
    result = CarliniWagner(steps=3, search_steps=1, initial_c=1e-3)(model, x, y, target=(y + 1) % 10)
    assert not result.success.all() and torch.equal(model(result.x_adv).argmax(1), result.prediction)
