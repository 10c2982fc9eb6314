"""Datasets by name, from files, or from a user's own arrays and datasets."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmlda._utils.checks import invalid
from mmlda.data import formats
from mmlda.data.alignment import relabelled
from mmlda.data.convert import as_images, is_arrays
from mmlda.data.images import ImageData
from mmlda.data.subsets import split

FASHION = tuple("T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(","))
CIFAR10 = tuple("airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck".split(","))
DIGITS = tuple("0123456789")
CIFAR100_GROUPS = {  # CIFAR-100's coarse classes and the fine ones of each
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}
CIFAR100 = tuple(sorted(" ".join(CIFAR100_GROUPS.values()).split()))


@dataclass(frozen=True)
class Known:
    """A dataset that is known by name.

    Parameters
    ----------
    classes
        Names of the classes.
    folders
        Where it may be below the root: our own name first, then torchvision's and the root itself.
    cifar
        Which CIFAR its files are; None for IDX files.
    inside, archives
        Folders and archives of a CIFAR inside `folders`.
    groups_of
        Name of the dataset whose classes it groups; it has no files of its own.
    """

    classes: tuple[str, ...]
    folders: tuple[str, ...] = ()
    cifar: formats.Cifar | None = None
    inside: tuple[str, ...] = ()
    archives: tuple[str, ...] = ()
    groups_of: str = ""


KNOWN = {
    "digits": Known(DIGITS),
    "mnist": Known(DIGITS, folders=("mnist", "MNIST/raw", ".")),
    "fashion-mnist": Known(FASHION, folders=("fashion-mnist", "FashionMNIST/raw", ".")),
    "cifar10": Known(
        CIFAR10,
        folders=("cifar10", "cifar-10", "."),
        cifar=formats.CIFAR10,
        inside=("cifar-10-batches-bin", "cifar-10-batches-py", "."),
        archives=("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
    ),
    "cifar100": Known(
        CIFAR100,
        folders=("cifar100", "cifar-100", "."),
        cifar=formats.CIFAR100,
        inside=("cifar-100-binary", "cifar-100-python", "."),
        archives=("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz"),
    ),
    "cifar100-coarse": Known(tuple(CIFAR100_GROUPS), groups_of="cifar100"),
}
CLASSES = {name: known.classes for name, known in KNOWN.items()}


def load(source: Any, root: str | Path | None = None) -> tuple[ImageData, ImageData]:
    """Load the training and test set of a source.

    Parameters
    ----------
    source
        - `"digits"` (comes with scikit-learn), `"mnist"`, `"fashion-mnist"`, `"cifar10"`, `"cifar100"` or
          `"cifar100-coarse"` (its 20 groups of classes), from files below `root`;
        - a folder of IDX files, or a folder or tar of CIFAR batches;
        - a folder of images by class: `train/<class>/*.png` and `test/<class>/*.png`, or just `<class>/*.png`;
        - a pair (train, test) of anything `as_images` takes, whose classes are matched by name;
        - one such dataset, which is split.
    root
        Folder of the named datasets; by default $MMLDA_DATA, else ~/.cache/mmlda.

    Returns
    -------
    train, test : ImageData
        Data without a test set is split by `split`: fixed and stratified.

    Raises
    ------
    ValueError
        If the source is unknown, a file is damaged, or train and test set do not fit together.
    FileNotFoundError
        If a named dataset has not been fetched.

    Examples
    --------
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
        if any(part.classes != longer[: part.num_classes] for part in (train, test)):
            test, longer = relabelled(train.classes, test, "the training set"), train.classes
        if train.shape != test.shape:
            raise ValueError(f"test images must have the shape {train.shape} of the training images, got {test.shape}")
        return replace(train, classes=longer), replace(test, classes=longer)
    return split(as_images(source))


def data_root(root: str | Path | None = None) -> Path:
    """The folder of the datasets.

    Parameters
    ----------
    root
        Folder (default: $MMLDA_DATA, or ~/.cache/mmlda if that is not set).

    Returns
    -------
    Path
        The folder, which need not exist.
    """
    return Path(root or os.environ.get("MMLDA_DATA") or "~/.cache/mmlda").expanduser()


def find(name: str, root: str | Path | None = None) -> Path | None:
    """Find the folder or archive that holds a dataset.

    Parameters
    ----------
    name
        Name of the dataset, such as "cifar10".
    root
        Folder of the datasets, see `data_root`.

    Returns
    -------
    Path or None
        None if the dataset is not there.
    """
    known = KNOWN[KNOWN[name].groups_of or name]
    for folder in (data_root(root) / place for place in known.folders):
        if known.cifar is None:
            found = [folder] if formats.idx_image_files(folder) else []
        else:
            found = [folder / part for part in known.inside if formats.cifar_in(folder / part) == known.cifar]
            found += [folder / archive for archive in known.archives if (folder / archive).is_file()]
        if found:
            return found[0]
    return None


def _load_named(name: str, root: Path) -> tuple[ImageData, ImageData]:
    path, own = find(name, root), KNOWN[name].groups_of or name
    if path is None:
        raise FileNotFoundError(f"{name} is not below {root}: get it with `mmlda data fetch {own}`")
    train, test = _load_path(path, own)
    return (train, test) if own == name else (_coarse(train), _coarse(test))


def _coarse(data: ImageData) -> ImageData:
    """CIFAR-100 with its 20 groups as classes."""
    group = {fine: k for k, names in enumerate(CIFAR100_GROUPS.values()) for fine in names.split()}
    labels = torch.tensor([group[fine] for fine in CIFAR100])[data.labels]
    return replace(data, labels=labels, classes=CLASSES["cifar100-coarse"], name="cifar100-coarse")


def _load_path(path: Path, name: str = "") -> tuple[ImageData, ImageData]:
    if path.is_file() or formats.cifar_in(path):
        kind, arrays = formats.read_cifar(path)
        own = "cifar100" if kind == formats.CIFAR100 else "cifar10"
        return _pair(arrays, CLASSES[own], name or own)
    if formats.idx_image_files(path):
        arrays = formats.read_idx_folder(path)
        L = 1 + max(int(y.max(initial=0)) for _, y in arrays)
        return _pair(arrays, CLASSES.get(name) or tuple(map(str, range(L))), name or path.name)
    arrays, classes = formats.read_image_folder(path)
    return _pair(arrays, classes, path.name)


def _pair(arrays: formats.Arrays, classes: tuple[str, ...], name: str) -> tuple[ImageData, ImageData]:
    """The training and test set; a single set is split."""
    sets = [ImageData(torch.from_numpy(x), torch.from_numpy(y).long(), classes, name) for x, y in arrays]
    train, test = sets if len(sets) == 2 else split(sets[0])
    if train.shape != test.shape:
        raise ValueError(
            f"{name}: test images must have the shape {train.shape} of the training images, got {test.shape}"
        )
    return train, test


def _load_digits() -> tuple[ImageData, ImageData]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)  # [1797, 64], integers 0..16
    pixels = np.rint(x * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return _pair([(pixels, y)], DIGITS, "digits")
