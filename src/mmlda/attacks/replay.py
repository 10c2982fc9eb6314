"""A function of tensors as one CUDA graph.

A small network's step is hundreds of kernels of a few microseconds each, and Python takes longer to launch
them than the device to run them. Captured once for the shapes of a batch, the whole step (forward, backward,
update) is one launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

__all__ = ["Replay", "replay"]

Step = Callable[..., tuple[Tensor, ...]]


class Replay:
    """`step(*inputs)` captured; calling it copies the inputs in and replays.

    The outputs are buffers of the graph's: the next call overwrites them, so clone what is to be kept. Feeding
    them back as inputs is fine. Inputs and outputs lie outside the memory that the graph works in, so that
    graphs that never run at the same time can share it (`pool`). Everything the graph reads or writes is
    referred to from here and lives as long as it does.
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
                    with suppress(RuntimeError):  # that the capture has failed is known
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        torch._foreach_copy_(self._inputs, inputs)  # a few launches for all of them
        self._graph.replay()
        return self._outputs


def replay(
    step: Step, inputs: tuple[Tensor, ...], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> Step:
    """`step` as a CUDA graph for inputs of these shapes.

    Or `step` itself, where there is nothing to gain (the CPU, or a capture already under way) or where the
    model cannot be captured, which is said in a warning.
    """
    if not inputs[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return step
    try:
        return Replay(step, inputs, stream, pool)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.synchronize(inputs[0].device)
        warnings.warn(
            f"the model cannot be captured in a CUDA graph, the attack runs without one and slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return step
