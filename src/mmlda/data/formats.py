"""Dataset files to arrays, safely: IDX, CIFAR's two formats, tar archives, folders of images.

No reader trusts what it reads. Lengths are checked against headers before memory is taken, the size a
compressed file may expand to is bounded, pickles can build arrays and nothing else, tar members can't leave the folder.
A file that violates its format raises a `ValueError` that names it.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

Arrays = list[tuple[np.ndarray, np.ndarray]]  # (images, labels) of train and test, or of one set

LIMIT = 8 << 30  # bytes: no file may unpack to more than this, whatever its header says
GZIP_RATIO = 1032  # deflate can't do better, so a header that promises more than this times the file is false
CIFAR_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR_TEST = "test_batch"


@dataclass(frozen=True)
class Cifar:
    """The files of one of the two CIFARs, and its labels: as many bytes before an image, of which the last counts."""

    title: str
    train: tuple[str, ...]
    test: str
    labels: tuple[str, ...]  # keys of the pickles, in the order of the bytes
    classes: tuple[int, ...]


CIFAR10 = Cifar("CIFAR-10", CIFAR_TRAIN, CIFAR_TEST, ("labels",), (10,))
CIFAR100 = Cifar("CIFAR-100", ("train",), "test", ("coarse_labels", "fine_labels"), (20, 100))

IDX_IMAGES = re.compile(r"(?P<prefix>.*?)(?P<split>train|t10k|test)-images(?P<dash>[-.])idx[34]-ubyte(\.gz)?")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")


def open_plain(path: Path) -> IO[bytes]:
    """Open a file, through gzip when it starts with gzip's two magic bytes, whatever it is called."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else open(path, "rb")  # type: ignore[return-value]


def read_idx(path: str | Path) -> np.ndarray:
    """An IDX file of unsigned bytes, plain or gzipped, as a uint8 array of the shape its header gives.

    The header is two zero bytes, the type (8: unsigned byte), the number of dimensions, then each dimension
    as a big-endian 32-bit integer; the values follow, and nothing after them.
    """
    path = Path(path)
    try:
        with open_plain(path) as file:
            start = file.read(4)
            if len(start) < 4 or start[:2] != b"\0\0" or start[2] != 8 or not 1 <= start[3] <= 4:
                got = start.hex(" ") or "nothing"
                raise ValueError(f"{path} is not an IDX file: it starts with {got}, expected 00 00 08 01 to 04")
            header = file.read(4 * start[3])
            if len(header) < 4 * start[3]:
                raise ValueError(f"{path} is truncated: it ends within its IDX header")
            shape = struct.unpack(f">{start[3]}I", header)
            expected, possible = math.prod(shape), path.stat().st_size
            if isinstance(file, gzip.GzipFile):
                possible *= GZIP_RATIO
            if expected > min(LIMIT, possible):
                raise ValueError(f"{path} is truncated, or its header {shape} is false: it promises {expected} bytes")
            values = file.read(expected + 1)  # one more, to notice what should not be there
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from error
    if len(values) != expected:
        what = "is truncated" if len(values) < expected else "has bytes after its last value"
        raise ValueError(f"{path} {what}: its header {shape} promises {expected} bytes")
    return np.frombuffer(values, np.uint8).reshape(shape)


def idx_image_files(folder: Path) -> list[re.Match[str]]:
    """The names in `folder` that are those of IDX image files, taken apart."""
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return [match for name in names if (match := IDX_IMAGES.fullmatch(name))]


def read_idx_folder(folder: Path) -> Arrays:
    """Train and test from a folder with MNIST's four file names (any prefix, gzipped or not).

    Images may have three dimensions [N, H, W] or four [N, C, H, W]; they come back as the latter.
    """
    splits = []
    for wanted in (("train",), ("t10k", "test")):
        # Sorted backwards, so that of a file that is there plain and gzipped the plain one stays.
        found = {m["prefix"] + m["split"]: m for m in idx_image_files(folder)[::-1] if m["split"] in wanted}
        if len(found) != 1:
            what = " or ".join(wanted)
            raise ValueError(f"{folder} has {len(found)} IDX image files for {what}, expected one")
        ((stem, match),) = found.items()
        labels = folder / f"{stem}-labels{match['dash']}idx1-ubyte"
        if not labels.is_file():
            labels = labels.with_name(labels.name + ".gz")
        if not labels.is_file():
            raise ValueError(f"{labels} is missing: {match[0]} has no labels")
        x, y = read_idx(folder / match[0]), read_idx(labels)
        if x.ndim not in (3, 4) or y.ndim != 1 or len(x) != len(y):
            raise ValueError(f"{folder / match[0]} has shape {x.shape} and {labels.name} {y.shape}: no match")
        x = x if x.ndim == 4 else x[:, None]  # [N, C, H, W]
        splits.append((x.copy(), y.copy()))  # copies: bytes are read-only, which PyTorch does not support
    return splits


class _Bounded:
    """A stream that raises once more than `limit` bytes were read: the end of a decompression bomb."""

    def __init__(self, file: IO[bytes], limit: int, name: str) -> None:
        self.file, self.left, self.name = file, limit, name

    def read(self, size: int = -1) -> bytes:
        block = self.file.read(self.left + 1 if size < 0 else min(size, self.left + 1))
        self.left -= len(block)
        if self.left < 0:
            raise ValueError(f"{self.name} unpacks to more than was allowed")
        return block


def tar_files(source: str | Path | IO[bytes], limit: int = LIMIT, name: str = "") -> Iterator[tuple[str, bytes]]:
    """The regular files of a tar (plain or gzipped), one after another, as (relative path, content).

    A member with an absolute path or a `..` in it, and any link, device or sparse file, is a `ValueError`: an
    honest dataset has none. `limit` bounds the unpacked archive. `source` is a path or an open tar stream.
    """
    name = name or str(source)
    opened = open_plain(Path(source)) if isinstance(source, str | Path) else None
    stream: Any = _Bounded(opened or source, limit, name)  # type: ignore[arg-type]
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                path = PurePosixPath(member.name.replace("\\", "/"))
                if path.is_absolute() or ".." in path.parts or re.match("[A-Za-z]:", member.name):
                    raise ValueError(f"{name}: member {member.name!r} would leave the folder")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise ValueError(f"{name}: member {member.name!r} is not a regular file")
                if member.size > limit:
                    raise ValueError(f"{name}: member {member.name!r} is larger than was allowed")
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                if len(content) != member.size:
                    raise ValueError(f"{name} is truncated within {member.name!r}")
                yield str(path), content
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name} is not a whole tar archive: {error}") from error
    finally:
        if opened is not None:
            opened.close()


def cifar_records(content: bytes, name: str, kind: Cifar = CIFAR10) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR's binary version: records of one or two label bytes and 3,072 pixel bytes, as images and labels.

    Returns [N, 3, 32, 32] uint8 and [N] uint8, CIFAR-100's fine labels.
    """
    bytes_each = 3072 + len(kind.labels)
    if not content or len(content) % bytes_each:
        raise ValueError(f"{name} holds {len(content)} bytes, expected a multiple of {bytes_each} (truncated?)")
    records = np.frombuffer(content, np.uint8).reshape(-1, bytes_each)
    return _checked_cifar(records[:, len(kind.labels) :], list(records[:, : len(kind.labels)].T), name, kind)


def cifar_pickle(content: bytes, name: str, kind: Cifar = CIFAR10) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR's python version: a pickled dict with `data` [N, 3072] and lists of labels, as images and labels.

    The pickle goes through `ArrayUnpickler`. Returns [N, 3, 32, 32] uint8 and [N] uint8.
    """
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a hostile or damaged pickle can raise anything at all
        raise ValueError(f"{name} is not a {kind.title} batch: {error}") from error
    if not isinstance(batch, dict):
        raise ValueError(f"{name} is not a {kind.title} batch: a {type(batch).__name__}, expected a dict")
    fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    data = fields.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise ValueError(f"{name} is not a {kind.title} batch: `data` is not a uint8 array [N, 3072]")
    lists = [fields.get(key) for key in kind.labels]
    for key, labels in zip(kind.labels, lists):
        if not isinstance(labels, list) or not all(type(y) is int and 0 <= y < 256 for y in labels):
            raise ValueError(f"{name} is not a {kind.title} batch: `{key}` is not a list of small integers")
    return _checked_cifar(data, [np.array(labels, np.uint8) for labels in lists], name, kind)


def _checked_cifar(
    pixels: np.ndarray, columns: Sequence[np.ndarray], name: str, kind: Cifar
) -> tuple[np.ndarray, np.ndarray]:
    for labels, L in zip(columns, kind.classes):
        if len(pixels) != len(labels) or not len(labels):
            raise ValueError(f"{name} holds {len(pixels)} images and {len(labels)} labels")
        if labels.max() >= L:
            raise ValueError(f"{name} has a label {labels.max()}, expected 0 to {L - 1} (not {kind.title}?)")
    return pixels.reshape(-1, 3, 32, 32), columns[-1]


def _latin1(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):  # how Python 3 writes bytes at protocol 2; no other is needed
        raise pickle.UnpicklingError(f"the pickle asks for the codec {encoding!r}")
    return text.encode("latin-1")


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that builds containers, numbers, strings and NumPy arrays, and refuses any other name."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
            "numpy._core.multiarray._reconstruct": np.empty(0).__reduce__()[0],  # NumPy 2's name for it
            "numpy.ndarray": np.ndarray,
            "numpy.dtype": np.dtype,
            "_codecs.encode": _latin1,
        }
        if f"{module}.{name}" not in allowed:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, which is not allowed")
        return allowed[f"{module}.{name}"]


def cifar_in(folder: Path) -> Cifar | None:
    """Which CIFAR a folder holds batches of, if any."""
    kinds = (kind for kind in (CIFAR10, CIFAR100) for end in ("", ".bin") if (folder / (kind.train[0] + end)).is_file())
    return next(kinds, None)


def read_cifar(path: str | Path) -> tuple[Cifar, Arrays]:
    """The train and test batches of CIFAR-10 or CIFAR-100 from a folder or a tar of either version."""
    path = Path(path)
    folder = path.is_dir()
    wanted = {
        f"{name}{end}" for kind in (CIFAR10, CIFAR100) for name in (*kind.train, kind.test) for end in ("", ".bin")
    }
    if folder:
        batches = {name: _bounded_bytes(path / name, 256 << 20) for name in wanted if (path / name).is_file()}
    else:
        members = ((PurePosixPath(member).name, content) for member, content in tar_files(path, limit=1 << 30))
        batches = {name: content for name, content in members if name in wanted}
    kind = CIFAR100 if batches and batches.keys() <= {"train", "test", "train.bin", "test.bin"} else CIFAR10
    names = (*kind.train, kind.test)
    end = ".bin" if f"{kind.test}.bin" in batches or f"{kind.train[0]}.bin" in batches else ""
    read = cifar_records if end else cifar_pickle
    if missing := [name + end for name in names if name + end not in batches]:
        raise ValueError(f"{path} is not a whole {kind.title}: {', '.join(missing)} missing")
    splits = []
    for group in (kind.train, (kind.test,)):
        parts = [read(batches.pop(n + end), f"{path}{'/' if folder else ':'}{n}{end}", kind) for n in group]
        splits.append((np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])))
    return kind, splits


def _bounded_bytes(path: Path, limit: int) -> bytes:
    if (size := path.stat().st_size) > limit:
        raise ValueError(f"{path} holds {size} bytes, expected at most {limit}")
    return path.read_bytes()


def read_image_folder(folder: Path) -> tuple[Arrays, tuple[str, ...]]:
    """A folder of images by class: train and test, or one set where it has no such subfolders; class names.

    `folder/train/<class>/*` with `folder/test/<class>/*` (or val/), or `folder/<class>/*`.
    """
    held = next((p for p in (folder / "test", folder / "val") if p.is_dir()), None)
    both = held is not None and (folder / "train").is_dir()
    folders = _class_folders(folder / "train" if both else folder)
    names = tuple(p.name for p in folders)
    if not names:
        raise ValueError(f"{folder} holds no IDX files, no CIFAR batches and no folders of images by class")
    x, y = read_images(folders)
    if not both or held is None:
        return [(x, y)], names
    held_folders = _class_folders(held)
    if extra := {p.name for p in held_folders} - set(names):
        raise ValueError(f"{held} has classes that train lacks: {', '.join(sorted(extra))}")
    held_x, held_y = read_images(held_folders, channels=x.shape[1])
    held_y = np.array([names.index(p.name) for p in held_folders], np.int64)[held_y]
    return [(x, y), (held_x, held_y)], names


def _class_folders(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.iterdir()) if p.is_dir() and any(_image_files(p))]


def _image_files(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.iterdir()) if p.suffix.lower() in IMAGE_SUFFIXES and p.name[0] != ".")


def read_images(folders: list[Path], channels: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Every image of `folders`, one folder per class, as [N, C, H, W] uint8 and labels [N] int64.

    All must have one size. One channel when every image is grey (modes 1, L, LA), otherwise three; `channels`
    forces it. Transparency is dropped. Images with more than 8 bits per value are refused.
    """
    from PIL import Image

    files = [(path, k) for k, folder in enumerate(folders) for path in _image_files(folder)]
    size, grey = None, True
    for path, _ in files:  # headers only: nothing is decoded before every size and mode has been seen
        try:
            with Image.open(path) as image:
                this, mode = image.size, image.mode
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} can't be read as an image: {error}") from error
        size = size or this
        if this != size:
            first = f"{size[0]} x {size[1]} as {files[0][0]}"
            raise ValueError(f"{path} is {this[0]} x {this[1]}, expected {first}")
        if mode.startswith(("I", "F")):
            raise ValueError(f"{path} has more than 8 bits per value (mode {mode}), expected 8-bit images")
        grey = grey and mode in ("1", "L", "LA")
    if size is None:
        raise ValueError(f"no images below {', '.join(map(str, folders)) or 'an empty list of folders'}")
    C = channels or (1 if grey else 3)
    if len(files) * C * size[0] * size[1] > LIMIT:
        raise ValueError(f"{len(files)} images of {size[0]} x {size[1]} don't fit in {LIMIT} bytes")
    images = np.empty((len(files), C, size[1], size[0]), np.uint8)
    for n, (path, _) in enumerate(files):
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("L" if C == 1 else "RGB"))
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"{path} can't be read as an image: {error}") from error
        images[n] = pixels if C == 1 else pixels.transpose(2, 0, 1)
    return images, np.array([k for _, k in files], np.int64)
