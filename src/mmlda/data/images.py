"""Images and their labels as two tensors."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Index = Tensor | np.ndarray | Sequence[int] | slice


@dataclass(frozen=True, eq=False, repr=False)
class ImageData(Dataset[tuple[Tensor, int]]):
    """Images and their labels as two tensors, and a `Dataset` of (image as floats in [0, 1], label) pairs.

    Rows of a table are stored in the same way, as `images` [N, D]; see `mmlda.data.table`.

    Parameters
    ----------
    images
        [N, C, H, W], uint8, or float32 in [0, 1] where bytes would lose precision.
    labels
        [N] int64, in 0..L-1.
    classes
        Names of the L classes; a class may have no images.
    name
        Name of the data in reports.
    bounds
        Range of each column of a table in its own units, [2, D]; None for images.
    parts
        Where each image is several of `images` side by side, their rows, [N, parts] int64; see `digit_strings`.

    Raises
    ------
    ValueError
        If a tensor has another type or shape, there are no images, or a label has no class.

    Examples
    --------
    >>> data = ImageData(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1]), ("cat", "dog"))
    >>> len(data), data.num_classes, data.shape, data.priors.tolist()
    (3, 2, (1, 2, 2), [0.3333333333333333, 0.6666666666666666])
    >>> image, label = data[2]
    >>> image.shape, label
    (torch.Size([1, 2, 2]), 1)
    >>> data[1:], data[[0, 2]].labels
    (ImageData('', 2 images of 1 x 2 x 2, 2 classes), tensor([0, 1]))
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    name: str = ""
    bounds: Tensor | None = None
    parts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.images.dtype not in (torch.uint8, torch.float32) or self.images.ndim not in (2, 4):
            got = f"{self.images.dtype} {list(self.images.shape)}"
            raise ValueError(f"images must be uint8 or float32 [N, C, H, W] (or [N, D] for tables), got {got}")
        count = len(self.images if self.parts is None else self.parts)
        if self.labels.dtype != torch.int64 or self.labels.shape != (count,):
            got = f"{self.labels.dtype} {list(self.labels.shape)}"
            raise ValueError(f"labels must be int64 [{count}], got {got}")
        if not len(self.labels):
            raise ValueError("images must be at least one image, got none")
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.labels.device.type == "cpu":  # elsewhere it would cost a synchronisation
            low, high = int(self.labels.min()), int(self.labels.max())
            if low < 0 or high >= len(self.classes):
                raise ValueError(f"labels must be classes from 0 to {len(self.classes) - 1}, got {low} to {high}")

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, int]: ...

    @overload
    def __getitem__(self, index: Index) -> ImageData: ...

    def __getitem__(self, index: Any) -> Any:
        """The image at an integer as floats in [0, 1], and its label; for any other index, `subset(index)`."""
        if isinstance(index, slice) or np.ndim(index):
            return self.subset(index)
        index = operator.index(index)
        return self.pixels(slice(index, index + 1 or None))[0], int(self.labels[index])

    def __repr__(self) -> str:
        what = f"rows of {self.shape[0]}" if self.is_table else "images of " + " x ".join(map(str, self.shape))
        return f"ImageData({self.name!r}, {len(self)} {what}, {self.num_classes} classes)"

    @property
    def is_table(self) -> bool:
        """Whether the data are rows of a table, not images."""
        return self.images.ndim == 2

    @property
    def unit(self) -> str:
        """What the data are: "rows" of a table, or "images"."""
        return "rows" if self.is_table else "images"

    @property
    def num_classes(self) -> int:
        """Number of classes L."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image, or (D,) of one row."""
        *rest, width = self.images.shape[1:]
        return (*rest, width if self.parts is None else width * self.parts.shape[1])

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
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
        """Copy the data to a device.

        Parameters
        ----------
        device
            Such as "cpu" or "cuda:0".

        Returns
        -------
        ImageData
            The data on that device.
        """
        parts = None if self.parts is None else self.parts.to(device)
        return replace(self, images=self.images.to(device), labels=self.labels.to(device), parts=parts)

    def subset(self, index: Index) -> ImageData:
        """Select images.

        Parameters
        ----------
        index
            Positions, a boolean mask, or a slice.

        Returns
        -------
        ImageData
            The images at `index`, with all class names.
        """
        if not isinstance(index, slice):
            index = torch.as_tensor(index, device=self.device)
        if self.parts is not None:
            return replace(self, labels=self.labels[index], parts=self.parts[index])
        return replace(self, images=self.images[index], labels=self.labels[index])

    def pixels(self, index: Index | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Images as floats in [0, 1]: a byte v becomes v / 255.

        Parameters
        ----------
        index
            Positions, a boolean mask, or a slice (default: all images).
        dtype
            Of the result.

        Returns
        -------
        Tensor
            Pixels [N, C, H, W], or rows [N, D].
        """
        if index is not None and not isinstance(index, slice | Tensor):
            index = torch.as_tensor(index, device=self.device)
        images = self.images if index is None and self.parts is None else gather(self.images, self.parts, index)
        return images.to(dtype).div_(255) if images.dtype == torch.uint8 else images.to(dtype)

    def class_means(self) -> Tensor:
        """Mean image of each class; for a class without images, the mean of the others.

        Returns
        -------
        Tensor
            Pixels [L, C, H, W], or rows [L, D], float64.

        Examples
        --------
        >>> data = ImageData(torch.tensor([[0.0], [0.5], [1.0]]), torch.tensor([0, 2, 2]), ("a", "b", "c"))
        >>> data.class_means().tolist()
        [[0.0], [0.375], [0.75]]
        """
        sums = torch.zeros((self.num_classes, *self.shape), dtype=torch.float64, device=self.device)
        for rows in torch.arange(len(self), device=self.device).split(1000):
            sums.index_add_(0, self.labels[rows], self.pixels(rows, torch.float64))
        counts = self.counts
        means = sums / counts.clamp(min=1).view(-1, *[1] * len(self.shape))
        means[counts == 0] = means[counts > 0].mean(0)
        return means

    def in_units(self, rows: Tensor) -> Tensor:
        """Convert rows of a table, such as adversarial ones, to the columns' own units.

        Parameters
        ----------
        rows
            Rows [N, D] in [0, 1].

        Returns
        -------
        Tensor
            Rows [N, D], float64.

        Raises
        ------
        ValueError
            If the data is not a table.
        """
        if self.bounds is None:
            raise ValueError("data must be a table with bounds, got images")
        low, high = self.bounds.to(rows.device)
        return low + rows.double() * (high - low)

    def digest(self) -> str:
        """SHA-256 of the images and labels (not the names), to record which data a result was made with.

        Returns
        -------
        str
            64 hexadecimal digits.
        """
        hasher = hashlib.sha256(f"{self.images.dtype} {list(self.images.shape)}".encode())
        for tensor in (self.images, self.labels, *([] if self.parts is None else [self.parts])):
            hasher.update(tensor.cpu().contiguous().numpy().data)
        return hasher.hexdigest()


def gather(images: Tensor, parts: Tensor | None, index: Tensor | slice | None) -> Tensor:
    """The images at `index`: rows of `images`, or with `parts` the images that it puts side by side."""
    index = slice(None) if index is None else index
    if parts is None:
        return images[index]
    chosen = images[parts[index]]  # [n, parts, C, H, W]
    return chosen.permute(0, 2, 3, 1, 4).flatten(3)  # [n, C, H, parts * W]
