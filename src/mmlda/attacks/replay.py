"""A function of tensors as one CUDA graph.

A small network's step is hundreds of kernels of a few microseconds each, and Python takes longer to launch
them than the device to run them. Captured once for the shapes of a batch, the whole step (forward, backward,
update) is one launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Replay", "replay"]

Step = Callable[..., tuple[Tensor, ...]]


class Replay:
    """`step(*inputs)` captured; calling it copies the inputs in and replays.

    The outputs are the graph's own buffers: the next call overwrites them, so clone what is to be kept.
    Feeding them back as inputs is fine. Buffers and what `step` refers to live as long as the graph does.
    """

    def __init__(self, step: Step, inputs: tuple[Tensor, ...]) -> None:
        self._step = step
        self._inputs = tuple(t.clone() for t in inputs)
        self._seen: tuple[tuple[Tensor, int] | None, ...] = (None,) * len(inputs)
        device = inputs[0].device
        with torch.cuda.device(device):
            # Lazy set-up (cuDNN's plans, cuBLAS workspaces) must happen before the capture, on a side stream.
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(2):
                    step(*self._inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._outputs = tuple(self._own(t) for t in step(*self._inputs))

    def _own(self, output: Tensor) -> Tensor:
        """An output in memory of its own: one that is an input would be overwritten while inputs are copied."""
        at = output.untyped_storage().data_ptr()
        return output.clone() if any(at == t.untyped_storage().data_ptr() for t in self._inputs) else output

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        seen = []
        for mine, given, last in zip(self._inputs, inputs, self._seen):
            # Images and labels are the same tensors at every step: copy them once.
            if last is None or last[0] is not given or last[1] != given._version:
                mine.copy_(given)
            seen.append((given, given._version))
        self._graph.replay()
        # A replay writes to the outputs without moving their version, so they never count as seen.
        self._seen = tuple(None if any(g is o for o in self._outputs) else (g, v) for g, v in seen)
        return self._outputs


def replay(step: Step, inputs: tuple[Tensor, ...]) -> Step:
    """`step` as a CUDA graph for inputs of these shapes.

    Or `step` itself, where there is nothing to gain (the CPU, or a capture already under way) or where the
    model cannot be captured, which is said in a warning.
    """
    if not inputs[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return step
    try:
        return Replay(step, inputs)
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
