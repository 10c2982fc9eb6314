"""A training pass of a Resnet in the package's own kernels on CUDA: nothing is compiled by torch, and launches are few.

The kernels need much shared memory, as an A100 has or what came after it for data centres. They run only while training
captures a step: outside a CUDA graph their launches would cost more than they save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmlda.models.kernels import launch

INPUTS = 16  # channels of the images, padded: the fewest that a matrix product takes


class Tiling(NamedTuple):
    """How the convolutions that write so many channels are cut up."""

    pixels: int  # of a tile
    warps: int
    programs: int  # at most about this many


class Split(NamedTuple):
    """How the gradient of a layer's filters is cut up."""

    pixels: int  # summed in one matrix product
    taps: int  # of a program: 1 or 3
    programs: int  # at most about this many


# Measured on an H200 at batch 128.
TILINGS = {16: Tiling(256, 4, 256), 32: Tiling(128, 4, 256), 64: Tiling(64, 4, 128)}
SPLITS = {
    (16, 16): Split(128, 3, 88),
    (16, 32): Split(128, 3, 88),
    (32, 32): Split(64, 3, 88),
    (32, 64): Split(64, 3, 44),
    (64, 64): Split(64, 1, 32),
}
FLAT = {16: 16384, 32: 8192, 64: 8192}  # numbers per program of the launches without a product


class Layer(NamedTuple):
    """Shape of one convolution with its norm."""

    inputs: int
    outputs: int
    stride: int
    height: int  # of the output
    width: int


def layers_of(net: Any) -> tuple[list[Any], list[Any]]:
    """Convolutions, and the batch norm that follows each."""
    convs = [net.conv, *(conv for block in net.blocks for conv in (block.conv1, block.conv2))]
    return convs, [net.norm, *(norm for block in net.blocks for norm in (block.norm1, block.norm2))]


@contextmanager
def own_pass(net: Any) -> Iterator[None]:
    """Run a `ResNet` that `has_kernels` in them, in training mode and for the time of the block."""
    net.own_pass = True
    try:
        yield
    finally:
        net.own_pass = False


def features(net: Any, x: Tensor, kind: torch.dtype = torch.bfloat16) -> Tensor:
    """Features [N, 64] in float32 of images x [N, C, H, W], normalised, in training mode.

    Running statistics move. Activations are of type `kind`. Differentiable in the network's parameters alone.
    """
    convs, norms = layers_of(net)
    parameters = [t for conv, norm in zip(convs, norms) for t in (conv.weight, norm.weight, norm.bias)]
    return _Features.apply(x, net, kind, *parameters)


@torch.no_grad()
def rehearse(net: Any, x: Tensor, kind: torch.dtype = torch.bfloat16) -> None:
    """Launch every kernel of a pass, for `compiled_ahead`."""
    z, kept = _forward(net, x, kind)
    _backward(z, kept)


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Any, kind: torch.dtype, *parameters: Tensor) -> Tensor:
        with torch.cuda.device_of(x):
            z, ctx.kept = _forward(net, x, kind)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.cuda.device_of(grads[0]):
            return None, None, None, *_backward(grads[0].contiguous(), ctx.kept)


class _Kept(NamedTuple):
    """What the backward pass needs, each in the order of the layers."""

    layers: list[Layer]
    channels: int  # of the images, before padding
    filters: list[Tensor]  # [D, 9, C]
    gammas: list[Tensor]
    raw: list[Tensor]  # output of the convolution, [N, H, W, D]
    stats: list[Tensor]  # its mean and 1 / deviation, [2, D]
    active: list[Tensor]  # the images, then the output of each layer


def _forward(net: Any, x: Tensor, kind: torch.dtype) -> tuple[Tensor, _Kept]:
    convs, norms = layers_of(net)
    layers = _shapes(convs, *x.shape[2:])
    filters = _filters(convs, layers, kind)
    raw: list[Tensor] = []
    stats: list[Tensor] = []
    active = [_padded(x, kind)]
    for n, (layer, norm) in enumerate(zip(layers, norms)):
        c, sums = _convolved(active[n], filters[n], layer, early=n > 0)
        short = active[n - 1] if n and n % 2 == 0 else None  # at the end of a block
        a, statistics = _finished(c, sums, norm, short)
        raw.append(c)
        stats.append(statistics)
        active.append(a)
    kept = _Kept(layers, x.shape[1], filters, [norm.weight for norm in norms], raw, stats, active)
    return active[-1].mean((1, 2), dtype=torch.float32), kept


def _backward(grad: Tensor, kept: _Kept) -> list[Tensor]:
    """Gradients in each layer's filters, and in weight and bias of its norm."""
    layers, raw, active = kept.layers, kept.raw, kept.active
    norms = [torch.empty(2, layer.outputs, device=grad.device) for layer in layers]
    filters = _FilterGradients(layers, len(grad), grad.device)
    g, sums = _pooled(grad, active[-1], raw[-1])
    end = g  # the gradient behind the last ReLU of a block, which goes into its shortcut too
    for n in reversed(range(len(layers))):
        dc = _settled(g, raw[n], sums, kept.stats[n], kept.gammas[n], norms[n])
        filters.add(n, active[n], dc)
        if n:
            g, sums = _back(dc, kept.filters[n], active[n], raw[n - 1], end if n % 2 else None, layers[n])
            end = g if n % 2 else end
    weights = filters.join()
    weights[0] = weights[0][:, : kept.channels]
    return [t for dw, (dgamma, dbeta) in zip(weights, norms) for t in (dw, dgamma, dbeta)]


class _FilterGradients:
    """Gradients in the filters, on a stream of their own beside the rest of the backward pass.

    Layers of one shape are summed together when the first of them, the last to come, is there.
    """

    def __init__(self, layers: list[Layer], images: int, device: torch.device):
        self.layers, self.device = layers, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.rows = {layer: [n for n, other in enumerate(layers) if other == layer] for layer in layers}
        self.parts = {
            layer: torch.empty(len(rows), _rounds(layer, images)[1], 9, layer.inputs, layer.outputs, device=device)
            for layer, rows in self.rows.items()
        }
        self.sums = {
            layer: torch.empty(len(rows), layer.outputs, 3, 3, layer.inputs, device=device)
            for layer, rows in self.rows.items()
        }
        self.held: list[Tensor] = []  # until the streams join, lest their memory be used again before

    def add(self, n: int, x: Tensor, dc: Tensor) -> None:
        """Begin with layer n, from its input and the gradient in its convolution's output."""
        layer = self.layers[n]
        rows = self.rows[layer]
        self.held.append(dc)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            _correlated(x, dc, self.parts[layer][rows.index(n)], layer)
            if n == rows[0]:
                _summed(self.parts[layer], self.sums[layer])

    def join(self) -> list[Tensor]:
        """The gradients [D, C, 3, 3] in the order of the layers, channels last."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.held.clear()
        return [self.sums[layer][self.rows[layer].index(n)].permute(0, 3, 1, 2) for n, layer in enumerate(self.layers)]


def _shapes(convs: Sequence[Any], height: int, width: int) -> list[Layer]:
    found = []
    for conv in convs:
        stride = conv.stride[0]
        height, width = (height - 1) // stride + 1, (width - 1) // stride + 1
        found.append(Layer(max(conv.in_channels, INPUTS), conv.out_channels, stride, height, width))
    return found


def _filters(convs: Sequence[Any], layers: Sequence[Layer], kind: torch.dtype) -> list[Tensor]:
    """The filters in type `kind`, channels last, padded to INPUTS channels: few launches."""
    sizes = [layer.outputs * 9 * layer.inputs for layer in layers]
    flat = torch.zeros(sum(sizes), dtype=kind, device=convs[0].weight.device)
    packed = [
        part.view(layer.outputs, 3, 3, layer.inputs).permute(0, 3, 1, 2)
        for part, layer in zip(flat.split(sizes), layers)
    ]
    packed[0][:, : convs[0].in_channels].copy_(convs[0].weight)
    torch._foreach_copy_(packed[1:], [conv.weight for conv in convs[1:]])
    return packed


def _padded(x: Tensor, kind: torch.dtype) -> Tensor:
    """Images channels last, in type `kind`, with zeros for the channels that they lack."""
    padded = torch.zeros(len(x), *x.shape[2:], INPUTS, dtype=kind, device=x.device)
    padded[..., : x.shape[1]].copy_(x.permute(0, 2, 3, 1))
    return padded


def _cut(tiling: Tiling, pixels: int) -> tuple[int, int]:
    """(programs, tiles of each)."""
    tiles = _over(_over(pixels, tiling.pixels), tiling.programs)
    return _over(pixels, tiling.pixels * tiles), tiles


def _over(a: int, b: int) -> int:
    return -(-a // b)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def _can_be_early(x: Tensor) -> bool:
    """Whether a launch on this device can start while the one before it ends."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _on(x: Tensor, early: bool = True) -> dict[str, Any]:
    """Options of a launch."""
    return {"launch_pdl": early} if _can_be_early(x) else {}


def _convolved(x: Tensor, filters: Tensor, layer: Layer, *, early: bool) -> tuple[Tensor, Tensor]:
    """A layer's convolution, and its sums."""
    from mmlda.models import triton_training as kernels

    C, D, stride, h, w = layer
    N, H, W, _ = x.shape
    tiling = TILINGS[D]
    programs, tiles = _cut(tiling, N * h * w)
    c, sums = x.new_empty(N, h, w, D), torch.empty(programs, 2, D, device=x.device)
    sizes = (N * h * w, H, W, h, w, C, D, stride, False, False, tiling.pixels, tiles, early and _can_be_early(x))
    options = {"num_warps": tiling.warps, "num_stages": 1, **_on(x, early)}
    launch(kernels.gather, (programs,), x, filters, c, sums, c, c, c, *sizes, **options)
    return c, sums


def _finished(c: Tensor, sums: Tensor, norm: Any, short: Tensor | None) -> tuple[Tensor, Tensor]:
    """A layer's output from that of its convolution, and the statistics."""
    from mmlda.models import triton_training as kernels

    N, H, W, D = c.shape
    a, stats = torch.empty_like(c), torch.empty(2, D, device=c.device)
    kind = 0 if short is None else 1 if short.shape == c.shape else 2
    past = a if short is None else short
    block = FLAT[D] // D
    weights = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    numbers = (N * H * W, norm.momentum or 0.1, norm.eps)
    sizes = (H, W, *past.shape[1:], D, kind, block, _power(len(sums)), _can_be_early(c))
    grid = (_over(N * H * W, block),)
    arguments = (c, sums, len(sums), *weights, stats, past, a, *numbers, *sizes)
    launch(kernels.finish, grid, *arguments, num_warps=8, **_on(c))
    return a, stats


def _pooled(grad: Tensor, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient in the last layer's norm from that in the features, and its sums."""
    from mmlda.models import triton_training as kernels

    N, H, W, D = a.shape
    tiling = TILINGS[D]
    programs, tiles = _cut(tiling, N * H * W)
    g, sums = torch.empty_like(a), torch.empty(programs, 2, D, device=a.device)
    sizes = (N * H * W, H * W, D, tiling.pixels, tiles)
    launch(kernels.pooled, (programs,), grad, g, sums, a, c, *sizes, num_warps=tiling.warps)
    return g, sums


def _settled(g: Tensor, c: Tensor, sums: Tensor, stats: Tensor, gamma: Tensor, norm: Tensor) -> Tensor:
    """The gradient in a convolution's output from that in its norm's; `norm` takes those in weight and bias."""
    from mmlda.models import triton_training as kernels

    pixels, D = g.numel() // g.shape[3], g.shape[3]
    dc, block = torch.empty_like(g), FLAT[D] // D
    arguments = (g, c, sums, len(sums), stats, gamma, norm[0], norm[1], dc)
    sizes = (pixels, D, block, _power(len(sums)), _can_be_early(g))
    launch(kernels.settle, (_over(pixels, block),), *arguments, *sizes, num_warps=8, **_on(g))
    return dc


def _back(
    dc: Tensor, filters: Tensor, a: Tensor, c: Tensor, short: Tensor | None, layer: Layer
) -> tuple[Tensor, Tensor]:
    """The gradient in the norm of the layer before, whose output is `a` and convolution's `c`, and its sums."""
    from mmlda.models import triton_training as kernels

    (N, h, w, D), (_, H, W, C) = dc.shape, a.shape
    g = torch.empty_like(a)
    tiling = TILINGS[C]
    halves = 4 if layer.stride == 2 else 1  # pixels of each parity apart
    pixels = N * H * W if halves == 1 else N * ((H + 1) // 2) * ((W + 1) // 2)
    programs, tiles = _cut(tiling._replace(programs=tiling.programs // halves), pixels)
    sums = torch.empty(programs * halves, 2, C, device=g.device)
    arguments = (dc, filters, g, sums, a, c, a if short is None else short, pixels, h, w, H, W, D, C)
    options = {"num_warps": tiling.warps, "num_stages": 1, **_on(g)}
    if halves == 1:
        sizes = (1, True, short is not None, tiling.pixels, tiles, _can_be_early(g))
        launch(kernels.gather, (programs,), *arguments, *sizes, **options)
    else:  # the first of its block, so it has a shortcut
        launch(kernels.scatter, (programs, 4), *arguments, tiling.pixels, tiles, _can_be_early(g), **options)
    return g, sums


def _rounds(layer: Layer, images: int) -> tuple[int, int]:
    """(rounds of a program, groups of pixels) for the gradient of a layer's filters."""
    split, pixels = SPLITS[layer.inputs, layer.outputs], images * layer.height * layer.width
    rounds = _over(_over(pixels, split.programs), split.pixels)
    return rounds, _over(pixels, rounds * split.pixels)


def _correlated(x: Tensor, dc: Tensor, parts: Tensor, layer: Layer) -> None:
    """Parts of the gradient of a layer's filters."""
    from mmlda.models import triton_training as kernels

    C, D, stride, h, w = layer
    (N, H, W, _), split = x.shape, SPLITS[C, D]
    rounds, groups = _rounds(layer, N)
    sizes = (N * h * w, H, W, h, w, C, D, stride, split.pixels, split.taps, rounds, _can_be_early(x))
    options = {"num_warps": 4, "num_stages": 3, **_on(x)}
    launch(kernels.correlate, (groups, 9 // split.taps), x, dc, parts, *sizes, **options)


def _summed(parts: Tensor, dw: Tensor) -> None:
    """Gradients dw [layers, D, 3, 3, C] of the filters of layers of one shape, from their parts."""
    from mmlda.models import triton_training as kernels

    layers, groups, _, C, D = parts.shape
    launch(kernels.sum_parts, (9 * C * D // 32, layers), parts, dw, C, D, groups, 32, num_warps=4)
