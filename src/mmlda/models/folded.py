"""A Resnet with fixed weights on CUDA, for crafting images: batch norm is folded in, and a whole stage is one kernel.

While images are crafted the weights stand still: no statistics and no gradients in the weights are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda.models.backbones import ResNet, fold_norms
from mmlda.models.classifier import Classifier
from mmlda.models.kernel_checks import has_kernels
from mmlda.models.kernels import compiled_ahead, launch
from mmlda.models.training_pass import layers_of


class Cut(NamedTuple):
    """How a stage's kernels are cut up."""

    pixels: int  # of the image in one matrix product
    taps: int  # of the filter in one matrix product: 8 (and the ninth alone) or 1
    pairs: bool  # whether two neighbouring pixels share a row of the product, with four taps of a row instead
    warps: int


# By channels, measured on an H200 in bfloat16 at batches of 128 and 1,000. Fewer warps than these for 16 or 32 channels
# make Triton 3.6 compute wrong results.
CUTS = {16: Cut(512, 8, True, 16), 32: Cut(256, 8, True, 8), 64: Cut(64, 8, False, 4)}

SLOPE = 8.0  # largest gradient of an image's features in half precision, between overflow and underflow further down


class Stage(NamedTuple):
    """Filters of a stage for the forward and the backward pass, each tap's as [inputs, outputs], and shifts."""

    first: Tensor  # [9, B, C]
    first_back: Tensor  # [9, C, B]
    first_shift: Tensor  # [C]
    weights: Tensor  # [layers, 3, 3, C, C], or as `_for_pairs` returns them
    back: Tensor
    shifts: Tensor  # [layers, C]


def foldable(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether `folded` has kernels for this network, on this device, with images of this shape [C, H, W].

    Parameters
    ----------
    model
        Any network.
    shape
        Shape of an image.

    Returns
    -------
    bool
        True for a `Classifier` on a post-activation `ResNet` of width 16 with ReLU, as this package makes it, on CUDA.
        The width of the images must be divisible by 4.

    Examples
    --------
    >>> foldable(nn.Linear(2, 2), (2,))
    False
    """
    return (
        isinstance(model, Classifier)
        and has_kernels(model.backbone, shape)
        and shape[2] % 4 == 0
        and torch.cuda.get_device_capability(next(model.parameters()).device) >= (9, 0)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    )


def folded(model: Classifier, kind: torch.dtype = torch.bfloat16) -> Callable[[Tensor], Tensor]:
    """The network in eval mode, with its present weights, as a function from images to logits for attacks.

    Parameters
    ----------
    model
        A network that is `foldable`.
    kind
        Type of the activations: bfloat16, or float16, whose 10 bits are those of TF32.

    Returns
    -------
    callable
        Logits `[N, L]` of images `[N, C, H, W]`, differentiable in the images alone. Later changes of the convolutions
        do not reach it.
    """
    fixed = _fixed(model, kind)

    def logits(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return model.head(model._latent(_Features.apply(x, *fixed)))

    return logits


def _fixed(model: Classifier, kind: torch.dtype) -> tuple[list[Stage], Tensor, Tensor]:
    """What the kernels read of the network: its stages, and the images' mean and deviation per channel."""
    net: Any = model.backbone
    mean, std = (t.flatten().expand(net.config["channels"]).contiguous() for t in (model.mean, model.std))
    return fold(net, kind), mean, std


def agrees(model: Classifier, x: Tensor, kind: torch.dtype = torch.bfloat16) -> bool:
    """Whether `folded` computes what the network in eval mode does, to rounding; reads values from the device.

    Logits and gradients in the images are compared. The kernels depend on Triton's compiler, which is at work on every
    kind of device and in every release anew.
    """
    rounding = 0.05 if kind == torch.bfloat16 else 0.005
    try:
        with compiled_ahead(lambda: _rehearse(model, x, kind)):
            want, slope = _slopes(model, x)
        z, g = _slopes(folded(model, kind), x)
        same = (z - want).norm() < rounding * want.norm() + 1e-3
        along = (g * slope).sum() > 0.8 * g.norm() * slope.norm()  # a ReLU near 0 may fall on the other side
        return bool(same & (along | (slope == 0).all()))
    except Exception:  # of Triton: not enough shared memory, for example
        return False


@torch.no_grad()
def _rehearse(model: Classifier, x: Tensor, kind: torch.dtype) -> None:
    """Launch all kernels, for `compiled_ahead`."""
    stages, mean, std = _fixed(model, kind)
    g = torch.zeros(len(x), model.backbone.num_features, device=x.device)  # type: ignore[call-overload]
    _image_grad(g, _activations(x, stages, mean, std), stages, std)


@torch.enable_grad()
def _slopes(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient in the images of the cross-entropy with the least probable class."""
    x = x.detach().requires_grad_()
    z = function(x).float()
    loss = F.cross_entropy(z, z.detach().argmin(1), reduction="sum")
    return z.detach(), torch.autograd.grad(loss, x)[0]


def fold(net: ResNet, kind: torch.dtype) -> list[Stage]:
    """The stages of a post-activation `ResNet`, with its batch norms in eval mode folded into the convolutions."""
    convs, norms = layers_of(net)
    weights, shifts = fold_norms(convs, norms)
    begins = [0, *(1 + 2 * n for n, block in enumerate(net.blocks) if block.stride > 1), len(convs)]  # type: ignore
    return [_stage(weights[i:j], shifts[i:j], kind, stem=i == 0) for i, j in itertools.pairwise(begins)]


def _stage(weights: Any, shifts: Any, kind: torch.dtype, stem: bool) -> Stage:
    first, rest = weights[0], torch.stack(weights[1:])  # [C, B, 3, 3], [layers, C, C, 3, 3]
    C, B = first.shape[:2]
    if stem:  # the gradient in the image, padded to 16 channels
        first_back = first.new_zeros(3, 3, C, 16)
        first_back[..., :B] = first.flip(2, 3).permute(2, 3, 0, 1)
    else:
        first_back = first.permute(2, 3, 0, 1)
    there, back = rest.permute(0, 3, 4, 2, 1), rest.flip(3, 4).permute(0, 3, 4, 1, 2)
    if CUTS[C].pairs:
        there, back = _for_pairs(there), _for_pairs(back)
    a, b, c, d = (w.to(kind).contiguous() for w in (first.permute(2, 3, 1, 0), first_back, there, back))
    return Stage(a, b, shifts[0], c, d, torch.stack(shifts[1:]))


def _for_pairs(weights: Tensor) -> Tensor:
    """Filters [layers, 3, 3, C, C] for two neighbouring pixels at once: [layers, 3, 4, C, 2, C].

    Four pixels of a row, of which the left one of the two sees the first three, the right one the last three.
    """
    wide = weights.new_zeros(len(weights), 3, 4, weights.shape[3], 2, weights.shape[4])
    wide[:, :, :3, :, 0] = weights
    wide[:, :, 1:, :, 1] = weights
    return wide


class _Features(torch.autograd.Function):
    """Pooled features [N, C] in float32 of images x [N, B, H, W], scaled as (x - mean) / std."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stages: list[Stage], mean: Tensor, std: Tensor) -> Tensor:
        kept = _activations(x, stages, mean, std)
        ctx.save_for_backward(*kept)
        ctx.stages, ctx.std = stages, std
        return kept[-1][-1].mean((1, 2), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        largest = g.abs().amax(1, keepdim=True)  # an image's gradient is not that of another, so each has its own scale
        scale = torch.where(largest > 0, SLOPE / largest, 1.0)  # [N, 1]
        dx = _image_grad((g * scale).contiguous(), ctx.saved_tensors, ctx.stages, ctx.std)
        return dx / scale.view(-1, 1, 1, 1), None, None, None


def _activations(x: Tensor, stages: list[Stage], mean: Tensor, std: Tensor) -> list[Tensor]:
    """The images, channels last, and the slots of each stage."""
    from mmlda.models import triton_resnet

    x = x.contiguous(memory_format=torch.channels_last)
    kept, before = [x], x
    for n, stage in enumerate(stages):
        (N, B, BH, BW), (layers, C) = before.shape, stage.shifts.shape
        H, W = (BH, BW) if n == 0 else ((BH + 1) // 2, (BW + 1) // 2)
        slots = torch.empty(layers + 2, N, H, W, C, dtype=stage.weights.dtype, device=x.device)
        cut = CUTS[C]
        arguments = (before, mean, std, stage.first, stage.first_shift, stage.weights, stage.shifts, slots)
        sizes = (slots[0].numel(), BH, BW, B, H, W, C, layers, n == 0, cut.pixels, cut.taps, cut.pairs)
        launch(triton_resnet.stage_forward, (N,), *arguments, *sizes, num_warps=cut.warps, num_stages=1)
        before = slots[-1].permute(0, 3, 1, 2)
        kept.append(slots)
    return kept


def _image_grad(g: Tensor, activations: Sequence[Tensor], stages: list[Stage], std: Tensor) -> Tensor:
    """The gradient in the images from that in the pooled features, `g` [N, C]."""
    from mmlda.models import triton_resnet

    x, *kept = activations
    for n in reversed(range(len(kept))):
        slots, stage = kept[n], stages[n]
        before = x if n == 0 else kept[n - 1][-1].permute(0, 3, 1, 2)
        (N, B, BH, BW), (H, W, C), layers = before.shape, slots.shape[2:], len(slots) - 2
        spare, dx = torch.empty_like(slots[:3]), torch.empty_like(before)
        cut, last = CUTS[C], n == len(kept) - 1
        arguments = (g, slots, before, std, stage.first_back, stage.back, spare, dx)
        sizes = (slots[0].numel(), BH, BW, B, H, W, C, layers, n == 0, last, cut.pixels, cut.taps, cut.pairs)
        launch(triton_resnet.stage_backward, (N,), *arguments, *sizes, num_warps=cut.warps, num_stages=1)
        g = dx
    return g
