"""Where a number comes from: versions, device, commit, and the SHA-256 of weights and images."""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlda._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["code_version", "device_name", "head_of", "measured_on", "traced", "versions", "weights_digest"]


def device_name(device: torch.device | str) -> str:
    """The name of a device: that of the GPU, or of the processor."""
    import torch

    place = torch.device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The versions that numbers depend on, and the number of threads."""
    import torch

    return {
        "mmlda": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def measured_on(device: torch.device | str) -> dict[str, Any]:
    """Where something is measured, as fields of `Result`: device, versions, commit."""
    return {"device": device_name(device), "versions": versions(), "commit": code_version()}


def traced(model: Any, data: Any, device: torch.device | str, name: str = "") -> dict[str, Any]:
    """What is measured and where, as fields of `Result`: network, its weights' SHA-256, data, and `measured_on`.

    `model` is a module, or a function without weights; `data` is an `ImageData`.
    """
    weights = model.state_dict() if hasattr(model, "state_dict") else {}
    return {
        "network": name,
        "network_sha256": weights_digest(weights) if weights else "",
        "data": {"name": data.name, "images": len(data), "sha256": data.digest()},
        **measured_on(device),
    }


def head_of(model: Any) -> str:
    """The head of a network that can describe itself, "softmax" or "mmlda"; "" for others."""
    try:
        return str(model.config["head"])
    except (AttributeError, KeyError, TypeError, ValueError):  # ValueError: a backbone of the user's own
        return ""


def weights_digest(state_dict: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 of a network's weights, as safetensors stores them."""
    from mmlda._utils.tensors import packed

    return hashlib.sha256(packed(dict(state_dict))).hexdigest()


@functools.cache
def code_version() -> str:
    """The commit of this code, with "+" where it has been changed since; "" outside a checkout of it."""
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
