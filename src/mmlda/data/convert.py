"""A user's own data as `ImageData`: arrays, datasets, loaders, dictionaries, names and paths."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, IterableDataset, TensorDataset

from mmlda._utils.checks import invalid
from mmlda.data.images import ImageData

IMAGE_KEYS, LABEL_KEYS = ("image", "img"), ("label", "fine_label")  # of Hugging Face's image datasets
CHANNELS = (1, 3, 4)  # of an image whose channels come last
EXPECTED = "an ImageData, (x, y), a Dataset, a DataLoader, a name or a path"
NO_CLASSES = "data must be a DataLoader whose dataset has classes where labels are strings, got none"


def as_images(
    source: Any, classes: Sequence[str] | None = None, name: str = "", *, split: Literal["train", "test"] = "train"
) -> ImageData:
    """Anything that holds images and labels as `ImageData`: every function that takes data calls this one.

    Parameters
    ----------
    source
        - an `ImageData`, which is returned unchanged;
        - a pair (x, y): x is [N, C, H, W], [N, H, W, C] or [N, H, W], uint8 or floats in [0, 1], a list of images, or a
          table [N, D] with values in [0, 1] (`mmlda.data.table` scales one); y are integers or strings;
        - a `torch.utils.data.Dataset`, or any sequence, of (image, label) pairs or of dictionaries with "image" and
          "label", such as a Hugging Face dataset. An image is a tensor [C, H, W] or [H, W], a PIL image, or an
          array [H, W, C] or [H, W];
        - a `DataLoader` of (x, y) batches, which is read once;
        - a dictionary with "image" and "label" as x and y, or with one dataset per split;
        - the name of a dataset or a path, see `mmlda.data.load`.
    classes
        Class names; by default those of the dataset, else the strings among the labels sorted, else "0", "1"...
    name
        Name of the data in reports.
    split
        Which part to use of a source that has a train and a test set.

    Returns
    -------
    ImageData
        Floats become bytes if every value is v / 255 for an integer v, which loses nothing; otherwise they stay
        float32. A table within a `Subset`, a `ConcatDataset` or a `DataLoader` keeps its bounds.

    Raises
    ------
    ValueError
        If the source is of another kind, its images or labels do not fit together, or it concatenates datasets with
        other classes or bounds than each other.

    Examples
    --------
    >>> x, y = torch.tensor([0.0, 51 / 255, 1.0]).view(3, 1, 1, 1), ["cat", "dog", "cat"]
    >>> data = as_images((x, y))
    >>> data.images.flatten(), data.labels, data.classes
    (tensor([  0,  51, 255], dtype=torch.uint8), tensor([0, 1, 0]), ('cat', 'dog'))
    """
    if isinstance(source, str | Path):
        from mmlda.data.datasets import load  # which itself calls this function

        source = load(source)[split == "test"]
    if isinstance(source, ImageData):
        if classes is None and not name:
            return source
        return replace(source, classes=tuple(classes or source.classes), name=name or source.name)
    if isinstance(source, Mapping):
        if split in source:
            return as_images(source[split], classes, name)
        source = as_pair(source, "data")
    classes, bounds = dataset_classes(source) if classes is None else classes, dataset_bounds(source)
    if isinstance(source, DataLoader):
        x, y = join_batches([as_pair(batch, "a batch of data") for batch in source])
    elif is_arrays(source):
        x, y = source
    elif _is_list_of_images(source):
        x, y = _stack(zip(*source, strict=True))
    elif isinstance(source, TensorDataset) and len(source.tensors) == 2:
        x, y = source.tensors
    elif isinstance(source, IterableDataset):
        x, y = _stack(source)
    elif isinstance(source, Dataset) or (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        if isinstance(source, bytes) or _is_array(source):
            raise ValueError(f"data must be {EXPECTED}, got a {type(source).__name__} without labels")
        x, y = _stack(source[n] for n in range(len(source)))
    else:
        raise ValueError(f"data must be {EXPECTED}, got a {type(source).__name__}")
    labels, names = as_labels(y, classes)
    return with_bounds(ImageData(_as_bytes(_channels_first(_tensor(x))), labels, names, name), bounds)


def is_arrays(source: Any) -> bool:
    """Whether `source` is (x, y): images as one array, and labels as an array or a list."""
    pair = isinstance(source, tuple | list) and len(source) == 2
    return pair and _is_array(source[0]) and (_is_array(source[1]) or isinstance(source[1], list | tuple))


def _is_array(value: Any) -> bool:
    pandas = hasattr(value, "__array__") and hasattr(value, "iloc")
    return isinstance(value, Tensor | np.ndarray) or pandas or is_sparse(value)


def is_sparse(value: Any) -> bool:
    """Whether `value` is a sparse matrix of SciPy, without importing SciPy."""
    return hasattr(value, "toarray") and hasattr(value, "nnz")


def _is_list_of_images(source: Any) -> bool:
    """Whether `source` is (x, y) with a list of images as x."""
    pair = isinstance(source, tuple | list) and len(source) == 2 and isinstance(source[0], list | tuple)
    if not pair or not all(_is_picture(image) or getattr(image, "ndim", 0) in (2, 3) for image in source[0]):
        return False
    return bool(source[0]) and hasattr(source[1], "__len__") and len(source[1]) == len(source[0])


def _is_picture(image: Any) -> bool:
    """Whether `image` is a PIL image, without importing PIL."""
    return hasattr(image, "convert") and hasattr(image, "mode")


def dataset_classes(source: Any) -> Sequence[str] | None:
    """The class names of a dataset, also of one within a Subset or a DataLoader, and of Hugging Face's.

    Those of a ConcatDataset are the names of its parts, which must be the same; parts may also have only numbers.
    """
    if (names := getattr(source, "classes", None)) is not None:
        return names
    features = getattr(source, "features", None)
    if isinstance(features, Mapping):
        for key in LABEL_KEYS:
            if (names := getattr(features.get(key), "names", None)) is not None:
                return names
    listed = [dataset_classes(part) for part in _parts(source)]
    found = [list(map(str, names)) for names in listed if names is not None]
    named = [names for names in found if not numbered(names)]
    for names in named:
        if names != named[0]:
            first, other = in_words(named[0]), in_words(names)
            raise ValueError(f"every dataset of a ConcatDataset must have the same classes, {first}, got {other}")
    if named:
        return named[0]
    return max(found, key=len, default=None) if len(found) == len(listed) else None


def dataset_bounds(source: Any) -> Tensor | None:
    """The bounds of a table, also within a Subset, a DataLoader or a ConcatDataset of tables with the same bounds."""
    if isinstance(source, ImageData):
        return source.bounds
    found = [dataset_bounds(part) for part in _parts(source)]
    tables = [bounds for bounds in found if bounds is not None]
    if tables and (len(tables) < len(found) or not all(torch.equal(bounds, tables[0]) for bounds in tables)):
        got = "one without" if len(tables) < len(found) else "different ones"
        raise ValueError(f"every dataset of a ConcatDataset must have the same table bounds, got {got}")
    return tables[0] if tables else None


def _parts(source: Any) -> Sequence[Any]:
    """The datasets that a dataset concatenates, or the one that it wraps."""
    if isinstance(source, ConcatDataset | ChainDataset):
        return source.datasets if isinstance(source.datasets, list | tuple) else ()
    inner = getattr(source, "dataset", None)
    return () if inner is None else (inner,)


def with_bounds(data: ImageData, bounds: Tensor | None) -> ImageData:
    """A table with the bounds of the dataset that its rows are from; other data is returned unchanged."""
    if bounds is None or bounds.shape != (2, *data.shape):
        return data
    return replace(data, images=data.pixels(), bounds=bounds)


def numbered(names: Sequence[str]) -> bool:
    """Whether these are the names of classes that have only numbers."""
    return list(map(str, names)) == [str(k) for k in range(len(names))]


def in_words(names: Sequence[str]) -> str:
    """Class names for a message, the first of them if there are many."""
    return ", ".join(names) if len(names) <= 10 else f"{', '.join(names[:8])}, ... ({len(names)})"


def as_pair(item: Any, what: str) -> tuple[Any, Any]:
    """(image, label) of an item, which is that pair or a dictionary."""
    if isinstance(item, Mapping):
        keys = [next((key for key in names if key in item), None) for names in (IMAGE_KEYS, LABEL_KEYS)]
        if None not in keys:
            return item[keys[0]], item[keys[1]]
        raise ValueError(f'{what} must have the keys "image" and "label", got {sorted(map(str, item))}')
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise ValueError(
        f'{what} must be (image, label) or a dictionary with "image" and "label", got a {type(item).__name__}'
    )


def _stack(items: Iterable[Any]) -> tuple[Tensor, list[Any]]:
    images: list[Tensor] = []
    labels: list[Any] = []
    for n, item in enumerate(items):
        image, label = as_pair(item, f"item {n} of data")
        image = _one_image(image, n)
        if images and (image.shape != images[0].shape or image.dtype != images[0].dtype):
            wanted = f"{images[0].dtype} {list(images[0].shape)} like the first"
            raise ValueError(f"image {n} must be {wanted}, got {image.dtype} {list(image.shape)}")
        images.append(image)
        labels.append(label)
    if not images:
        raise ValueError("data must have at least one image, got an empty dataset")
    named = isinstance(labels[0], str)
    return torch.stack(images), labels if named else [_whole(label, n) for n, label in enumerate(labels)]


def _one_image(image: Any, n: int) -> Tensor:
    """One image of a dataset as a tensor: [C, H, W], [H, W], or [D] for a row of a table."""
    if isinstance(image, Tensor):
        return image
    if _is_picture(image):
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"image {n} must have 8 bits per value, got a PIL image of mode {image.mode}")
        image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    array = np.array(image)  # a copy: PIL's memory is read-only
    if array.dtype.kind not in "uifb":
        raise ValueError(f"image {n} must be a tensor, an array or a PIL image, got a {type(image).__name__}")
    channels_last = array.ndim == 3 and (array.shape[2] in CHANNELS or array.shape[0] not in CHANNELS)
    return torch.from_numpy(array.transpose(2, 0, 1) if channels_last else array)


def join_batches(parts: Sequence[tuple[Any, Any]]) -> tuple[Tensor, Any]:
    """The (x, y) of all batches of a loader from those of each."""
    if not parts:
        raise ValueError("data must have at least one image, got an empty DataLoader")
    labels = [y for _, y in parts]
    if isinstance(labels[0], list | tuple):  # strings, as PyTorch collates them
        return torch.cat([_tensor(x) for x, _ in parts]), [label for part in labels for label in part]
    return torch.cat([_tensor(x) for x, _ in parts]), torch.cat([_tensor(y) for y in labels])


def as_batch(
    batch: Any, classes: Sequence[str] | None, num_classes: int | None, names: Sequence[str] | None = None
) -> tuple[Tensor, Tensor]:
    """A batch of a `DataLoader` as images, uint8 or float32 in [0, 1], and labels int64 [N], each one of the classes.

    `classes` are those that the dataset lists; without them, strings are numbered by `names`, those of the network.
    """
    x, y = as_pair(batch, "a batch of data")
    if classes is None and isinstance(y, list | tuple) and any(isinstance(label, str) for label in y):
        if names is None and num_classes is None:  # each batch would number its own
            raise ValueError(NO_CLASSES)
        classes = tuple(map(str, range(num_classes or 0))) if names is None else names
    labels = label_numbers(y, classes)
    L = num_classes if classes is None else len(classes)
    if L is not None and len(labels) and not (labels.min() >= 0 and labels.max() < L):
        hint = " (subtract 1 if they begin at 1)" if labels.min() > 0 and labels.max() == L else ""
        raise ValueError(f"labels must be classes from 0 to {L - 1}, got {labels.min()} to {labels.max()}{hint}")
    return as_pixels(_channels_first(_tensor(x))), labels


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise ValueError(f"x must be dense, got a tensor of layout {value.layout}; use x.to_dense()")
    if is_sparse(value):
        raise ValueError(f"x must be dense, got a {type(value).__name__}; use x.toarray()")
    try:
        return (value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))).detach()
    except TypeError:
        raise ValueError(f"x must be an array of numbers, got a {type(value).__name__}") from None


def as_labels(y: Any, classes: Sequence[str] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as int64 [N], and the names of the classes."""
    names = None if classes is None else tuple(map(str, classes))
    if names is None and _are_words(y):
        names = tuple(sorted(set(np.asarray(y).tolist())))
    labels = label_numbers(y, names)
    if names is None:
        L = int(labels.max()) + 1 if len(labels) else 0
        names = tuple(map(str, range(L)))
    return labels, names


def label_numbers(y: Any, names: Sequence[str] | None) -> Tensor:
    """Labels as int64 [N]: integers as they are, words by their place in `names`."""
    if names is not None and _are_words(y):
        words, index = np.asarray(y).tolist(), {word: k for k, word in enumerate(names)}
        if unknown := sorted(set(words) - set(index)):
            raise ValueError(f"labels must be among the classes {', '.join(names)}, got {unknown[0]!r}")
        return torch.tensor([index[word] for word in words])
    if not isinstance(y, Tensor):
        values = np.asarray(y)
        if values.dtype.kind not in "iufb":
            values = np.array([_whole(label, n) for n, label in enumerate(values.flat)])
        y = torch.from_numpy(np.array(values))
    if y.is_floating_point() or y.is_complex() or y.ndim != 1 or y.layout != torch.strided:
        raise ValueError(f"y must be integer or string labels [N], got {y.dtype} {list(y.shape)}")
    return y.detach().long()


def _are_words(y: Any) -> bool:
    values = None if isinstance(y, Tensor) else np.asarray(y)
    return values is not None and values.dtype.kind in "OUS" and all(isinstance(value, str) for value in values.flat)


def _whole(label: Any, n: int) -> int:
    """A label as an int; a ValueError if int() would truncate or fail."""
    try:
        if (whole := int(label)) == float(label):
            return whole
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise invalid(f"label {n}", "an integer", label)


def _channels_first(x: Tensor) -> Tensor:
    """x as [N, C, H, W]; [N, D] is returned unchanged. [N, H, W, C] is recognised by its last dimension."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in CHANNELS and min(x.shape[1:3]) > max(CHANNELS):
        N, H, W, C = x.shape
        warnings.warn(
            f"x of shape {list(x.shape)} is read as {N} images of {H} x {W} with {C} channels last (NHWC); "
            "permute it to [N, C, H, W] to silence this warning",
            stacklevel=3,
        )
        return x.permute(0, 3, 1, 2).contiguous()
    return x


def _as_bytes(x: Tensor) -> Tensor:
    """uint8 unchanged, floats in [0, 1] as uint8 if that is exact and as float32 otherwise."""
    x = as_pixels(x)
    if x.dtype == torch.uint8:
        return x
    v = (x * 255).round()
    return v.to(torch.uint8) if torch.equal(v / 255, x) else x.contiguous()


def as_pixels(x: Tensor) -> Tensor:
    """uint8 unchanged, floats as float32; a ValueError unless they are in [0, 1]."""
    if x.dtype == torch.uint8:
        return x
    if not x.is_floating_point():
        raise ValueError(f"x must be uint8 or floats in [0, 1], got {x.dtype}")
    x = x.float()
    low, high = x.aminmax() if x.numel() else (0, 1)
    if not (low >= 0 and high <= 1):  # written so that NaN fails too
        hint = "scale a table with mmlda.data.table" if x.ndim == 2 else "put the normalisation into the network"
        raise ValueError(f"x must be in [0, 1], got values from {low:g} to {high:g} ({hint})")
    return x
