"""Mutate valid files of every format that is read, and check what becomes of them.

A mutant must be refused with a documented error, a `ValueError` or an `OSError` in a sentence that names the file, or
be read as what its format promises:

- "same": the format has a checksum, so what is read is what was written. Mutants made with a right checksum, as an
  attacker would make them, need only be valid.
- "valid": the format has none, so a changed pixel cannot be noticed: shapes, types and ranges are right.

Every mutant is read under a limit of 1 GiB of memory above what the process has before, and of 30 seconds.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import pickle
import random
import resource
import signal
import struct
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmlda
from mmlda import results
from mmlda._utils.checks import DamagedFile
from mmlda._utils.files import json_digest
from mmlda._utils.tensors import packed, unpacked
from mmlda.data import formats
from mmlda.evaluation.chunks import Chunks
from mmlda.report import build as build_report
from mmlda.training import Options, Run, checkpoints
from mmlda.training.loop import training_steps

MEMORY = 1 << 30
SECONDS = 30
BATCH = 250
FEWER = {"report": 100}  # a page takes a second: a hundredth of the mutants
ROOT = Path(__file__).parents[1]
Bytes = Callable[[bytes], bytes]


@dataclasses.dataclass(frozen=True)
class Format:
    """How to write a valid input to a folder, how to read it, and what is promised of a mutant."""

    write: Callable[[Path], None]
    read: Callable[[Path], Any]  # something that can be compared
    promise: str = "same"
    skip: tuple[str, ...] = ()  # files that are not mutated
    names: tuple[str, ...] = ()  # that an error may have instead of the file's
    forge: Callable[[random.Random, bytes], bytes] | None = None  # a mutant with a right checksum


# ------------------------------------------------------------------------------------------------ mutations


def mutated(rng: random.Random, content: bytes, path: Path) -> bytes:
    """One of: flipped bits, truncation, spliced, inserted, removed or repeated bytes, extreme numbers, changed JSON."""
    if path.suffix in (".json", ".jsonl") and rng.random() < 0.6:
        return json_mutated(rng, content, path.suffix == ".jsonl")
    if path.suffix == ".safetensors" and rng.random() < 0.4:
        size = int.from_bytes(content[:8], "little")
        header = json_mutated(rng, content[8 : 8 + size], False)
        return len(header).to_bytes(8, "little") + header + content[8 + size :]
    data, kind = bytearray(content), rng.randrange(8)
    # headers are small, and most of what can go wrong is in them
    near = max(1, min(len(data), rng.choice((8, 64, 1024, len(data)))))
    at, length = rng.randrange(near), rng.choice((1, 2, 4, 8, 64, 1024))
    if kind == 0:
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            data[rng.randrange(near)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) if rng.random() < 0.7 else at :]
    elif kind == 2:
        begin = rng.randrange(len(data))
        data[at : at + length] = data[begin : begin + length]
    elif kind == 3:
        data[at:at] = rng.randbytes(length)
    elif kind == 4:
        del data[at : at + length]
    elif kind == 5:
        data[at:at] = data[at : at + length]
    elif kind == 6:
        width = rng.choice((1, 2, 4, 8))
        value = rng.choice((0, 1, (1 << 8 * width) - 1, (1 << 8 * width - 1) - 1, 1 << 8 * width - 1, 1 << 4 * width))
        data[at : at + width] = value.to_bytes(width, rng.choice(("big", "little")))
    else:
        data += rng.choice((b"\0", rng.randbytes(length), bytes(content[:length])))
    return bytes(data)


EXTREMES = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-300, 1e308, 2**31, 2**63, 2**64, 10**30, 10**400, 600_002),
    *(float("nan"), float("inf"), "", "0", "false", "../x", "/etc/passwd", "x" * 5000, "\x00", "\ud800", [], {}, [[]]),
    *([0] * 5000, [1, 2], {"a": 1}, [None], ["x"], {"": {}}),
)


def json_mutated(rng: random.Random, content: bytes, lines: bool) -> bytes:
    """A JSON document, or a line of several, with one value replaced, removed, renamed or nested deeply."""
    rows = content.split(b"\n")[:-1] if lines else [content]
    at = rng.randrange(len(rows))
    value = json.loads(rows[at])
    places: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        parent = todo.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        places += [(parent, key) for key in keys]
        todo += [parent[key] for key in keys if isinstance(parent[key], dict | list)]
    parent, key = rng.choice(places)
    kind = rng.randrange(10)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice((*parent, "x", ""))] = parent.pop(key)
    elif kind == 2:
        other, name = rng.choice(places)
        parent[key] = other[name] if name in other or not isinstance(other, dict) else None
    elif kind == 3:
        parent[key] = "DEEP"
    elif kind == 4 and isinstance(parent[key], int | float):
        parent[key] = parent[key] * rng.choice((-1, 0.5, 2, 10, 1000)) + rng.choice((0, 1))
    else:
        parent[key] = rng.choice(EXTREMES)
    try:
        rows[at] = json.dumps(value).encode("utf-8", "surrogatepass")
    except (RecursionError, ValueError):  # a value put into itself
        rows[at] = b"{}"
    depth = rng.choice((10, 40, 500, 5000, 200_000))
    rows[at] = rows[at].replace(b'"DEEP"', b"[" * depth + b"]" * depth)
    return b"\n".join(rows) + (b"\n" if lines else b"")


# -------------------------------------------------------------------------------------------------- formats


def _pixels(seed: int, n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), np.uint8)


def _idx(values: np.ndarray) -> bytes:
    return struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_idx(folder: Path, pack: Bytes = bytes, tail: str = "") -> None:
    for k, name in enumerate(("train", "t10k")):
        (folder / f"{name}-images-idx3-ubyte{tail}").write_bytes(pack(_idx(_pixels(k, 12, 8, 8))))
        (folder / f"{name}-labels-idx1-ubyte{tail}").write_bytes(pack(_idx(np.arange(12, dtype=np.uint8) % 10)))


def _gzipped(content: bytes) -> bytes:
    return gzip.compress(content, 6, mtime=0)


def _cifar(seed: int, python: bool) -> bytes:
    x, y = _pixels(seed, 3, 3072), [0, 5, 9]
    if python:
        names = [b"a.png", b"b.png", b"c.png"]
        return pickle.dumps({b"batch_label": b"x", b"labels": y, b"data": x, b"filenames": names}, protocol=2)
    return b"".join(bytes([label]) + row.tobytes() for row, label in zip(x, y))


def write_cifar(folder: Path, python: bool = False) -> None:
    for k, name in enumerate((*formats.CIFAR_TRAIN, formats.CIFAR_TEST)):
        (folder / (name if python else f"{name}.bin")).write_bytes(_cifar(k, python))


def write_tar(folder: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for k, name in enumerate((*formats.CIFAR_TRAIN, formats.CIFAR_TEST)):
            content, info = _cifar(k, False), tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (folder / "cifar.tar.gz").write_bytes(_gzipped(buffer.getvalue()))


def write_images(folder: Path, suffixes: tuple[str, ...] = (".png", ".png")) -> None:
    from PIL import Image

    for k, name in enumerate("ab"):
        (folder / name).mkdir()
        for n, suffix in enumerate(suffixes):
            Image.fromarray(_pixels(2 * n + k, 8, 8, 3)).save(folder / name / f"{n}{suffix}")


def read_images(folder: Path) -> Any:
    """Pixels and labels of train and test, after the checks that a network's training relies on."""
    file = folder / "cifar.tar.gz"
    sets = mmlda.data.load(file if file.exists() else folder)
    for part in sets:
        assert part.images.dtype == torch.uint8 and part.images.dim() == 4 and len(part) == len(part.labels) > 0
        assert part.labels.dtype == torch.int64 and 0 <= int(part.labels.min())
        assert int(part.labels.max()) < part.num_classes <= 256
    return [(part.images.numpy().tobytes(), part.shape, part.labels.tolist()) for part in sets]


CONFIG = {"backbone": "conv_net", "width": 2, "head": "mmlda", "dim": 12, "C": 50.0}
RECIPE = mmlda.Recipe(steps=6, batch_size=8, optimizer="adam", lr=1e-3)


def write_run(folder: Path, steps: int = 6) -> None:
    data = mmlda.data.load("digits")[0].subset(slice(32))
    run = Run(mmlda.models.build(CONFIG, seed=0), RECIPE, folder)
    options = Options(checkpoint_every=2, log_every=2)
    for step in training_steps(run, data, options, report=lambda done, **numbers: None):
        if step == steps and steps < 6:
            break
    for path in (*folder.glob(".*"), *(folder.glob("step-*") if steps == 6 else ())):  # not read beside a network
        path.unlink()


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    return results.weights_digest(tensors)


def read_run(folder: Path) -> Any:
    about = checkpoints.read_about(folder)
    model = mmlda.load(folder)
    about.pop("sha256", None)  # without it, it is a file of an older version
    about.pop("versions", None)
    return about, model.config, _digest(model.state_dict())


def forge_run(rng: random.Random, content: bytes) -> bytes:
    for _ in range(20):
        try:
            about = json.loads(json_mutated(rng, content, False))
            about.pop("sha256", None)
            return json.dumps({**about, "sha256": json_digest(about)}).encode()
        except (ValueError, RecursionError, AttributeError):
            continue
    return content


def read_checkpoint(folder: Path) -> Any:
    found = checkpoints.newest(folder, checkpoints.read_about(folder))
    return None if found is None else (found[1]["step"], _digest(found[0]))


def write_chunks(folder: Path) -> None:
    chunks = Chunks(folder, 20, 10, {"network": "x"})
    for start in (0, 10):
        x = torch.from_numpy(_pixels(start, 10, 1, 8, 8).astype(np.float32) / 255)
        chunks.save(start, {"x_adv": x, "success": x[:, 0, 0, 0] > 0.5})


def read_chunks(folder: Path) -> Any:
    """Digests of the chunks that are used; one that is computed again is as good as refused."""
    chunks = Chunks(folder, 20, 10, {"network": "x"})
    if again := chunks.missing():
        raise ValueError(f"{folder}: {len(again)} chunks are computed again")
    return [_digest(part) for part in chunks.load()]


def write_results(folder: Path) -> None:
    for kind, keep in (("audit", 1), ("table1", 2), ("fig4", 99)):
        lines = (ROOT / "results" / "mnist" / f"{kind}.jsonl").read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines[: keep + 1]]
        shared = {v for row in rows[1:] for v in row.values() if isinstance(v, str)} & rows[0]["shared"].keys()
        rows[0]["shared"] = {key: rows[0]["shared"][key] for key in sorted(shared)}
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcomes = (ROOT / "results" / "mnist" / "fig4.safetensors").read_bytes()
    (folder / "fig4.safetensors").write_bytes(outcomes)
    columns = packed({"clean": torch.arange(50) % 10})
    results.Result(name="x", kind="evaluation", what="accuracy", value=0.5, n=50).save(folder, columns)


def read_results(folder: Path) -> Any:
    """The results, and their outcomes, which have the checksum that their result has."""
    read = results.find_results(folder)
    with_outcomes = [result for result in read.values() if result.outcomes is not None and result.kind != "table1"]
    for result in with_outcomes:
        content = result.read_outcomes(folder)
        assert hashlib.sha256(content).hexdigest() == result.outcomes["sha256"]  # type: ignore[index]
        unpacked(content)
    return [dataclasses.asdict(result) for result in read.values()]


def read_report(folder: Path) -> Any:
    return build_report(folder, folder.parent / "page.html").read_text()


def write_network(folder: Path) -> None:
    mmlda.save(mmlda.models.build(CONFIG, seed=0), folder)


def read_network(folder: Path) -> Any:
    model = mmlda.load(folder)
    assert model(torch.zeros(2, 1, 8, 8)).shape[0] == 2
    return model.config, _digest(model.state_dict())


def _inside(rng: random.Random, content: bytes) -> bytes:
    """A gzip file of mutated content, with the checksum of that."""
    return _gzipped(mutated(rng, gzip.decompress(content), Path("x")))


RESULTS = ("audit-mnist", "table1-mnist", "fig4-mnist", "x: ")
FORMATS = {
    "idx": Format(write_idx, read_images, "valid"),
    "idx.gz": Format(lambda folder: write_idx(folder, _gzipped, ".gz"), read_images, forge=_inside),
    "cifar-binary": Format(write_cifar, read_images, "valid"),
    "cifar-python": Format(lambda folder: write_cifar(folder, True), read_images, "valid"),
    "cifar-tar.gz": Format(write_tar, read_images, forge=_inside),
    "png": Format(write_images, read_images),
    "images": Format(
        lambda f: write_images(f, (".jpg", ".bmp", ".gif", ".webp", ".tif", ".ppm")), read_images, "valid"
    ),
    "run.json": Format(write_run, read_run, skip=("metrics.jsonl",), forge=forge_run),
    "checkpoints": Format(lambda folder: write_run(folder, 5), read_checkpoint, skip=("metrics.jsonl",)),
    "chunks": Format(write_chunks, read_chunks),
    "results": Format(write_results, read_results, "valid", names=RESULTS),
    "report": Format(write_results, read_report, "valid", names=RESULTS),
    "network": Format(write_network, read_network),
}


# ---------------------------------------------------------------------------------------------------- trial


def soak(name: str, n: int, seed: int, processes: int = 2) -> dict[str, Any]:
    """Counts over `n` mutants of a format: how many were refused, read the same, read as something else that is valid.

    `failures` lists those that broke the promise, each with its number, which with the seed makes it again.
    """
    begin, n = time.perf_counter(), max(1, n // FEWER.get(name, 1))
    batches = [range(start, min(start + BATCH, n)) for start in range(0, n, BATCH)]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    peak = 0
    try:
        with ProcessPoolExecutor(processes) as pool:
            for found, bad, memory in pool.map(trial, *zip(*[(name, seed, batch) for batch in batches])):
                counts.update(found)
                failures += bad
                peak = max(peak, memory)
    except BrokenProcessPool as error:
        failures.append(f"a process died: {error}")
    about = {"mutants": n, **{key: counts[key] for key in ("refused", "same", "valid")}, "peak_MiB": peak >> 10}
    rate = round(n / (time.perf_counter() - begin))
    return {"promise": FORMATS[name].promise, **about, "per_second": rate, "failures": failures}


def trial(name: str, seed: int, numbers: range) -> tuple[Counter[str], list[str], int]:
    """Read some mutants of a format: counts, failures, and the largest resident memory of the process in KiB."""
    torch.set_num_threads(1)
    kind, counts, failures = FORMATS[name], Counter[str](), []
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "input"
        folder.mkdir()
        kind.write(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in kind.skip)
        whole = {path: path.read_bytes() for path in files}
        right = [kind.read(folder)]
        if name == "checkpoints":  # the one before a damaged one
            newest = max(folder.glob("step-*.json"))
            newest.rename(Path(top) / "aside")
            right.append(kind.read(folder))
            (Path(top) / "aside").rename(newest)
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, before[1]))
        signal.signal(signal.SIGALRM, _hung)
        for number in numbers:
            rng = random.Random(f"{seed} {name} {number}")
            path = rng.choice(files)
            forged = kind.forge is not None and path.suffix in (".json", ".gz") and rng.random() < 0.3
            make = kind.forge if forged else lambda rng, content, path=path: mutated(rng, content, path)
            path.write_bytes(make(rng, whole[path]))  # type: ignore[misc]
            signal.alarm(SECONDS)
            outcome = _outcome(kind, folder, right, forged)
            signal.alarm(0)
            if outcome in ("refused", "same", "valid"):
                counts[outcome] += 1
            else:
                failures.append(f"{number}, {path.relative_to(folder)}{' (forged)' if forged else ''}: {outcome}")
            for extra in set(folder.rglob("*")) - set(files) - {p for f in files for p in f.parents}:
                if extra.is_file() and extra.name not in kind.skip:
                    extra.unlink()
            path.write_bytes(whole[path])
    resource.setrlimit(resource.RLIMIT_AS, before)
    return counts, failures, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _outcome(kind: Format, folder: Path, right: list[Any], forged: bool) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):
            found = kind.read(folder)
    except Exception as error:
        clear = type(error) in (ValueError, DamagedFile) or isinstance(error, OSError)
        text = str(error)
        if not clear or isinstance(error, TimeoutError):
            return f"{type(error).__name__}: {text[:200]}"
        named = folder.name in text or any(name in text for name in kind.names)
        return "refused" if named else f"an error without the file: {text[:200]}"
    if found in right:
        return "same"
    return "valid" if forged or kind.promise == "valid" else "read as something else"


def _hung(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
