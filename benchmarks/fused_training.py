"""A training pass of the Resnet in its own kernels: batch norm inside the convolutions' launches, nothing compiled.

    python benchmarks/fused_training.py --out FILE            # one step on a GPU, beside torch.compile; tilings; errors
    python benchmarks/fused_training.py --fit fused --out FILE    # `fit` and `fit_many` so; MODES has the others
    python benchmarks/fused_training.py --smoke               # each kernel on a GPU, one at a time; errors
    TRITON_INTERPRET=1 python benchmarks/fused_training.py --check --device cpu    # the errors alone

Today a step compiles the network, which takes half a minute, and runs about 310 kernels in a chain. Here a layer is
four launches, and weight gradients are beside the chain:

forward    `conv`    the convolution, and per program the sums of its output and of its square
           `finish`  statistics from those sums, then relu(norm(c) + shortcut)
backward   `back`    the gradient in the layer's input, behind its ReLU, and the sums that batch norm's gradient needs
           `settle`  that gradient: in the convolution's output, in weight and bias of the norm
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from mmlda import accuracy, fit
from mmlda._utils.files import write_json
from mmlda.attacks.replay import compile_quietly
from mmlda.data import ImageData
from mmlda.models import build, fast_convolutions
from mmlda.models.triton_conv import Split, _load_taps, _load_weights, _rounded, split_config
from mmlda.results import code_version, device_name, versions
from mmlda.training.recipes import RECIPES
from mmlda.training.step import Step


@triton.jit
def _total(sums, parts, C: tl.constexpr, ROWS: tl.constexpr):
    """Sums [parts, 2, C] over their parts, at most ROWS, in a fixed order: two vectors [C]."""
    row, d = tl.arange(0, ROWS), tl.arange(0, C)
    place, live = row[:, None] * (2 * C) + d[None, :], (row < parts)[:, None]
    first = tl.load(sums + place, mask=live, other=0.0)
    second = tl.load(sums + place + C, mask=live, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _behind_relu(acc, a, c, g, sums, m, live, program, D: tl.constexpr, total, product):
    """Store the gradient where the activation is positive; return the sums of it and of it times c."""
    place = m[:, None] * D + tl.arange(0, D)[None, :]
    acc = tl.where(tl.load(a + place, mask=live[:, None], other=0.0) > 0, acc, 0.0).to(g.dtype.element_ty)
    tl.store(g + place, acc, mask=live[:, None])
    acc = acc.to(tl.float32)
    raw = tl.load(c + place, mask=live[:, None], other=0.0).to(tl.float32)
    return total + tl.sum(acc, 0), product + tl.sum(acc * raw, 0)


@triton.jit
def _store_sums(sums, program, D: tl.constexpr, first, second):
    d = tl.arange(0, D)
    tl.store(sums + program * (2 * D) + d, first)
    tl.store(sums + program * (2 * D) + D + d, second)


@triton.jit
def stem(
    x,
    mean,
    std,
    weight,
    out,
    sums,
    pixels,
    s_in,
    s_out,
    s_kh,
    s_kw,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """The first convolution, of (x - mean) / std for x [N, H, W, B] in float32 with B <= 3."""
    kind: tl.constexpr = out.dtype.element_ty
    k, d = tl.arange(0, 32), tl.arange(0, D)
    tap, b = k // B, k % B
    place = (tap // 3 * s_kh + tap % 3 * s_kw + b * s_in)[:, None] + (d * s_out)[None, :]
    w = _rounded(tl.load(weight + place, mask=(tap < 9)[:, None], other=0.0), kind)
    total, square = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for t in range(TILES):
        m = (tl.program_id(0) * TILES + t) * BLOCK + tl.arange(0, BLOCK)
        v = _load_images(x, mean, std, m, pixels, B, H, W)
        c = tl.dot(_rounded(v, kind), w).to(kind)
        tl.store(out + m[:, None] * D + d[None, :], c, mask=(m < pixels)[:, None])
        c = c.to(tl.float32)
        total += tl.sum(c, 0)
        square += tl.sum(c * c, 0)
    _store_sums(sums, tl.program_id(0), D, total, square)


@triton.jit
def _load_images(x, mean, std, m, pixels, B: tl.constexpr, H: tl.constexpr, W: tl.constexpr):
    """The 9 B numbers around each pixel, padded to 32: [pixels, 32]."""
    k = tl.arange(0, 32)
    tap, b = k // B, k % B
    h, w = (m // W % H - 1)[:, None] + (tap // 3)[None, :], (m % W - 1)[:, None] + (tap % 3)[None, :]
    inside = (m < pixels)[:, None] & (tap < 9)[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    v = tl.load(x + ((m // (H * W))[:, None] * (H * W) + h * W + w) * B + b[None, :], mask=inside, other=0.0)
    return tl.where(inside, (v - tl.load(mean + b)[None, :]) / tl.load(std + b)[None, :], 0.0)


@triton.jit
def stem_grad(
    x,
    mean,
    std,
    dc,
    parts,
    pixels,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Its weight gradient, in parts [programs, 32, D]."""
    k, d = tl.arange(0, 32), tl.arange(0, D)
    acc = tl.zeros([32, D], tl.float32)
    for t in range(ROUNDS):
        m = (tl.program_id(0) * ROUNDS + t) * BLOCK + tl.arange(0, BLOCK)
        v = _rounded(_load_images(x, mean, std, m, pixels, B, H, W), dc.dtype.element_ty)
        g = tl.load(dc + m[:, None] * D + d[None, :], mask=(m < pixels)[:, None], other=0.0)
        acc = tl.dot(tl.trans(v), g, acc)
    tl.store(parts + (tl.program_id(0) * 32 + k)[:, None] * D + d[None, :], acc)


@triton.jit
def gather(
    x,
    weight,
    out,
    sums,
    a,
    c,
    short,
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
    BACK: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """`conv`, or with BACK `back` of a layer of stride 1; with SHORT the shortcut's gradient is added."""
    kind: tl.constexpr = x.dtype.element_ty
    d = tl.arange(0, D)
    weight += s_start
    most = _load_weights(weight, 0, s_in, s_out, s_kh, s_kw, C, D, 8, kind)
    last = _load_weights(weight, 8, s_in, s_out, s_kh, s_kw, C, D, 1, kind)
    first, second = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for t in range(TILES):
        m = (tl.program_id(0) * TILES + t) * BLOCK + tl.arange(0, BLOCK)
        live = m < pixels
        row, col = (m // OW) % OH * STRIDE - 1, m % OW * STRIDE - 1
        base = ((m // (OH * OW) * H + row) * W + col) * C
        eight = _load_taps(x, row, col, base, live, 0, H, W, C, 8)
        ninth = _load_taps(x, row, col, base, live, 8, H, W, C, 1)  # loaded before the products: see `broken`
        acc = tl.dot(ninth, last, tl.dot(eight, most))  # [BLOCK, D]
        if BACK:
            if SHORT:
                place = m[:, None] * D + d[None, :]
                acc += tl.load(short + place, mask=live[:, None], other=0.0).to(tl.float32)
            first, second = _behind_relu(acc, a, c, out, sums, m, live, 0, D, first, second)
        else:
            value = acc.to(kind)
            tl.store(out + m[:, None] * D + d[None, :], value, mask=live[:, None])
            value = value.to(tl.float32)
            first += tl.sum(value, 0)
            second += tl.sum(value * value, 0)
    _store_sums(sums, tl.program_id(0), D, first, second)


@triton.jit
def back_2(
    dc,
    weight,
    g,
    sums,
    a,
    c,
    short,
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
    TILES: tl.constexpr,
):
    """`back` of a layer of stride 2: g [N, OH, OW, D] from dc [N, H, W, C], with the shortcut's gradient.

    Pixels of one parity (p, q) see the same (1 + p)(1 + q) taps: an even row only the middle one, an odd row the
    other two. Each program handles pixels of one parity and fills the taps they lack with zeros.
    """
    kind: tl.constexpr = dc.dtype.element_ty
    p, q = tl.program_id(1) // 2, tl.program_id(1) % 2
    HALF_H: tl.constexpr = (OH + 1) // 2
    HALF_W: tl.constexpr = (OW + 1) // 2
    k, d = tl.arange(0, 4 * C), tl.arange(0, D)
    down, right = k // (2 * C), k // C % 2  # position of the tap in dc, relative to (row, col)
    used = (down <= p) & (right <= q)
    kh, kw = 1 + p - 2 * down, 1 + q - 2 * right
    filters = weight + (kh * s_kh + kw * s_kw + k % C * s_in)[:, None] + (d * s_out)[None, :]
    w = _rounded(tl.load(filters, mask=used[:, None], other=0.0), kind)
    first, second = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for t in range(TILES):
        m = (tl.program_id(0) * TILES + t) * BLOCK + tl.arange(0, BLOCK)
        n, row, col = m // (HALF_H * HALF_W), m // HALF_W % HALF_H, m % HALF_W
        i, j = 2 * row + p, 2 * col + q
        live = (m < pixels) & (i < OH) & (j < OW)
        h, v = row[:, None] + down[None, :], col[:, None] + right[None, :]
        place = ((n * H + row) * W + col)[:, None] * C + ((down * W + right) * C + k % C)[None, :]
        inside = live[:, None] & used[None, :] & (h < H) & (v < W)
        acc = tl.dot(_rounded(tl.load(dc + place, mask=inside, other=0.0), kind), w)  # [BLOCK, D]
        even = live & (i % 2 + j % 2 == 0)
        past = short + ((n * H + row) * W + col)[:, None] * C + (C - D) // 2 + d[None, :]
        acc += tl.load(past, mask=even[:, None], other=0.0).to(tl.float32)
        first, second = _behind_relu(acc, a, c, g, sums, (n * OH + i) * OW + j, live, 0, D, first, second)
    _store_sums(sums, tl.program_id(0) * 4 + tl.program_id(1), D, first, second)


@triton.jit
def pooled(features, g, sums, a, c, pixels, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """`back` of the mean over an image's pixels, from the gradient in the features [N, D]."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = m < pixels
    place = (m // (H * W))[:, None] * D + tl.arange(0, D)[None, :]
    acc = tl.load(features + place, mask=live[:, None], other=0.0).to(tl.float32) / (H * W)
    zero = tl.zeros([D], tl.float32)
    first, second = _behind_relu(acc, a, c, g, sums, m, live, 0, D, zero, zero)
    _store_sums(sums, tl.program_id(0), D, first, second)


@triton.jit
def finish(
    c,
    sums,
    parts,
    gamma,
    beta,
    running_mean,
    running_var,
    stats,
    short,
    out,
    pixels,
    momentum,
    eps,
    H: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """relu(norm(c) + shortcut). SHORT: 0 none, 1 the same shape, 2 subsampled from B channels and padded."""
    total, square = _total(sums, parts, D, ROWS)
    d = tl.arange(0, D)
    mean = total / pixels
    variance = tl.maximum(square / pixels - mean * mean, 0.0)
    rstd = 1 / tl.sqrt(variance + eps)
    if tl.program_id(0) == 0:
        tl.store(stats + d, mean)
        tl.store(stats + D + d, rstd)
        unbiased = variance * pixels / (pixels - 1)
        tl.store(running_mean + d, (1 - momentum) * tl.load(running_mean + d) + momentum * mean)
        tl.store(running_var + d, (1 - momentum) * tl.load(running_var + d) + momentum * unbiased)
    scale = tl.load(gamma + d) * rstd
    shift = tl.load(beta + d) - mean * scale
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (m < pixels)[:, None]
    place = m[:, None] * D + d[None, :]
    v = tl.load(c + place, mask=live, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if SHORT == 1:
        v += tl.load(short + place, mask=live, other=0.0).to(tl.float32)
    if SHORT == 2:
        e = d - (D - B) // 2
        n, i, j = m // (H * W), m // W % H, m % W
        past = ((n * (2 * H) + 2 * i) * (2 * W) + 2 * j)[:, None] * B + e[None, :]
        v += tl.load(short + past, mask=live & ((e >= 0) & (e < B))[None, :], other=0.0).to(tl.float32)
    v = tl.where(v <= 0, 0.0, v)  # keeps NaN, as torch's does
    tl.store(out + place, v.to(out.dtype.element_ty), mask=live)


@triton.jit
def settle(
    g, c, sums, parts, stats, gamma, dgamma, dbeta, dc, pixels, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Batch norm's gradient in its input, weight and bias, from that in its output."""
    total, product = _total(sums, parts, D, ROWS)
    d = tl.arange(0, D)
    mean, rstd = tl.load(stats + d), tl.load(stats + D + d)
    slope = rstd * (product - mean * total)
    if tl.program_id(0) == 0:
        tl.store(dgamma + d, slope)
        tl.store(dbeta + d, total)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, live = m[:, None] * D + d[None, :], (m < pixels)[:, None]
    hat = (tl.load(c + place, mask=live, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    v = tl.load(g + place, mask=live, other=0.0).to(tl.float32)
    v = (v - (total / pixels)[None, :] - hat * (slope / pixels)[None, :]) * (tl.load(gamma + d) * rstd)[None, :]
    tl.store(dc + place, v.to(dc.dtype.element_ty), mask=live)


@triton.jit
def correlate(
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
    d, k = tl.arange(0, D), tl.arange(0, PADDED * C)
    acc = tl.zeros([PADDED * C, D], tl.float32)
    for t in range(ROUNDS):
        m = (tl.program_id(0) * ROUNDS + t) * BLOCK + tl.arange(0, BLOCK)
        live = m < pixels
        row, col = (m // OW) % OH * STRIDE - 1, m % OW * STRIDE - 1
        base = ((m // (OH * OW) * H + row) * W + col) * C
        g = tl.load(dy + m[:, None] * D + d[None, :], mask=live[:, None], other=0.0)  # [BLOCK, D]
        acc = tl.dot(tl.trans(_load_taps(x, row, col, base, live, first, H, W, C, TAPS)), g, acc)
    parts += tl.program_id(0) * 9 * C * D
    tl.store(parts + ((first * C + k) * D)[:, None] + d[None, :], acc, mask=(k < TAPS * C)[:, None])


@triton.jit
def sum_parts(
    parts,
    dw,
    s_in,
    s_out,
    s_kh,
    s_kw,
    size,
    C: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dw[layer, kh, kw, c, d] = the sum of its parts [layers, SPLITS, K, D], in a fixed order."""
    layer = tl.program_id(1)
    parts += layer * (SPLITS * K * D)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([32, BLOCK], tl.float32)
    for start in range(0, SPLITS, 32):
        s = start + tl.arange(0, 32)
        acc += tl.load(parts + s[:, None] * (K * D) + e[None, :], mask=(s < SPLITS)[:, None], other=0.0)
    tap, c, d = e // (C * D), e // D % C, e % D
    place = layer * size + tap // 3 * s_kh + tap % 3 * s_kw + c * s_in + d * s_out
    tl.store(dw + place, tl.sum(acc, 0), mask=tap < 9)


class Layer(NamedTuple):
    """Shape of one convolution with its norm."""

    inputs: int
    outputs: int
    stride: int
    height: int  # of the output
    width: int


def layers_of(net: Any, height: int, width: int) -> list[Layer]:
    """The network's convolutions in order."""
    found = [Layer(net.config["channels"], net.config["width"], 1, height, width)]
    for block in net.blocks:
        for conv in (block.conv1, block.conv2):
            _, _, _, h, w = found[-1]
            if conv.stride[0] == 2:
                h, w = (h + 1) // 2, (w + 1) // 2
            found.append(Layer(conv.in_channels, conv.out_channels, conv.stride[0], h, w))
    return found


class Cut(NamedTuple):
    """How a layer's kernels are cut up."""

    pixels: int
    warps: int
    programs: int  # of a convolution, at most about this many


CUTS = {16: Cut(128, 4, 256), 32: Cut(128, 4, 256), 64: Cut(64, 8, 128)}
FLAT = {16: 8192, 32: 8192, 64: 4096}  # numbers per program of `finish` and `settle`


def _strides(weight: Tensor, *, turned: bool = False) -> tuple[int, ...]:
    """(s_in, s_out, s_kh, s_kw, s_start); turned by 180 degrees with inputs and outputs exchanged."""
    s_out, s_in, s_kh, s_kw = weight.stride()
    return (s_out, s_in, -s_kh, -s_kw, 2 * (s_kh + s_kw)) if turned else (s_in, s_out, s_kh, s_kw, 0)


def _cut(pixels: int, channels: int, kind: torch.dtype) -> tuple[Cut, int, int]:
    """The cut, tiles per program, programs."""
    cut = CUTS[channels]
    if kind == torch.float32:  # shared memory is too small for as many pixels
        cut = cut._replace(pixels=cut.pixels // 2)
    tiles = triton.cdiv(triton.cdiv(pixels, cut.pixels), cut.programs)
    return cut, tiles, triton.cdiv(pixels, cut.pixels * tiles)


class FusedPass(torch.autograd.Function):
    """Features [N, 4 width] of images [N, B, H, W] in training mode; running statistics move as a side effect.

    Differentiable in weights and norms, not in the images.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, net: Any, mean: Tensor, std: Tensor, kind: torch.dtype, *parameters: Tensor
    ) -> Tensor:
        x = x.permute(0, 2, 3, 1).contiguous()  # a view if x is channels_last
        N, H, W, B = x.shape
        layers, norms = layers_of(net, H, W), norms_of(net)
        weights, gammas, betas = parameters[::3], parameters[1::3], parameters[2::3]
        raw, active, stats = [], [], []
        for n, (layer, weight, norm) in enumerate(zip(layers, weights, norms)):
            C, D, stride, h, w = layer
            pixels = N * h * w
            cut, tiles, programs = _cut(pixels, D, kind)
            c, a = (torch.empty(N, h, w, D, dtype=kind, device=x.device) for _ in range(2))
            sums = torch.empty(programs, 2, D, device=x.device)
            if n == 0:
                stem[(programs,)](
                    x,
                    mean,
                    std,
                    weight,
                    c,
                    sums,
                    pixels,
                    *_strides(weight)[:4],
                    B,
                    h,
                    w,
                    D,
                    cut.pixels,
                    tiles,
                    num_warps=4,
                )
            else:
                before = active[-1]
                gather[(programs,)](
                    before,
                    weight,
                    c,
                    sums,
                    c,
                    c,
                    c,
                    pixels,
                    *_strides(weight),
                    before.shape[1],
                    before.shape[2],
                    h,
                    w,
                    C,
                    D,
                    stride,
                    False,
                    False,
                    cut.pixels,
                    tiles,
                    num_warps=cut.warps,
                    num_stages=1,
                )
            ends = n > 0 and n % 2 == 0
            short = active[n - 2] if ends else a
            kind_of = 0 if not ends else 1 if short.shape == a.shape else 2
            stat = torch.empty(2, D, device=x.device)
            block = FLAT[D] // D
            finish[(triton.cdiv(pixels, block),)](
                c,
                sums,
                programs,
                gammas[n],
                betas[n],
                norm.running_mean,
                norm.running_var,
                stat,
                short,
                a,
                pixels,
                norm.momentum,
                norm.eps,
                h,
                w,
                D,
                short.shape[3],
                kind_of,
                block,
                triton.next_power_of_2(programs),
                num_warps=8,
            )
            raw.append(c), active.append(a), stats.append(stat)
        ctx.save_for_backward(x, mean, std, *weights, *gammas, *raw, *active, *stats)
        ctx.layers = layers
        return active[-1].mean((1, 2), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, std, *saved = ctx.saved_tensors
        layers, L = ctx.layers, len(ctx.layers)
        weights, gammas, raw, active, stats = (saved[i * L : (i + 1) * L] for i in range(5))
        N, device = len(x), x.device
        D, h, w = layers[-1].outputs, layers[-1].height, layers[-1].width
        sums = torch.empty(triton.cdiv(N * h * w, 64), 2, D, device=device)
        g = torch.empty_like(raw[-1])
        pooled[(len(sums),)](grads[0].contiguous(), g, sums, active[-1], raw[-1], N * h * w, h, w, D, 64, num_warps=4)
        slopes = [torch.empty(2, layer.outputs, device=device) for layer in layers]
        parts = {layer: [] for layer in layers}  # the layers of one shape
        sizes = {layer: _split(layer, N * layer.height * layer.width) for layer in layers}
        for n, layer in enumerate(layers):
            parts[layer].append(n)
        buffers = {
            layer: torch.empty(len(rows), sizes[layer][1], _taps(layer), layer.outputs, device=device)
            for layer, rows in parts.items()
        }
        ends = g  # the gradient behind the ReLU of the last block's end, which also goes into its shortcut
        side = torch.cuda.Stream() if x.is_cuda and SIDE else None
        kept = []
        for n in reversed(range(L)):
            layer = layers[n]
            C, D, stride, h, w = layer
            pixels, dc, block = N * h * w, torch.empty_like(raw[n]), FLAT[D] // D
            settle[(triton.cdiv(pixels, block),)](
                g,
                raw[n],
                sums,
                len(sums),
                stats[n],
                gammas[n],
                slopes[n][0],
                slopes[n][1],
                dc,
                pixels,
                D,
                block,
                triton.next_power_of_2(len(sums)),
                num_warps=8,
            )
            kept.append(dc)
            mine = buffers[layer][parts[layer].index(n)]
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                _weight_parts(n, layer, (x, mean, std), active, dc, mine, sizes[layer])
            if n == 0:
                break
            before, cut = active[n - 1], CUTS[C]
            (H, W), out = before.shape[1:3], torch.empty_like(before)
            first_of_block = n % 2 == 1
            if stride == 1:
                cut, tiles, programs = _cut(N * H * W, C, before.dtype)
                sums = torch.empty(programs, 2, C, device=device)
                gather[(programs,)](
                    dc,
                    weights[n],
                    out,
                    sums,
                    before,
                    raw[n - 1],
                    ends,
                    N * H * W,
                    *_strides(weights[n], turned=True),
                    h,
                    w,
                    H,
                    W,
                    D,
                    C,
                    1,
                    True,
                    first_of_block,
                    cut.pixels,
                    tiles,
                    num_warps=cut.warps,
                    num_stages=1,
                )
            else:
                quarter = N * ((H + 1) // 2) * ((W + 1) // 2)
                tiles = triton.cdiv(triton.cdiv(quarter, 128), 64)
                programs = triton.cdiv(quarter, 128 * tiles)
                sums = torch.empty(4 * programs, 2, C, device=device)
                s_in, s_out, s_kh, s_kw = weights[n].stride()
                back_2[(programs, 4)](
                    dc,
                    weights[n],
                    out,
                    sums,
                    before,
                    raw[n - 1],
                    ends,
                    quarter,
                    s_in,
                    s_out,
                    s_kh,
                    s_kw,
                    h,
                    w,
                    H,
                    W,
                    D,
                    C,
                    128,
                    tiles,
                    num_warps=4,
                    num_stages=1,
                )
            g = out
            if first_of_block:
                ends = g
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        filters: list[Tensor | None] = [None] * L
        for layer, rows in parts.items():
            C, D = layer.inputs, layer.outputs
            weight = weights[rows[0]]
            dw = torch.empty(len(rows), weight.numel(), device=device)
            s_in, s_out, s_kh, s_kw, _ = _strides(weight)
            K = _taps(layer)
            sum_parts[(K * D // 32, len(rows))](
                buffers[layer], dw, s_in, s_out, s_kh, s_kw, weight.numel(), C, D, K, sizes[layer][1], 32, num_warps=4
            )
            for i, n in enumerate(rows):
                filters[n] = dw[i].as_strided(weight.shape, weight.stride())
        out = [t for n in range(L) for t in (filters[n], slopes[n][0], slopes[n][1])]
        return (None,) * 5 + tuple(out)


SIDE = True  # weight gradients on a stream of their own


def _taps(layer: Layer) -> int:
    """Rows of a weight gradient: taps times inputs, padded for the first layer."""
    return 32 if layer.inputs < 16 else 9 * layer.inputs


def _split_cut(layer: Layer) -> Split:
    return split_config(*layer[:3]) if layer.inputs >= 16 else Split(64, 1, 264, 4, 3)


def _split(layer: Layer, pixels: int) -> tuple[int, int]:
    """(rounds of a program, programs) of a weight gradient."""
    cut = _split_cut(layer)
    rounds = triton.cdiv(triton.cdiv(pixels, cut.splits), cut.pixels)
    return rounds, triton.cdiv(pixels, rounds * cut.pixels)


def _weight_parts(
    n: int,
    layer: Layer,
    images: tuple[Tensor, Tensor, Tensor],
    active: list[Tensor],
    dc: Tensor,
    out: Tensor,
    size: tuple[int, int],
) -> None:
    """Launch the weight gradient of layer n, in parts."""
    C, D, stride, h, w = layer
    pixels, (rounds, splits), cut = len(dc) * h * w, size, _split_cut(layer)
    if n == 0:
        stem_grad[(splits,)](*images, dc, out, pixels, C, h, w, D, cut.pixels, rounds, num_warps=4)
        return
    before = active[n - 1]
    correlate[(splits, 9 // cut.taps)](
        before,
        dc,
        out,
        pixels,
        before.shape[1],
        before.shape[2],
        h,
        w,
        C,
        D,
        stride,
        cut.pixels,
        cut.taps,
        rounds,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


def norms_of(net: Any) -> list[Any]:
    return [net.norm, *(norm for block in net.blocks for norm in (block.norm1, block.norm2))]


def parameters_of(net: Any) -> list[Tensor]:
    convs = [net.conv, *(conv for block in net.blocks for conv in (block.conv1, block.conv2))]
    return [t for conv, norm in zip(convs, norms_of(net)) for t in (conv.weight, norm.weight, norm.bias)]


def fused_features(model: Any, x: Tensor, kind: torch.dtype = torch.bfloat16) -> Tensor:
    """The backbone's features in training mode."""
    net = model.backbone
    mean, std = (t.flatten().expand(net.config["channels"]).contiguous() for t in (model.mean, model.std))
    return FusedPass.apply(x, net, mean, std, kind, *parameters_of(net))  # type: ignore[no-any-return]


def fused_logits(model: Any, x: Tensor) -> Tensor:
    z = fused_features(model, x)
    with torch.autocast(x.device.type, enabled=False):
        return model.head(model._latent(z))  # type: ignore[no-any-return]


LAYOUT = torch.contiguous_format  # of the weights in `network`


def network(depth: int, channels: int, head: str, device: str, seed: int = 0) -> nn.Module:
    config = {"backbone": "resnet", "depth": depth, "channels": channels, "head": head, "num_classes": 10}
    return build(config, seed=seed).to(device, memory_format=LAYOUT).train()


def check(depth: int, shape: tuple[int, int, int], n: int, device: str, kind: torch.dtype) -> dict[str, float]:
    """Relative errors of features, gradients and running statistics against the network in float64."""
    ours, exact = network(depth, shape[0], "mmlda", device), network(depth, shape[0], "mmlda", device).double()
    generator = torch.Generator().manual_seed(1)
    x, v = torch.rand((n, *shape), generator=generator).to(device), torch.randn(n, 64, generator=generator).to(device)
    z, want = fused_features(ours, x, kind), exact.backbone(x.double() - 0.5)
    (z * v).sum().backward(), (want * v.double()).sum().backward()

    def error(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    grads = {
        name: error(mine.grad, theirs.grad)
        for (name, mine), theirs in zip(ours.backbone.named_parameters(), exact.backbone.parameters())
    }
    pairs = zip(ours.backbone.named_buffers(), exact.backbone.buffers())
    moved = [error(mine, theirs) for (name, mine), theirs in pairs if "running" in name]
    worst = max(grads, key=lambda name: grads[name])
    return {"features": error(z.detach(), want.detach()), worst: grads[worst], "statistics": max(moved)}


@contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple, dict]]]:
    """Collect the launches of kernels instead of running them."""
    calls: list[tuple[Any, tuple, dict]] = []
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.run = lambda self, *args, **options: calls.append((self, args, options))
    try:
        yield calls
    finally:
        triton.runtime.jit.JITFunction.run = run


def compile_kernels(work: Callable[[], Any]) -> int:
    """Compile the kernels that `work` launches, on all cores; how many there are."""
    with recorded() as calls:
        work()
    unique = {}
    for kernel, args, options in calls:
        key = kernel.fn.__name__, *(a for a in args if not isinstance(a, Tensor)), options["num_warps"]
        unique[key] = kernel, args, options
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda call: call[0].run(*call[1], **{**call[2], "warmup": True}), unique.values()))
    return len(unique)


def broken(kernel: Any) -> bool:
    """Whether ptxas made a wgmma's descriptor from the stack pointer, so that it reads outside shared memory.

    ptxas 12.8.93 (in Triton 3.6.0) does, when it runs out of uniform registers; 12.9.86 did not with the same PTX.
    """
    return re.search(r"R2UR[^;]*\bR1\b", kernel.asm["sass"]) is not None


@contextmanager
def one_by_one() -> Iterator[None]:
    """Wait for each kernel launched and print a line about it."""
    run, seen = triton.runtime.jit.JITFunction.run, set()

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        key = self.fn.__name__, *(a for a in args if not isinstance(a, Tensor))
        if key not in seen:  # before its launch, lest that fails
            kernel = run(self, *args, **{**options, "warmup": True})
            print(*key, "shared", kernel.metadata.shared, "BROKEN" if broken(kernel) else "fine", flush=True)
            seen.add(key)
        kernel = run(self, *args, **options)
        torch.cuda.synchronize()
        return kernel

    triton.runtime.jit.JITFunction.run = launch
    try:
        yield
    finally:
        triton.runtime.jit.JITFunction.run = run


def smoke() -> None:
    """A small network, kernel by kernel, with both layouts of the weights."""
    global LAYOUT
    for LAYOUT in (torch.contiguous_format, torch.channels_last):
        for kind in (torch.bfloat16, torch.float32):
            with one_by_one():
                print(LAYOUT, kind, check(8, (3, 32, 32), 8, "cuda", kind), flush=True)


def captured(step: Callable[[], Any]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(work: Callable[[], Any], rounds: int = 200) -> float:
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(rounds):
            work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin) / rounds)
    return min(times)


def step_of(which: str, batch: int, head: str) -> tuple[Callable[[], Any], Callable[[Tensor], Tensor]]:
    """A step of SGD on one batch, and the network as it computes there."""
    model = network(32, 3, head, "cuda").to(memory_format=torch.channels_last)
    x = torch.rand(batch, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    logits: Any = partial(fused_logits, model)
    if which != "fused":
        fast_convolutions(model, True)
        logits = torch.compile(model, dynamic=False)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=which != "fused"):
            loss = nn.functional.cross_entropy(logits(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, lambda: logits(x).float().sum().backward()  # type: ignore[return-value]


def time_all(found: dict[str, Any]) -> None:
    global SIDE
    begin = time.perf_counter()
    step, passes = step_of("fused", 128, "mmlda")
    found["kernels"] = compile_kernels(passes)
    found["kernels compiled, s"] = time.perf_counter() - begin
    step()
    torch.cuda.synchronize()
    found["first step, s"] = time.perf_counter() - begin
    print(found, flush=True)
    for batch in (128, 256):
        for SIDE in (False, True):
            found[f"fused, batch {batch}, side stream {SIDE}, ms"] = milliseconds(
                captured(step_of("fused", batch, "mmlda")[0])
            )
            print(list(found.items())[-1], flush=True)
        begin = time.perf_counter()
        step, _ = step_of("compiled", batch, "mmlda")
        step()
        torch.cuda.synchronize()
        found[f"compiled, batch {batch}, first step, s"] = time.perf_counter() - begin
        found[f"compiled, batch {batch}, ms"] = milliseconds(captured(step))
        print(list(found.items())[-2:], flush=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step_of("fused", 128, "mmlda")[0]()
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=40))
    base = CUTS.copy()
    for C, options in SWEEP.items():  # one width at a time
        for cut in options:
            CUTS.update(base | {C: cut})
            try:
                found[f"{C}: {tuple(cut)}"] = milliseconds(captured(step_of("fused", 128, "mmlda")[0]))
            except Exception as error:
                found[f"{C}: {tuple(cut)}"] = str(error)[:80]
            print(list(found.items())[-1], flush=True)
    CUTS.update(base)
    for share in (0.5, 4):  # half, then double
        FLAT.update({C: int(n * share) for C, n in FLAT.items()})
        found[f"flat {FLAT}"] = milliseconds(captured(step_of("fused", 128, "mmlda")[0]))
        print(list(found.items())[-1], flush=True)


class FusedModel(nn.Module):
    """A network whose logits in training come from the kernels here."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.inner = (model,)  # its weights belong to the model

    def forward(self, x: Tensor) -> Tensor:
        return fused_logits(self.inner[0], x)


def prepare(step: Step, take: bool) -> None:
    """In place of `Step.compile`: only the images' way from the data set may be compiled."""
    step.batches.for_any_length()
    step.objective.model = FusedModel(step.attacked)  # type: ignore[attr-defined]
    if take:
        step.take = compile_quietly(step.take, dynamic=False)
    paired = step.adversary is not None and step.adversary.paired
    x = torch.zeros(step.batches.size * (1 + paired), *step.batches.shape, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last)
    parameters = parameters_of(step.attacked.backbone)
    compile_kernels(lambda: torch.autograd.grad(fused_features(step.attacked, x).sum(), parameters))
    step.fold = step._foldable()


MODES = {"compiled": Step.compile, "fused": partial(prepare, take=False), "fused-take": partial(prepare, take=True)}


def time_fit(mode: str, found: dict[str, Any]) -> None:
    """Seconds to the first step from a cold start, then milliseconds per step and network."""
    from waits import pgd10, together

    Step.compile = lambda step: MODES[mode](step)  # type: ignore[method-assign]
    jobs = {"plain": RECIPES["cifar10-sr"], "PGD-10": pgd10(), "robust": RECIPES["cifar10-mmlda-robust"]}
    for name, count in (("plain", 1), ("plain", 4), ("plain", 8), ("PGD-10", 1), ("PGD-10", 4), ("robust", 6)):
        first, each = together(jobs[name], count, 300 if name == "plain" else 60)
        found[f"{mode}, {name}, {count} at once"] = {"first step, s": first, "ms": 1e3 * each}
        print(list(found.items())[-1], flush=True)
    data = blobs()
    for seed in (0, 1):  # does it learn the same?
        model = build({"backbone": "resnet", "depth": 32, "channels": 3, "head": "mmlda", "num_classes": 10}, seed=seed)
        recipe = dataclasses.replace(RECIPES["cifar10-mmlda"].scaled(600), seed=seed)
        run = fit(model, data, recipe, device="cuda", show=False)
        losses = [entry["loss"] for entry in run.history]
        found[f"{mode}, losses, seed {seed}"] = losses[:: max(1, len(losses) // 8)]
        found[f"{mode}, accuracy, seed {seed}"] = accuracy(run.model, data, n=2000, device="cuda").accuracy
        print(list(found.items())[-2:], flush=True)


def blobs() -> ImageData:
    """Ten classes of smooth random patterns under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = nn.functional.interpolate(torch.rand(10, 3, 4, 4, generator=generator), size=32, mode="bilinear")
    y = torch.arange(20_000) % 10
    pixels = 255 * (0.7 * patterns[y] + 0.6 * (torch.rand(20_000, 3, 32, 32, generator=generator) - 0.25))
    return ImageData(pixels.clamp(0, 255).to(torch.uint8), y, tuple("0123456789"), "blobs")


SWEEP = {
    16: [Cut(128, 4, 512), Cut(128, 4, 128), Cut(256, 8, 256), Cut(64, 4, 256), Cut(128, 8, 256)],
    32: [Cut(64, 4, 512), Cut(128, 8, 256), Cut(64, 8, 256), Cut(64, 4, 256)],
    64: [Cut(64, 4, 128), Cut(32, 4, 256), Cut(32, 8, 256), Cut(128, 8, 64)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--fit", choices=MODES, help="time `fit` in this mode")
    parser.add_argument("--check", action="store_true", help="only compare with float64")
    parser.add_argument("--smoke", action="store_true", help="only run a small network, kernel by kernel")
    parser.add_argument("--out", type=Path, help="write the times to this JSON file")
    options = parser.parse_args()
    if options.smoke:
        smoke()
        return
    found: dict[str, Any] = {"versions": versions(), "device": device_name(options.device), "commit": code_version()}
    if options.fit:
        time_fit(options.fit, found)
        write_json(options.out, found)
        return
    if not options.check:
        time_all(found)
        if options.out:
            write_json(options.out, found)
    on_cpu = options.device == "cpu"
    sizes = [(8, (3, 16, 16), 3), (14, (1, 12, 8), 5)] if on_cpu else [(8, (3, 32, 32), 37), (32, (1, 28, 28), 128)]
    for kind in (torch.float32, torch.float16 if on_cpu else torch.bfloat16):  # the interpreter's bfloat16 is wrong
        for depth, shape, n in sizes:
            print(kind, depth, shape, n, check(depth, shape, n, options.device, kind), flush=True)


if __name__ == "__main__":
    main()
