"""Training networks of swap_head with many classes: the loss is streamed, without logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmlda.data import digit_strings, load
from mmlda.models import SwappedHead, structured, swap_head
from mmlda.models.heads import max_mahalanobis
from mmlda.training import Recipe
from mmlda.training.batches import Batches
from mmlda.training.step import Objective, Step, Tally, make_optimizer


@pytest.fixture(autouse=True)
def always_structured(monkeypatch):
    monkeypatch.setattr(max_mahalanobis, "PLAIN", 0)
    monkeypatch.setattr(structured, "BLOCK", 64)  # several blocks


class Net(torch.nn.Module):
    """A network as timm builds them; `power` is applied to its logits."""

    def __init__(self, power=None):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8)
        self.fc, self.power = torch.nn.Linear(8, 10), power

    def forward(self, x):
        logits = self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))
        return logits if self.power is None else logits**self.power


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor, also inside this package's operator."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.mmlda.code_cross_entropy.default:
            with self:
                out = structured.cross_entropy._init_fn(*args)
        else:
            out = function(*args, **(kwargs or {}))
        self.size = max([self.size, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def swapped_step(monkeypatch, stream, power=None, amp=False):
    """Loss, network and largest tensor of a step of 64 images with 10,000 classes in 64 dimensions."""
    torch.manual_seed(0)
    net = swap_head(Net(power), num_classes=10_000, dim=64, C=10.0)
    data = digit_strings(load("digits")[0], 4, 10_000)
    batches = Batches(data, Recipe(steps=1, batch_size=64, lr=1.0), torch.device("cpu"))
    batches.seek(0)
    optimizer, tally = make_optimizer(net, batches.recipe, torch.device("cpu")), Tally(torch.device("cpu"), 0)
    if not stream:
        monkeypatch.setattr(SwappedHead, "is_last", lambda *_: False)
    step = Step(net, batches, optimizer, tally, amp=amp)
    with Largest() as largest:
        step()
    return tally.read()[0], net, largest.size


@pytest.mark.parametrize("amp", [False, True])
def test_a_swapped_head_trains_without_logits(monkeypatch, amp):
    loss, net, largest = swapped_step(monkeypatch, True, amp=amp)
    plain, other, every = swapped_step(monkeypatch, False, amp=amp)
    assert largest < 64 * 10_000 <= every
    assert loss == pytest.approx(plain, rel=1e-5)
    for one, two in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3 if amp else 1e-4, atol=1e-2 if amp else 1e-5)
    assert net(torch.rand(2, 1, 8, 32)).shape == (2, 10_000) and not net.fc.headless


def test_logits_that_the_network_changes_are_not_streamed(monkeypatch):
    loss, _, largest = swapped_step(monkeypatch, True, power=3)
    assert largest >= 64 * 10_000 and loss == swapped_step(monkeypatch, False, power=3)[0]


def test_a_swapped_head_compiles_whole():
    net = swap_head(Net(), num_classes=281, dim=20)
    objective = Objective(net, Recipe(steps=1), net.fc)
    x, y = torch.rand(8, 1, 8, 8), torch.arange(8)
    found = torch.compile(objective, backend="aot_eager", fullgraph=True)(x, y)[0]
    torch.testing.assert_close(found, F.cross_entropy(net(x), y))
    assert not net.fc.headless
