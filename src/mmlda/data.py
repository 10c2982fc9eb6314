"""Datasets as tensors: by name, from files, from a user's own; splits, class-biased subsets, augmentation.

A dataset is two tensors and the names of its classes, small enough to live on the device it is used on:

>>> train, test = load("digits")
>>> train
ImageData('digits', 1437 images of 1 x 8 x 8, 10 classes)
>>> train.pixels([0, 1]).shape                       # [0, 1] floats on use, bytes in storage
torch.Size([2, 1, 8, 8])

Everything random here (splits, folds, biased sets) comes from a bit generator whose stream NumPy has frozen,
so a seed means the same images on every machine, device and version.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmlda import formats
from mmlda.images import ImageData, as_images, is_arrays

FASHION = tuple("T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(","))
CIFAR10 = tuple("airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck".split(","))
DIGITS = tuple("0123456789")
CLASSES = {"digits": DIGITS, "mnist": DIGITS, "fashion-mnist": FASHION, "cifar10": CIFAR10}
# Where a dataset may lie below the root: our own name first, then torchvision's and its archive's.
FOLDERS = {
    "mnist": ("mnist", "MNIST/raw", "."),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw", "."),
    "cifar10": ("cifar10", "cifar-10", "."),
}
CIFAR_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py", ".")
CIFAR_ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")


# ---------------------------------------------------------------------------------------------------- loading


def load(source: Any, root: str | Path | None = None) -> tuple[ImageData, ImageData]:
    """The train and test set of `source`.

    Args:
        source: `"digits"` (comes with scikit-learn), `"mnist"`, `"fashion-mnist"` or `"cifar10"` (from files
            below `root`); a folder of IDX files; a folder or tar of CIFAR-10 batches; a folder of images by
            class, as `train/<class>/*.png` and `test/<class>/*.png` or just `<class>/*.png`; a pair (train,
            test) of anything `as_images` takes; or one such dataset. What comes without a test set gets a
            fixed stratified one, see `split`.
        root: where files of named datasets lie; $MMLDA_DATA, or ~/.cache/mmlda, if not given.

    >>> x, y = torch.rand(50, 1, 8, 8), torch.arange(50) % 5
    >>> load((x, y))
    (ImageData('', 40 images of 1 x 8 x 8, 5 classes), ImageData('', 10 images of 1 x 8 x 8, 5 classes))
    """
    if isinstance(source, str) and source in CLASSES:
        return _load_digits() if source == "digits" else _load_named(source, data_root(root))
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if not path.exists():
            raise ValueError(f"source is {str(source)!r}, expected {', '.join(CLASSES)}, or a path that exists")
        return _load_path(path)
    if isinstance(source, tuple | list) and len(source) == 2 and not is_arrays(source):
        train, test = (as_images(part) for part in source)
        longer = max(train.classes, test.classes, key=len)  # one part may lack the last classes
        for part in (train, test):
            if part.classes != longer[: len(part.classes)]:
                raise ValueError(f"source has train classes {train.classes} and test classes {test.classes}")
        if train.shape != test.shape:
            raise ValueError(f"source has train images {train.shape} and test images {test.shape}")
        return replace(train, classes=longer), replace(test, classes=longer)
    return split(as_images(source))


def data_root(root: str | Path | None = None) -> Path:
    """Where dataset files live: `root`, else $MMLDA_DATA, else ~/.cache/mmlda."""
    return Path(root or os.environ.get("MMLDA_DATA") or "~/.cache/mmlda").expanduser()


def find(name: str, root: str | Path | None = None) -> Path | None:
    """The folder or archive below `root` that holds the named dataset, or None."""
    for folder in (data_root(root) / place for place in FOLDERS[name]):
        if name != "cifar10":
            if formats.idx_image_files(folder):
                return folder
            continue
        for place in (folder / p for p in CIFAR_FOLDERS):
            if formats.has_cifar10(place):
                return place
        for archive in (folder / p for p in CIFAR_ARCHIVES):
            if archive.is_file():
                return archive
    return None


def _load_named(name: str, root: Path) -> tuple[ImageData, ImageData]:
    path = find(name, root)
    if path is None:
        raise FileNotFoundError(f"{name} is not below {root}: get it with `mmlda data fetch {name}`")
    return _load_path(path, name)


def _load_path(path: Path, name: str = "") -> tuple[ImageData, ImageData]:
    if path.is_file() or formats.has_cifar10(path):
        return _pair(formats.read_cifar10(path), CIFAR10, name or "cifar10")
    if formats.idx_image_files(path):
        arrays = formats.read_idx_folder(path)
        L = 1 + max(int(y.max(initial=0)) for _, y in arrays)
        return _pair(arrays, CLASSES.get(name) or tuple(map(str, range(L))), name or path.name)
    arrays, classes = formats.read_image_folder(path)
    if len(arrays) == 2:
        return _pair(arrays, classes, path.name)
    return split(ImageData(torch.from_numpy(arrays[0][0]), torch.from_numpy(arrays[0][1]), classes, path.name))


def _pair(arrays: formats.Arrays, classes: tuple[str, ...], name: str) -> tuple[ImageData, ImageData]:
    train, test = (ImageData(torch.from_numpy(x), torch.from_numpy(y).long(), classes, name) for x, y in arrays)
    if train.shape != test.shape:
        raise ValueError(f"{name} has train images {train.shape} and test images {test.shape}")
    return train, test


def _load_digits() -> tuple[ImageData, ImageData]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)  # [1797, 64], integers 0..16
    pixels = np.rint(x * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return split(ImageData(torch.from_numpy(pixels), torch.from_numpy(y).long(), DIGITS, "digits"))


# ---------------------------------------------------------------------------------------------------- subsets


def split(data: ImageData, part: float = 0.2) -> tuple[ImageData, ImageData]:
    """The fixed stratified split of a dataset that has no test set of its own: (train, test).

    Within a class the images are put in the order of their SHA-256, and the first ones are the test set:
    `part` of all images, rounded up, shared over the classes in proportion. No generator is involved, so the
    split follows from the images alone.
    """
    n = math.ceil(len(data) * part)
    if not 0 < n < len(data):
        what = f"data has {len(data)} images and part is {part}"
        raise ValueError(f"{what}, expected at least one image to train on and one to test on")
    flat = data.images.cpu().contiguous().view(len(data), -1).numpy()
    keys = [hashlib.sha256(row.tobytes()).digest() for row in flat]
    order = np.array(sorted(range(len(data)), key=lambda i: (keys[i], i)))
    return _hold(data, order, n)


def holdout(data: ImageData, n: int, seed: int = 0) -> tuple[ImageData, ImageData]:
    """Hold `n` random images out, stratified: (rest, held). Each keeps the order the images had.

    >>> train, _ = load("digits")
    >>> rest, held = holdout(train, 100, seed=0)
    >>> len(rest), len(held), held.counts.tolist()
    (1337, 100, [10, 10, 10, 10, 10, 10, 10, 10, 10, 10])
    """
    if not 0 < n < len(data):
        raise ValueError(f"n is {n}, expected 1 to {len(data) - 1}")
    return _hold(data, np.argsort(_uniform(len(data), seed), kind="stable"), n)


def _hold(data: ImageData, order: np.ndarray, n: int) -> tuple[ImageData, ImageData]:
    """Share n over the classes by largest remainder, and take that many of each class, first in `order`."""
    y = data.labels.cpu().numpy()
    share = n * np.bincount(y, minlength=data.num_classes) / len(y)  # [L]
    take = np.floor(share).astype(np.int64)
    take[np.argsort(-(share - take), kind="stable")[: n - take.sum()]] += 1
    held = np.zeros(len(y), bool)
    for k in range(data.num_classes):
        held[order[y[order] == k][: take[k]]] = True
    return data.subset(~held), data.subset(held)


def folds(data: ImageData, k: int = 5, seed: int = 0) -> list[tuple[ImageData, ImageData]]:
    """k stratified folds, each as (train, validation); the validation parts are disjoint and cover the data.

    Classes are dealt out like cards, one class after the other, so fold sizes differ by at most one, and so
    do the counts of any class.
    """
    held = [fold_rows(data, i, k, seed) for i in range(max(k, 1))]
    return [(data.subset(~rows), data.subset(rows)) for rows in held]


def fold_rows(data: ImageData, i: int, k: int = 5, seed: int = 0) -> Tensor:
    """Which images are the validation part of the i-th of k folds: bool [N]."""
    if not 2 <= k <= len(data):
        raise ValueError(f"k is {k}, expected 2 to {len(data)}")
    dealt = np.lexsort((_uniform(len(data), seed), data.labels.cpu().numpy()))  # by class, random within
    fold = np.empty(len(data), np.int64)
    fold[dealt] = np.arange(len(data)) % k
    return torch.from_numpy(fold == i)


def biased(data: ImageData, alpha: Tensor | np.ndarray | Sequence[float], seed: int = 0) -> ImageData:
    """A class-biased subset (Sec. 4.4): each image (x, y) is kept with probability alpha_y, independently.

    Apply the same alpha to the train and the test set. `priors` of the result are the empirical ones, whose
    expectation is alpha_k / sum(alpha). With one seed, a larger alpha keeps all that a smaller one keeps.

    >>> train, test = load("digits")
    >>> biased(train, bp2()[3], seed=0).counts.tolist()
    [26, 31, 31, 146, 30, 31, 23, 26, 32, 30]
    """
    a = np.asarray(torch.as_tensor(alpha), np.float64)
    if a.shape != (data.num_classes,) or not ((a >= 0) & (a <= 1)).all():
        raise ValueError(f"alpha is {a.tolist()}, expected {data.num_classes} probabilities")
    kept = _uniform(len(data), seed) < a[data.labels.cpu().numpy()]
    if not kept.any():
        raise ValueError(f"alpha is {a.tolist()}, which keeps none of the {len(data)} images")
    return data.subset(kept)


def bp1(seed: int = 0) -> Tensor:
    """Bias Probability 1: ten random permutations of (0.1, 0.2, ..., 1.0), [10, 10] float64, a row each."""
    rows = np.argsort(_uniform(100, seed).reshape(10, 10), axis=1, kind="stable")
    return torch.from_numpy((rows + 1) / 10)


def bp2() -> Tensor:
    """Bias Probability 2: row i gives class i probability 1.0 and the others 0.2, [10, 10] float64."""
    return torch.full((10, 10), 0.2, dtype=torch.float64).fill_diagonal_(1.0)


def _uniform(n: int, seed: int) -> np.ndarray:
    """n doubles in [0, 1). From raw bits: those NumPy never changes, while its distributions may."""
    return (np.random.PCG64(seed).random_raw(n) >> np.uint64(11)) * 2.0**-53


# ----------------------------------------------------------------------------------------------- augmentation


def draw_augmentation(
    *size: int,
    pad: int = 4,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random (dy, dx, flip) for `augment`, each of shape `size`: [N] for a batch, [steps, N] for an epoch.

    dy and dx are uniform over 0..2 pad (int64), flip is true half the time (bool).
    """
    device = device or (generator.device if generator is not None else None)
    dy, dx = torch.randint(2 * pad + 1, (2, *size), generator=generator, device=device)
    return dy, dx, torch.randint(2, size, generator=generator, device=device) == 1


def augment(x: Tensor, dy: Tensor, dx: Tensor, flip: Tensor | None = None, pad: int = 4) -> Tensor:
    """Pad with black, crop back to size at (dy, dx), mirror where `flip`: a whole batch in one gather.

        out[n, c, i, j] = padded[n, c, i + dy_n, j' + dx_n],   j' = W-1-j if flip_n else j

    Args:
        x: [N, C, H, W], any dtype, contiguous or channels_last; the result has the same layout.
        dy, dx: [N] integers in 0..2 pad; dy = dx = pad leaves the image where it is.
        flip: [N] bool, or None for no mirroring.

    A pure function of its arguments: no random draws, no values read back, so it can be compiled, and
    captured in a CUDA graph. Draw with `draw_augmentation`.

    >>> x = torch.arange(4.0).view(1, 1, 2, 2)
    >>> augment(x, torch.tensor([1]), torch.tensor([2]), pad=1)  # one to the left
    tensor([[[[1., 0.],
              [3., 0.]]]])
    """
    N, C, H, W = x.shape
    i = torch.arange(H, device=x.device) + (dy - pad)[:, None]  # [N, H]
    j = torch.arange(W, device=x.device).expand(N, W)
    if flip is not None:
        j = torch.where(flip[:, None], W - 1 - j, j)
    j = j + (dx - pad)[:, None]  # [N, W]
    inside = ((i >= 0) & (i < H))[:, :, None] & ((j >= 0) & (j < W))[:, None, :]  # [N, H, W]
    at = i.clamp(0, H - 1)[:, :, None] * W + j.clamp(0, W - 1)[:, None, :]  # [N, H, W]
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        rows = x.permute(0, 2, 3, 1).view(N, H * W, C)
        moved = rows.gather(1, at.view(N, -1, 1).expand(N, H * W, C)).view(N, H, W, C)
        return (moved * inside[..., None]).permute(0, 3, 1, 2)
    moved = x.flatten(2).gather(2, at.view(N, 1, -1).expand(N, C, H * W)).view(N, C, H, W)
    return moved * inside[:, None]
