"""Results in folders, packed or one file each."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mmlda.results.record import Result, read_file


def load_all(folder: str | Path) -> list[Result]:
    """Read the results in a folder and its subfolders, sorted by name; see `find_results`.

    Parameters
    ----------
    folder
        Folder to search.

    Returns
    -------
    list of Result
        The results, without their paths.
    """
    return list(find_results(folder).values())


def find_results(folder: str | Path) -> dict[str, Result]:
    """Read the results in a folder and its subfolders, packed or not.

    A result in its own file replaces a packed one of the same name in the same folder or below, since it is newer.
    Files of other kinds are skipped, with a warning where they are not JSON. A subfolder of work (with a `work.json`)
    counts only where no result outside has its name: `evaluate` and `reproduce` store their results above it, `attack`
    leaves its result in it.

    Parameters
    ----------
    folder
        Folder to search.

    Returns
    -------
    dict of str to Result
        Sorted by name. The keys are paths for `Result.load`, relative to the folder: `name.json` or `table.jsonl#name`.

    Raises
    ------
    ValueError
        If `folder` is not a folder, or if one of its results is damaged.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = Result(name="x", kind="theory", what="a bound", value=7.45).save(folder)
    >>> {key: result.value for key, result in find_results(folder).items()}
    {'x.json': 7.45}
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder must be a folder of results, got {str(folder)!r}")
    paths = sorted(folder.rglob("*.json"))
    working = {path.parent for path in paths if path.name == "work.json"} - {folder}
    found, newer = {}, set()
    for path in paths:
        for name, result in read_file(path).items():
            found[path] = result
            newer.add((path.parent, name))
    for table in sorted(folder.rglob("*.jsonl")):
        for name, result in read_file(table).items():
            if not any((parent, name) in newer for parent in table.parents):
                found[Path(f"{table}#{name}")] = result
    names = {result.name for path, result in found.items() if path.parent not in working}
    found = {path: r for path, r in found.items() if path.parent not in working or path.parent.name not in names}
    ordered = sorted(found.items(), key=lambda item: (item[1].name, item[0]))
    return {str(path.relative_to(folder)): _seen_from(folder, path, result) for path, result in ordered}


def find_result(folder: str | Path, name: str) -> Result | None:
    """Read the result of one name: from its own file, or packed in the folder or one directly below it.

    Parameters
    ----------
    folder
        Folder to search.
    name
        Name of the result.

    Returns
    -------
    Result or None
        None if the folder has no such result.

    Examples
    --------
    >>> import tempfile
    >>> find_result(tempfile.mkdtemp(), "table1-digits-sr-0") is None
    True
    """
    folder = Path(folder)
    for path in (*folder.glob(f"{name}.json"), *folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")):
        if result := read_file(path, name).get(name):
            return _seen_from(folder, path, result)
    return None


def _seen_from(folder: Path, path: Path, result: Result) -> Result:
    """The result at a path, with its outcomes' file relative to the folder."""
    if not isinstance(result.outcomes, dict) or path.parent == folder:
        return result
    file = path.parent.relative_to(folder) / str(result.outcomes.get("file", ""))
    return dataclasses.replace(result, outcomes={**result.outcomes, "file": str(file)})
