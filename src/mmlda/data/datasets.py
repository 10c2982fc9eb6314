"""Datasets by name, from files, or from a user's own arrays and datasets."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmlda._utils.checks import invalid
from mmlda.data import formats
from mmlda.data.images import ImageData, as_images, is_arrays
from mmlda.data.subsets import split

__all__ = ["CIFAR10", "CLASSES", "DIGITS", "FASHION", "data_root", "find", "load"]

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
            raise invalid("source", f"{', '.join(CLASSES)} or an existing path", str(source))
        return _load_path(path)
    if isinstance(source, tuple | list) and len(source) == 2 and not is_arrays(source):
        train, test = (as_images(part) for part in source)
        longer = max(train.classes, test.classes, key=len)  # one part may lack the last classes
        for part in (train, test):
            if part.classes != longer[: len(part.classes)]:
                raise ValueError(f"test classes must be the training set's {train.classes}, got {test.classes}")
        if train.shape != test.shape:
            raise ValueError(f"test images must be {train.shape} as the training images, got {test.shape}")
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
        raise ValueError(f"{name}: test images must be {train.shape} as the training images, got {test.shape}")
    return train, test


def _load_digits() -> tuple[ImageData, ImageData]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)  # [1797, 64], integers 0..16
    pixels = np.rint(x * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return split(ImageData(torch.from_numpy(pixels), torch.from_numpy(y).long(), DIGITS, "digits"))
