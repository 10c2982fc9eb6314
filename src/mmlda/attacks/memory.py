"""The C library's memory, kept for the next step instead of given back."""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress

__all__ = ["keep_memory"]


@functools.cache
def keep_memory() -> None:
    """Have freed memory stay with this process, for the next step to use; done once, for the whole process.

    glibc gives large blocks back to the system, so that a step on the CPU spends a good part of its time on having the
    same pages mapped and cleared again. Nothing happens where the C library has no such setting, where the
    environment sets memory up already (MALLOC_..., GLIBC_TUNABLES, LD_PRELOAD), or with MMLDA_KEEP_MEMORY=0.
    """
    ours = os.environ.get("MMLDA_KEEP_MEMORY", "1") != "0"
    if not ours or any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ):
        return
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    with suppress(AttributeError, OSError, TypeError):  # macOS, Windows, musl
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # the most it takes
        libc.mallopt(trim_threshold, 2**31 - 1)
