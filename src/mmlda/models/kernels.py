"""How the package's Triton kernels are launched, and compiled beforehand.

Triton is imported when a kernel first runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

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


def tf32_allowed() -> bool:
    """Whether cuDNN may multiply float32 as TF32."""
    # Also in attacks/replay.py: neither package may import the other.
    cudnn = torch.backends.cudnn
    allowed = cudnn.conv.fp32_precision == "tf32" if hasattr(cudnn, "conv") else cudnn.allow_tf32
    return allowed and cudnn.enabled
