"""Where a number comes from: versions, device, commit, and the SHA-256 of weights and images."""

from __future__ import annotations

import functools
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlda._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def device_name(device: torch.device | str) -> str:
    """Name of a device: the model of the GPU or of the processor.

    Parameters
    ----------
    device
        Such as "cpu" or "cuda:0".

    Returns
    -------
    str
        The name.

    Examples
    --------
    >>> bool(device_name("cpu"))
    True
    """
    import torch

    place = torch.device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of the software that numbers depend on, and the number of threads.

    Returns
    -------
    dict of str to str
        The versions by name.

    Examples
    --------
    >>> list(versions())
    ['mmlda', 'torch', 'python', 'threads']
    """
    import torch

    return {
        "mmlda": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def measured_on(device: torch.device | str) -> dict[str, Any]:
    """Fields of `Result` that record where a number was measured: device, versions and commit.

    Parameters
    ----------
    device
        Such as "cpu" or "cuda:0".

    Returns
    -------
    dict
        `device`, `versions` and `commit`.

    Examples
    --------
    >>> list(measured_on("cpu"))
    ['device', 'versions', 'commit']
    """
    return {"device": device_name(device), "versions": versions(), "commit": code_version()}


def traced(model: Any, data: Any, device: torch.device | str, name: str = "") -> dict[str, Any]:
    """Fields of `Result` that record what was measured, and where.

    Parameters
    ----------
    model
        A module, or a function without weights.
    data
        An `ImageData`.
    device
        Such as "cpu" or "cuda:0".
    name
        Name of the network (default: "").

    Returns
    -------
    dict
        `network`, `network_sha256` ("" without weights), `data`, and the fields of `measured_on`.

    Examples
    --------
    >>> import torch
    >>> from mmlda import ImageData
    >>> data = ImageData(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    >>> traced(torch.nn.Flatten(), data, "cpu", "mine")["network"]
    'mine'
    """
    weights = model.state_dict() if hasattr(model, "state_dict") else {}
    return {
        "network": name,
        "network_sha256": weights_digest(weights) if weights else "",
        "data": {"name": data.name, "images": len(data), "sha256": data.digest()},
        **measured_on(device),
    }


def head_of(model: Any) -> str:
    """Head of a network.

    Parameters
    ----------
    model
        Any model.

    Returns
    -------
    str
        "softmax" or "mmlda"; "" for a network without a `config`.

    Examples
    --------
    >>> from mmlda.models import build
    >>> head_of(build({"backbone": "conv_net", "head": "softmax"}))
    'softmax'
    """
    try:
        return str(model.config["head"])
    except (AttributeError, KeyError, TypeError, ValueError):  # ValueError: the backbone is not this package's
        return ""


def weights_digest(state_dict: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of a network's weights, as safetensors stores them.

    Parameters
    ----------
    state_dict
        Tensors by name.

    Returns
    -------
    str
        64 hexadecimal digits.

    Examples
    --------
    >>> import torch
    >>> len(weights_digest(torch.nn.Linear(3, 2).state_dict()))
    64
    """
    from mmlda._utils.tensors import tensors_digest

    return tensors_digest(dict(state_dict))


@functools.cache
def code_version() -> str:
    """Commit of this code.

    Returns
    -------
    str
        12 digits, with a "+" if files have changed since; "" outside a git checkout.

    Examples
    --------
    >>> len(code_version()) in (0, 12, 13)
    True
    """
    here = Path(__file__).resolve().parents[1]  # src/mmlda

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != here.parent.parent:
            return ""  # installed inside another project's checkout
        return git("rev-parse", "HEAD")[:12] + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return ""
