"""Packed results: `<dataset>/<kind>.jsonl` with one result per line, and their outcomes in a safetensors file."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mmlda._utils.checks import invalid
from mmlda._utils.files import write_whole
from mmlda.results.columns import join_columns, read_columns
from mmlda.results.record import SHARED, Result, read_file
from mmlda.results.search import find_results
from mmlda.results.upgrade import SCHEMA

REQUIRED = ("name", "kind", "what", "value")
DEFAULTS = dataclasses.asdict(Result(name="none", kind="", what="", value=None))


def pack(folder: str | Path, *, replace: bool = False) -> tuple[list[str], list[str]]:
    """Pack the results in a folder, one file each, into tables: `folder/<dataset>/<kind>.jsonl`.

    Each table is written in full before the files it replaces are removed. Jobs may write results to the folder at the
    same time.

    Parameters
    ----------
    folder
        Folder of results.
    replace
        Whether a result replaces a packed one of the same name but with another value or number of images
        (default: it stays in its own file).

    Returns
    -------
    tuple of list of str
        Names of the packed results, and of those left because they differ.

    Raises
    ------
    ValueError
        If `folder` is not a folder, a result is damaged, or its outcomes are missing or altered.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = Result(name="x", kind="theory", what="a bound", value=7.45).save(folder)
    >>> pack(folder)
    (['x'], [])
    >>> Result.load(f"{folder}/theory.jsonl#x").value
    7.45
    """
    folder, packed, differing = Path(folder), [], []
    if not folder.is_dir():
        raise invalid("folder", "a folder of results", str(folder))
    with ExitStack() as stack:  # one process at a time packs a folder
        lock = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        tables: dict[Path, dict[Path, Result]] = {}
        for reference, result in find_results(folder).items():
            if reference == f"{result.name}.json":
                tables.setdefault(_table_of(folder, result), {})[folder / reference] = result
        for table, singles in tables.items():
            there = read_file(table) if table.is_file() else {}
            for path, result in list(singles.items()):
                old = there.get(result.name, result)
                if (old.value, old.n) != (result.value, result.n) and not replace:
                    differing.append(result.name)
                    del singles[path]
            if singles:
                _write_table(table, there, singles)
            packed += [result.name for result in singles.values()]
    return packed, differing


def _table_of(folder: Path, result: Result) -> Path:
    """The table of a result. `dataset` and `kind` come from a file, so they must not act as paths."""
    dataset, kind = (re.sub(r"[^\w+-]+", "-", str(word)) for word in (result.dataset, result.kind))
    return folder / dataset / f"{kind or 'other'}.jsonl"


def _write_table(table: Path, there: dict[str, Result], singles: dict[Path, Result]) -> None:
    """Add results to a table, then remove their own files unless a job has rewritten them meanwhile."""
    beside, columns = table.with_suffix(".safetensors"), {}
    if beside.is_file():
        new = {result.name for result in singles.values()}
        columns = {key: column for key, column in read_columns(beside).items() if key.partition("/")[0] not in new}
    merged = dict(there)
    for path, result in singles.items():
        merged[result.name] = result
        if result.outcomes is not None:
            result.read_outcomes(path.parent)  # raises ValueError if they are not the result's
            own = read_columns(path.parent / result.outcomes["file"])
            content = join_columns(own)
            about = {**result.outcomes, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            merged[result.name] = dataclasses.replace(result, outcomes=about)
            columns |= {f"{result.name}/{key}": column for key, column in own.items()}
    if columns:
        write_whole(beside, join_columns(columns))
    write_whole(table, _text([merged[name] for name in sorted(merged)]).encode())
    for path, result in singles.items():
        if Result.load(path) == result:
            path.unlink()
            if result.outcomes is not None:
                (path.parent / result.outcomes["file"]).unlink()


def _text(results: list[Result]) -> str:
    """The lines of a table: see `read_file`."""
    rows = [_short(result) for result in results]
    dumped = [{key: json.dumps(row[key]) for key in SHARED if key in row} for row in rows]
    counts = Counter(text for texts in dumped for text in texts.values())
    shared = {}
    for row, texts in zip(rows, dumped):
        for key, text in texts.items():
            if counts[text] > 1:
                digest = hashlib.sha256(text.encode()).hexdigest()[:12]
                shared[digest], row[key] = row[key], digest
    header = {"schema": SCHEMA, "shared": dict(sorted(shared.items()))}
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in [header, *rows])


def _short(result: Result) -> dict[str, Any]:
    """The fields of a result that differ from their default, without the schema and the outcomes' file."""
    values = dataclasses.asdict(result)
    if result.outcomes is not None:
        del values["outcomes"]["file"]
    return {key: value for key, value in values.items() if key in REQUIRED or value != DEFAULTS[key]}
