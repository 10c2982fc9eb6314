"""Memory that the C library keeps for the next step instead of returning it to the system."""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress


@functools.cache
def keep_memory() -> None:
    """Keep freed memory in this process for later steps: faster steps on the CPU, at the largest size used so far.

    glibc returns large blocks to the system, so a step on the CPU spends much of its time having the same pages mapped
    and cleared again. The setting applies to the whole process, so attacks never change it on their own: call this
    once, or set MMLDA_KEEP_MEMORY=1 before importing `mmlda.attacks`. `mmlda.fit` on the CPU calls it.

    Does nothing where the C library has no such setting, where the environment configures memory already (`MALLOC_*`,
    GLIBC_TUNABLES, LD_PRELOAD), or with MMLDA_KEEP_MEMORY=0.
    """
    configured = any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)
    if configured or os.environ.get("MMLDA_KEEP_MEMORY") == "0":
        return
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    with suppress(AttributeError, OSError, TypeError):  # macOS, Windows, musl
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # the most it takes
        libc.mallopt(trim_threshold, 2**31 - 1)


if os.environ.get("MMLDA_KEEP_MEMORY") == "1":
    keep_memory()
