"""The streamed cross-entropy of `mmlda.models.structured` as one Triton kernel: logits exist in registers only.

A program goes over some bases with some features, keeps the running maximum, sum of exponentials and mean direction,
and writes them once; the caller adds up what the programs of the same features wrote. The transform multiplies by two
small Hadamard matrices, p = A * B, with products of TF32 numbers that are as precise as float32.
"""
# mypy: disable-error-code="no-untyped-def"
# (Triton has no types for the arguments of kernels)

from __future__ import annotations

from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # the module can be imported, but not run

    def jit(program):
        return program


SIZES = tuple(1 << m for m in range(4, 13))  # a matrix product needs 16 rows; more than 4,096 columns do not fit
_PROGRAMS = 528  # at least, if there are as many bases: four per multiprocessor of an H200
_ELEMENTS = 2048  # of the features of a program: more do not fit into registers


@jit
def _hadamard(N: tl.constexpr):
    bits = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)  # the entry is the parity; N is at most 64
    return (1 - 2 * (bits & 1)).to(tl.float32)


@jit
def _forth(t, a, b, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Transform of [R, A * B]; a column of the result, i * A + j, is column j * B + i of the transform."""
    t = tl.dot(tl.reshape(t, (R * A, B)), b, input_precision="tf32x3")
    if A > 1:
        t = _short(tl.permute(tl.reshape(t, (R, A, B)), (0, 2, 1)), a, R, A, B)
    return tl.reshape(t, (R, A * B))


@jit
def _short(t, a, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Transform of the last dimension of [R, B, A]."""
    if A == 2:
        left, right = tl.split(t)
        return tl.join(left + right, left - right)
    else:
        return tl.reshape(tl.dot(tl.reshape(t, (R * B, A)), a, input_precision="tf32x3"), (R, B, A))


@jit
def _back(t, a, b, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Transform of what has the columns of `_forth`."""
    if A > 1:
        t = tl.permute(_short(tl.reshape(t, (R, B, A)), a, R, A, B), (0, 2, 1))
    t = tl.dot(tl.reshape(t, (R * A, B)), b, input_precision="tf32x3")
    return tl.reshape(t, (R, A * B))


@jit
def _stream(
    x_at,  # float32 [N, P], divided by sqrt(P)
    y_at,  # int64 [N]
    signs_at,  # int8 [bases, P]
    plus_at,  # float32 [bases * P]: log priors of the rows, and of their opposites
    minus_at,
    top_at,  # float32 [chunks, N]: outputs
    total_at,
    own_at,
    direction_at,  # float32 [chunks, N, P]
    N,
    bases,
    per,
    GRADIENT: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    P: tl.constexpr = A * B
    row, chunk = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1)
    column = tl.arange(0, P)
    shuffled = column % A * B + column // A
    live = row < N
    at = row[:, None].to(tl.int64) * P + column[None, :]
    x = tl.load(x_at + at, mask=live[:, None], other=0.0)
    y = tl.load(y_at + row, mask=live, other=-1)
    a, b = _hadamard(A), _hadamard(B)
    top = tl.full((R,), -3.4e38, tl.float32)
    total = tl.zeros((R,), tl.float32)
    own = tl.zeros((R,), tl.float32)
    direction = tl.zeros((R, P), tl.float32)
    for basis in range(chunk * per, min((chunk + 1) * per, bases)):
        signs = tl.load(signs_at + basis * P + column).to(tl.float32)
        t = _forth(x * signs[None, :], a, b, R, A, B)
        up = t + tl.load(plus_at + basis * P + shuffled)[None, :]
        down = tl.load(minus_at + basis * P + shuffled)[None, :] - t
        place = y - 2 * P * basis
        inside = (place >= 0) & (place < 2 * P)
        if tl.sum(inside.to(tl.int32)) > 0:
            mine = tl.where(place[:, None] % 2 == 0, up, down)
            here = inside[:, None] & (shuffled[None, :] == place[:, None] // 2)
            own += tl.sum(tl.where(here, mine, 0.0), 1)
        before = top
        top = tl.maximum(top, tl.maximum(tl.max(up, 1), tl.max(down, 1)))
        shrink = tl.exp(before - top)
        up, down = tl.exp(up - top[:, None]), tl.exp(down - top[:, None])
        total = total * shrink + tl.sum(up, 1) + tl.sum(down, 1)
        if GRADIENT:
            direction = direction * shrink[:, None] + _back(up - down, a, b, R, A, B) * signs[None, :]
    out = chunk * N + row
    tl.store(top_at + out, top, mask=live)
    tl.store(total_at + out, total, mask=live)
    tl.store(own_at + out, own, mask=live)
    if GRADIENT:
        tl.store(direction_at + chunk.to(tl.int64) * N * P + at, direction, mask=live[:, None])


def stream(
    x: Tensor, y: Tensor, signs: Tensor, plus: Tensor, minus: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Go over the bases, some at a time.

    Parameters
    ----------
    x
        Features times precision and norm of the means, divided by sqrt(P): float32 [N, P].
    y
        Classes, int64 [N].
    signs
        int8 [bases, P].
    plus, minus
        Log priors of the rows of the bases and of their opposites, float32 [bases * P].
    gradient
        Whether to compute the direction.

    Returns
    -------
    tuple of Tensor
        For each of some chunks of bases: the largest logit, the sum of exponentials below it and the logit of y if it
        is among them, 0 otherwise, `[chunks, N]`; the sum of the rows by their weights `[chunks, N, P]`, empty without
        `gradient`.
    """
    (N, P), bases = x.shape, len(signs)
    A = max(1, P // 64) if P <= 128 else 1 << ((P.bit_length() - 1) // 2)
    R = max(1, _ELEMENTS // P)
    tiles = triton.cdiv(N, R)
    per = triton.cdiv(bases, min(bases, max(1, _PROGRAMS // tiles)))
    chunks = triton.cdiv(bases, per)
    top, total, own = (x.new_empty(chunks, N) for _ in range(3))
    direction = x.new_empty(chunks, N, P) if gradient else x.new_empty(chunks, N, 0)
    arguments = (x, y, signs, plus, minus, top, total, own, direction, N, bases, per)
    _stream[(tiles, chunks)](*arguments, gradient, R, A, P // A, num_warps=8 if P in (64, 128) else 4)
    return top, total, own, direction
