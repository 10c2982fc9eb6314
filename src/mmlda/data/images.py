"""Images and their labels as two tensors, from arrays, datasets and loaders."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from mmlda._utils.checks import invalid

__all__ = ["ImageData", "as_images", "is_arrays"]

Index = Tensor | np.ndarray | Sequence[int] | slice


@dataclass(frozen=True, eq=False, repr=False)
class ImageData:
    """Images and their labels.

    Args:
        images: [N, C, H, W], uint8, or float32 in [0, 1] where bytes would lose precision.
        labels: [N] int64, in 0..L-1.
        classes: the names of the L classes; a class may have no images.
        name: what to call it in reports.

    >>> data = ImageData(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1]), ("cat", "dog"))
    >>> len(data), data.num_classes, data.shape, data.priors.tolist()
    (3, 2, (1, 2, 2), [0.3333333333333333, 0.6666666666666666])
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    name: str = ""

    def __post_init__(self) -> None:
        if self.images.dtype not in (torch.uint8, torch.float32) or self.images.ndim != 4:
            got = f"{self.images.dtype} {list(self.images.shape)}"
            raise ValueError(f"images must be uint8 or float32 [N, C, H, W], got {got}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            got = f"{self.labels.dtype} {list(self.labels.shape)}"
            raise ValueError(f"labels must be int64 [{len(self.images)}], got {got}")
        if not len(self.labels):
            raise ValueError("images must be at least one image, got none")
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.labels.device.type == "cpu":  # elsewhere it would cost a synchronisation
            low, high = int(self.labels.min()), int(self.labels.max())
            if low < 0 or high >= len(self.classes):
                raise ValueError(f"labels must be classes from 0 to {len(self.classes) - 1}, got {low} to {high}")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        C, H, W = self.shape
        return f"ImageData({self.name!r}, {len(self)} images of {C} x {H} x {W}, {self.num_classes} classes)"

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        _, C, H, W = self.images.shape
        return C, H, W

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def counts(self) -> Tensor:
        """How many images each class has, [L] int64."""
        return torch.bincount(self.labels, minlength=self.num_classes)

    @property
    def priors(self) -> Tensor:
        """The empirical class priors N_k / N, [L] float64."""
        return self.counts.double() / len(self)

    def to(self, device: torch.device | str) -> ImageData:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def subset(self, index: Index) -> ImageData:
        """The images at `index`: positions, a boolean mask, or a slice."""
        if not isinstance(index, slice):
            index = torch.as_tensor(index, device=self.device)
        return replace(self, images=self.images[index], labels=self.labels[index])

    def pixels(self, index: Index | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The images (at `index`) as floats in [0, 1], [N, C, H, W]: a byte v is v / 255."""
        if index is not None and not isinstance(index, slice | Tensor):
            index = torch.as_tensor(index, device=self.device)
        images = self.images if index is None else self.images[index]
        return images.to(dtype).div_(255) if images.dtype == torch.uint8 else images.to(dtype)

    def digest(self) -> str:
        """SHA-256 of the images and labels (not the names), to record which data a result was made with."""
        hasher = hashlib.sha256(f"{self.images.dtype} {list(self.images.shape)}".encode())
        for tensor in (self.images, self.labels):
            hasher.update(tensor.cpu().contiguous().numpy().data)
        return hasher.hexdigest()


def as_images(source: Any, classes: Sequence[str] | None = None, name: str = "") -> ImageData:
    """A user's own images as `ImageData`.

    `source` is an `ImageData` (returned as it is), a pair (x, y) of tensors or arrays, a `torch.utils.data.Dataset`
    of (image, label) pairs, or a `DataLoader` of (x, y) batches, which is read once. x is [N, C, H, W] or [N, H, W],
    uint8 or floats in [0, 1]. Images of a `Dataset` may be tensors ([C, H, W] or [H, W]), PIL images, or arrays as
    those give them ([H, W, C] or [H, W]).

    Floats become bytes when every value is v / 255 for an integer v (so that nothing is lost), and are
    otherwise kept, as float32. Class names: `classes`, else the dataset's own `classes`, else "0", "1", ...

    >>> x, y = torch.tensor([0.0, 51 / 255, 1.0]).view(3, 1, 1, 1), torch.tensor([0, 1, 1])
    >>> as_images((x, y)).images.flatten()
    tensor([  0,  51, 255], dtype=torch.uint8)
    """
    if isinstance(source, ImageData):
        if classes is None and not name:
            return source
        return replace(source, classes=tuple(classes or source.classes), name=name or source.name)
    if isinstance(source, Dataset | DataLoader):
        inner: Any = source
        while classes is None and inner is not None:  # those of the dataset within a Subset or a DataLoader
            classes, inner = getattr(inner, "classes", None), getattr(inner, "dataset", None)
        source = _join(source) if isinstance(source, DataLoader) else _stack(source)
    if not is_arrays(source):
        raise ValueError(f"data must be an ImageData, (x, y), a Dataset or a DataLoader, got a {type(source).__name__}")
    x, y = torch.as_tensor(source[0]).detach(), torch.as_tensor(source[1])
    if x.ndim == 3:
        x = x[:, None]  # [N, 1, H, W]
    if y.is_floating_point() or y.is_complex() or y.ndim != 1:
        raise ValueError(f"y must be integer labels [N], got {y.dtype} {list(y.shape)}")
    y = y.long()
    if classes is None:
        classes = tuple(map(str, range(int(y.max()) + 1 if len(y) else 0)))
    return ImageData(_as_bytes(x), y, tuple(map(str, classes)), name)


def is_arrays(source: Any) -> bool:
    """Whether `source` is a pair of tensors or arrays."""
    return (
        isinstance(source, tuple | list)
        and len(source) == 2
        and all(isinstance(part, Tensor | np.ndarray) for part in source)
    )


def _as_bytes(x: Tensor) -> Tensor:
    """uint8 as it is, floats in [0, 1] as uint8 where that is exact and as float32 where it is not."""
    if x.dtype == torch.uint8:
        return x
    if not x.is_floating_point():
        raise ValueError(f"x must be uint8 or floats in [0, 1], got {x.dtype}")
    x = x.float()
    if x.numel() and not (x.min() >= 0 and x.max() <= 1):  # written so that NaN fails too
        raise ValueError(f"x must be in [0, 1], got values from {x.min():g} to {x.max():g}")
    v = (x * 255).round()
    return v.to(torch.uint8) if torch.equal(v / 255, x) else x.contiguous()


def _stack(dataset: Any) -> tuple[Tensor, Tensor]:
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    streamed = isinstance(dataset, IterableDataset)
    items: Iterable[Any] = dataset if streamed else (dataset[n] for n in range(len(dataset)))
    images: list[Tensor] = []
    labels: list[int] = []
    for n, (image, label) in enumerate(items):
        if not isinstance(image, Tensor):
            array = np.array(image)  # a copy: PIL's memory is read-only
            image = torch.from_numpy(array if array.ndim == 2 else array.transpose(2, 0, 1))
        if images and (image.shape != images[0].shape or image.dtype != images[0].dtype):
            wanted = f"{images[0].dtype} {list(images[0].shape)} as the first"
            raise ValueError(f"image {n} must be {wanted}, got {image.dtype} {list(image.shape)}")
        images.append(image)
        labels.append(_whole(label, n))
    if not images:
        raise ValueError("data must have at least one image, got an empty dataset")
    return torch.stack(images), torch.tensor(labels)


def _join(loader: DataLoader) -> tuple[Tensor, Tensor]:
    parts = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in loader]
    if not parts:
        raise ValueError("data must have at least one image, got an empty DataLoader")
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _whole(label: Any, n: int) -> int:
    """A label as an int; a ValueError where int() would cut something off or fail."""
    try:
        if (whole := int(label)) == float(label):
            return whole
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise invalid(f"label {n}", "an integer", label)
