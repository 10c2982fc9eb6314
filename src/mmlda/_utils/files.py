"""Files that appear whole or not at all, and files that are not trusted. torch is not imported here."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from mmlda._utils.checks import damaged

JSON_BYTES = 32 << 20  # of a JSON file, which may take 30 times as much memory: the largest here have a few MB
DEPTH = 32  # levels of a JSON document: what it holds can then be copied, compared and written by recursion


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
            error.filename = str(path)  # the error for a full disk does not name the file
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
    return path


def write_json(path: str | Path, value: Any) -> Path:
    """`write_whole` of a JSON document; NaN and infinity are rejected, since JSON cannot represent them."""
    return write_whole(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def open_regular(path: str | Path, most: int | None = None) -> IO[bytes]:
    """Open a regular file for reading; a ValueError for a pipe, on which reading would wait, a device or a socket.

    It is a ValueError too where the file has more than `most` bytes.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    about = os.fstat(file)
    if stat.S_ISREG(about.st_mode) and (most is None or about.st_size <= most):
        return os.fdopen(file, "rb")
    os.close(file)
    if stat.S_ISREG(about.st_mode):
        raise damaged(path, f"a file of at most {most} bytes", about.st_size)
    raise damaged(path, "a regular file", "a folder, a pipe or a device")


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file; a ValueError that names the file for everything else."""
    with open_regular(path, JSON_BYTES) as file:
        try:
            value = parse_json(file.read())
        except ValueError as error:
            raise damaged(path, "a JSON object", f"a damaged one ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path, "a JSON object", f"a {type(value).__name__}")
    return value


def parse_json(text: str | bytes) -> Any:
    """A JSON document; a ValueError also where it is nested too deeply or has a number that is not finite.

    >>> parse_json("[" * 10**6)
    Traceback (most recent call last):
    ValueError: JSON must have at most 32 levels, got more
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"JSON must have at most {DEPTH} levels, got more") from None
    level = [value]
    for _ in range(DEPTH + 1):
        for number in level:
            if isinstance(number, int | float) and not abs(number) < 1e300:  # a larger integer is not even a float
                raise ValueError("JSON must have numbers below 1e300, got a larger one or NaN")
        parents = [parent for parent in level if isinstance(parent, dict | list)]
        if not parents:
            return value
        level = [child for parent in parents for child in (parent.values() if isinstance(parent, dict) else parent)]
    raise ValueError(f"JSON must have at most {DEPTH} levels, got more")


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON document, whatever the order of its names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
