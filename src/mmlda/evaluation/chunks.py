"""Finished chunks of images as files, so that work that was stopped resumes after the last of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from mmlda._utils.checks import check_count, damaged
from mmlda._utils.files import json_digest, read_json, write_json
from mmlda._utils.tensors import read_tensors, save_tensors


class Chunks:
    """The outcomes of `n` images, `size` images per chunk.

    Each chunk is a safetensors file in `folder`, with a checksum and its place, or stays in memory if that is None.
    `about` (JSON) identifies the work: a folder with chunks of other work raises a ValueError, and a chunk copied from
    other work or from another place is computed again. "priors" in `about` only words that error, since the hash of the
    network contains them.
    """

    def __init__(self, folder: str | Path | None, n: int, size: int, about: dict[str, Any]) -> None:
        self.n, self.size = n, check_count("chunk", size, 1)
        self.folder = None if folder is None else Path(folder)
        self._memory: dict[int, dict[str, Tensor]] = {}
        self._work = json_digest({key: value for key, value in about.items() if key != "priors"} | {"chunk": self.size})
        if self.folder is not None:
            _claim(self.folder, {**about, "chunk": self.size})

    def missing(self) -> list[range]:
        """The rows of each chunk that is not finished."""
        chunks = [range(start, min(start + self.size, self.n)) for start in range(0, self.n, self.size)]
        return [rows for rows in chunks if self._read(rows.start, check=True) is None]

    def save(self, start: int, values: dict[str, Tensor]) -> None:
        """Keep the values of the chunk that begins at row `start`."""
        if self.folder is None:
            self._memory[start] = {name: value.detach().cpu() for name, value in values.items()}
        else:
            save_tensors(_path(self.folder, start), values, self._place(start))

    def load(self) -> list[dict[str, Tensor]]:
        """The values of every chunk, in order; all must be finished."""
        return [values for start in range(0, self.n, self.size) if (values := self._read(start)) is not None]

    def _read(self, start: int, check: bool = False) -> dict[str, Tensor] | None:
        if self.folder is None:
            return self._memory.get(start)
        path = _path(self.folder, start)
        if not path.exists():
            return None
        try:
            values, place = read_tensors(path, checksum=True)
            if place != self._place(start):
                raise damaged(path, "a chunk of this work and place", "another")
            return values
        except ValueError as error:  # cut short or altered by a failing disk, copied, or of an older version
            if not check:
                raise
            warnings.warn(f"damaged chunk, computed again: {error}", stacklevel=4)
            return None

    def _place(self, start: int) -> dict[str, str]:
        return {"work": self._work, "start": str(start)}


def chunk_files(folder: str | Path) -> list[Path]:
    """The files of the finished chunks in a folder, in order."""
    return sorted(Path(folder).glob("images-*.safetensors"))


def _path(folder: Path, start: int) -> Path:
    return folder / f"images-{start:06d}.safetensors"


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Record what a folder is for, in work.json; a ValueError if it already holds chunks of other work."""
    path, about = folder / "work.json", json.loads(json.dumps(about))
    if not (path.is_file() and chunk_files(folder)):
        write_json(path, about)
        return
    try:
        known = read_json(path)
    except ValueError:
        what = "whole, to use the chunks beside it (or choose another folder)"
        raise damaged(path, what, "a damaged file") from None
    changed = {key for key in about if known.get(key) != about[key]}
    if changed - {"priors"}:
        words = ", ".join(sorted(changed - {"network"} if "priors" in changed else changed))
        raise ValueError(f"out must be a folder without other work, got {str(folder)!r} (other {words})")
