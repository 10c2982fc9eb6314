"""Made-up datasets, and files in the formats that the readers take."""

import io
import pickle
import struct
import tarfile

import numpy as np
import torch
from PIL import Image

from mmlda.data import ImageData

rng = np.random.default_rng(0)


def idx_bytes(values):
    """The format as its page describes it: magic, sizes, values."""
    return struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def cifar_bin(images, labels):
    return b"".join(bytes([y]) + x.tobytes() for x, y in zip(images, labels))


def cifar_py(images, labels, protocol=2):
    batch = {b"batch_label": b"a batch", b"labels": labels.tolist(), b"data": images.reshape(len(images), -1)}
    return pickle.dumps(batch, protocol=protocol)


def images_and_labels(n, shape=(3, 32, 32)):
    """Random images, with labels of every class from 10 images on."""
    return rng.integers(0, 256, (n, *shape), np.uint8), rng.permutation(np.arange(n) % 10).astype(np.uint8)


def tar_bytes(members, mode="w:gz"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


def write_idx(folder, train, test, end="-idx3-ubyte", pack=bytes, tail="", names=("train", "t10k")):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (x, y) in zip(names, (train, test)):
        (folder / f"{name}-images{end}{tail}").write_bytes(pack(idx_bytes(x)))
        (folder / f"{name}-labels{end.replace('3', '1')}{tail}").write_bytes(pack(idx_bytes(y)))


def made_up(counts=(30, 5, 12, 1), seed=0, shape=(2, 3, 4)):
    g = torch.Generator().manual_seed(seed)
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    y = y[torch.randperm(len(y), generator=g)]
    x = torch.randint(0, 256, (len(y), *shape), generator=g, dtype=torch.uint8)
    return ImageData(x, y, tuple("abcdefghijkl"[: len(counts)]), "made-up")


def same(part, images, labels):
    return (
        part.images.dtype == torch.uint8
        and torch.equal(part.images, torch.from_numpy(np.asarray(images)))
        and torch.equal(part.labels, torch.from_numpy(np.asarray(labels)).long())
    )


def cifar100_bin(images, fine, coarse):
    return b"".join(bytes([c, f]) + x.tobytes() for x, f, c in zip(images, fine, coarse))


def cifar100_py(images, fine, coarse):
    data = images.reshape(len(images), -1)
    batch = {b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist(), b"data": data, b"filenames": [b"a.png"]}
    return pickle.dumps(batch, protocol=2)
