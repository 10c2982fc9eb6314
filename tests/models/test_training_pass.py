"""A training pass in the package's own kernels against the network itself, and when it steps aside."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import types

import pytest
import torch

import mmlda
from mmlda import Recipe, fit
from mmlda.data import ImageData
from mmlda.models import build, kernel_checks, kernels, training_pass
from mmlda.models.folded import foldable
from mmlda.models.kernel_checks import has_kernels, problem
from mmlda.models.training_pass import features, own_pass

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and TRITON
cuda = pytest.mark.skipif(not torch.cuda.is_available() or not TRITON, reason="needs CUDA and triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 and triton")


def network(depth, channels, device="cpu", **options):
    config = {"backbone": "resnet", "depth": depth, "channels": channels, "head": "mmlda", "num_classes": 10} | options
    return build(config, seed=0).to(device, memory_format=torch.channels_last).train()


def images(n, shape, device="cpu"):
    x = torch.rand((n, *shape), generator=torch.Generator().manual_seed(1)) - 0.5
    return x.to(device, memory_format=torch.channels_last)


def errors(depth, shape, n, kind, device="cpu"):
    """Relative errors against the network in float64: features, running statistics, gradients in filters and in all."""
    ours, exact = network(depth, shape[0], device).backbone, network(depth, shape[0], device).double().backbone
    x, v = images(n, shape, device), torch.randn(n, 64, generator=torch.Generator().manual_seed(2)).to(device)
    with kernels.compiled_ahead(lambda: device == "cuda" and training_pass.rehearse(ours, x, kind)):
        want = exact(x.double())
    z = features(ours, x, kind)
    (z * v).sum().backward()
    (want * v.double()).sum().backward()

    def error(a, b):
        return float((a.double() - b).norm() / b.norm())

    moved = [error(a, b) for (name, a), b in zip(ours.named_buffers(), exact.buffers()) if "running" in name]
    pairs = list(zip(ours.parameters(), exact.parameters(), strict=True))
    assert all(mine.grad.shape == mine.shape and mine.grad.dtype == torch.float32 for mine, _ in pairs)
    every = [error(mine.grad, theirs.grad) for mine, theirs in pairs]
    return error(z.detach(), want.detach()), max(moved), [e for e, (p, _) in zip(every, pairs) if p.dim() == 4], every


@interpreted
@pytest.mark.parametrize(("depth", "shape", "n"), [(8, (3, 16, 16), 3), (14, (1, 12, 9), 5)])
def test_interpreted(depth, shape, n):
    z, moved, weights, every = errors(depth, shape, n, torch.float32)
    assert z < 1e-5 and moved < 1e-5 and max(every) < 1e-4
    z, moved, weights, _ = errors(depth, shape, n, torch.float16)
    assert z < 0.01 and moved < 0.01 and max(weights) < 0.2


def test_other_networks_and_devices_have_no_kernels():
    assert not has_kernels(network(8, 3).backbone, (3, 32, 32))  # on the CPU
    assert not has_kernels(torch.nn.Linear(4, 2), (4,))


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_a_rehearsal_launches_what_training_does(monkeypatch):
    def note(kernel, grid, *arguments, **options):
        kinds = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)
        launches.append((kernel.fn.__name__, grid, kinds, tuple(options.items())))

    monkeypatch.setattr(training_pass, "launch", note)
    net, launches = network(14, 3).backbone, []
    training_pass.rehearse(net, torch.zeros(3, 3, 10, 12))
    ahead, launches = launches, []
    features(net, images(3, (3, 10, 12))).sum().backward()
    assert launches == ahead and len(launches) == 1 + 13 * 5 - 1 + 5  # the first layer has no gradient in its input


def test_it_runs_in_training_mode_and_in_its_block_alone(monkeypatch):
    monkeypatch.setattr(training_pass, "features", lambda net, x: "own")
    net = network(8, 1).backbone
    x = torch.rand(2, 1, 8, 8)
    with own_pass(net):
        assert net(x) == "own"
        assert net.eval()(x).shape == (2, 64)
    assert net.train()(x).shape == (2, 64)
    with pytest.raises(ZeroDivisionError), own_pass(net):
        _ = 1 / 0
    assert not net.own_pass


def scaled_gradient(net, name, factor):
    """The network, in bfloat16, whose gradient in one parameter is multiplied by `factor`."""

    def features(x):
        weight = dict(net.named_parameters())[name]
        with torch.autocast("cpu", torch.bfloat16):
            twisted = weight.detach() + (weight - weight.detach()) * factor
            return torch.func.functional_call(net, {name: twisted}, (x,))

    return features


def tap_dropped(shape):
    factor = torch.ones(shape)
    factor[:, :, 1, 2] = 0
    return factor


@pytest.mark.parametrize(
    ("wrong", "agree"),
    [
        ("nothing", True),
        ("features", False),
        ("tap", False),
        ("filters", False),
        ("gamma", False),
        ("beta", False),
        ("statistics", False),
    ],
)
def test_it_is_compared_with_the_network(wrong, agree, monkeypatch):
    """Running statistics and the mode stay as they were."""
    net = network(14, 1).backbone.eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    name, factor = {
        "tap": ("blocks.2.conv1.weight", tap_dropped((32, 16, 3, 3))),
        "filters": ("blocks.4.conv2.weight", 1.2),
        "gamma": ("blocks.3.norm1.weight", 2.0),
        "beta": ("blocks.3.norm1.bias", -1.0),
    }.get(wrong, ("conv.weight", 1.0))

    def features(net, x, kind):
        z = scaled_gradient(net, name, factor)(x)
        if wrong == "statistics":
            net.blocks[0].norm2.running_var.mul_(1.2)
        return 1.1 * z if wrong == "features" else z

    monkeypatch.setattr(kernel_checks, "features", features)
    x = images(16, (1, 16, 16))
    assert (problem(net, x) == "") == agree
    assert not net.training and all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    net.conv.weight.requires_grad_(False)
    assert (problem(net, x) == "") == agree


def test_gradients_in_the_images_are_not_lost(monkeypatch):
    monkeypatch.setattr(training_pass, "features", lambda net, x: 1 / 0)
    net = network(8, 1).backbone
    with own_pass(net):
        net(torch.rand(2, 1, 8, 8, requires_grad=True)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def change_block(net):
    net.blocks.append(torch.nn.Dropout2d(0.1))


def change_norm(net):
    net.blocks[1].norm1 = torch.nn.BatchNorm2d(32)


def hook_forward(net):
    net.blocks[0].conv1.register_forward_hook(lambda *args: None)


def hook_backward(net):
    net.blocks[0].register_full_backward_hook(lambda *args: None)


@pytest.mark.parametrize("change", [None, change_block, change_norm, hook_forward, hook_backward])
def test_networks_that_somebody_has_changed(change, monkeypatch):
    """Where there is a GPU for them."""
    room = types.SimpleNamespace(shared_memory_per_block_optin=160 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: room)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    net = network(8, 3).backbone
    if change is not None:
        change(net)
    assert has_kernels(net, (3, 32, 32)) == (change is None)
    assert not foldable(mmlda.Classifier(net, mmlda.SoftmaxHead(10, 64)), (3, 32, 32))  # needs (9, 0)
    room.shared_memory_per_block_optin = 99 << 10
    assert not has_kernels(net, (3, 32, 32))
    room.shared_memory_per_block_optin = 160 << 10
    assert not has_kernels(network(8, 3, width=8).backbone, (3, 32, 32))
    assert not has_kernels(network(8, 3, preactivation=True).backbone, (3, 32, 32))
    assert not has_kernels(network(8, 3, activation="silu").backbone, (3, 32, 32))


@interpreted
def test_the_kernels_agree_with_the_network():
    net = network(14, 3).backbone
    assert not problem(net, images(8, (3, 12, 12)), torch.float16)


@pytest.mark.skipif(TRITON, reason="triton is installed")
def test_without_triton_it_steps_aside():
    assert problem(network(8, 1).backbone, torch.rand(4, 1, 8, 8))


def test_triton_is_imported_late():
    code = "import sys, mmlda, mmlda.models.folded, mmlda.models.training_pass; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this torch has the older setting alone")
@pytest.mark.parametrize(
    "setting", ["cudnn.conv.fp32_precision", "fp32_precision", "cudnn.allow_tf32", "cudnn.enabled"]
)
def test_both_ways_to_forbid_tf32_are_understood(setting):
    code = (
        "import torch; from mmlda.models import kernels; from mmlda.attacks import replay\n"
        "read = lambda: (kernels.tf32_allowed(), replay.tf32_allowed()); before = read()\n"
        f"torch.backends.{setting} = {'ieee' if 'precision' in setting else False!r}\n"
        "assert before == (True, True) and read() == (False, False), (before, read())"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class Kernel:
    """Stands in for one of Triton's: notes what is launched and what is compiled ahead."""

    def __init__(self, fails=False):
        self.fails, self.launched, self.compiled, self.threads = fails, [], [], set()

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launched.append(grid)

    def run(self, *arguments, grid, warmup, **options):
        assert warmup
        self.compiled.append((arguments, options))
        self.threads.add(threading.get_ident())
        if self.fails:
            raise RuntimeError("not enough shared memory")


def test_kernels_are_compiled_ahead_once_each_and_not_launched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    kernel, broken, x = Kernel(), Kernel(fails=True), torch.zeros(2)

    def work():
        kernels.launch(broken, (1,), x)
        for stride in (1, 2, 1):  # the third as the first
            kernels.launch(kernel, (5,), x, stride, num_warps=4)
        kernels.launch(kernel, (5,), x.double(), 1, num_warps=4)
        kernels.launch(kernel, (5,), x, 1, num_warps=8)

    def work_beside_another_thread():
        other = threading.Thread(target=kernels.launch, args=(kernel, (7,), x))
        other.start()
        other.join()
        work()

    with kernels.compiled_ahead(work_beside_another_thread):
        assert kernel.launched == [(7,)]  # the other thread collects nothing
    assert kernel.launched == [(7,)] and broken.launched == []
    assert len(kernel.compiled) == 4 and len(broken.compiled) == 1
    assert threading.get_ident() not in kernel.threads
    work()
    assert len(kernel.launched) == 6 and len(broken.launched) == 1


@cuda
@pytest.mark.parametrize(
    ("depth", "shape", "n"), [(8, (3, 32, 32), 37), (32, (1, 28, 28), 128), (32, (3, 32, 32), 256), (8, (2, 11, 13), 5)]
)
def test_on_cuda(depth, shape, n):
    for kind, z_error, error in ((torch.bfloat16, 0.02, 0.5), (torch.float16, 0.003, 0.2)):
        z, moved, weights, _ = errors(depth, shape, n, kind, "cuda")
        assert z < z_error and moved < 0.02 and max(weights) < error


@cuda
def test_the_same_images_give_the_same_bits():
    x, found = images(64, (3, 32, 32), "cuda"), []
    for _ in range(2):
        net = network(14, 3, "cuda").backbone
        features(net, x).square().sum().backward()
        found.append([p.grad for p in net.parameters()] + list(net.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@cuda
@pytest.mark.parametrize("deterministic", [False, True])
def test_training_in_them_learns_as_without(deterministic, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 3, 8, 8, generator=generator).repeat_interleave(2, 2).repeat_interleave(2, 3)
    y = torch.arange(2000) % 10
    pixels = 255 * (0.5 * patterns[y] + 0.5 * torch.rand(2000, 3, 16, 16, generator=generator))
    data, found, passes = ImageData(pixels.to(torch.uint8), y, tuple("0123456789"), "patterns"), [], []
    original = training_pass.features
    monkeypatch.setattr(training_pass, "features", lambda net, x: passes.append(len(x)) or original(net, x))
    for own in (True, False):
        if not own:
            monkeypatch.setattr(kernel_checks, "has_kernels", lambda net, shape: False)
        model = network(14, 3)
        passes.clear()
        run = fit(model, data, Recipe(steps=200, lr=0.05), device="cuda", deterministic=deterministic, show=False)
        assert bool(passes) == own and not model.backbone.own_pass
        found.append(torch.tensor([entry["loss"] for entry in run.history]))
        assert run.accuracy > 0.9
    assert (found[0] - found[1]).abs().max() < 0.2 * found[1].max()
