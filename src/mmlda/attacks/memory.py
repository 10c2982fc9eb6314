"""The C library's memory, kept for the next step instead of given back."""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress

__all__ = ["keep_memory"]


@functools.cache
def keep_memory() -> None:
    """Have freed memory stay with this process, for the next step to use; done once, for the whole process.

    glibc gives large blocks back to the system, so that a step on the CPU spends a quarter to half of its time on
    having the same pages mapped and cleared again. Where the C library has no such setting nothing happens.
    """
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # the most it takes
        libc.mallopt(trim_threshold, 2**31 - 1)
