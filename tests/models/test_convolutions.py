"""conv3x3 against F.conv2d in float64: its values, its gradients, and when it steps aside."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from mmlda.models import convolutions as kernels
from mmlda.models import resnet, triton_conv
from mmlda.models.convolutions import conv3x3, supported
from mmlda.models.triton_conv import Gather, Split

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = importlib.util.find_spec("triton") is not None
cuda = pytest.mark.skipif(not torch.cuda.is_available() or not TRITON, reason="needs CUDA and triton")

# inputs, outputs, stride, height, width: Resnet-32's layers on CIFAR-10, on MNIST, and images of odd shape
LAYERS = [(16, 16, 1, 32, 32), (16, 32, 2, 32, 32), (32, 32, 1, 16, 16), (32, 64, 2, 16, 16), (64, 64, 1, 8, 8)]
ODD = [
    (16, 16, 1, 28, 28),
    (16, 32, 2, 28, 28),
    (32, 32, 1, 14, 14),
    (32, 64, 2, 14, 14),
    (64, 64, 1, 7, 7),
    (16, 32, 2, 7, 10),
    (32, 64, 2, 5, 3),
    (16, 64, 1, 3, 1),
    (64, 16, 2, 1, 9),
    (32, 16, 1, 1, 1),
]
CUTS = [
    (Gather(16, 1, 1, 4, 2), Split(16, 1, 3, 4, 2)),
    (Gather(32, 3, 1, 4, 2), Split(32, 3, 2, 4, 2)),
    (Gather(16, 8, 2, 4, 1), Split(16, 8, 4, 4, 1)),
]

NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # the one that CUDA's arithmetic makes


def make(layer, batch, kind, *, weight_kind=None, device="cpu", channels_last=True, seed=0, exact=False):
    """x, weight, dy of a layer, and their float64 answers y, dx, dw with the weight rounded as the programs do.

    With `exact` in 11 bits, which TF32 has.
    """
    inputs, outputs, stride, height, width = layer
    g = torch.Generator().manual_seed(seed)
    form = torch.channels_last if channels_last else torch.contiguous_format
    fine = torch.float16 if exact else torch.float32
    x = torch.randn(batch, inputs, height, width, generator=g).to(fine).to(kind)
    weight = (torch.randn(outputs, inputs, 3, 3, generator=g) / (3 * inputs**0.5)).to(fine).to(weight_kind or kind)
    x64, w64 = x.to(device).double().requires_grad_(), weight.to(kind).to(device).double().requires_grad_()
    y = F.conv2d(x64, w64, stride=stride, padding=1)
    dy = torch.randn(y.shape, generator=g).to(fine).to(kind).to(device)
    dx, dw = torch.autograd.grad(y, (x64, w64), dy.double())
    given = [t.to(device).contiguous(memory_format=form) for t in (x, weight, dy)]
    return given, (y.detach(), dx, dw)


def error(got, want):
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("inputs, outputs", [(3, 16), (16, 16), (16, 32), (5, 7)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_the_fallback_is_conv2d(inputs, outputs, stride, kind):
    (x, weight, dy), _ = make((inputs, outputs, stride, 7, 6), 3, kind)
    assert not supported(x, weight, stride)
    results = []
    for f in (conv3x3, lambda x, weight, stride: F.conv2d(x, weight, stride=stride, padding=1)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = f(a, b, stride)
        results.append((y.detach(), *torch.autograd.grad(y, (a, b), dy)))
    for ours, theirs in zip(*results):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_the_fallback_under_autocast():
    (x, weight, _), _ = make((16, 16, 1, 8, 8), 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = conv3x3(x, weight)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, F.conv2d(x, weight, padding=1))


def test_triton_is_imported_late():
    code = "import sys, mmlda, mmlda.models.convolutions; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this torch has the older setting alone")
@pytest.mark.parametrize(
    "setting", ["cudnn.conv.fp32_precision", "fp32_precision", "cudnn.allow_tf32", "cudnn.enabled"]
)
def test_both_ways_to_forbid_tf32_are_understood(setting):
    code = (
        "import torch; from mmlda.models import convolutions; from mmlda.attacks import replay; x = torch.zeros(1)\n"
        "read = lambda: (convolutions._aside(x), replay.tf32_allowed()); before = read()\n"
        f"torch.backends.{setting} = {'ieee' if 'precision' in setting else False!r}\n"
        "assert before == (False, True) and read() == (True, False), (before, read())"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("layer", [*LAYERS, *ODD])
def test_what_the_compiler_is_told(layer):
    """Shapes, dtypes and strides of the operators without running them."""
    inputs, outputs, stride, height, width = layer
    x = torch.empty(2, inputs, height, width, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(outputs, inputs, 3, 3, device="meta", requires_grad=True)
    y = kernels._forward(x, weight, stride)
    like = F.conv2d(x, weight.bfloat16(), stride=stride, padding=1)
    assert (y.shape, y.dtype) == (like.shape, torch.bfloat16)
    assert y.is_contiguous(memory_format=torch.channels_last)
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
    assert (dw.shape, dw.dtype, dw.stride()) == (weight.shape, torch.float32, weight.stride())


@pytest.mark.parametrize("layer", LAYERS)
def test_the_measured_cuts_are_known(layer):
    """Every layer of the network has its own entry in the tables, for all three programs."""
    inputs, outputs, stride, *_ = layer
    assert (inputs, outputs, stride) in triton_conv._GATHER
    assert (outputs, inputs, stride) in triton_conv._GATHER
    assert (inputs, outputs, stride) in triton_conv._SPLIT
    if inputs == 16:
        assert (inputs, outputs, stride) in triton_conv._GATHER_FLOAT32
        assert (outputs, inputs, stride) in triton_conv._GATHER_FLOAT32


# Compiling before the first launch.


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


def test_a_rehearsal_without_kernels_has_the_shapes():
    net = resnet(8)
    with kernels.compiled_ahead(lambda: net.rehearse(torch.zeros(2, 3, 9, 10))):
        y = kernels.rehearse(torch.zeros(2, 16, 9, 10), net.blocks[1].conv1.weight, 2)
    assert y.shape == (2, 32, 5, 5) and y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_rehearsal_launches_what_training_does(layout, monkeypatch):
    def note(kernel, grid, *arguments, **options):
        kinds = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)
        launches.append((kernel.fn.__name__, grid, kinds, tuple(options.items())))

    monkeypatch.setattr(triton_conv, "launch", note)
    monkeypatch.setattr(kernels, "supported", lambda *args, **options: True)
    monkeypatch.setattr(kernels, "_aside", lambda x: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    net, launches = resnet(14).to(memory_format=layout), []
    net.rehearse(torch.zeros(3, 3, 10, 12))
    ahead, launches = launches, []
    h = torch.zeros(3, 16, 10, 12, dtype=torch.bfloat16, requires_grad=True)
    z = h.contiguous(memory_format=torch.channels_last)
    for block in net.blocks:
        z = kernels._forward(kernels._forward(z, block.conv1.weight, block.conv1.stride[0]), block.conv2.weight, 1)
    z.float().sum().backward()
    assert len(launches) == 12 * 4 and sorted(launches, key=str) == sorted(ahead, key=str)


# The programs in Triton's interpreter, where there is no GPU: float32 and half (its bfloat16 products are wrong).


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
@pytest.mark.long
def test_in_the_interpreter():
    """Triton chooses its interpreter when it's imported, so the tests below run in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "interpreted"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "failed" not in done.stdout


@pytest.mark.skipif(not (TRITON and INTERPRETED), reason="for Triton's interpreter (TRITON_INTERPRET=1)")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "kind, weight_kind, channels_last, most",
    [
        (torch.float32, torch.float32, False, 1e-6),
        (torch.float16, torch.float32, True, 1e-3),
        (torch.float16, torch.float16, False, 1e-3),
    ],
)
@pytest.mark.parametrize("layer", [(16, 16, 1, 7, 7), (16, 32, 2, 7, 6), (32, 16, 2, 5, 8), (16, 16, 1, 1, 3)])
def test_interpreted_programs(layer, kind, weight_kind, channels_last, most, cut):
    (x, weight, dy), (y, dx, dw) = make(layer, 2, kind, weight_kind=weight_kind, exact=True)
    weight = weight.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    stride, (gather, split) = layer[2], cut
    assert error(triton_conv.forward(x, weight, stride, gather), y) < most
    assert error(triton_conv.input_grad(dy, weight, stride, *x.shape[2:], gather), dx) < most
    got = triton_conv.weight_grad(x, dy, weight, stride, split)
    assert (got.dtype, got.stride()) == (weight.dtype, weight.stride())
    assert error(got, dw) < most


@pytest.mark.skipif(not (TRITON and INTERPRETED), reason="for Triton's interpreter (TRITON_INTERPRET=1)")
@pytest.mark.parametrize("cut", [gather for gather, _ in CUTS])
@pytest.mark.parametrize("stride", [1, 2])
def test_interpreted_rounding(stride, cut):
    """Float32 is rounded to the nearest 11 bits, as frexp and round do it; NaN and infinity stay."""

    def tf32(t):
        mantissa, exponent = torch.frexp(t.double())
        return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)

    (x, weight, dy), _ = make((16, 32, stride, 6, 6), 2, torch.float32)
    want = F.conv2d(tf32(x), tf32(weight), stride=stride, padding=1)
    assert error(triton_conv.forward(x, weight, stride, cut), want) < 1e-6
    assert error(F.conv2d(x, weight, stride=stride, padding=1), want) > 1e-5  # without it
    place = tf32(x).requires_grad_()
    (want,) = torch.autograd.grad(F.conv2d(place, tf32(weight), stride=stride, padding=1), place, tf32(dy))
    assert error(triton_conv.input_grad(dy, weight, stride, 6, 6, cut), want) < 1e-6
    x[0, 0, 0, 0], x[1, 0, 5, 5] = NAN, torch.inf
    y = triton_conv.forward(x, weight.abs(), stride, cut)
    assert y[0, :, 0, 0].isnan().all() and y[0, :, -1, -1].isfinite().all()
    assert (y[1, :, -1, -1] == torch.inf).all() and y[1, :, 0, 0].isfinite().all()


# On CUDA.


@cuda
@pytest.mark.parametrize("layer, batch", [(layer, n) for layer in (*LAYERS, *ODD) for n in (1, 3, 128)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_on_cuda(layer, batch, kind):
    (x, weight, dy), want = make(layer, batch, kind, device="cuda")
    x.requires_grad_()
    weight.requires_grad_()
    assert supported(x, weight, layer[2])
    y = conv3x3(x, weight, layer[2])
    assert y.dtype == kind and y.is_contiguous(memory_format=torch.channels_last)
    for got, true in zip((y, *torch.autograd.grad(y, (x, weight), dy)), want):
        assert got.dtype == kind
        assert error(got, true) < 1e-2


@cuda
@pytest.mark.parametrize("layer, batch", [(layer, n) for layer in (*LAYERS, *ODD) for n in (1, 128) if layer[0] == 16])
def test_float32_on_cuda(layer, batch, monkeypatch):
    """TF32 as cuDNN has it, rounded to nearest; exact where TF32 is not allowed; cuDNN's for a weight to be trained."""
    (x, weight, dy), want = make(layer, batch, torch.float32, device="cuda")
    x.requires_grad_()
    assert supported(x, weight, layer[2], tf32=True) and not supported(x, weight, layer[2])
    runs, images = [], triton_conv._images
    monkeypatch.setattr(triton_conv, "_images", lambda *args: runs.append(args) or images(*args))
    for allowed, most in ((True, 5e-4), (False, 1e-5)):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        y = conv3x3(x, weight, layer[2], tf32=True)
        assert y.dtype == torch.float32 and y.is_contiguous(memory_format=torch.channels_last)
        for got, true in zip((y, *torch.autograd.grad(y, x, dy)), want):
            assert error(got, true) < most
            bias = ((got - true) * true.sign()).sum() / true.abs().sum()  # cut off instead of rounded: 7e-4
            assert abs(bias) < 2e-4 or true.numel() < 1000
        assert len(runs) == 2  # a program forward and one back while TF32 was allowed, and none after
    assert not supported(x, weight.requires_grad_(), layer[2], tf32=True)


@cuda
def test_float32_keeps_nan_and_infinity():
    x, weight = torch.zeros(1, 16, 8, 8, device="cuda"), torch.ones(16, 16, 3, 3, device="cuda")
    x[0, 0, 0, 0], x[0, 0, 7, 7] = NAN, torch.inf
    y = conv3x3(x, weight, tf32=True)
    assert y[0, :, :2, :2].isnan().all() and (y[0, :, 6:, 6:] == torch.inf).all()
    assert int((y == 0).sum()) == 16 * (64 - 8)


@cuda
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("channels_last", [True, False])
def test_autocast_on_cuda(layer, channels_last):
    """A float32 weight in any memory format is rounded inside; its gradient is float32."""
    (x, weight, dy), want = make(
        layer, 4, torch.bfloat16, weight_kind=torch.float32, device="cuda", channels_last=channels_last
    )
    x.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        assert supported(x, weight, layer[2])
        y = conv3x3(x, weight, layer[2])
        assert torch.equal(y, conv3x3(x.float(), weight, layer[2]))
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    for got, true in zip((y, dx), want):
        assert error(got, true) < 1e-2
    assert error(dw, want[2]) < 1e-5  # never rounded to bfloat16


@cuda
@pytest.mark.parametrize("layer", LAYERS)
def test_the_same_bits(layer):
    (x, weight, dy), _ = make(layer, 128, torch.bfloat16, weight_kind=torch.float32, device="cuda")
    first = None
    for _ in range(5):
        dw = kernels._weight_grad(dy, x, weight, layer[2])
        first = dw if first is None else first
        assert torch.equal(dw, first)


@cuda
@pytest.mark.parametrize("stride", [1, 2])
def test_compiled_and_captured(stride):
    """One graph for the compiler, and a CUDA graph that follows its inputs."""
    shape = (16, 32, stride, 16, 16)
    (x, weight, dy), _ = make(shape, 8, torch.bfloat16, weight_kind=torch.float32, device="cuda")
    (x2, _, _), _ = make(shape, 8, torch.bfloat16, weight_kind=torch.float32, device="cuda", seed=1)
    x.requires_grad_()
    weight.requires_grad_()

    def layer(x, weight):
        with torch.autocast("cuda", torch.bfloat16):
            return F.relu(conv3x3(F.relu(x), weight, stride))

    compiled = torch.compile(layer, fullgraph=True)
    for f in (layer, compiled):
        y = f(x, weight)
        grads = torch.autograd.grad(y, (x, weight), dy)
        if f is layer:
            eager = (y, *grads)
    for got, true in zip((y, *grads), eager):
        assert error(got, true.double()) < 1e-2

    fixed, w = x.detach().clone(memory_format=torch.preserve_format), weight.detach().bfloat16()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        conv3x3(fixed, w, stride)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = conv3x3(fixed, w, stride)
    fixed.copy_(x2)
    graph.replay()
    assert torch.equal(out, conv3x3(x2, w, stride))


@cuda
def test_operators_keep_their_contract():
    (x, weight, dy), _ = make((16, 32, 2, 7, 6), 3, torch.bfloat16, weight_kind=torch.float32, device="cuda")
    x.requires_grad_()
    weight.requires_grad_()
    torch.library.opcheck(kernels._forward, (x, weight, 2))
    torch.library.opcheck(kernels._input_grad, (dy, x.detach(), weight.detach(), 2))
    torch.library.opcheck(kernels._weight_grad, (dy, x.detach(), weight.detach(), 2))


@cuda
@pytest.mark.parametrize("channels", [3, 24, 128])
def test_other_channels_step_aside_on_cuda(channels):
    (x, weight, _), _ = make((channels, 16, 1, 8, 8), 2, torch.bfloat16, device="cuda")
    assert not supported(x, weight)
    assert torch.equal(conv3x3(x, weight), F.conv2d(x, weight, padding=1))
