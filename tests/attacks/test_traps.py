"""What breaks other attack libraries, tried on every attack.

To add an attack, add it to ATTACKS: a function of the width of the image range and of `Attack`'s own settings.
Every attack here must break most of the digits that a clean network gets right, so a do-nothing attack fails.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attack_models import images, network
from torch import Tensor, nn

from mmlda.attacks import (
    APGD,
    BIM,
    FAB,
    FGSM,
    ILCM,
    JSMA,
    PGD,
    Attack,
    AttackResult,
    CarliniWagner,
    Square,
    WorstCase,
)

EPS = 0.25
EPS_L2 = 1.5


def _short_worst(eps: float, **kw: Any) -> WorstCase:
    lists = (APGD(eps=eps, steps=10, **kw), FAB(eps=eps, targets=2, steps=10, **kw))
    return WorstCase(eps=eps, attacks=(*lists, Square(eps=eps, queries=60, **kw)), **kw)


ATTACKS: dict[str, Callable[..., Attack]] = {
    "FGSM": lambda width=1.0, **kw: FGSM(eps=EPS * width, **kw),
    "FGSM-l2": lambda width=1.0, **kw: FGSM(eps=EPS_L2 * width, norm="l2", **kw),
    "BIM": lambda width=1.0, **kw: BIM(eps=EPS * width, **kw),
    "ILCM": lambda width=1.0, **kw: ILCM(eps=2 * EPS * width, **kw),
    "PGD": lambda width=1.0, **kw: PGD(eps=EPS * width, steps=10, restarts=2, **kw),
    "PGD-l2": lambda width=1.0, **kw: PGD(eps=EPS_L2 * width, norm="l2", steps=10, **kw),
    "PGD-every": lambda width=1.0, **kw: PGD(eps=EPS * width, loss="margin", target="every", steps=5, **kw),
    "APGD": lambda width=1.0, **kw: APGD(eps=EPS * width, steps=20, **kw),
    "APGD-l2": lambda width=1.0, **kw: APGD(eps=EPS_L2 * width, norm="l2", steps=20, **kw),
    "APGD-t": lambda width=1.0, **kw: APGD(
        eps=EPS * width, loss="dlr", target="every", targets=3, steps=15, **kw
    ),
    "Square": lambda width=1.0, **kw: Square(eps=EPS * width, queries=200, **kw),
    "Square-l2": lambda width=1.0, **kw: Square(eps=EPS_L2 * width, norm="l2", queries=300, **kw),
    "FAB": lambda width=1.0, **kw: FAB(targets=3, steps=15, **kw),
    "FAB-l2": lambda width=1.0, **kw: FAB(norm="l2", targets=3, steps=15, restarts=2, **kw),
    "WorstCase": lambda width=1.0, **kw: _short_worst(EPS * width, **kw),
    "JSMA": lambda width=1.0, **kw: JSMA(eps=width, **kw),
    "JSMA-pairs": lambda width=1.0, **kw: JSMA(
        eps=0.5 * width, pairs=True, surface="softmax", target="random", **kw
    ),
    "CW": lambda width=1.0, **kw: CarliniWagner(search_steps=3, steps=60, initial_c=0.1, rate=0.1, **kw),
}
# The radius an attack must keep to: (norm, eps); minimum-norm attacks have none.
BALLS: dict[str, tuple[str, float]] = {
    name: ("l2", EPS_L2) if name.endswith("-l2") else ("linf", 2 * EPS if name == "ILCM" else EPS)
    for name in ATTACKS
}
BALLS.update({name: ("linf", 1.0) for name in ATTACKS if name.startswith("JSMA")})  # the whole range
MINIMUM_NORM = {"FAB", "FAB-l2", "CW"}
GRADIENT = {name for name in ATTACKS if not name.startswith("Square")}
DETERMINISTIC = {"FGSM", "FGSM-l2", "BIM", "ILCM", "FAB", "JSMA", "CW"}

every_attack = pytest.mark.parametrize("name", ATTACKS)


def at_work(result: AttackResult, x: Tensor) -> None:
    """An attack that did nothing is none of whatever else is tested."""
    assert (result.x_adv.to(x) != x.detach()).flatten(1).any(1).double().mean() > 0.3
    assert result.success.double().mean() > 0.2


def double(head: str = "sr") -> nn.Module:
    return copy.deepcopy(network(head)).double()


@every_attack
@pytest.mark.parametrize("head", ["sr", "mm"])  # the logits of "mm", -||z - mu||^2 / 2, are all negative
def test_it_breaks_what_was_right_and_says_so_truly(name: str, head: str) -> None:
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
def test_ball_range_and_measures(name: str) -> None:
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
def test_the_callers_things_are_untouched(name: str) -> None:
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
def test_usable_where_autograd_is_off(name: str) -> None:
    model, (x, y) = network("sr"), images(10)
    expected = ATTACKS[name]()(model, x, y)
    at_work(expected, x)
    with torch.no_grad():
        assert torch.equal(ATTACKS[name]()(model, x, y).x_adv, expected.x_adv)
    with torch.inference_mode():
        assert torch.equal(ATTACKS[name]()(model, x.clone(), y.clone()).x_adv, expected.x_adv)


@every_attack
def test_the_seed_decides(name: str) -> None:
    model, (x, y) = network("sr"), images(30)
    first, again, other = (ATTACKS[name](seed=s)(model, x, y) for s in (1, 1, 2))
    assert torch.equal(first.x_adv, again.x_adv) and torch.equal(first.steps, again.steps)
    assert torch.equal(first.x_adv, other.x_adv) == (name in DETERMINISTIC)


@every_attack
def test_a_sample_does_not_depend_on_its_batch(name: str) -> None:
    """In float64: alone, in smaller batches, in another order and under a memory limit."""
    model, (x, y) = double(), images(24)
    x = x.double()
    whole = ATTACKS[name]()(model, x, y)
    at_work(whole, x)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    batched = ATTACKS[name](batch_size=7)(model, x, y)
    shuffled = ATTACKS[name]()(model, x[order], y[order], index=order)
    frugal = ATTACKS[name](memory_limit=300_000)(model, x, y)
    for result, back in ((batched, slice(None)), (shuffled, order.argsort()), (frugal, slice(None))):
        result = result.take(back)
        assert torch.equal(result.success, whole.success) and torch.equal(result.steps, whole.steps)
        torch.testing.assert_close(result.x_adv, whole.x_adv, rtol=0, atol=1e-9)
    alone = ATTACKS[name]()(model, x[5:6], y[5:6], index=torch.tensor([5]))
    torch.testing.assert_close(alone.x_adv, whole.x_adv[5:6], rtol=0, atol=1e-9)


@every_attack
def test_batches_agree_in_float32(name: str) -> None:
    model, (x, y) = network("sr"), images(400)
    whole, parts = ATTACKS[name]()(model, x, y), ATTACKS[name](batch_size=96)(model, x, y)
    at_work(parts, x)
    assert (whole.success == parts.success).float().mean() >= 0.995


@every_attack
def test_pixels_at_the_ends_of_the_range(name: str) -> None:
    model, (x, y) = network("sr"), images(60)
    x = x.round()  # nothing but 0 and 1
    with torch.no_grad():
        right = model(x).argmax(1) == y
    result = ATTACKS[name]()(model, x, y)
    assert result.x_adv.isfinite().all() and result.x_adv.min() >= 0 and result.x_adv.max() <= 1
    assert right.sum() > 20 and result.success[right].float().mean() > 0.3


@every_attack
def test_logits_shifted_by_a_constant(name: str) -> None:
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


@every_attack
def test_a_rounding_error_outside_the_range(name: str) -> None:
    model, (x, y) = network("sr"), images(30)
    out = torch.where(x == 0, -1e-7, torch.where(x == 1, 1 + 1e-6, x))
    assert out.min() < 0 and out.max() > 1
    result, plain = ATTACKS[name]()(model, out, y), ATTACKS[name]()(model, x, y)
    at_work(result, x)
    assert result.x_adv.min() >= 0 and result.x_adv.max() <= 1
    assert torch.equal(result.success, plain.success)
    for wrong in (x + 0.01, x - 0.01, x * torch.nan):
        with pytest.raises(ValueError, match=r"x has values .* bounds=\(0.0, 1.0\)"):
            ATTACKS[name]()(model, wrong, y)


@every_attack
def test_a_model_that_returns_probabilities(name: str) -> None:
    model, (x, y) = network("sr"), images(10)
    with pytest.warns(UserWarning, match="probabilities"):
        ATTACKS[name]()(lambda v: model(v).softmax(1), x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ATTACKS[name]()(lambda v: model(v).log_softmax(1), x, y)


@every_attack
def test_labels_out_of_range(name: str) -> None:
    model, (x, y) = network("sr"), images(10)
    for wrong in (10, -1):
        bad = y.clone()
        bad[4] = wrong
        with pytest.raises(ValueError, match=r"y has labels .* classes 0 to 9"):
            ATTACKS[name]()(model, x, bad)
    with pytest.raises(ValueError, match=r"target has labels .* classes 0 to 9"):
        ATTACKS[name]()(model, x, y, target=torch.full_like(y, 12))
    with pytest.raises(ValueError, match="y is"):
        ATTACKS[name]()(model, x, y.float())
    with pytest.raises(ValueError, match="y is"):
        ATTACKS[name]()(model, x, y[:-1])
    with pytest.raises(ValueError, match="x is"):
        ATTACKS[name]()(model, (x * 255).byte(), y)


@every_attack
def test_an_empty_batch(name: str) -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("the model was asked about nothing")

    result = ATTACKS[name]()(never, torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    assert len(result) == 0 and result.x_adv.shape == (0, 1, 8, 8)
    assert result.success.dtype == torch.bool and result.linf.shape == (0,)


@every_attack
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model, (x, y) = copy.deepcopy(network("sr")).to(dtype), images(30)
    x = x.to(dtype)
    result, single = ATTACKS[name]()(model, x, y), ATTACKS[name]()(network("sr"), x.float(), y)
    at_work(result, x)
    assert result.x_adv.dtype == dtype and result.x_adv.min() >= 0 and result.x_adv.max() <= 1
    assert result.l2.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert result.success.float().mean() >= single.success.float().mean() - 0.15
    if name not in MINIMUM_NORM:
        norm, eps = BALLS[name]
        size = result.linf if norm == "linf" else result.l2
        # x +- eps is rounded to the dtype, pixel by pixel.
        assert (size <= eps * (1 + 1e-6) + 8 * torch.finfo(dtype).eps).all()


@every_attack
def test_channels_last(name: str) -> None:
    """Three channels, as two memory formats of the same images."""
    gray, (x, y) = double(), images(16)
    x = x.double().expand(-1, 3, -1, -1).contiguous()

    def model(v: Tensor) -> Tensor:
        return gray(v.mean(1, keepdim=True))

    plain = ATTACKS[name]()(model, x, y)
    last = ATTACKS[name]()(model, x.contiguous(memory_format=torch.channels_last), y)
    at_work(last, x)
    assert torch.equal(last.success, plain.success)
    torch.testing.assert_close(last.x_adv, plain.x_adv, rtol=0, atol=1e-7)


@every_attack
def test_another_image_range(name: str) -> None:
    model, (x, y) = double(), images(30)
    x = x.double()
    plain = ATTACKS[name]()(model, x, y)
    wide = ATTACKS[name](width=4.0, bounds=(-1.0, 3.0))(lambda v: model((v + 1) / 4), 4 * x - 1, y)
    assert plain.success.float().mean() > 0.3
    assert (wide.success == plain.success).float().mean() >= 0.95
    assert wide.x_adv.min() >= -1 and wide.x_adv.max() <= 3
    same = plain.success & wide.success
    torch.testing.assert_close(wide.distortion[same].median(), plain.distortion[same].median(), rtol=1e-3, atol=0)


@every_attack
def test_a_given_target_is_what_counts(name: str) -> None:
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
def test_a_model_that_returns_nan_or_the_wrong_shape(name: str) -> None:
    model, (x, y) = network("sr"), images(5)
    with pytest.raises(ValueError, match="NaN"):
        ATTACKS[name]()(lambda v: model(v) * torch.nan, x, y)
    with pytest.raises(ValueError, match=r"model returned shape"):
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

    with pytest.raises(ValueError, match="NaN logits for 3 of 24 images"):
        ATTACKS[name](batch_size=8)(torn, x, y)
    at_work(ATTACKS[name](batch_size=8)(torn, x[:9], y[:9]), x[:9])


@pytest.mark.parametrize(("norm", "eps", "looks"), [("linf", EPS, 0), ("l2", EPS_L2, 1)])
def test_nan_on_the_way_is_no_fault_and_costs_one_more_look_at_most(norm: str, eps: float, looks: int) -> None:
    """Signs of a gradient are asked for without a look at the logits; the gradient itself is not."""
    model, (x, y) = network("sr"), images(20)
    calls = 0

    def hiccup(v: Tensor, at: int) -> Tensor:
        nonlocal calls
        calls += 1
        return model(v) * (torch.nan if calls == at else 1.0)

    attack = BIM(eps=eps, norm=norm, steps=10)
    plain = attack(lambda v: hiccup(v, 0), x, y)
    assert calls == 11  # ten gradients and the verdict: no call to check
    calls = 0
    result = attack(lambda v: hiccup(v, 4), x, y)
    assert calls == 11 + looks and result.success.float().mean() > 0.6
    assert getattr(result, norm).max() <= getattr(plain, norm).max() * (1 + 1e-6)
    assert torch.equal(model(result.x_adv).argmax(1), result.prediction)


def test_a_model_that_returns_sigmoids() -> None:
    model, (x, y) = network("sr"), images(20)
    for attack in (BIM(eps=0.1), APGD(eps=0.1, steps=3), Square(eps=0.1, queries=5)):  # one image first, or all
        with pytest.warns(UserWarning, match=r"between 0 and 1.* look like probabilities \(sigmoid\)"):
            attack(lambda v: (2 * model(v)).sigmoid(), x, y)
    assert 0.1 < 0.02 * model(x).max() < 0.9
    with warnings.catch_warnings():  # between 0 and 1 by chance, or not between them
        warnings.simplefilter("error")
        for squeeze in (lambda z: (0.01 * z).sigmoid(), lambda z: 0.02 * z.relu(), lambda z: 2 * z.sigmoid(),
                        lambda z: 0.5 + 0.5 * torch.tanh(z / 20)):  # fmt: skip
            BIM(eps=0.1)(lambda v: squeeze(model(v)), x, y)  # noqa: B023


class Buffers:
    """What a CUDA graph does to `Surface.step`, on the CPU: the function captured first is the one that runs, on
    buffers of its own, and every call overwrites the outputs of the one before."""

    def __init__(self) -> None:
        self.graphs: dict[object, tuple[Any, ...]] = {}
        self.replays = 0

    def step(self, surface: Any, key: object, step: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        key = (id(surface), key, *((t.shape, t.dtype) for t in inputs))
        if key not in self.graphs:
            buffers = tuple(t.clone() for t in inputs)
            self.graphs[key] = step, buffers, tuple(t.clone() for t in step(*buffers)), surface
        captured, buffers, outputs, _ = self.graphs[key]
        for mine, given in zip(buffers, inputs):
            mine.copy_(given)
        for mine, computed in zip(outputs, captured(*buffers)):
            mine.copy_(computed)
        self.replays += 1
        return outputs


@every_attack
def test_ready_for_cuda_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With buffers that are overwritten, steps captured once, and batches cut to halves, nothing changes."""
    from mmlda.attacks import apgd, fab, gradient, jsma, square, surface, worst

    def halves(alive: Tensor) -> Tensor:
        n, size = int(alive.sum()), len(alive)
        while n and size // 2 >= n:
            size //= 2
        return alive.to(torch.int8).argsort(descending=True, stable=True)[: size if n else 0].sort().values

    model, (x, y) = double(), images(22)
    x = x.double()
    plain = ATTACKS[name](batch_size=11)(model, x, y)
    buffers = Buffers()
    monkeypatch.setattr(surface.Surface, "step", lambda self, *a: buffers.step(self, *a))
    for module in (apgd, fab, gradient, jsma, square, worst):
        monkeypatch.setattr(module, "survivors", halves)
    monkeypatch.setattr(apgd.APGD, "_compact_before", lambda self, k, *_: k & (k - 1) == 0)
    monkeypatch.setattr(fab.FAB, "_compact_before", lambda self, k, *_: k & (k - 1) == 0)
    replayed = ATTACKS[name](batch_size=11)(model, x, y)
    assert buffers.replays > len(buffers.graphs) > 0
    assert torch.equal(replayed.success, plain.success) and torch.equal(replayed.steps, plain.steps)
    assert torch.equal(replayed.prediction, plain.prediction)
    torch.testing.assert_close(replayed.x_adv, plain.x_adv, rtol=0, atol=1e-9)
    torch.testing.assert_close(replayed.l2, plain.l2, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.dlr. with a target is undefined")
@pytest.mark.parametrize("name", ATTACKS)
def test_a_gradient_that_is_one_number_for_all_pixels(name: str) -> None:
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
def test_what_is_no_classifier_or_no_labels_is_named(name: str) -> None:
    model, (x, y) = network("sr"), images(4)
    for wrong, what in ((lambda v: (model(v), None), "a tuple"), (lambda v: model(v)[:, :1], "2 classes or more")):
        with pytest.raises(ValueError, match=what):
            ATTACKS[name]()(wrong, x, torch.zeros_like(y))
    with pytest.raises(ValueError, match="y is a list"):
        ATTACKS[name]()(model, x, y.tolist())
    for wrong_target in (y.tolist(), True):
        with pytest.raises(ValueError, match=r"target is .*: expected a tensor of integers"):
            ATTACKS[name]()(model, x, y, target=wrong_target)


@pytest.mark.parametrize("eps", ["0.1", True, None, -0.1, float("nan")])
def test_a_radius_that_is_none_is_refused(eps: Any) -> None:
    for kind in (FGSM, BIM, PGD, APGD, Square, WorstCase):
        with pytest.raises(ValueError, match="eps="):
            kind(eps=eps)


def test_fab_within_a_radius_breaks_nothing_beyond_it() -> None:
    model, (x, y) = network("sr"), images(60)
    free, bound = FAB()(model, x, y), FAB(eps=0.03)(model, x, y)
    assert free.success.all() and 0.05 < bound.success.float().mean() < 0.95
    assert (bound.linf[bound.success] <= 0.03 * (1 + 1e-5) + 1e-6).all()
    assert bound.linf[~bound.success].isinf().all() and torch.equal(bound.x_adv[~bound.success], x[~bound.success])
    with torch.no_grad():
        assert torch.equal(bound.prediction, model(bound.x_adv).argmax(1))


def test_the_worst_case_counts_what_a_targeted_attack_breaks_on_its_way() -> None:
    model, (x, y) = network("sr"), images(60)
    alone = ILCM(eps=0.25)(model, x, y)
    worst = WorstCase(eps=0.25, attacks=[ILCM(eps=0.25)])(model, x, y)
    assert torch.equal(worst.success, worst.prediction != y)
    assert torch.equal(worst.success, alone.prediction != y) and worst.success.sum() > alone.success.sum()
