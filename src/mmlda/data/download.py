"""Download one file: whole and with the right digest, or not at all.

A download resumes where it was cut and tries one mirror after another.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmlda._version import __version__

Progress = Callable[[int, int], None]  # bytes done, bytes in all

BLOCK = 1 << 18
ATTEMPTS = 100  # per mirror, each of which must make progress
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def silent(done: int, total: int) -> None:
    """Report no progress."""


class FetchError(RuntimeError):
    """No source had the file; the message lists what each one answered."""


@dataclass(frozen=True)
class File:
    name: str
    size: int
    digest: str  # "sha256:..." or, where its publisher gives no other, "md5:..."


def download(urls: Sequence[str], dest: Path, file: File, progress: Progress = silent) -> Path:
    """Download `file` from the first of `urls` that has it, to `dest`: whole and with the right digest, or not at all.

    Received bytes are kept in `dest.part`, from which a cut download, or a later call, resumes. A full disk
    raises an `OSError` and leaves nothing; a `FetchError` lists the failures if every address failed.
    """
    part = dest.with_name(dest.name + ".part")
    dest.parent.mkdir(parents=True, exist_ok=True)
    if dest.exists() and file_digest(dest, file.digest) == file.digest:
        return dest
    failures = []
    for url in urls:
        resumed = part.exists()
        for _ in range(ATTEMPTS):
            had = _size(part)
            try:
                _transfer(url, part, file.size, progress)
                found = file_digest(part, file.digest)
                if found == file.digest:
                    with open(part, "rb") as whole:
                        os.fsync(whole.fileno())
                    return part.replace(dest)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno in FULL:
                    part.unlink(missing_ok=True)
                    raise OSError(error.errno, f"no space for {dest} ({file.size} bytes)") from error
                if _size(part) > had:
                    time.sleep(0.2)
                    continue  # cut, but with progress: resume from there
                failures.append(f"{url}: {error}")
                break
            part.unlink()
            if not resumed:
                failures.append(f"{url}: must have {file.digest}, got {found}")
                break
            resumed = False  # the part received earlier may be damaged: start again
    raise FetchError("; ".join(failures))


def _transfer(url: str, part: Path, size: int, progress: Progress) -> None:
    """One request: append to `part` what is missing of its `size` bytes."""
    if _size(part) > size:
        part.unlink()
    have = _size(part)
    if have == size:
        return
    headers = {"User-Agent": f"mmlda/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as response:
        if response.status != 206:  # the server sends the whole file
            have = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise ConnectionError(f"answered with {response.headers.get('Content-Range')}, asked for {have}-")
        with open(part, "ab" if have else "wb") as out:
            while block := response.read(BLOCK):
                have += len(block)
                if have > size:
                    raise ConnectionError(f"sent more than the {size} bytes expected")
                out.write(block)
                progress(have, size)
    if have < size:
        raise ConnectionError(f"was cut after {have} of {size} bytes")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def file_digest(path: Path, like: str) -> str:
    """The digest of a file, with the algorithm `like` names: "sha256:...", "md5:..."."""
    algorithm = like.partition(":")[0]
    with open(path, "rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"
