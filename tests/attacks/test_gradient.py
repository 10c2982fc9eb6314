"""FGSM, BIM, ILCM, PGD against plain loops and closed forms; losses, targets and noise."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from attack_models import images, linear_case, network
from torch import Tensor, nn

from mmlda.attacks import APGD, BIM, FGSM, ILCM, PGD, ascend
from mmlda.attacks.base import activation_bytes, survivors
from mmlda.attacks.losses import choose_target, other_classes, score
from mmlda.attacks.noise import Noise
from mmlda.attacks.surface import Surface

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def plain_loop(
    model: nn.Module,
    x: Tensor,
    label: Tensor,
    start: Tensor,
    eps: float,
    a: float,
    steps: int,
    norm: str,
    sign: int,
) -> Tensor:
    """The textbook loop, one gradient of cross-entropy at a time, sample by sample in the projection."""
    v = start
    for _ in range(steps):
        v = v.clone().requires_grad_(True)
        F.cross_entropy(model(v), label, reduction="sum").backward()
        g = sign * v.grad
        v = v.detach()
        if norm == "linf":
            v = v + a * g.sign()
            v = torch.max(torch.min(v, x + eps), x - eps)
        else:
            g = torch.stack([gi / gi.abs().max() for gi in g])
            v = v + a * torch.stack([gi / gi.norm() for gi in g])
            v = torch.stack([xi + di * (eps / di.norm()) if di.norm() > eps else xi + di for xi, di in zip(x, v - x)])
        v = v.clamp(0, 1)
    return v


@pytest.mark.parametrize("head", ["sr", "mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bit_equal_to_a_plain_loop(head: str, dtype: torch.dtype) -> None:
    model, (x, y) = copy.deepcopy(network(head)).to(dtype), images(40)
    x, eps = x.to(dtype), 0.1
    least = model(x).detach().scatter(1, y[:, None], torch.inf).argmin(1)
    noise = 2 * Noise(5, torch.arange(40)).uniform((1, 8, 8), 0, dtype) - 1
    start = torch.clamp(x + eps * noise, x - eps, x + eps).clamp(0, 1)
    cases = (
        (FGSM(eps=eps), y, x, eps, 1, 1),
        (BIM(eps=eps), y, x, eps / 10, 10, 1),
        (BIM(eps=eps, steps=4, step_size=0.04), y, x, 0.04, 4, 1),
        (ILCM(eps=eps), least, x, eps / 10, 10, -1),
        (PGD(eps=eps, steps=7, seed=5), y, start, 2.5 * eps / 7, 7, 1),
    )
    for attack, label, begin, a, steps, sign in cases:
        expected = plain_loop(model, x, label, begin, eps, a, steps, "linf", sign)
        result = attack(model, x, y)
        assert torch.equal(result.x_adv, expected), attack
        assert (result.steps == steps).all()


def test_l2_equal_to_a_plain_loop() -> None:
    model, (x, y) = copy.deepcopy(network("sr")).double(), images(30)
    x = x.double()
    for steps, a in ((1, 0.7), (12, 0.1)):
        expected = plain_loop(model, x, y, x, 0.7, a, steps, "l2", 1)
        result = BIM(eps=0.7, norm="l2", steps=steps, step_size=a)(model, x, y)
        torch.testing.assert_close(result.x_adv, expected, rtol=0, atol=1e-12)
    assert result.l2.max() <= 0.7 + 1e-12 and result.l2.median() > 0.5


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_closed_form_on_a_linear_model(norm: str) -> None:
    """With two classes the loop's direction is exact: it breaks at eps 1% beyond the distance, not 1% before."""
    model, x, y = linear_case(2)
    distance = model.distance(x, y, norm)
    for i in range(8):
        xi, yi = x[i : i + 1], y[i : i + 1]
        for factor in (0.99, 1.01):
            eps = factor * distance[i].item()
            attacks = (
                FGSM(eps=eps, norm=norm),
                BIM(eps=eps, norm=norm),
                BIM(eps=eps, norm=norm, loss="margin"),
                ILCM(eps=eps, norm=norm),
                PGD(eps=eps, norm=norm, steps=200, step_size=0.2 * eps),
                APGD(eps=eps, norm=norm),
            )
            for attack in attacks:
                assert attack(model, xi, yi).success.item() == (factor > 1), (attack, factor)


def test_ascend_takes_a_radius_for_each_sample() -> None:
    model, (x, y) = network("sr"), images(6)
    surface = Surface(model, y)

    def gradient(v: Tensor, who: slice = slice(None)) -> Tensor:
        return surface.gradient("ce", v, y[who])[2]

    eps = torch.linspace(0.02, 0.2, 6)
    for norm in ("linf", "l2"):
        kw = {"steps": 5, "norm": norm}
        together = ascend(gradient, x, x, eps=eps, step_size=eps / 4, **kw)
        for i in range(6):
            who = slice(i, i + 1)
            alone = ascend(
                lambda v: gradient(v, who),  # noqa: B023
                x[who],
                x[who],
                eps=eps[i].item(),
                step_size=eps[i].item() / 4,
                **kw,
            )
            torch.testing.assert_close(together[who], alone, rtol=0, atol=1e-5)
        size = (together - x).flatten(1).abs().amax(1) if norm == "linf" else (together - x).flatten(1).norm(dim=1)
        assert (size <= eps + 1e-6).all() and (size > 0.5 * eps).all()


def test_ascend_never_looks_at_a_value() -> None:
    """Tensors without values go through it: nothing waits for the device, so a training step can capture it."""
    x, eps = torch.empty(4, 3, 8, 8, device="meta"), torch.empty(4, device="meta")
    for norm in ("linf", "l2"):
        assert ascend(torch.sin, x, x, eps=eps, step_size=eps, steps=2, norm=norm).shape == x.shape


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_signs_of_a_gradient_that_is_no_number(device: str, dtype: torch.dtype) -> None:
    """NaN is 0, as it is in the gradient: `Surface.sign` rests on what torch makes of NaN, which it does not say."""
    slope = torch.tensor([torch.nan, torch.inf, -torch.inf, -2.0, 0.0, 3.0] * 20, dtype=dtype, device=device)
    x, y = torch.zeros(2, 120, dtype=dtype, device=device), torch.zeros(2, dtype=torch.int64, device=device)

    def loss(model: object, x: Tensor, y: Tensor) -> Tensor:
        return (x * slope).sum(1)

    surface = Surface(lambda v: v[:, :3], y)
    expected = torch.tensor([0.0, 1.0, -1.0, -1.0, 0.0, 1.0] * 20, dtype=dtype, device=device).expand(2, 120)
    assert torch.equal(surface.sign(loss, x, y)[1], expected)
    assert torch.equal(surface.gradient(loss, x, y)[2].sign(), expected)


def test_saturated_logits() -> None:
    """A gap of hundreds of nats: "ce" stands still and says so, "margin" and "targeted" do not care."""
    net, (x, y) = network("sr"), images(60)

    def model(v: Tensor) -> Tensor:
        return 300 * net(v)

    z = model(x).detach()
    x, y = x[z.argmax(1) == y], y[z.argmax(1) == y]
    top = model(x).detach().topk(2, 1).values
    x, y = x[top[:, 0] - top[:, 1] > 110], y[top[:, 0] - top[:, 1] > 110]
    assert len(y) > 40
    still = BIM(eps=0.25)(model, x, y)
    assert still.zero_gradient == 1.0 and not still.success.any() and (still.linf == 0).all()
    for attack in (
        BIM(eps=0.25, loss="margin"),
        PGD(eps=0.25, loss="targeted", target="every", steps=10),
        BIM(eps=2.0, loss="margin", norm="l2"),
        APGD(eps=0.25, loss="dlr", steps=10),
    ):
        moved = attack(model, x, y)
        assert moved.zero_gradient == 0.0 and moved.success.float().mean() > 0.8, attack


def test_an_l2_step_along_a_tiny_gradient() -> None:
    x, y = torch.full((2, 4), 0.5), torch.tensor([0, 0])
    w = torch.tensor([[1e-25, -2e-25, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    result = FGSM(eps=0.1, norm="l2", loss="margin")(lambda v: v @ w.T, x, y)
    torch.testing.assert_close(result.l2, torch.full((2,), 0.1))


def test_losses_by_their_formulas() -> None:
    z = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 - 20
    y = torch.randint(6, (50,), generator=torch.Generator().manual_seed(1))
    t = (y + 1 + torch.randint(5, (50,), generator=torch.Generator().manual_seed(2))) % 6
    for i in range(50):
        zi, yi, ti = z[i].tolist(), int(y[i]), int(t[i])
        top = sorted(zi, reverse=True)
        others = max(v for k, v in enumerate(zi) if k != yi)
        rest = max(v for k, v in enumerate(zi) if k != ti)
        log_p = z[i].log_softmax(0)
        plain = {
            "ce": -log_p[yi],
            "margin": others - zi[yi],
            "dlr": (others - zi[yi]) / (top[0] - top[2]),
        }
        aimed = {
            "ce": log_p[ti],
            "margin": zi[ti] - rest,
            "dlr": (zi[ti] - zi[yi]) / (top[0] - (top[2] + top[3]) / 2),
            "targeted": zi[ti] - zi[yi],
        }
        row = slice(i, i + 1)
        for name, value in plain.items():
            assert score(name, z[row], y[row]).item() == pytest.approx(float(value), rel=1e-9)
        for name, value in aimed.items():
            assert score(name, z[row], y[row], t[row]).item() == pytest.approx(float(value), rel=1e-9)


def test_losses_that_cannot_be() -> None:
    z, y = torch.zeros(2, 3), torch.tensor([0, 1])
    with pytest.raises(ValueError, match='fewer than 3 classes, got "dlr" and 2 classes'):
        score("dlr", z[:, :2], y)
    with pytest.raises(ValueError, match='fewer than 4 classes with a target, got "dlr" and 3'):
        score("dlr", z, y, y.flip(0))
    with pytest.raises(ValueError, match='target must be given for loss="targeted"'):
        BIM(eps=0.1, loss="targeted")(lambda v: v, torch.rand(2, 3), y)
    with pytest.raises(ValueError, match="model must be differentiable in x"):
        BIM(eps=0.1)(lambda v: z, torch.rand(2, 3), y)


def test_a_loss_may_be_a_function() -> None:
    model, (x, y) = network("sr"), images(30)

    def ce(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    for attack in (BIM, PGD, APGD):
        assert torch.equal(attack(eps=0.1, loss=ce)(model, x, y).x_adv, attack(eps=0.1)(model, x, y).x_adv)

    def to_target(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return -F.cross_entropy(model(x), y, reduction="none")

    aimed = BIM(eps=0.2, loss=to_target)(model, x, y, target=(y + 3) % 10)
    assert torch.equal(aimed.x_adv, BIM(eps=0.2)(model, x, y, target=(y + 3) % 10).x_adv)

    def features(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """From one class's mean to the next one's in the space of the latent features: no logits involved."""
        return (model.body(x) * (model.mu[(y + 1) % 10] - model.mu[y])).sum(1)

    net = network("mm")
    result = BIM(eps=0.25, loss=features)(net, x, y)
    before = features(net, x, y)
    assert (features(net, result.x_adv, y) > before).all() and result.success.float().mean() > 0.5
    with pytest.raises(ValueError, match=r"loss must return one value per sample, .* got a float32 tensor \[\]"):
        BIM(eps=0.1, loss=lambda m, x, y: F.cross_entropy(m(x), y))(model, x, y)


def test_targets() -> None:
    z = torch.tensor([[3.0, -500.0, -900.0, 1.0], [0.0, 5.0, 4.0, -1.0]])
    y = torch.tensor([0, 3])
    noise = Noise(0, torch.arange(2))
    # As float32 probabilities the two least likely classes of the first row tie at 0.
    assert choose_target("least-likely", z, y, noise).tolist() == [2, 0]
    assert other_classes(z, y).tolist() == [[3, 1, 2], [1, 2, 0]]
    y = torch.arange(5000) % 10
    random = choose_target("random", torch.zeros(5000, 10), y, Noise(0, torch.arange(5000)))
    assert (random != y).all()
    share = torch.bincount((random - y) % 10, minlength=10)[1:] / 5000
    assert (share - 1 / 9).abs().max() < 0.02

    model, (x, y) = network("sr"), images(60)
    result = ILCM(eps=0.4)(model, x, y)
    assert torch.equal(result.target, model(x).scatter(1, y[:, None], torch.inf).argmin(1))
    random = BIM(eps=0.4, target="random")(model, x, y)
    again = BIM(eps=0.4, target="random")(model, x[20:], y[20:], index=torch.arange(20, 60))
    assert torch.equal(random.target[20:], again.target) and (random.target != y).all()


def test_every_target_is_the_worst_of_the_single_ones() -> None:
    model, (x, y) = network("sr"), images(60)
    eps = 0.1
    best = torch.zeros(60, dtype=torch.bool)
    for k in range(10):
        single = BIM(eps=eps, loss="margin")(model, x, y, target=k)
        best |= single.prediction != y
    every = BIM(eps=eps, loss="margin", target="every")(model, x, y)
    assert torch.equal(every.success, best) and 0.2 < best.float().mean() < 0.9
    assert (every.steps[every.success] <= 90).all() and (every.steps[~every.success] == 90).all()
    assert every.steps.min() == 10


def test_restarts_only_add() -> None:
    model, (x, y) = network("mm", 0.15), images(200)
    kw = {"eps": 0.2, "steps": 5, "step_size": 0.1}
    one, four = PGD(**kw)(model, x, y), PGD(restarts=4, **kw)(model, x, y)
    assert (four.success | ~one.success).all() and four.success.sum() > one.success.sum()
    assert torch.equal(four.x_adv[one.success], one.x_adv[one.success])
    assert (four.steps[one.success] == 5).all() and (four.steps[~four.success] == 20).all()


def test_settings_that_cannot_be() -> None:
    for kw, message in (
        ({"eps": -0.1}, r"eps must be a finite number >= 0, got -0.1"),
        ({"eps": float("nan")}, r"eps must be .* got nan"),
        ({"eps": 0.1, "norm": "l1"}, r"norm must be one of 'linf', 'l2', got 'l1'"),
        ({"eps": 0.1, "loss": "cross"}, r"loss must be one of 'ce', 'margin', 'dlr', 'targeted', .* got 'cross'"),
        (
            {"eps": 0.1, "target": "worst"},
            r"target must be one of None, 'least-likely', .* got 'worst'",
        ),
        ({"eps": 0.1, "steps": 0}, r"steps must be an integer >= 1, got 0"),
        ({"eps": 0.1, "restarts": 0}, r"restarts must be an integer >= 1, got 0"),
        ({"eps": 0.1, "step_size": 0.0}, r"step_size must be a finite number > 0, got 0.0"),
        ({"eps": 0.1, "bounds": (1.0, 0.0)}, r"bounds must be \(low, high\) with low < high, got \(1.0, 0.0\)"),
        ({"eps": 0.1, "batch_size": 0}, r"batch_size must be an integer >= 1, got 0"),
        ({"eps": 0.1, "batch_size": 2.5}, r"batch_size must be an integer >= 1, got 2\.5"),
        ({"eps": 0.1, "steps": 2.5}, r"steps must be an integer >= 1, got 2\.5"),
        ({"eps": 0.1, "seed": 1.5}, r"seed must be an integer, got 1\.5"),
        ({"eps": 0.1, "memory_limit": 0}, r"memory_limit must be an integer >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            PGD(**kw)
    with pytest.raises(TypeError):
        FGSM(0.1)
    with pytest.raises(AttributeError):
        FGSM(eps=0.1).eps = 0.2


def test_noise_is_noise() -> None:
    noise = Noise(0, torch.arange(1000))
    u = noise.uniform((500,), 0, torch.float64)
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 2e-3 and abs(u.var() - 1 / 12) < 1e-3
    n = noise.normal((500,), 0, torch.float64)
    assert abs(n.mean()) < 5e-3 and abs(n.var() - 1) < 1e-2 and abs((n**4).mean() - 3) < 0.1
    assert torch.equal(noise.integers(7, (300,), 3).unique(), torch.arange(7))
    other = {
        "draw": noise.uniform((500,), 1, torch.float64),
        "negative draw": noise.uniform((500,), -1, torch.float64),
        "seed": Noise(1, torch.arange(1000)).uniform((500,), 0, torch.float64),
        "sample": Noise(0, torch.arange(1, 1001)).uniform((500,), 0, torch.float64),
        "element": u.roll(1, 1),
    }
    for what, v in other.items():
        if what == "sample":  # the next sample's stream is not this one's, shifted
            assert torch.equal(v[:-1], u[1:])
            v = u.roll(1, 0)
        assert abs(torch.corrcoef(torch.stack([u.flatten(), v.flatten()]))[0, 1]) < 5e-3, what
    shape = (2, 3)
    half = noise.uniform(shape, 5, torch.float16)
    torch.testing.assert_close(half.double(), noise.uniform(shape, 5, torch.float64), rtol=1e-3, atol=1e-3)
    per_sample = noise.uniform(shape, torch.arange(1000))
    assert torch.equal(per_sample[4], noise.uniform(shape, 4)[4])


def test_a_memory_limit_cuts_the_batch() -> None:
    model, (x, y) = network("sr"), images(100)
    sizes = []

    def spy(v: Tensor) -> Tensor:
        sizes.append(len(v))
        return model(v)

    each = activation_bytes(Surface(model, y), x[:1])
    # What the two convolutions, the ReLUs and the linear layers must keep, in float32.
    assert 4 * (64 + 16 * 64 + 16 * 16) <= each <= 4 * 4 * (64 + 16 * 64 + 16 * 16 + 16)
    limit = 10 * (each + 12 * 64 * 4)
    result = BIM(eps=0.1, memory_limit=limit)(spy, x, y)
    assert max(sizes) == 10
    assert torch.equal(result.success, BIM(eps=0.1)(model, x, y).success)


def test_survivors() -> None:
    alive = torch.tensor([True, False, True, True, False])
    assert survivors(alive).tolist() == [0, 2, 3] and len(survivors(~alive & alive)) == 0
