"""Where a number comes from: versions, device and commit."""

from __future__ import annotations

import functools
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from mmlda._version import __version__

if TYPE_CHECKING:
    import torch

__all__ = ["code_version", "versions"]


def versions(device: torch.device) -> dict[str, str]:
    """What the numbers of a run depend on beside its description."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"mmlda": __version__, "torch": torch.__version__, "python": platform.python_version(), "device": name,
            "threads": str(torch.get_num_threads())}  # fmt: skip


@functools.cache
def code_version() -> str:
    """The commit this code is of, with "+" where it has been changed since; "" outside a checkout of it."""
    here = Path(__file__).resolve().parents[1]  # src/mmlda

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != here.parent.parent:
            return ""  # installed inside somebody else's checkout
        return git("rev-parse", "HEAD")[:12] + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return ""
