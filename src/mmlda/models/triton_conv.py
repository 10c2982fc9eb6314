"""Triton kernels for 3x3 convolutions with few channels: forward, input gradient, weight gradient.

Imported only by `mmlda.models.convolutions`, when a convolution first runs on CUDA. Images are NHWC in memory. Layers
of 16 to 64 channels at CIFAR's sizes are latency-bound: their tensors fit in the L2 cache, and a whole layer takes only
0.6 GFLOP. So each program gathers the taps of a tile of pixels directly into one operand (implicit GEMM), computes all
output channels, and reads the float32 weights itself. Every sum has a fixed order (no atomics): the same inputs give
the same bits.
"""
# mypy: disable-error-code="no-untyped-def"
# (Triton has no types for the arguments of kernels)

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmlda.models.convolutions import launch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # the module can be imported, but not run

    def jit(program):
        return program


class Gather(NamedTuple):
    """Tiling of `forward` and `input_grad`."""

    pixels: int  # output pixels in a tile
    taps: int  # taps in one matrix product: 1, 3 (a row of the filter, padded to 4), or 8 (and the ninth alone)
    tiles: int  # tiles per program, processed in turn with the same weights; 1 unless taps = 8
    warps: int
    stages: int


class Split(NamedTuple):
    """Tiling of `weight_grad`."""

    pixels: int  # pixels summed in one matrix product
    taps: int  # taps per program: 1, 3 or 8 (plus the ninth, so all)
    splits: int  # groups of pixels, summed afterwards
    warps: int
    stages: int


# (channels read, channels written, stride), measured by benchmarks/convolutions.py on an H200 at batch 128.
_GATHER = {
    (16, 16, 1): Gather(128, 8, 2, 4, 1),
    (16, 32, 2): Gather(128, 8, 1, 8, 1),
    (32, 32, 1): Gather(128, 8, 1, 4, 1),
    (32, 64, 2): Gather(64, 8, 1, 4, 1),
    (64, 64, 1): Gather(64, 8, 1, 8, 1),
    (32, 16, 2): Gather(128, 1, 1, 4, 1),  # input gradients at stride 2: four taps at once, `taps` is ignored
    (64, 32, 2): Gather(128, 1, 1, 4, 1),
}
_GATHER_FLOAT32 = {  # for the layers where it beats cuDNN at batches of 128 and 1,000
    (16, 16, 1): Gather(128, 1, 1, 4, 3),
    (16, 32, 2): Gather(64, 8, 2, 4, 1),
    (32, 16, 2): Gather(64, 1, 1, 4, 1),
}
_SPLIT = {
    (16, 16, 1): Split(128, 3, 88, 4, 3),
    (16, 32, 2): Split(128, 3, 88, 4, 3),
    (32, 32, 1): Split(64, 3, 88, 4, 3),
    (32, 64, 2): Split(64, 3, 44, 4, 3),
    (64, 64, 1): Split(64, 1, 32, 4, 3),
}
_REDUCED = 32  # weights per program of `_sum_parts`


def gather_config(read: int, written: int, stride: int, kind: torch.dtype) -> Gather:
    """The measured tiling for these channels and this dtype, or a safe default."""
    table = _GATHER_FLOAT32 if kind == torch.float32 else _GATHER
    return table.get((read, written, stride), Gather(64, 1, 1, 4, 3))


def split_config(read: int, written: int, stride: int) -> Split:
    """The measured tiling for these channels, or a safe default."""
    return _SPLIT.get((read, written, stride), Split(64, 1, 32, 4, 3))


@jit
def _rounded(t, kind: tl.constexpr):
    """Convert `t` to `kind`. Float32 is rounded to the nearest TF32, since a product would truncate 13 bits."""
    if kind == tl.float32:
        bits = (t.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        t = tl.where(t == t, bits.to(tl.float32, bitcast=True), t)  # keep NaN
    return t.to(kind)


@jit
def _load_taps(x, row, col, base, live, first, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr):
    """Load taps first .. first + TAPS - 1 of each pixel side by side, with 3 padded to 4: [pixels, PADDED * C].

    Zero outside the image. row, col and base locate tap 0: one up and one left of the filter's centre.
    """
    PADDED: tl.constexpr = 4 if TAPS == 3 else TAPS
    k = tl.arange(0, PADDED * C)
    tap = first + k // C
    kh, kw = tap // 3, tap % 3
    h, w = row[:, None] + kh[None, :], col[:, None] + kw[None, :]
    inside = live[:, None] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    if PADDED != TAPS:
        inside = inside & (k < TAPS * C)[None, :]
    place = base[:, None] + ((kh * W + kw) * C + k % C)[None, :]
    return _rounded(tl.load(x + place, mask=inside, other=0.0, cache_modifier=".ca"), x.dtype.element_ty)


@jit
def _load_weights(
    weight, first, s_in, s_out, s_kh, s_kw, C: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, kind: tl.constexpr
):
    """Load the weights of those taps in the images' dtype: [PADDED * C, D]."""
    PADDED: tl.constexpr = 4 if TAPS == 3 else TAPS
    k = tl.arange(0, PADDED * C)
    tap = first + k // C
    place = ((tap // 3) * s_kh + (tap % 3) * s_kw + (k % C) * s_in)[:, None] + (tl.arange(0, D) * s_out)[None, :]
    if PADDED != TAPS:
        return _rounded(tl.load(weight + place, mask=(k < TAPS * C)[:, None], other=0.0), kind)
    return _rounded(tl.load(weight + place), kind)


@jit
def _gather(
    x,
    weight,
    out,
    pixels,
    s_in,
    s_out,
    s_kh,
    s_kw,
    s_start,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    TILES: tl.constexpr,
):
    """out[n, i, j, d] = sum over taps and c of x[n, STRIDE i + kh - 1, STRIDE j + kw - 1, c] w[kh, kw, c, d]."""
    kind: tl.constexpr = x.dtype.element_ty
    d = tl.arange(0, D)
    weight += s_start
    if TAPS == 8:
        most = _load_weights(weight, 0, s_in, s_out, s_kh, s_kw, C, D, 8, kind)
        last = _load_weights(weight, 8, s_in, s_out, s_kh, s_kw, C, D, 1, kind)
        for t in range(TILES):
            m = (tl.program_id(0) * TILES + t) * BLOCK + tl.arange(0, BLOCK)
            live = m < pixels
            row, col = (m // OW) % OH * STRIDE - 1, m % OW * STRIDE - 1
            base = ((m // (OH * OW) * H + row) * W + col) * C
            a = _load_taps(x, row, col, base, live, 0, H, W, C, 8)
            b = _load_taps(x, row, col, base, live, 8, H, W, C, 1)
            acc = tl.dot(b, last, tl.dot(a, most))  # [BLOCK, D]
            tl.store(out + m[:, None] * D + d[None, :], acc.to(kind), mask=live[:, None])
    else:
        m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        live = m < pixels
        row, col = (m // OW) % OH * STRIDE - 1, m % OW * STRIDE - 1
        base = ((m // (OH * OW) * H + row) * W + col) * C
        acc = tl.zeros([BLOCK, D], tl.float32)
        for first in range(0, 9, TAPS):
            a = _load_taps(x, row, col, base, live, first, H, W, C, TAPS)
            b = _load_weights(weight, first, s_in, s_out, s_kh, s_kw, C, D, TAPS, kind)
            acc = tl.dot(a, b, acc)
        tl.store(out + m[:, None] * D + d[None, :], acc.to(kind), mask=live[:, None])


@jit
def _scatter(
    dy,
    weight,
    dx,
    pixels,
    s_in,
    s_out,
    s_kh,
    s_kw,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The input gradient at stride 2: dx [N, OH, OW, D] from dy [N, H, W, C].

    Pixels of one parity (p, q) see the same (1 + p)(1 + q) taps: an even row only the middle one, an odd row the
    other two. Each program handles pixels of one parity and fills the taps they lack with zeros.
    """
    kind: tl.constexpr = dy.dtype.element_ty
    p, q = tl.program_id(1) // 2, tl.program_id(1) % 2
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    HALF_H: tl.constexpr = (OH + 1) // 2
    HALF_W: tl.constexpr = (OW + 1) // 2
    n, row, col = m // (HALF_H * HALF_W), m // HALF_W % HALF_H, m % HALF_W
    i, j = 2 * row + p, 2 * col + q
    live = (m < pixels) & (i < OH) & (j < OW)
    k, d = tl.arange(0, 4 * C), tl.arange(0, D)
    down, right = k // (2 * C), k // C % 2  # position of the tap in dy, relative to (row, col)
    used = (down <= p) & (right <= q)
    h, w = row[:, None] + down[None, :], col[:, None] + right[None, :]
    place = ((n * H + row) * W + col)[:, None] * C + ((down * W + right) * C + k % C)[None, :]
    inside = live[:, None] & used[None, :] & (h < H) & (w < W)
    a = _rounded(tl.load(dy + place, mask=inside, other=0.0), kind)  # [BLOCK, 4 C]
    kh, kw = 1 + p - 2 * down, 1 + q - 2 * right
    place = (kh * s_kh + kw * s_kw + k % C * s_in)[:, None] + (d * s_out)[None, :]
    acc = tl.dot(a, _rounded(tl.load(weight + place, mask=used[:, None], other=0.0), kind))  # [BLOCK, D]
    place = ((n * OH + i) * OW + j) * D
    tl.store(dx + place[:, None] + d[None, :], acc.to(kind), mask=live[:, None])


@jit
def _correlate(
    x,
    dy,
    parts,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """parts[s, tap, c, d] = the s-th part of the sum over pixels of x[pixel + tap, c] dy[pixel, d]."""
    PADDED: tl.constexpr = 4 if TAPS == 3 else TAPS
    first = tl.program_id(1) * TAPS
    d = tl.arange(0, D)
    acc = tl.zeros([PADDED * C, D], tl.float32)
    rest = tl.zeros([C, D], tl.float32)  # the ninth tap, where TAPS = 8
    for t in range(ROUNDS):
        m = (tl.program_id(0) * ROUNDS + t) * BLOCK + tl.arange(0, BLOCK)
        live = m < pixels
        row, col = (m // OW) % OH * STRIDE - 1, m % OW * STRIDE - 1
        base = ((m // (OH * OW) * H + row) * W + col) * C
        g = tl.load(dy + m[:, None] * D + d[None, :], mask=live[:, None], other=0.0)  # [BLOCK, D]
        a = _load_taps(x, row, col, base, live, first, H, W, C, TAPS)
        acc = tl.dot(tl.trans(a), g, acc)
        if TAPS == 8:
            b = _load_taps(x, row, col, base, live, 8, H, W, C, 1)
            rest = tl.dot(tl.trans(b), g, rest)
    parts += tl.program_id(0) * 9 * C * D
    k = tl.arange(0, PADDED * C)
    tl.store(parts + ((first * C + k) * D)[:, None] + d[None, :], acc, mask=(k < TAPS * C)[:, None])
    if TAPS == 8:
        k = 8 * C + tl.arange(0, C)
        tl.store(parts + (k * D)[:, None] + d[None, :], rest)


@jit
def _sum_parts(
    parts,
    dw,
    s_in,
    s_out,
    s_kh,
    s_kw,
    C: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dw[kh, kw, c, d] = the sum of its parts, in a fixed order."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, SPLITS, ROWS):
        s = start + tl.arange(0, ROWS)
        acc += tl.load(parts + s[:, None] * (9 * C * D) + e[None, :], mask=(s < SPLITS)[:, None], other=0.0)
    tap = e // (C * D)
    place = tap // 3 * s_kh + tap % 3 * s_kw + e // D % C * s_in + e % D * s_out
    tl.store(dw + place, tl.sum(acc, 0).to(dw.dtype.element_ty))


def _images(like: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _run_gather(
    x: Tensor, weight: Tensor, out: Tensor, strides: tuple[int, ...], stride: int, config: Gather
) -> Tensor:
    (N, C, H, W), (_, D, OH, OW) = x.shape, out.shape
    pixels = N * OH * OW
    tiles = config.tiles if config.taps == 8 else 1
    grid = (triton.cdiv(pixels, config.pixels * tiles),)
    sizes = (H, W, OH, OW, C, D, stride, config.pixels, config.taps, tiles)
    launch(_gather, grid, x, weight, out, pixels, *strides, *sizes, num_warps=config.warps, num_stages=config.stages)
    return out


def forward(x: Tensor, weight: Tensor, stride: int, config: Gather | None = None) -> Tensor:
    """conv2d(x, weight, stride, padding=1) of channels_last x [N, C, H, W], weight [D, C, 3, 3] of any strides."""
    (N, C, H, W), D = x.shape, weight.shape[0]
    out = _images(x, (N, D, (H - 1) // stride + 1, (W - 1) // stride + 1))
    s_out, s_in, s_kh, s_kw = weight.stride()
    config = config or gather_config(C, D, stride, x.dtype)
    return _run_gather(x, weight, out, (s_in, s_out, s_kh, s_kw, 0), stride, config)


def input_grad(
    dy: Tensor, weight: Tensor, stride: int, height: int, width: int, config: Gather | None = None
) -> Tensor:
    """Gradient [N, C, height, width] with respect to the input, from channels_last dy [N, D, OH, OW]."""
    (N, D, H, W), C = dy.shape, weight.shape[1]
    dx = _images(dy, (N, C, height, width))
    s_in, s_out, s_kh, s_kw = weight.stride()
    config = config or gather_config(D, C, stride, dy.dtype)
    if stride == 1:  # the same correlation with the filter rotated by 180 degrees
        start = 2 * (s_kh + s_kw)
        return _run_gather(dy, weight, dx, (s_in, s_out, -s_kh, -s_kw, start), 1, config)
    pixels = N * ((height + 1) // 2) * ((width + 1) // 2)
    grid = (triton.cdiv(pixels, config.pixels), 4)
    arguments = (dy, weight, dx, pixels, s_in, s_out, s_kh, s_kw, H, W, height, width, D, C, config.pixels)
    launch(_scatter, grid, *arguments, num_warps=config.warps, num_stages=config.stages)
    return dx


def weight_grad(x: Tensor, dy: Tensor, weight: Tensor, stride: int, config: Split | None = None) -> Tensor:
    """Gradient with respect to the weight, with its dtype and strides, from channels_last x and dy."""
    return sum_parts(correlate(x, dy, stride, config), weight)


def correlate(x: Tensor, dy: Tensor, stride: int, config: Split | None = None) -> Tensor:
    """The weight gradient in parts, one per group of pixels: [parts, 9, C, D] float32."""
    (N, C, H, W), (_, D, OH, OW) = x.shape, dy.shape
    config = config or split_config(C, D, stride)
    pixels = N * OH * OW
    rounds = triton.cdiv(triton.cdiv(pixels, config.splits), config.pixels)
    splits = triton.cdiv(pixels, rounds * config.pixels)  # without empty groups
    parts = torch.empty((splits, 9, C, D), dtype=torch.float32, device=x.device)
    grid = (splits, 1 if config.taps == 8 else 9 // config.taps)
    sizes = (H, W, OH, OW, C, D, stride, config.pixels, config.taps, rounds)
    launch(_correlate, grid, x, dy, parts, pixels, *sizes, num_warps=config.warps, num_stages=config.stages)
    return parts


def sum_parts(parts: Tensor, weight: Tensor) -> Tensor:
    """Sum of the parts, in the memory layout of the weight [D, C, 3, 3]."""
    splits, _, C, D = parts.shape
    dw = torch.empty_like(weight)
    s_out, s_in, s_kh, s_kw = dw.stride()
    rows = min(triton.next_power_of_2(splits), 128)
    arguments = (parts, dw, s_in, s_out, s_kh, s_kw, C, D, splits, rows, _REDUCED)
    launch(_sum_parts, (9 * C * D // _REDUCED,), *arguments, num_warps=4)
    return dw
