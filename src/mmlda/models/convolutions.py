"""3x3 convolutions for networks with few channels, faster than cuDNN's on CUDA in half precision and in TF32.

`conv3x3` equals `F.conv2d(x, weight, stride=stride, padding=1)` in value, gradients and dtypes, also under autocast.
Where `supported` returns True it runs this package's Triton kernels, elsewhere F.conv2d itself. The kernels sum in a
fixed order, so the same inputs give the same bits, which cuDNN's fastest weight gradients do not guarantee.

Triton is imported when a kernel first runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHANNELS = (16, 32, 64)
_TRITON = importlib.util.find_spec("triton") is not None


# While `compiled_ahead` collects launches, in its thread alone: arguments of a kernel's `run`.
_LAUNCHES: ContextVar[dict[Any, tuple[Any, ...]] | None] = ContextVar("launches", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch one of the package's Triton kernels."""
    launches = _LAUNCHES.get()
    if launches is None:
        kernel[grid](*arguments, **options)
    else:  # tensors that differ in no more than their values and shapes share a compiled kernel
        key = tuple(a.dtype if isinstance(a, Tensor) else a for a in arguments)
        launches[kernel, key, *options.items()] = kernel, arguments, options


@contextmanager
def compiled_ahead(work: Callable[[], Any]) -> Iterator[None]:
    """Compile and load the kernels that `work` launches, in threads beside the block, which ends when they are ready.

    Triton would compile each when it is first launched, one after another. `work` is called at once and launches
    nothing, so it must not read what a kernel would write. A kernel that does not compile fails where it is launched.
    """
    launches: dict[Any, tuple[Any, ...]] = {}
    token = _LAUNCHES.set(launches)
    try:
        work()
    finally:
        _LAUNCHES.reset(token)

    def compile(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        with torch.cuda.device(arguments[0].device):  # a thread starts on the first one
            ready = kernel.run(*arguments, grid=(1,), warmup=True, **options)
            _ = ready.run  # to load it, which compiles its launcher in C

    with ThreadPoolExecutor() as threads:
        for one in launches.values():
            threads.submit(compile, *one)
        yield


def supported(x: Tensor, weight: Tensor, stride: int = 1, *, tf32: bool = False) -> bool:
    """Whether `conv3x3` with these arguments runs the fast kernels under the current autocast setting.

    It does for bfloat16 and half precision on CUDA (by dtype, or by autocast from a float32 weight), 16, 32 or 64
    channels in and out, and stride 1 or 2; images may have any size. With `tf32` it does for float32 too, given 16
    input channels and a weight that needs no gradient; for other layers cuDNN is faster.

    >>> supported(torch.zeros(1, 16, 8, 8), torch.zeros(16, 16, 3, 3))  # on the CPU
    False
    """
    if not (_TRITON and x.is_cuda and weight.is_cuda and x.dim() == 4 and weight.dim() == 4 and stride in (1, 2)):
        return False
    if torch.is_autocast_enabled("cuda"):
        kind = torch.get_autocast_dtype("cuda")
        right = weight.dtype in (kind, torch.float32)  # the kernels convert float32 weights as they read them
    else:
        kind = x.dtype
        right = weight.dtype == kind
    (outputs, inputs), frozen = weight.shape[:2], not weight.requires_grad
    return (
        right
        and (kind in (torch.bfloat16, torch.float16) or (tf32 and kind == torch.float32 and frozen and inputs == 16))
        and x.shape[1] == inputs
        and inputs in _CHANNELS
        and outputs in _CHANNELS
        and tuple(weight.shape[2:]) == (3, 3)
        and x.numel() > 0
        and x.shape[0] * x.shape[2] * x.shape[3] * max(inputs, outputs) < 2**31  # offsets are 32-bit
    )


def conv3x3(x: Tensor, weight: Tensor, stride: int = 1, *, tf32: bool = False) -> Tensor:
    """Correlate x [N, C, H, W] with weight [D, C, 3, 3], padded by one zero on each side: [N, D, H', W'].

    H' = (H - 1) // stride + 1, and likewise W'. Fastest with x and weight in channels_last memory format, which the
    output has too. Second derivatives need F.conv2d. With `tf32`, float32 may be multiplied as TF32, rounded to nearest
    as in cuDNN, unless `torch.backends.cudnn.allow_tf32` is False.

    >>> x, weight = torch.rand(2, 16, 8, 8), torch.rand(32, 16, 3, 3)
    >>> conv3x3(x, weight, stride=2).shape
    torch.Size([2, 32, 4, 4])
    """
    if not supported(x, weight, stride, tf32=tf32):
        return F.conv2d(x, weight, stride=stride, padding=1)
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    return _forward(x, weight, stride)


# The kernels are registered as operators: torch.compile and graph capture see one call each, without graph breaks.


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _aside(x: Tensor) -> bool:
    """Whether to call ATen instead: bfloat16 and TF32 matrix products need Ampere, and TF32 must be allowed.

    Evaluated on every run, since a compiled step would cache the answer.
    """
    if x.dtype == torch.float32 and not tf32_allowed():
        return True
    return x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)


def tf32_allowed() -> bool:
    """Whether cuDNN may multiply float32 as TF32."""
    # Also in attacks/replay.py: neither package may import the other.
    cudnn = torch.backends.cudnn
    allowed = cudnn.conv.fp32_precision == "tf32" if hasattr(cudnn, "conv") else cudnn.allow_tf32
    return allowed and cudnn.enabled


def _aten_grad(dy: Tensor, x: Tensor, weight: Tensor, stride: int, which: int) -> Tensor:
    grads = torch.ops.aten.convolution_backward(
        dy, x, weight.to(x.dtype), None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, [which == 0, which == 1, False]
    )
    return grads[which]


@torch.library.custom_op("mmlda::conv3x3", mutates_args=())
def _forward(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    if _aside(x):
        return _dense(F.conv2d(x, weight.to(x.dtype), stride=stride, padding=1))
    from mmlda.models import triton_conv

    with torch.cuda.device(x.device):
        return triton_conv.forward(_dense(x), weight, stride)


@torch.library.custom_op("mmlda::conv3x3_input_grad", mutates_args=())
def _input_grad(dy: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    if _aside(x):
        return _dense(_aten_grad(dy, x, weight, stride, 0))
    from mmlda.models import triton_conv

    with torch.cuda.device(x.device):
        return triton_conv.input_grad(_dense(dy), weight, stride, *x.shape[2:])


@torch.library.custom_op("mmlda::conv3x3_weight_grad", mutates_args=())
def _weight_grad(dy: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    if _aside(x):
        return torch.empty_like(weight).copy_(_aten_grad(dy, x, weight, stride, 1))
    from mmlda.models import triton_conv

    with torch.cuda.device(x.device):
        return triton_conv.weight_grad(_dense(x), _dense(dy), weight, stride)


def rehearse(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Launch what a layer launches in training, forward and backward; an output, of any values."""
    if not supported(x, weight, stride):
        return _empty_output(x, weight, stride)
    with torch.no_grad():
        y = _forward(x, weight, stride)
        _input_grad(y, x, weight, stride)
        _weight_grad(y, x, weight, stride)
    return y


@_forward.register_fake
def _empty_output(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    N, _, H, W = x.shape
    shape = (N, weight.shape[0], (H - 1) // stride + 1, (W - 1) // stride + 1)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@_input_grad.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@_weight_grad.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    x, weight, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    dx = _input_grad(dy, x, weight, ctx.stride) if ctx.needs_input_grad[0] else None
    dw = _weight_grad(dy, x, weight, ctx.stride) if ctx.needs_input_grad[1] else None
    return dx, dw, None


_forward.register_autograd(_backward, setup_context=_keep)
