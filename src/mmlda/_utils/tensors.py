"""Named tensors as safetensors, in memory and as files, with a checksum in the file's header."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from mmlda._utils.checks import damaged
from mmlda._utils.files import json_digest, open_regular, parse_json, write_whole
from mmlda._utils.settings import typed

ENTRY = "mmlda"  # of a file's header; one only, as safetensors writes several in any order


def save_tensors(path: str | Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> Path:
    """Named tensors as one safetensors file, whole or not at all.

    Its header has the SHA-256 of the tensors and `about`, and a SHA-256 of these.
    """
    header = {"sha256": tensors_digest(tensors), **(about or {})}
    return write_whole(path, packed(tensors, {ENTRY: json.dumps({**header, "about_sha256": json_digest(header)})}))


def read_tensors(path: str | Path, *, checksum: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file and its header's `about`; a ValueError if either is damaged or altered.

    With `checksum`, a file without one (of another program or an older version) is rejected too.
    """
    with open_regular(path) as file:
        content = file.read()
    try:
        tensors = unpacked(content)
        header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__") or {}
        if ENTRY in header:
            header = parse_json(header[ENTRY])
            typed({"header": dict[str, str]}, {"header": header})
            if header.pop("about_sha256", None) != json_digest(header):
                raise damaged("header", "as it was written", "another SHA-256")
        digest = header.pop("sha256", None)
        if (digest or not checksum) and digest in (None, tensors_digest(tensors)):
            return tensors, header
        raise damaged("tensors", "as they were written", "another SHA-256" if digest else "no SHA-256")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def packed(tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> bytes:
    """Named tensors in the safetensors format."""
    # copies: the format does not allow two names for one tensor, as in a network with tied weights
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return save_bytes(plain, metadata=about)


def tensors_digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of named tensors, as safetensors stores them."""
    return hashlib.sha256(packed(tensors)).hexdigest()


def unpacked(content: bytes) -> dict[str, Tensor]:
    """The inverse of `packed`; a ValueError if the content is not a safetensors file."""
    try:
        return load_bytes(content)
    except (SafetensorError, KeyError, RuntimeError, TypeError, OverflowError) as error:  # unknown dtypes, odd shapes
        raise damaged("it", "a whole safetensors file", f"another ({str(error)[:200]})") from None
