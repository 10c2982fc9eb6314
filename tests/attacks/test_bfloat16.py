"""Attacks in bfloat16 on the CPU: the labels of float32, rounded gradients."""

import copy
import warnings

import pytest
import torch
from torch import nn

import mmlda
from mmlda.attacks import FAB, PGD, CarliniWagner, WorstCase, compiled, replay
from mmlda.attacks.bfloat16 import Bfloat16


@pytest.fixture(autouse=True)
def a_processor_that_has_it(monkeypatch):
    monkeypatch.setattr(replay, "fast_bfloat16", lambda: True)


def network(scale=1.0, shift=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10))
    with torch.no_grad():
        model[3].weight *= scale
        model[3].bias += shift
    return model.eval()


def images(n):
    return torch.rand(n, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def test_labels_are_those_of_float32_where_rounding_would_change_them():
    model, x = network(), images(20_000)
    with torch.no_grad():
        want, fast = model(x), compiled(model)(x)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(x).float()
    assert (rounded.argmax(1) != want.argmax(1)).sum() > 10
    assert torch.equal(fast.argmax(1), want.argmax(1))
    assert not torch.allclose(fast, want, atol=1e-5) and torch.allclose(fast, want, atol=0.02)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("bias", [0.0, 3.0])
@pytest.mark.parametrize("size", [1.0, 0.01])
def test_labels_are_exact_with_few_classes_and_logits_close_to_each_other(classes, bias, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, classes)).eval()
    nn.init.constant_(model[3].bias, bias)
    fast, x = compiled(model), images(4000)
    fast(x[:16])
    with torch.no_grad():
        assert torch.equal(fast(size * x).argmax(1), model(size * x).argmax(1))


def test_two_classes_are_attacked_as_without():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 2)).eval()
    x = images(60)
    with torch.no_grad():
        model[3].bias[0] -= (model(x)[:, 0] - model(x)[:, 1]).median()  # as many of each class
        y = model(x).argmax(1)
    for attack in (FAB(), CarliniWagner(steps=50, search_steps=3)):
        result = attack(compiled(model), x, y)
        assert torch.equal(model(result.x_adv).argmax(1)[result.success], result.prediction[result.success])
        assert abs(int(result.success.sum()) - int(attack(model, x, y).success.sum())) <= 3
        assert result.success.any()


def test_the_gradient_is_that_of_bfloat16_and_close_to_the_exact_one():
    model, x = network(), images(200)
    exact, rounded = (
        torch.autograd.grad(net(v).logsumexp(1).sum(), v)[0]
        for net, v in ((net, x.clone().requires_grad_()) for net in (model, compiled(model)))
    )
    assert not torch.allclose(exact, rounded, rtol=1e-4, atol=0)
    assert nn.functional.cosine_similarity(exact.flatten(), rounded.flatten(), dim=0) > 0.999


def test_a_network_that_rounding_would_change_stays_in_float32():
    model, x = network(shift=100.0), images(20)  # differences of 0.1 vanish beside 100
    assert torch.equal(compiled(model)(x), model(x))


def test_labels_are_exact_where_rounding_counts_only_later():
    fast, x, far = Bfloat16(nn.Sequential(network(), Remote())), images(64), 1000 * images(200)
    assert not torch.equal(fast(x), fast.model(x))
    rounded = fast._rounded(far)
    assert (rounded.argmax(1) != fast.model(far).argmax(1)).any()
    assert torch.equal(fast(far).argmax(1), fast.model(far).argmax(1))


class Product(torch.autograd.Function):
    """x W, whose backward pass knows float32 only."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, g):
        return g.mm(ctx.saved_tensors[0].double().float()), None


class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = network(), kind

    def forward(self, x):
        z = self.inner[:3](x)
        if self.kind == "product":
            return Product.apply(z, self.inner[3].weight)
        z = self.inner[3](z)
        if self.kind == "numpy":
            return torch.from_numpy(z.detach().numpy())
        filled = torch.zeros(len(x), 10)
        filled[torch.arange(len(x))] = z
        return filled


@pytest.mark.parametrize("kind", ["assign", "numpy", "product"])
def test_a_network_that_cannot_be_rounded_stays_in_float32(kind):
    model, x = Odd(kind).eval(), images(4)
    fast = compiled(model)
    assert torch.equal(fast(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = model(x).argmax(1)
        assert WorstCase(eps=0.05)(fast, x, y).prediction.equal(WorstCase(eps=0.05)(model, x, y).prediction)


def test_what_is_not_logits_is_refused_as_without():
    model = nn.Sequential(network(), Pair())
    for net in (model, compiled(model)):
        with pytest.raises(ValueError, match="model must return logits"):
            PGD(eps=0.1)(net, images(4), torch.zeros(4, dtype=torch.int64))


class Pair(nn.Module):
    def forward(self, z):
        return z, z


def test_an_empty_batch_decides_nothing():
    fast = compiled(network(shift=100.0))
    assert fast(images(4)[:0]).shape == (0, 10)
    assert torch.equal(fast(images(4)), network(shift=100.0)(images(4)))


def test_the_copy_has_the_networks_attributes():
    model = mmlda.models.build({"backbone": "mlp", "inputs": 4, "num_classes": 3}, seed=0)
    fast = compiled(model)
    assert isinstance(fast, Bfloat16) and fast.num_classes == 3 and fast.head.num_classes == 3
    assert copy.deepcopy(fast).head.num_classes == 3
    with pytest.raises(AttributeError, match="nothing"):
        fast.nothing  # noqa: B018


class Remote(nn.Module):
    """Large equal shifts of the logits for large inputs, in bfloat16 under autocast."""

    def forward(self, z):
        shift = 1e4 * (z.abs().amax(1, keepdim=True) > 20)
        return z + shift.to(z.dtype)


@pytest.mark.parametrize("attack", [PGD(eps=0.05, steps=5), WorstCase(eps=0.05)])
def test_an_attack_reports_what_the_network_itself_predicts(attack):
    model, x = network(scale=4.0), images(64)
    y = model(x).argmax(1)
    result = attack(compiled(model), x, y)
    assert torch.equal(model(result.x_adv).argmax(1), result.prediction)
    assert 0 < result.success.sum()
    reference = attack(model, x, y)
    assert abs(int(result.success.sum()) - int(reference.success.sum())) <= 5


def test_only_a_processor_with_bfloat16_uses_it(monkeypatch):
    model = network()
    assert isinstance(compiled(model), Bfloat16)
    assert isinstance(compiled(compiled(model)).model, nn.Sequential)  # not twice
    monkeypatch.setattr(replay, "fast_bfloat16", lambda: False)
    assert not isinstance(compiled(model), Bfloat16)
    torch.testing.assert_close(compiled(model)(images(4)), model(images(4)))


def test_networks_in_double_precision_and_of_one_logit_are_computed_as_they_are():
    model, x = network().double(), images(4).double()
    assert torch.equal(compiled(model)(x), model(x))
    one = nn.Sequential(nn.Flatten(), nn.Linear(48, 1))
    assert torch.equal(compiled(one)(images(4)), one(images(4)))


def test_an_attack_on_a_shipped_network_reports_what_it_predicts():
    model = mmlda.load("mnist-mmlda")
    x = torch.rand(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    y = model.eval()(x).argmax(1)
    result = PGD(eps=0.3, steps=5)(compiled(model), x, y)
    assert torch.equal(model(result.x_adv).argmax(1), result.prediction)
