"""A function of tensors as one CUDA graph, and copies of a network that long attacks run faster on.

A small network's step is hundreds of kernels of a few microseconds each, and Python takes longer to launch
them than the device to run them. Captured once for the shapes of a batch, the whole step (forward, backward,
update) is one launch. Compiling the network also makes its kernels fewer and larger.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from mmlda.attacks.bfloat16 import Bfloat16, fast_bfloat16
from mmlda.attacks.checks import invalid, warn_caller

__all__ = ["Replay", "compile_quietly", "compiled", "replay", "tf32_allowed"]

Step = Callable[..., tuple[Tensor, ...]]


class Replay:
    """`step(*inputs)`, captured; calling it copies the inputs and replays the graph.

    The outputs are buffers of the graph: the next call overwrites them, so clone what you keep. They may be
    passed back as inputs. Inputs and outputs lie outside the memory that the graph works in, so graphs that never
    run at the same time can share it (`pool`). This object holds references to everything the graph reads or writes.
    """

    def __init__(
        self, step: Step, inputs: tuple[Tensor, ...], stream: torch.cuda.Stream | None = None, pool: Any = None
    ) -> None:
        self._step = step
        self._inputs = tuple(t.clone() for t in inputs)
        device = inputs[0].device
        with torch.cuda.device(device):
            # Lazy set-up (cuDNN's plans, kernels to load or tune) must happen before the capture.
            self._outputs = tuple(t.clone() for t in step(*self._inputs))
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            # By hand, since `torch.cuda.graph` empties the allocator's cache each time, which takes longer than
            # the rest.
            with torch.cuda.stream(stream or torch.cuda.Stream(device)):
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    for mine, computed in zip(self._outputs, step(*self._inputs)):
                        mine.copy_(computed)
                except BaseException:
                    with suppress(RuntimeError):  # the exception already reports the failure
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        torch._foreach_copy_(self._inputs, inputs)  # a few launches for all of them
        self._graph.replay()
        return self._outputs


def replay(step: Step, inputs: tuple[Tensor, ...], stream: torch.cuda.Stream | None = None, pool: Any = None) -> Step:
    """`step` as a CUDA graph for inputs of these shapes.

    Returns `step` itself where there is nothing to gain (on the CPU, or during another capture) or, with a warning,
    where the model cannot be captured.
    """
    if not inputs[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return step
    try:
        return Replay(step, inputs, stream, pool)
    except torch.cuda.OutOfMemoryError:
        pass  # below, when the tensors that this error refers to are gone
    except RuntimeError as error:
        torch.cuda.synchronize(inputs[0].device)
        words = "the model cannot be captured in a CUDA graph, the attack runs without one and slower"
        warn_caller(f"{words}: {error}", RuntimeWarning)
        return step
    # During a capture the allocator cannot release the memory it caches, such as that of earlier graphs.
    torch.cuda.synchronize(inputs[0].device)
    torch.cuda.empty_cache()
    return Replay(step, inputs, stream, pool)


def compile_quietly(what: Any, **options: Any) -> Any:
    """`torch.compile` without its side effect of disabling the argument checks of torch.distributions for good."""
    checks = Distribution._validate_args
    try:
        return torch.compile(what, **options)
    finally:
        Distribution.set_default_validate_args(checks)


def tf32_allowed() -> bool:
    """Whether convolutions of float32 on CUDA may use TF32 (models/kernels.py asks the same)."""
    cudnn = torch.backends.cudnn
    allowed = cudnn.conv.fp32_precision == "tf32" if hasattr(cudnn, "conv") else cudnn.allow_tf32
    return allowed and cudnn.enabled


class _Compiled(nn.Module):
    def __init__(self, model: nn.Module, backend: str) -> None:
        super().__init__()
        self.model = model
        self._backend = backend
        self._program: Any = None  # compiled when needed: setting up the compiler takes seconds
        self._hook: Any = getattr(model, "for_attack_images", None) if backend == "inductor" else None
        self._own: dict[Any, Any] = {}  # the model's own programs, by images and precision

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if self._hook is not None:
            key = x.shape[1:], x.dtype, tf32_allowed()
            if key not in self._own:
                self._own[key] = self._hook(x.detach())
            if self._own[key] is not None:
                return self._own[key](x)
        if self._program is None:
            self._program = compile_quietly(self.model, backend=self._backend)
        torch._dynamo.maybe_mark_dynamic(x, 0)  # one program for every number of images
        return self._program(x)


def compiled(model: nn.Module, *, backend: str = "inductor") -> nn.Module:
    """Copy a network for long attacks: compiled on CUDA; on the CPU with batch norms folded in, in bfloat16 if it can.

    The copy is in eval mode, with fixed weights and channels_last convolutions. On CUDA, compiling takes seconds to a
    minute, once per network and image shape; a step then takes half to two thirds of the time. On the CPU nothing is
    compiled unless you name a backend. Batch norms are folded into the convolutions, and a processor that multiplies in
    bfloat16 does so, unless that changes the logits much; where the two largest logits of an image are close, they are
    computed again in float32. Logits differ from the model's by rounding.

    The copy is meant for this package's attacks, which run each step as a CUDA graph. A module that can fold its batch
    norms can implement `for_fixed_weights() -> None`, which is called on each module of a copy on the CPU.
    A network with a program of its own for images like x can return it from `for_attack_images(x)`; if it returns None,
    it is compiled. It is asked once per image shape and type while TF32 is allowed, and once while it is not
    (`torch.backends.cudnn.allow_tf32`). This package's Resnets have a program in half precision, which rounds
    no more than TF32, on a Hopper GPU.

    Parameters
    ----------
    model
        The network.
    backend
        Backend of `torch.compile`.

    Returns
    -------
    nn.Module
        The copy.

    Raises
    ------
    ValueError
        If `model` is not a module.

    Examples
    --------
    >>> model = compiled(torch.nn.Linear(4, 3))
    >>> model(torch.zeros(2, 4)).shape, model.training
    (torch.Size([2, 3]), False)
    """
    if not isinstance(model, nn.Module):
        raise invalid("model", "a torch.nn.Module, which can be copied", model)
    twin = copy.deepcopy(model).requires_grad_(False)
    twin.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fold = backend == "inductor" and not any(parameter.is_cuda for parameter in twin.parameters())
    for module in list(twin.modules()):
        hook: Any = getattr(module, "for_fixed_weights", None) if fold else None
        if hook is not None:
            hook()
    if not fold:
        return _Compiled(twin, backend).eval()
    return (Bfloat16(twin) if fast_bfloat16() and not isinstance(twin, Bfloat16) else twin).eval()
