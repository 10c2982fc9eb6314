"""A folded Resnet against the network itself: logits, gradients in the images, and when it steps aside."""

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

import mmlda
from mmlda.models import build
from mmlda.models import folded as module
from mmlda.models.folded import Cut, agrees, fold, foldable, folded

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and TRITON
cuda = pytest.mark.skipif(not torch.cuda.is_available() or not TRITON, reason="needs CUDA and triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 and triton")


def network(depth, channels, head="mmlda", device="cpu", **options):
    """A network whose batch norms are as after training: no two alike."""
    model = build(
        {"backbone": "resnet", "depth": depth, "channels": channels, "head": head, "num_classes": 10} | options, seed=0
    )
    generator = torch.Generator().manual_seed(0)
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.weight.data.uniform_(0.3, 0.9, generator=generator)
            norm.bias.data.normal_(0, 0.3, generator=generator)
            norm.running_mean.normal_(0, 0.3, generator=generator)
            norm.running_var.uniform_(0.5, 1.5, generator=generator)
    return model.eval().to(device)


def images(n, shape, device="cpu"):
    return torch.rand((n, *shape), generator=torch.Generator().manual_seed(1)).to(device)


def slopes(function, x, v):
    x = x.detach().requires_grad_()
    z = function(x)
    return z.detach(), torch.autograd.grad((z * v).sum(), x)[0]


def cosines(g, h):
    return F.cosine_similarity(g.double().flatten(1), h.double().flatten(1))


@pytest.mark.parametrize("channels", [1, 3])
def test_filters_are_those_of_the_network(channels):
    """The stages, computed with F.conv2d from the folded filters, give the network's features."""
    model = network(14, channels).double()
    net = model.backbone
    x = images(2, (channels, 16, 16)).double()
    h = x - 0.5
    for number, stage in enumerate(fold(net, torch.float64)):
        C = stage.shifts.shape[1]
        before = h
        h = F.conv2d(h, stage.first.permute(3, 2, 0, 1), stage.first_shift, stride=2 if number else 1, padding=1)
        h = F.relu(h)
        past = h
        if number:
            past = F.pad(before[:, :, ::2, ::2], (0, 0, 0, 0, C // 4, C // 4))
        for layer, (weight, shift) in enumerate(zip(stage.weights, stage.shifts)):
            if weight.ndim == 5:  # for pairs of pixels: the left one sees the first three, the right one the last three
                assert torch.equal(weight[:, :3, :, 0], weight[:, 1:, :, 1])
                assert not weight[:, 3, :, 0].any() and not weight[:, 0, :, 1].any()
                weight = weight[:, :3, :, 0]
            if layer % 2 == (number == 0):
                h = past = F.relu(F.conv2d(h, weight.permute(3, 2, 0, 1), shift, padding=1) + past)
            else:
                h = F.relu(F.conv2d(h, weight.permute(3, 2, 0, 1), shift, padding=1))
    assert torch.allclose(h.mean((2, 3)), net(x - 0.5), rtol=1e-9, atol=1e-12)


def test_other_networks_are_not_folded():
    assert not foldable(network(8, 3), (3, 32, 32))  # on the CPU
    assert not foldable(torch.nn.Linear(4, 2), (4,))


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_a_rehearsal_launches_what_attacks_do(monkeypatch):
    """The kernels that are compiled ahead are those of batches of any size."""

    def note(kernel, grid, *arguments, num_warps, num_stages):
        kinds = [a.dtype if isinstance(a, torch.Tensor) else a for a in arguments]
        del kinds[8]  # the size of a slot, which the batch decides
        launches.append((kernel.fn.__name__, *kinds, num_warps, num_stages))

    monkeypatch.setattr(module, "launch", note)
    model, launches = network(14, 3), []
    module._rehearse(model, images(16, (3, 12, 20)), torch.float16)
    ahead, launches = launches, []
    slopes(folded(model, torch.float16), images(5, (3, 12, 20)), torch.zeros(5, 10))
    assert len(launches) == 6 and launches == ahead


@interpreted
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 12), (2, 14, 28)])
def test_interpreted(shape):
    model = network(14, shape[0])
    x, v = images(2, shape), torch.randn(2, 10, generator=torch.Generator().manual_seed(2))
    z, g = slopes(folded(model, torch.float16), x, v)
    want, slope = slopes(model, x, v)
    assert torch.allclose(z, want, rtol=0, atol=2e-3 * want.abs().max())
    assert cosines(g, slope).min() > 0.98  # a ReLU near 0 may fall on the other side


@interpreted
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_interpreted_gradients_of_any_size(size):
    """Half precision ends at 65,504 and at 6e-8: an image's gradient is scaled before and after."""
    model = network(8, 1)
    x, v = images(2, (1, 8, 8)), torch.randn(2, 10, generator=torch.Generator().manual_seed(2))
    sizes = torch.tensor([[size], [1.0]])
    g = slopes(folded(model, torch.float16), x, v * sizes)[1].flatten(1).double() / sizes
    slope = slopes(model, x, v)[1].flatten(1)
    assert cosines(g, slope).min() > 0.98
    assert torch.allclose(g.norm(dim=1).float(), slope.norm(dim=1), rtol=0.02)
    assert not slopes(folded(model, torch.float16), x, 0 * v)[1].any()


@interpreted
def test_interpreted_agreement(monkeypatch):
    """Both passes count: with the kernels of one stage at fault, the network is not folded."""
    model, x = network(8, 1), images(2, (1, 8, 8))
    assert agrees(model, x, torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr(module, "fold", lambda net, kind: [s._replace(weights=-s.weights) for s in fold(net, kind)])
        assert not agrees(model, x, torch.float16)
    monkeypatch.setattr(module, "fold", lambda net, kind: [s._replace(back=-s.back) for s in fold(net, kind)])
    assert not agrees(model, x, torch.float16)


@cuda
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 13, 12)])
@pytest.mark.parametrize("n", [1, 7, 128, 300])
@pytest.mark.parametrize("head", ["softmax", "mmlda"])
def test_on_cuda(n, shape, head):
    model = network(32, shape[0], head, "cuda")
    assert foldable(model, shape)
    x, v = images(n, shape, "cuda"), torch.randn(n, 10, device="cuda")
    assert agrees(model, x)
    z, g = slopes(folded(model), x, v)
    want, slope = slopes(network(32, shape[0], head, "cuda").double(), x.double(), v.double())
    with torch.autocast("cuda", torch.bfloat16):
        rounded = slopes(model, x, v)[1]
    assert (z - want).norm() < 0.03 * want.norm()
    assert cosines(g, slope).mean() > cosines(rounded, slope).mean() - 0.02  # no worse than autocast
    assert cosines(g, slope).mean() > 0.8


@cuda
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_in_half_precision_on_cuda(shape):
    model = network(32, shape[0], "mmlda", "cuda")
    x, v = images(200, shape, "cuda"), torch.randn(200, 10, device="cuda")
    assert agrees(model, x, torch.float16)
    z, g = slopes(folded(model, torch.float16), x, v)
    want, slope = slopes(network(32, shape[0], "mmlda", "cuda").double(), x.double(), v.double())
    assert (z - want).norm() < 5e-3 * want.norm()
    assert cosines(g, slope).mean() > cosines(slopes(model, x, v)[1], slope).mean() - 0.01  # cuDNN's TF32


@cuda
def test_attacks_use_it_in_place_of_compiling():
    model = network(14, 3, "mmlda", "cuda")
    x = images(50, (3, 32, 32), "cuda")
    y = model.predict(x)
    fast = mmlda.attacks.compiled(model)
    ours, plain = (mmlda.attacks.PGD(eps=4 / 255, steps=20, seed=0)(net, x, y) for net in (fast, model))
    assert list(fast._own.values()) != [None]
    assert (ours.prediction == plain.prediction).float().mean() > 0.9
    assert (model.predict(ours.x_adv) == ours.prediction).float().mean() > 0.9  # rounding decides ties


@cuda
def test_the_same_bits():
    model, x = network(32, 3, device="cuda"), images(64, (3, 32, 32), "cuda")
    first, second = (slopes(folded(model), x, torch.ones(64, 10, device="cuda")) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@cuda
@pytest.mark.parametrize(
    "options", [{"width": 32}, {"preactivation": True}, {"activation": "silu"}], ids=["wide", "preactivation", "silu"]
)
def test_others_step_aside_on_cuda(options):
    assert not foldable(network(8, 3, device="cuda", **options), (3, 32, 32))
    assert not foldable(network(8, 3, device="cuda"), (3, 32, 30))


@cuda
def test_what_does_not_fit_steps_aside(monkeypatch):
    monkeypatch.setitem(module.CUTS, 64, Cut(1024, 8, False, 4))  # more shared memory than there is
    assert not agrees(network(8, 3, device="cuda"), images(16, (3, 32, 32), "cuda"))


@cuda
def test_training_crafts_on_it(monkeypatch):
    """Loss and accuracy are those of training on the network itself, to the noise of a few steps."""
    data = mmlda.data.ImageData(
        torch.randint(0, 256, (512, 3, 16, 16), dtype=torch.uint8), torch.arange(512) % 4, tuple("abcd")
    )
    adversary = mmlda.Adversary(attack="pgd", eps=8 / 255, steps=3, step=0.5, random_start=True)
    recipe = mmlda.Recipe(steps=60, optimizer="sgd", lr=0.05, batch_size=64, adversary=adversary)
    losses, used = [], []
    for fast in (True, False):
        from mmlda.training import step

        monkeypatch.setattr(step, "agrees", lambda model, x, fast=fast: used.append(agrees(model, x)) or fast)
        model = build({"backbone": "resnet", "depth": 8, "channels": 3, "head": "softmax", "num_classes": 4}, seed=0)
        losses.append(mmlda.fit(model, data, recipe, device="cuda", show=False).loss)
    assert used == [True, True]
    assert abs(losses[0] - losses[1]) < 0.05
