"""A function of tensors as one CUDA graph.

A small network's step is hundreds of kernels of a few microseconds each, and Python takes longer to launch
them than the device to run them. Captured once for the shapes of a batch, the whole step (forward, backward,
update) is one launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
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

    def __init__(self, step: Step, inputs: tuple[Tensor, ...], pool: Any = None) -> None:
        self._step = step
        self._inputs = tuple(t.clone() for t in inputs)
        self._seen: list[tuple[Tensor, int] | None] = [None] * len(inputs)
        device = inputs[0].device
        with torch.cuda.device(device):
            # Lazy set-up (cuDNN's plans, cuBLAS workspaces) must happen before the capture, on a side stream.
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(2):
                    outputs = step(*self._inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            self._outputs = tuple(torch.empty_like(t) for t in outputs)
            del outputs
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                for mine, computed in zip(self._outputs, step(*self._inputs)):
                    mine.copy_(computed)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for i, (mine, given) in enumerate(zip(self._inputs, inputs)):
            # Images and labels are the same tensors at every step: copy them once. A replay writes to the
            # outputs without moving their version, so those never count as seen.
            last = self._seen[i]
            if last is None or last[0] is not given or last[1] != given._version:
                mine.copy_(given)
            self._seen[i] = None if any(given is t for t in self._outputs) else (given, given._version)
        self._graph.replay()
        return self._outputs


def replay(step: Step, inputs: tuple[Tensor, ...], pool: Any = None) -> Step:
    """`step` as a CUDA graph for inputs of these shapes.

    Or `step` itself, where there is nothing to gain (the CPU, or a capture already under way) or where the
    model cannot be captured, which is said in a warning.
    """
    if not inputs[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return step
    try:
        return Replay(step, inputs, pool)
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
