"""Named tensors as safetensors, in memory and as files."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save as save_bytes
from torch import Tensor

from mmlda._utils.files import write_whole

__all__ = ["packed", "save_tensors"]


def save_tensors(path: str | Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> Path:
    """Named tensors as one safetensors file, whole or not at all."""
    return write_whole(path, packed(tensors, about))


def packed(tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> bytes:
    """Named tensors in the safetensors format."""
    # copies: the format has no words for two names of one tensor, as a network with tied weights has them
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return save_bytes(plain, metadata=about)
