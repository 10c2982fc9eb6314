r"""The means of a binary code without their matrix: logits and cross-entropy by fast Walsh-Hadamard transforms.

The rows of one basis of `mmlda.theory.codes` are `H diag(s) / sqrt(p)`, so their inner products with z are the
transform of `s * z`, and those of the opposite rows are the negative. A basis costs p log p operations instead of
2 p^2, and its p signs are all that is stored.

The cross-entropy goes over the bases in blocks, with a running maximum, sum of exponentials and mean direction, as
flash attention does; on CUDA in one kernel. Logits `[N, L]` are never stored, and the backward pass is one product.

Throughout, `z` is `[N, p]` with p the size of the code, padded with zeros if that is punctured; `signs` int8
`[bases, p]`, without the standard basis, which comes last where the classes need one more; `core` the matrix of
`core_matrix`; `weight` the factor of the unit vectors, precision * sqrt(C); and `bias` the log priors `[L]`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmlda.theory.codes import hadamard

BLOCK = 1 << 14  # classes per block where the logits of a block are made
ROOM = 1 << 22  # logits of such a block on the CPU, where larger ones are slower


def core_matrix(size: int) -> Tensor:
    """Hadamard matrix, int8, of which `transform` makes that of `size`: H = H_a (x) H_b, with a <= b.

    Two products with small matrices are faster than log2(p) passes of additions; up to 64, one product is.
    """
    return torch.from_numpy(hadamard(size if size <= 64 else 1 << (size.bit_length() // 2)))


def transform(x: Tensor, core: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dimension, not normalised: [..., p] -> [..., p].

    Examples
    --------
    >>> x = torch.eye(128)[1]
    >>> bool((transform(x, core_matrix(128)) == torch.from_numpy(hadamard(128))[1]).all())
    True
    """
    a, core = x.shape[-1] // len(core), core.to(x.dtype)
    if a == 1:
        return x @ core
    square = x.unflatten(-1, (a, len(core))) @ core  # [..., a, b]
    return (core[:a, :a] @ square).flatten(-2)


def products(z: Tensor, signs: Tensor, core: Tensor, standard: bool) -> Tensor:
    """Inner products with the unit vectors of each basis, up to the sign: [N, p] -> [N, bases, p]."""
    t = transform((z / math.sqrt(z.shape[1]))[:, None] * signs.to(z.dtype), core)
    return torch.cat([t, z[:, None]], 1) if standard else t


def logits(z: Tensor, signs: Tensor, core: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Logits of every class: [N, p] -> [N, L]."""
    return next(logit_blocks(z, signs, core, weight, bias, len(bias)))


def logit_blocks(
    z: Tensor, signs: Tensor, core: Tensor, weight: Tensor, bias: Tensor, block: int = BLOCK
) -> Iterator[Tensor]:
    """Logits of about `block` classes at a time, in order: [N, p] -> [N, n] each."""
    size, x = z.shape[1], z * weight
    step = max(1, block // (2 * size))  # bases
    bases = _bases(len(bias), size)
    if step + 1 >= bases:
        step = bases
    for begin in range(0, bases, step):
        end = min(begin + step, bases)
        t = products(x, signs[begin:end], core, end > len(signs))  # [N, bases, p]
        part = bias[2 * size * begin : 2 * size * end]
        yield torch.stack([t, -t], -1).flatten(1)[:, : len(part)] + part


def rows(index: Tensor, signs: Tensor, scale: Tensor) -> Tensor:
    """Means of the classes in `index`, of norm `scale`: int64 [n] -> [n, p]."""
    size = signs.shape[1]
    basis, row = index // (2 * size), index % (2 * size) // 2
    column = torch.arange(size, device=index.device)
    bits = row[:, None] & column  # [n, p]; the entry of the Hadamard matrix is the parity
    for shift in (8, 4, 2, 1):
        bits = bits ^ (bits >> shift)
    entry = (signs[basis.clamp(max=len(signs) - 1)] * (1 - 2 * (bits & 1))).to(scale.dtype) / math.sqrt(size)
    unit = torch.where((basis < len(signs))[:, None], entry, (row[:, None] == column).to(scale.dtype))
    return unit * (scale * (1 - 2 * (index & 1)))[:, None]


def topk(z: Tensor, signs: Tensor, core: Tensor, weight: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits and their classes, largest first: [N, k] each. For k = 1 the classes are those of argmax."""
    values = indices = None
    begin = 0
    fixed = z.is_cuda or torch.compiler.is_compiling()  # a compiled program would depend on the batch size
    size = BLOCK if fixed else min(BLOCK, ROOM // max(1, len(z)))
    for block in logit_blocks(z, signs, core, weight, bias, size):
        value, index = _largest(block, k)
        index = index + begin
        begin += block.shape[1]
        if values is not None and indices is not None:
            value, index = torch.cat([values, value], 1), torch.cat([indices, index], 1)
            value, kept = _largest(value, k)
            index = index.gather(1, kept)
        values, indices = value, index
    assert values is not None and indices is not None
    return values, indices


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their columns; for k = 1 the first of equal ones."""
    if k == 1:
        values, columns = x.max(1, keepdim=True)
    else:
        values, columns = x.topk(min(k, x.shape[1]), dim=1)
    return values, columns


# A registered operator is one node for torch.compile, whatever the number of blocks.
@torch.library.custom_op("mmlda::code_cross_entropy", mutates_args=())
def cross_entropy(
    z: Tensor, y: Tensor, signs: Tensor, core: Tensor, weight: Tensor, bias: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy [N] of features z [N, p] with classes y [N], without their logits.

    Returns
    -------
    tuple of Tensor
        Losses `[N]`; their gradients `[N, p]`, empty unless `gradient`; whether no class has a larger logit `[N]`.
        Where y is not a class, loss and gradient are NaN. Where all logits are equal, only class 0 is right.
    """
    size, L = z.shape[1], len(bias)
    label, y = y, y.clamp(0, L - 1)  # within the bounds of every index
    known = label == y
    bases, x = _bases(L, size), z * weight
    padded = F.pad(bias, (0, 2 * size * bases - L), value=-math.inf).view(bases * size, 2)
    plus, minus = padded.T.contiguous()  # [bases * p] each
    parts = _by_kernel(x, y, signs, plus, minus, gradient) if _has_kernel(z) else None
    if parts is None or bases > len(signs):
        last = _by_blocks(x, y, signs, core, plus, minus, gradient, 0 if parts is None else len(signs))
        parts = last if parts is None else tuple(torch.cat(pair) for pair in zip(parts, last))
    tops, totals, owns, directions = parts  # [parts, N], and [parts, N, p]
    top = tops.amax(0)
    share = (tops - top).exp()
    total, own = (share * totals).sum(0), owns.sum(0)
    losses = torch.where(known, top - own + total.log(), math.nan)
    direction = z[:, :0].clone()
    if gradient:
        direction = (share[..., None] * directions).sum(0) * (weight / total[:, None]) - rows(y, signs, weight)
        direction = torch.where(known[:, None], direction, math.nan)
    hits = (own >= top) & ((total < L) | (y == 0)) & known  # total is L, exactly, where all logits are equal
    return losses, direction, hits


Parts = tuple[Tensor, ...]


def _has_kernel(z: Tensor) -> bool:
    if not z.is_cuda or z.dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return False
    from mmlda.models import triton_codes

    return z.shape[1] in triton_codes.SIZES and torch.cuda.get_device_capability(z.device) >= (8, 0)


def _by_kernel(x: Tensor, y: Tensor, signs: Tensor, plus: Tensor, minus: Tensor, gradient: bool) -> Parts:
    """As `_by_blocks` on the bases that have signs, without logits in memory."""
    from mmlda.models import triton_codes

    root = math.sqrt(x.shape[1])
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        *rest, direction = triton_codes.stream((x / root).contiguous(), y, signs, plus, minus, gradient)
    return *rest, direction / root


def _by_blocks(
    x: Tensor, y: Tensor, signs: Tensor, core: Tensor, plus: Tensor, minus: Tensor, gradient: bool, begin: int
) -> Parts:
    """Go over the bases from `begin` on, in blocks.

    Returns
    -------
    tuple of Tensor
        Largest logit, sum of exponentials below it, logit of y or 0 if it was before `begin`, `[1, N]` each; the unit
        means' sum by their weights `[1, N, p]`, empty unless `gradient`.
    """
    N, size = x.shape
    bases = len(plus) // size
    budget = 1 << (23 if x.is_cuda else 18)  # elements of a block: enough to keep a GPU busy, and a core's cache full
    step = max(1, budget // max(1, N * size))
    top = torch.full((N,), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)  # finite: a prior may be 0
    total, own = torch.zeros_like(top), torch.zeros_like(top)
    direction = torch.zeros_like(x if gradient else x[:, :0])
    for begin in range(begin, bases, step):  # noqa: B020
        end = min(begin + step, bases)
        standard = end > len(signs)
        t = products(x, signs[begin:end], core, standard).flatten(1)  # [N, bases * p]
        up, down = t + plus[size * begin : size * end], minus[size * begin : size * end] - t
        place = y - 2 * size * begin
        inside = (place >= 0) & (place < 2 * t.shape[1])
        place = place.clamp(0, 2 * t.shape[1] - 1)
        mine, opposite = (side.gather(1, place[:, None] // 2)[:, 0] for side in (up, down))
        own = torch.where(inside, torch.where(place % 2 == 0, mine, opposite), own)
        before, top = top, torch.maximum(top, torch.maximum(up.amax(1), down.amax(1)))
        up.sub_(top[:, None]).exp_()
        down.sub_(top[:, None]).exp_()
        shrink = (before - top).exp()
        total = total * shrink + up.sum(1) + down.sum(1)
        if gradient:
            direction *= shrink[:, None]
            direction += _transposed(up.sub_(down).unflatten(1, (end - begin, size)), signs[begin:end], core, standard)
    return top[None], total[None], own[None], direction[None]


def _transposed(g: Tensor, signs: Tensor, core: Tensor, standard: bool) -> Tensor:
    """Transpose of `products`: [N, bases, p] -> [N, p]."""
    last = g[:, -1] if standard else 0.0
    t = transform(g[:, : len(signs)], core) * signs.to(g.dtype)
    return t.sum(1) / math.sqrt(g.shape[2]) + last


@cross_entropy.register_fake
def _(
    z: Tensor, y: Tensor, signs: Tensor, core: Tensor, weight: Tensor, bias: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    direction = torch.empty_like(z if gradient else z[:, :0])
    return z.new_empty(len(z)), direction, z.new_empty(len(z), dtype=torch.bool)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, of_losses: Tensor | None, of_direction: Tensor | None, _: Any) -> tuple[Any, ...]:
    if of_direction is not None:
        raise RuntimeError("the streamed cross-entropy can be differentiated once; use F.cross_entropy(head(z), y)")
    (direction,) = ctx.saved_tensors
    return None if of_losses is None else of_losses[:, None] * direction, None, None, None, None, None, None


cross_entropy.register_autograd(_backward, setup_context=_setup)


def _bases(num_classes: int, size: int) -> int:
    return -(-num_classes // (2 * size))
