"""Files that appear whole or not at all. Standard library only."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["write_json", "write_whole"]


def write_whole(path: str | Path, write: Callable[[Path], None] | bytes) -> Path:
    """Write a file under a temporary name beside `path`, flush it to the disk, then rename it into place.

    `write` is the content, or a function that writes it to the path it is given. Whatever goes wrong (a full disk,
    a kill), `path` holds its old content or the whole of the new one, and no temporary file of a process that
    could still clean up stays behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        if isinstance(write, bytes):
            temporary.write_bytes(write)
        else:
            write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk says only that it is full
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
    return path


def write_json(path: str | Path, value: Any) -> Path:
    """`write_whole` of a JSON document; NaN and infinity are refused, as the standard has no words for them."""
    return write_whole(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())
