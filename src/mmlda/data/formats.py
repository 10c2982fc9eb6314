"""Dataset files to arrays, safely: IDX, CIFAR's two formats, tar archives, folders of images.

No reader trusts what it reads. Only regular files are opened. Lengths are checked against headers before memory is
taken, and what a file may unpack to is bounded (`limit`). Pickles are read without unpickling, tar members can't leave
the folder, and the checksums of gzip and PNG are checked. A file that violates its format raises a `ValueError` that
names it.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from mmlda._utils.checks import DamagedFile, check_count, damaged
from mmlda._utils.files import open_regular
from mmlda.data.pickles import read_pickle

Arrays = list[tuple[np.ndarray, np.ndarray]]  # (images, labels) of train and test, or of one set

LIMIT = 8 << 30  # bytes: the most that any dataset may unpack to, whatever its header claims
SMALL = 256 << 20  # bytes that a compressed file may always unpack to; beyond them, ...
RATIO = 64  # ... this times its size: images as gzip or PNG make 2 to 20, a bomb up to 1,032
PIXELS = 1 << 24  # of one image, which takes up to 12 bytes for each of them while it is decoded
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
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM", "TIFF")  # Pillow has others, one of which starts programs


def limit(packed: int) -> int:
    """Bytes that `packed` bytes of compressed files may unpack to: $MMLDA_DATA_LIMIT if set, else what is plausible."""
    if text := os.environ.get("MMLDA_DATA_LIMIT"):
        return check_count("MMLDA_DATA_LIMIT", int(text) if text.isdecimal() else text, 1)
    return min(LIMIT, max(SMALL, RATIO * packed))


def open_plain(path: Path) -> IO[bytes]:
    """Open a regular file, through gzip when it starts with gzip's two magic bytes, whatever it is called."""
    file = open_regular(path)
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not packed:
        return file
    stream = gzip.GzipFile(fileobj=file, mode="rb")
    stream.myfileobj = file  # type: ignore[assignment]  # closed with the stream
    return stream  # type: ignore[return-value]


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
                raise damaged(path, "an IDX file, which starts with 00 00 08 01 to 04", got)
            header = file.read(4 * start[3])
            if len(header) < 4 * start[3]:
                raise damaged(path, "a whole IDX file", "one truncated within its header")
            shape = struct.unpack(f">{start[3]}I", header)
            expected, size = math.prod(shape), path.stat().st_size
            allowed = limit(size) if isinstance(file, gzip.GzipFile) else size
            if expected > allowed or math.prod(n or 1 for n in shape) >> 62:  # too large for NumPy even where empty
                what = f"an IDX file of at most {allowed} bytes (MMLDA_DATA_LIMIT)"
                raise damaged(path, what, f"a truncated one or a false header {shape}, of {expected} bytes")
            values = np.empty(expected, np.uint8)  # memory is committed as it is filled
            done, view = 0, memoryview(values)  # type: ignore[arg-type]
            while done < expected and (count := file.readinto(view[done : done + (1 << 20)])):  # type: ignore[attr-defined]
                done += count
            if done < expected or file.read(1):
                got = "a truncated one" if done < expected else "bytes after its last value"
                raise damaged(path, f"an IDX file of {expected} bytes, as its header {shape} promises", got)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise damaged(path, "a whole gzip file", f"a truncated or damaged one ({error})") from error
    return values.reshape(shape)


def idx_image_files(folder: Path) -> list[re.Match[str]]:
    """The IDX image files in `folder`, with their names parsed."""
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return [match for name in names if (match := IDX_IMAGES.fullmatch(name))]


def read_idx_folder(folder: Path) -> Arrays:
    """Train and test from a folder with MNIST's four file names (any prefix, gzipped or not).

    Images may have three dimensions [N, H, W] or four [N, C, H, W]; they come back as the latter.
    """
    splits = []
    for wanted in (("train",), ("t10k", "test")):
        # Sorted backwards: if a file exists both plain and gzipped, the plain one is used.
        found = {m["prefix"] + m["split"]: m for m in idx_image_files(folder)[::-1] if m["split"] in wanted}
        if len(found) != 1:
            what = " or ".join(wanted)
            raise damaged(folder, f"a folder with one IDX image file for {what}", len(found))
        ((stem, match),) = found.items()
        labels = folder / f"{stem}-labels{match['dash']}idx1-ubyte"
        if not labels.is_file():
            labels = labels.with_name(labels.name + ".gz")
        if not labels.is_file():
            raise damaged(labels, f"the labels of {match[0]}", "no such file")
        x, y = read_idx(folder / match[0]), read_idx(labels)
        if x.ndim not in (3, 4) or y.ndim != 1 or len(x) != len(y):
            raise damaged(folder / match[0], f"images that match {labels.name}, {y.shape}", x.shape)
        splits.append((x if x.ndim == 4 else x[:, None], y))  # [N, C, H, W]
    return splits


class _Bounded:
    """A stream that raises once more than `limit` bytes were read, to stop decompression bombs."""

    def __init__(self, file: IO[bytes], limit: int, name: str) -> None:
        self.file, self.left, self.limit, self.name = file, limit, limit, name

    def read(self, size: int = -1) -> bytes:
        block = self.file.read(self.left + 1 if size < 0 else min(size, self.left + 1))
        self.left -= len(block)
        if self.left < 0:
            raise damaged(self.name, f"an archive that unpacks to at most {self.limit} bytes", "more")
        return block


def tar_files(source: str | Path | IO[bytes], limit: int = LIMIT, name: str = "") -> Iterator[tuple[str, bytes]]:
    """The regular files of a tar (plain or gzipped), one after another, as (relative path, content).

    A member with an absolute path or a `..` in it, and any link, device or sparse file, is a `ValueError`: an
    honest dataset has none. `limit` bounds the unpacked archive. `source` is a path or an open tar stream. It is read
    to its end, where gzip's checksum is: what was returned before a `ValueError` there is not to be used.
    """
    name = name or str(source)
    opened = open_plain(Path(source)) if isinstance(source, str | Path) else None
    stream: Any = _Bounded(opened or source, limit, name)  # type: ignore[arg-type]
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                what = f"{name}: member {member.name!r}"
                path = PurePosixPath(member.name.replace("\\", "/"))
                if path.is_absolute() or ".." in path.parts or re.match("[A-Za-z]:", member.name):
                    raise damaged(what, "inside the folder", "a path that leaves it")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise damaged(what, "a regular file", "another kind")
                if member.size > limit:
                    raise damaged(what, f"at most the {limit} bytes allowed", member.size)
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                if len(content) != member.size:
                    raise damaged(what, f"{member.size} bytes", f"{len(content)}: truncated")
                yield str(path), content
        while stream.read(1 << 20):
            pass
    except DamagedFile:
        raise
    except (
        tarfile.TarError,
        EOFError,
        gzip.BadGzipFile,
        zlib.error,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise damaged(name, "a whole tar archive", f"a damaged one ({error})") from None
    finally:
        if opened is not None:
            opened.close()


def cifar_records(content: bytes, name: str, kind: Cifar = CIFAR10) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR's binary version: records of one or two label bytes and 3,072 pixel bytes, as images and labels.

    Returns [N, 3, 32, 32] uint8 and [N] uint8, CIFAR-100's fine labels.
    """
    bytes_each = 3072 + len(kind.labels)
    if not content or len(content) % bytes_each:
        raise damaged(name, f"a multiple of {bytes_each} bytes", f"{len(content)}: truncated?")
    records = np.frombuffer(content, np.uint8).reshape(-1, bytes_each)
    return _checked_cifar(records[:, len(kind.labels) :], list(records[:, : len(kind.labels)].T), name, kind)


def cifar_pickle(content: bytes, name: str, kind: Cifar = CIFAR10) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR's python version: a pickled dict with `data` [N, 3072] and lists of labels, as images and labels.

    Nothing is unpickled, see `mmlda.data.pickles`. Returns [N, 3, 32, 32] uint8 and [N] uint8.
    """
    try:
        batch = read_pickle(content)
    except ValueError as error:
        raise damaged(name, f"a {kind.title} batch", f"another file ({error})") from error
    if not isinstance(batch, dict):
        raise damaged(name, f"a {kind.title} batch, a dict", f"a {type(batch).__name__}")
    fields = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    data = fields.get("data")
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3072:
        raise damaged(name, f"a {kind.title} batch with `data`, a uint8 array [N, 3072]", "other data")
    lists = [fields.get(key) for key in kind.labels]
    for key, labels in zip(kind.labels, lists):
        if not isinstance(labels, list) or not all(type(y) is int and 0 <= y < 256 for y in labels):
            raise damaged(name, f"a {kind.title} batch with `{key}`, a list of small integers", "other labels")
    return _checked_cifar(data, [np.array(labels, np.uint8) for labels in lists], name, kind)


def _checked_cifar(
    pixels: np.ndarray, columns: Sequence[np.ndarray], name: str, kind: Cifar
) -> tuple[np.ndarray, np.ndarray]:
    for labels, L in zip(columns, kind.classes):
        if len(pixels) != len(labels) or not len(labels):
            raise damaged(name, "images with one label each", f"{len(pixels)} images and {len(labels)} labels")
        if labels.max() >= L:
            raise damaged(name, f"{kind.title}, with labels 0 to {L - 1}", labels.max())
    return pixels.reshape(-1, 3, 32, 32), columns[-1]


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
        batches = {name: _bounded_bytes(path / name) for name in wanted if (path / name).is_file()}
    else:
        members = ((PurePosixPath(member).name, content) for member, content in tar_files(path, limit=limit(0)))
        batches = {name: content for name, content in members if name in wanted}
    kind = CIFAR100 if batches and batches.keys() <= {"train", "test", "train.bin", "test.bin"} else CIFAR10
    names = (*kind.train, kind.test)
    end = ".bin" if f"{kind.test}.bin" in batches or f"{kind.train[0]}.bin" in batches else ""
    read = cifar_records if end else cifar_pickle
    if missing := [name + end for name in names if name + end not in batches]:
        raise damaged(path, f"a whole {kind.title}", f"one without {', '.join(missing)}")
    splits = []
    for group in (kind.train, (kind.test,)):
        parts = [read(batches.pop(n + end), f"{path}{'/' if folder else ':'}{n}{end}", kind) for n in group]
        splits.append((np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])))
    return kind, splits


def _bounded_bytes(path: Path) -> bytes:
    with open_regular(path, limit(0)) as file:
        return file.read()


def read_image_folder(folder: Path) -> tuple[Arrays, tuple[str, ...]]:
    """A folder of images by class: train and test, or one set if it has no such subfolders; and the class names.

    `folder/train/<class>/*` with `folder/test/<class>/*` (or val/), or `folder/<class>/*`.
    """
    held = next((p for p in (folder / "test", folder / "val") if p.is_dir()), None)
    both = held is not None and (folder / "train").is_dir()
    folders = _class_folders(folder / "train" if both else folder)
    names = tuple(p.name for p in folders)
    if not names:
        raise damaged(folder, "a folder of IDX files, CIFAR batches or folders of images by class", "none of them")
    x, y = read_images(folders)
    if not both or held is None:
        return [(x, y)], names
    held_folders = _class_folders(held)
    if extra := {p.name for p in held_folders} - set(names):
        raise damaged(held, "a folder of the classes in train", f"also {', '.join(sorted(extra))}")
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
    forces it. Transparency is dropped. Images with more than 8 bits per value raise a ValueError.
    """
    files = [(path, k) for k, folder in enumerate(folders) for path in _image_files(folder)]
    size, grey, packed = None, True, 0
    for path, _ in files:  # headers and checksums: nothing is decoded before every size and mode has been seen
        with _image(path) as image:
            this, mode = image.size, image.mode
            packed += path.stat().st_size
            if math.prod(this) > max(PIXELS, limit(0) // 16):
                raise damaged(path, f"an image of at most {PIXELS} pixels (MMLDA_DATA_LIMIT)", f"{this[0]} x {this[1]}")
            image.verify()
        size = size or this
        if this != size:
            raise damaged(path, f"{size[0]} x {size[1]}, as {files[0][0]}", f"{this[0]} x {this[1]}")
        if mode.startswith(("I", "F")):
            raise damaged(path, "an image of 8 bits per value", f"mode {mode}")
        grey = grey and mode in ("1", "L", "LA")
    if size is None:
        raise damaged(", ".join(map(str, folders)) or "folders", "folders of images", "none")
    C = channels or (1 if grey else 3)
    if len(files) * C * size[0] * size[1] > limit(packed):
        raise damaged(
            files[0][0].parent.parent,
            f"images of {limit(packed)} bytes in all (MMLDA_DATA_LIMIT)",
            f"{len(files)} of {size[0]} x {size[1]}",
        )
    images = np.empty((len(files), C, size[1], size[0]), np.uint8)
    for n, (path, _) in enumerate(files):
        with _image(path) as image:
            pixels = np.asarray(image.convert("L" if C == 1 else "RGB"))
        images[n] = pixels if C == 1 else pixels.transpose(2, 0, 1)
    return images, np.array([k for _, k in files], np.int64)


@contextmanager
def _image(path: Path) -> Iterator[Any]:
    """An image file, opened; a ValueError if reading or decoding it fails."""
    from PIL import Image

    try:
        with open_regular(path) as file, Image.open(file, formats=IMAGE_FORMATS) as image:
            yield image
    except (MemoryError, DamagedFile):
        raise
    except Exception as error:  # Pillow's readers raise anything at all
        raise damaged(path, "an image", f"a file that cannot be read as one ({error})") from error
