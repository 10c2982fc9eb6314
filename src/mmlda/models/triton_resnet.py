"""Triton kernels for a `ResNet` with fixed weights: a whole stage in one launch, forward or backward.

Imported only by `mmlda.models.folded`. Batch norm is part of the weights, so the images of a batch do not depend on
each other: one program takes one image through all layers of a stage and waits for nothing but itself. Its activations
stay close to its multiprocessor, and a pass is six launches instead of a hundred.

A stage's activations lie in slots, each [N, H, W, C]. Slot 1 holds the output of its first convolution, slot l + 2 that
of layer l, which reads slot l + 1; the layers that end a block add slot l. Where a stage begins with stride 2, slot 0
holds the shortcut of its first block.
"""
# mypy: disable-error-code="no-untyped-def"
# (Triton has no types for the arguments of kernels)

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # the module can be imported, but not run

    def jit(program):
        return program


@jit
def _rounded(t, kind: tl.constexpr):
    """Convert `t` to `kind`. Float32 is rounded to the nearest TF32, since a product would truncate 13 bits."""
    if kind == tl.float32:
        bits = (t.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        t = tl.where(t == t, bits.to(tl.float32, bitcast=True), t)  # keep NaN
    return t.to(kind)


@jit
def _product(
    x, weight, row, col, live, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr
):
    """Correlate an image x [H, W, C] with a filter [9, C, D] whose first tap lies at (row, col): [pixels, D]."""
    d = tl.arange(0, D)
    base = (row * W + col) * C
    acc = tl.zeros([row.shape[0], D], tl.float32)
    for first in tl.static_range(0, 9, TAPS):  # with TAPS = 8: eight at once, then the ninth
        k = tl.arange(0, TAPS * C if first + TAPS <= 9 else C)
        tap = first + k // C
        kh, kw = tap // 3, tap % 3
        h, w = row[:, None] + kh[None, :], col[:, None] + kw[None, :]
        inside = live[:, None] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        a = tl.load(x + base[:, None] + ((kh * W + kw) * C + k % C)[None, :], mask=inside, other=0.0)
        b = tl.load(weight + ((first * C + k) * D)[:, None] + d[None, :])
        acc = tl.dot(_rounded(a, a.dtype), _rounded(b, b.dtype), acc)
    return acc


@jit
def _pairs(x, weight, m, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """The same at pairs m of neighbouring pixels: [pairs, 2 C]; the weights are those of `folded._for_pairs`."""
    k, d = tl.arange(0, 4 * C), tl.arange(0, 2 * C)
    row, col = m // (W // 2), m % (W // 2) * 2 - 1
    w = col[:, None] + (k // C)[None, :]
    inside = (m < H * W // 2)[:, None] & (w >= 0) & (w < W)
    acc = tl.zeros([m.shape[0], 2 * C], tl.float32)
    for tap in tl.static_range(3):
        h = row + tap - 1
        live = inside & ((h >= 0) & (h < H))[:, None]
        a = tl.load(x + ((h * W + col) * C)[:, None] + k[None, :], mask=live, other=0.0)
        b = tl.load(weight + ((tap * 4 * C + k) * 2 * C)[:, None] + d[None, :])
        acc = tl.dot(_rounded(a, a.dtype), _rounded(b, b.dtype), acc)
    return acc


@jit
def _layer(x, weight, m, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, PAIRS: tl.constexpr):
    """Correlate an image x [H, W, C] with a filter from C to C channels, at pixels or pairs m."""
    if PAIRS:
        return _pairs(x, weight, m, H, W, C)
    else:
        return _product(x, weight, m // W - 1, m % W - 1, m < H * W, H, W, C, C, TAPS)


@jit
def _relu(t):
    return tl.where(t <= 0, 0.0, t)  # keeps NaN, as torch's does


@jit
def stage_forward(
    before,
    mean,
    std,
    first,
    first_shift,
    weights,
    shifts,
    slots,
    slot,
    BH: tl.constexpr,
    BW: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    LAYERS: tl.constexpr,
    STEM: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Fill the slots of a stage from `before` [N, BH, BW, B]: the images of the network, or the last slot before."""
    kind: tl.constexpr = slots.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    slot = slot.to(tl.int64)  # the size of one, N H W C
    slots += n * (H * W * C)
    before += n * (BH * BW * B)
    SIDE: tl.constexpr = 2 if PAIRS else 1
    SIZE: tl.constexpr = (24 if PAIRS else 9) * C * C  # numbers in a filter
    d, ds = tl.arange(0, C), tl.arange(0, SIDE * C)
    for start in range(0, H * W, BLOCK):
        m = start + tl.arange(0, BLOCK)
        live = (m < H * W)[:, None]
        place = m[:, None] * C + d[None, :]
        if STEM:
            k = tl.arange(0, 32)  # 9 taps of at most 3 channels
            tap, c = k // B, k % B
            h, w = (m // W - 1)[:, None] + (tap // 3)[None, :], (m % W - 1)[:, None] + (tap % 3)[None, :]
            inside = live & (tap < 9)[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            a = tl.load(before + (h * W + w) * B + c[None, :], mask=inside, other=0.0)
            a = tl.where(inside, (a - tl.load(mean + c)[None, :]) / tl.load(std + c)[None, :], 0.0)
            b = tl.load(first + k[:, None] * C + d[None, :], mask=(tap < 9)[:, None], other=0.0)
            acc = tl.dot(_rounded(a, kind), _rounded(b, kind))
        else:
            row, col = m // W * 2, m % W * 2
            acc = _product(before, first, row - 1, col - 1, m < H * W, BH, BW, B, C, TAPS)
            c = d - (C - B) // 2
            known = live & ((c >= 0) & (c < B))[None, :]
            s = tl.load(before + ((row * BW + col) * B)[:, None] + c[None, :], mask=known, other=0.0)
            tl.store(slots + place, s, mask=live)
        acc = _relu(acc + tl.load(first_shift + d)[None, :])
        tl.store(slots + slot + place, acc.to(kind), mask=live)
    tl.debug_barrier()
    for layer in range(LAYERS):
        for start in range(0, H * W // SIDE, BLOCK // SIDE):
            m = start + tl.arange(0, BLOCK // SIDE)
            live = (m < H * W // SIDE)[:, None]
            place = m[:, None] * (SIDE * C) + ds[None, :]
            acc = _layer(slots + slot, weights, m, H, W, C, TAPS, PAIRS)
            acc += tl.load(shifts + ds % C)[None, :]
            if layer % 2 == STEM:
                acc += tl.load(slots + place, mask=live, other=0.0).to(tl.float32)
            tl.store(slots + 2 * slot + place, _relu(acc).to(kind), mask=live)
        tl.debug_barrier()
        slots += slot
        weights += SIZE
        shifts += C


@jit
def stage_backward(
    g,
    slots,
    before,
    std,
    first,
    weights,
    spare,
    dx,
    slot,
    BH: tl.constexpr,
    BW: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    LAYERS: tl.constexpr,
    STEM: tl.constexpr,
    POOLED: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The gradient `dx` in `before` [N, BH, BW, B] from that in the last slot, `g` [N, H, W, C].

    With POOLED, `g` [N, C] is that in the mean of the last slot over its pixels. `spare` holds the gradients in three
    slots. Each is 0 where the activation is not positive, as behind a ReLU; so is dx, unless it belongs to the images.
    """
    kind: tl.constexpr = slots.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    slot = slot.to(tl.int64)  # the size of one, N H W C
    slots += n * (H * W * C) + LAYERS * slot  # the input of the last layer, less one slot
    spare += n * (H * W * C)
    before += n * (BH * BW * B)
    dx += n * (BH * BW * B)
    SIDE: tl.constexpr = 2 if PAIRS else 1
    SIZE: tl.constexpr = (24 if PAIRS else 9) * C * C  # numbers in a filter
    d, ds = tl.arange(0, C), tl.arange(0, SIDE * C)
    weights += (LAYERS - 1) * SIZE
    for start in range(0, H * W, BLOCK):
        m = start + tl.arange(0, BLOCK)
        live = (m < H * W)[:, None]
        place = m[:, None] * C + d[None, :]
        if POOLED:
            given = tl.load(g + n * C + d)[None, :] / (H * W) + tl.zeros([BLOCK, C], tl.float32)
            given = tl.where(tl.load(slots + slot + place, mask=live, other=0.0) > 0, given, 0.0)
        else:
            given = tl.load(g + n * (H * W * C) + place, mask=live, other=0.0)
        tl.store(spare + (LAYERS + 1) % 3 * slot + place, given.to(kind), mask=live)
    tl.debug_barrier()
    for back in range(LAYERS):
        layer = LAYERS - 1 - back
        for start in range(0, H * W // SIDE, BLOCK // SIDE):
            m = start + tl.arange(0, BLOCK // SIDE)
            live = (m < H * W // SIDE)[:, None]
            place = m[:, None] * (SIDE * C) + ds[None, :]
            source = spare + (layer + 2) % 3 * slot
            acc = _layer(source, weights, m, H, W, C, TAPS, PAIRS)
            if ((layer + 1) % 2 == STEM) & (back > 0):
                acc += tl.load(spare + layer % 3 * slot + place, mask=live, other=0.0).to(tl.float32)
            acc = tl.where(tl.load(slots + place, mask=live, other=0.0) > 0, acc, 0.0)
            tl.store(spare + (layer + 1) % 3 * slot + place, acc.to(kind), mask=live)
        tl.debug_barrier()
        slots -= slot
        weights -= SIZE
    if STEM:
        e = tl.arange(0, 16)  # B, padded
        for start in range(0, H * W, BLOCK):
            m = start + tl.arange(0, BLOCK)
            acc = _product(spare + slot, first, m // W - 1, m % W - 1, m < H * W, H, W, C, 16, TAPS)
            known = (m < H * W)[:, None] & (e < B)[None, :]
            acc = acc / tl.load(std + e, mask=e < B, other=1.0)[None, :]
            tl.store(dx + m[:, None] * B + e[None, :], acc, mask=known)
    else:
        e = tl.arange(0, B)
        k = tl.arange(0, 4 * C)
        down, right = k // (2 * C), k // C % 2  # position of the tap, relative to (row, col)
        for parity in tl.static_range(4):  # pixels of one parity see the same taps
            p, q = parity // 2, parity % 2
            used = (down <= p) & (right <= q)
            tap = (1 + p - 2 * down) * 3 + 1 + q - 2 * right
            b = tl.load(first + ((tap * C + k % C) * B)[:, None] + e[None, :], mask=used[:, None], other=0.0)
            for start in range(0, H * W, BLOCK):
                m = start + tl.arange(0, BLOCK)
                row, col = m // W, m % W
                h, w = row[:, None] + down[None, :], col[:, None] + right[None, :]
                inside = (m < H * W)[:, None] & used[None, :] & (h < H) & (w < W)
                a = tl.load(spare + slot + ((h * W + w) * C + (k % C)[None, :]), mask=inside, other=0.0)
                acc = tl.dot(_rounded(a, kind), _rounded(b, kind))
                live = ((m < H * W) & (2 * row + p < BH) & (2 * col + q < BW))[:, None]
                if parity == 0:  # the shortcut
                    past = spare + 2 * slot + m[:, None] * C + (C - B) // 2 + e[None, :]
                    acc += tl.load(past, mask=live, other=0.0).to(tl.float32)
                place = (((2 * row + p) * BW + 2 * col + q) * B)[:, None] + e[None, :]
                acc = tl.where(tl.load(before + place, mask=live, other=0.0) > 0, acc, 0.0)
                tl.store(dx + place, acc.to(kind), mask=live)
