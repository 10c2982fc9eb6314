"""Triton kernels for a training pass of a `ResNet`: batch norm and ReLU in the launches of the convolutions.

Imported only by `mmlda.models.training_pass`, when such a pass first runs. Images are NHWC. A layer is a convolution,
its batch norm, perhaps a shortcut, and a ReLU; `c` is the output of the convolution, `a` that of the layer. At CIFAR's
sizes the tensors fit in the L2 cache and launches are what costs. So a layer is two of them in either direction, and a
third, for its filters, that the others do not wait for. A program leaves sums over its pixels for the next launch,
which adds them up. Every sum has a fixed order: the same inputs give the same bits.
"""
# mypy: disable-error-code="no-untyped-def"
# (Triton has no types for the arguments of kernels)

from __future__ import annotations

from mmlda.models.triton_resnet import jit

try:
    import triton.language as tl
    from triton.language.extra import cuda
except ImportError:  # the module can be imported, but not run
    pass


@jit
def _wait(EARLY: tl.constexpr):
    """Wait for the launch before; with EARLY this one was started before that one's end, as may be the next one."""
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@jit
def _load_filters(weight, first, C: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, BACK: tl.constexpr):
    """Taps first .. first + TAPS - 1 of filters [D, 9, C]: [TAPS * C, D]; of their reverse, [C, 9, D], with BACK."""
    k, d = tl.arange(0, TAPS * C), tl.arange(0, D)
    tap, c = first + k // C, k % C
    if BACK:
        return tl.load(weight + ((c * 9 + 8 - tap) * D)[:, None] + d[None, :])
    else:
        return tl.load(weight + (tap * C + c)[:, None] + (d * (9 * C))[None, :])


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
    return tl.load(x + place, mask=inside, other=0.0, cache_modifier=".ca")


@jit
def _store_sums(sums, program, first, second, D: tl.constexpr):
    """Leave what a program has summed, both [D], in its part of `sums` [programs, 2, D]."""
    d = tl.arange(0, D)
    tl.store(sums + program * (2 * D) + d, first)
    tl.store(sums + program * (2 * D) + D + d, second)


@jit
def _total(sums, parts, D: tl.constexpr, ROWS: tl.constexpr):
    """Add up `sums` [parts, 2, D], ROWS or fewer: two vectors [D]."""
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    place, live = row[:, None] * (2 * D) + d[None, :], (row < parts)[:, None]
    first = tl.load(sums + place, mask=live, other=0.0)
    second = tl.load(sums + place + D, mask=live, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@jit
def _behind_relu(acc, a, c, g, m, live, D: tl.constexpr):
    """Store the gradient g where the activation is positive; it, and its product with c."""
    place = m[:, None] * D + tl.arange(0, D)[None, :]
    positive = tl.load(a + place, mask=live[:, None], other=0.0) > 0
    raw = tl.load(c + place, mask=live[:, None], other=0.0).to(tl.float32)
    acc = tl.where(positive, acc, 0.0).to(g.dtype.element_ty)
    tl.store(g + place, acc, mask=live[:, None])
    acc = acc.to(tl.float32)
    return acc, acc * raw


@jit
def gather(
    x,
    weight,
    out,
    sums,
    a,
    c,
    short,
    pixels,
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
    EARLY: tl.constexpr,
):
    """Correlate x [N, H, W, C] with the filters, and sum the output and its square over pixels.

    With BACK x is the gradient in a convolution's output, at stride 1; the result is that in the layer before, behind
    its ReLU, and the sums are of it and of its product with c. With SHORT the shortcut's gradient is added.
    """
    kind: tl.constexpr = x.dtype.element_ty
    d = tl.arange(0, D)
    most, last = _load_filters(weight, 0, C, D, 8, BACK), _load_filters(weight, 8, C, D, 1, BACK)
    first, second = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
    _wait(EARLY)
    for t in range(TILES):
        m = (tl.program_id(0) * TILES + t) * BLOCK + tl.arange(0, BLOCK)
        live = m < pixels
        row, col = (m // OW) % OH * STRIDE - 1, m % OW * STRIDE - 1
        base = ((m // (OH * OW) * H + row) * W + col) * C
        eight = _load_taps(x, row, col, base, live, 0, H, W, C, 8)
        # Before the products: ptxas 12.8 ran out of uniform registers between them and read outside shared memory.
        ninth = _load_taps(x, row, col, base, live, 8, H, W, C, 1)
        acc = tl.dot(ninth, last, tl.dot(eight, most))  # [BLOCK, D]
        place = m[:, None] * D + d[None, :]
        if BACK:
            if SHORT:
                acc += tl.load(short + place, mask=live[:, None], other=0.0).to(tl.float32)
            value, product = _behind_relu(acc, a, c, out, m, live, D)
        else:
            rounded = acc.to(kind)
            tl.store(out + place, rounded, mask=live[:, None])
            value = rounded.to(tl.float32)
            product = value * value
        first += value
        second += product
    _store_sums(sums, tl.program_id(0), tl.sum(first, 0), tl.sum(second, 0), D)


@jit
def scatter(
    x,
    weight,
    out,
    sums,
    a,
    c,
    short,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`gather` with BACK and SHORT for a layer of stride 2: out [N, OH, OW, D] from x [N, H, W, C].

    Pixels of one parity (p, q) see the same (1 + p)(1 + q) taps: an even row only the middle one, an odd row the
    other two. Each program handles pixels of one parity and fills the taps they lack with zeros.
    """
    p, q = tl.program_id(1) // 2, tl.program_id(1) % 2
    HALF_H: tl.constexpr = (OH + 1) // 2
    HALF_W: tl.constexpr = (OW + 1) // 2
    k, d = tl.arange(0, 4 * C), tl.arange(0, D)
    down, right = k // (2 * C), k // C % 2  # position of the tap in x, relative to (row, col)
    used = (down <= p) & (right <= q)
    tap = (1 + p - 2 * down) * 3 + 1 + q - 2 * right
    w = tl.load(weight + ((k % C * 9 + tap) * D)[:, None] + d[None, :], mask=used[:, None], other=0.0)
    first, second = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
    _wait(EARLY)
    for t in range(TILES):
        m = (tl.program_id(0) * TILES + t) * BLOCK + tl.arange(0, BLOCK)
        n, row, col = m // (HALF_H * HALF_W), m // HALF_W % HALF_H, m % HALF_W
        i, j = 2 * row + p, 2 * col + q
        live = (m < pixels) & (i < OH) & (j < OW)
        h, v = row[:, None] + down[None, :], col[:, None] + right[None, :]
        place = ((n * H + row) * W + col)[:, None] * C + ((down * W + right) * C + k % C)[None, :]
        inside = live[:, None] & used[None, :] & (h < H) & (v < W)
        acc = tl.dot(tl.load(x + place, mask=inside, other=0.0), w)  # [BLOCK, D]
        even = live & (i % 2 + j % 2 == 0)
        past = short + ((n * H + row) * W + col)[:, None] * C + (C - D) // 2 + d[None, :]
        acc += tl.load(past, mask=even[:, None], other=0.0).to(tl.float32)
        value, product = _behind_relu(acc, a, c, out, (n * OH + i) * OW + j, live, D)
        first += value
        second += product
    _store_sums(sums, tl.program_id(0) * 4 + tl.program_id(1), tl.sum(first, 0), tl.sum(second, 0), D)


@jit
def pooled(g, out, sums, a, c, pixels, SIZE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """`gather` with BACK for the mean over an image's SIZE pixels, from the gradient g [N, D]."""
    first, second = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
    for t in range(TILES):
        m = (tl.program_id(0) * TILES + t) * BLOCK + tl.arange(0, BLOCK)
        live = m < pixels
        place = (m // SIZE)[:, None] * D + tl.arange(0, D)[None, :]
        acc = tl.load(g + place, mask=live[:, None], other=0.0).to(tl.float32) / SIZE
        value, product = _behind_relu(acc, a, c, out, m, live, D)
        first += value
        second += product
    _store_sums(sums, tl.program_id(0), tl.sum(first, 0), tl.sum(second, 0), D)


@jit
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
    BH: tl.constexpr,
    BW: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """relu(norm(c) + shortcut). SHORT: 0 none, 1 the same shape, 2 subsampled from [N, BH, BW, B] and padded."""
    d = tl.arange(0, D)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (m < pixels)[:, None]
    place = m[:, None] * D + d[None, :]
    scale, shift = tl.load(gamma + d), tl.load(beta + d)
    _wait(EARLY)
    v = tl.load(c + place, mask=live, other=0.0).to(tl.float32)
    if SHORT == 1:
        past = tl.load(short + place, mask=live, other=0.0).to(tl.float32)
    if SHORT == 2:
        e = d - (D - B) // 2
        n, i, j = m // (H * W), m // W % H, m % W
        there = ((n * BH + 2 * i) * BW + 2 * j)[:, None] * B + e[None, :]
        past = tl.load(short + there, mask=live & ((e >= 0) & (e < B))[None, :], other=0.0).to(tl.float32)
    total, square = _total(sums, parts, D, ROWS)
    mean = total / pixels
    variance = tl.maximum(square / pixels - mean * mean, 0.0)
    rstd = 1 / tl.sqrt(variance + eps)
    if tl.program_id(0) == 0:
        tl.store(stats + d, mean)
        tl.store(stats + D + d, rstd)
        unbiased = variance * pixels / (pixels - 1)
        tl.store(running_mean + d, (1 - momentum) * tl.load(running_mean + d) + momentum * mean)
        tl.store(running_var + d, (1 - momentum) * tl.load(running_var + d) + momentum * unbiased)
    scale *= rstd
    shift -= mean * scale
    v = v * scale[None, :] + shift[None, :]
    if SHORT != 0:
        v += past
    v = tl.where(v <= 0, 0.0, v)  # keeps NaN, as torch's does
    tl.store(out + place, v.to(out.dtype.element_ty), mask=live)


@jit
def settle(
    g,
    c,
    sums,
    parts,
    stats,
    gamma,
    dgamma,
    dbeta,
    dc,
    pixels,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Batch norm's gradient in its input, dc, and in its weight and bias, from that in its output, g."""
    d = tl.arange(0, D)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, live = m[:, None] * D + d[None, :], (m < pixels)[:, None]
    mean, rstd, scale = tl.load(stats + d), tl.load(stats + D + d), tl.load(gamma + d)
    raw = tl.load(c + place, mask=live, other=0.0).to(tl.float32)
    _wait(EARLY)
    v = tl.load(g + place, mask=live, other=0.0).to(tl.float32)
    total, product = _total(sums, parts, D, ROWS)
    slope = rstd * (product - mean * total)
    if tl.program_id(0) == 0:
        tl.store(dgamma + d, slope)
        tl.store(dbeta + d, total)
    hat = (raw - mean[None, :]) * rstd[None, :]
    v = (v - (total / pixels)[None, :] - hat * (slope / pixels)[None, :]) * (scale * rstd)[None, :]
    tl.store(dc + place, v.to(dc.dtype.element_ty), mask=live)


@jit
def correlate(
    x,
    dc,
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
    EARLY: tl.constexpr,
):
    """parts[s, tap, c, d] = the s-th part of the sum over pixels of x[pixel + tap, c] dc[pixel, d]."""
    PADDED: tl.constexpr = 4 if TAPS == 3 else TAPS
    first = tl.program_id(1) * TAPS
    d, k = tl.arange(0, D), tl.arange(0, PADDED * C)
    acc = tl.zeros([PADDED * C, D], tl.float32)
    _wait(EARLY)
    for t in range(ROUNDS):
        m = (tl.program_id(0) * ROUNDS + t) * BLOCK + tl.arange(0, BLOCK)
        live = m < pixels
        row, col = (m // OW) % OH * STRIDE - 1, m % OW * STRIDE - 1
        base = ((m // (OH * OW) * H + row) * W + col) * C
        g = tl.load(dc + m[:, None] * D + d[None, :], mask=live[:, None], other=0.0)  # [BLOCK, D]
        acc = tl.dot(tl.trans(_load_taps(x, row, col, base, live, first, H, W, C, TAPS)), g, acc)
    parts += tl.program_id(0) * (9 * C * D)
    tl.store(parts + ((first * C + k) * D)[:, None] + d[None, :], acc, mask=(k < TAPS * C)[:, None])


@jit
def sum_parts(parts, dw, C, D, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """dw[layer, d, tap, c] = the sum of parts [layers, SPLITS, 9, C, D] over SPLITS."""
    layer = tl.program_id(1)
    parts += layer * (SPLITS * 9 * C * D)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([32, BLOCK], tl.float32)
    for start in range(0, SPLITS, 32):
        s = start + tl.arange(0, 32)
        acc += tl.load(parts + s[:, None] * (9 * C * D) + e[None, :], mask=(s < SPLITS)[:, None], other=0.0)
    place = layer * (9 * C * D) + e % D * (9 * C) + e // D
    tl.store(dw + place, tl.sum(acc, 0))
