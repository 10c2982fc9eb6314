"""A `DataLoader` without holding its images: one batch after another, or a sample that leaves the rest unread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from mmlda._utils.checks import check_count
from mmlda._utils.device import check_model
from mmlda._utils.training_data import class_names
from mmlda.data.alignment import aligned, images_for
from mmlda.data.convert import (
    NO_CLASSES,
    as_images,
    as_pair,
    dataset_bounds,
    dataset_classes,
    join_batches,
    with_bounds,
)
from mmlda.data.images import ImageData
from mmlda.data.subsets import sample_rows, stratified


def loader_sampler(loader: DataLoader[Any]) -> Any:
    """What selects a loader's images, also inside a batch sampler of the user's own."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def loader_length(loader: DataLoader[Any]) -> int | None:
    """How many images a loader reads per epoch and process; None if it does not know."""
    if loader.batch_sampler is None:  # each item of the dataset is a batch
        return None
    try:
        return len(loader_sampler(loader))
    except TypeError:
        return None


def listed_classes(loader: DataLoader[Any]) -> ImageData | None:
    """The classes that a loader's dataset lists, as data with one blank image of each; None if it lists none."""
    names = dataset_classes(loader)
    if names is None:
        return None
    blank = torch.zeros(len(names), 1, 1, 1, dtype=torch.uint8)
    return ImageData(blank, torch.arange(len(names)), tuple(map(str, names)))


def batches_for(model: Any, loader: DataLoader[Any]) -> Iterator[ImageData]:
    """Every batch of a loader as `images_for` converts data; one warning if values of a table are clipped."""
    names, bounds, empty, warned = dataset_classes(loader), dataset_bounds(loader), True, False
    check_model(model)
    for batch in loader:
        x, y = as_pair(batch, "a batch of data")
        if isinstance(y, list | tuple) and names is None and class_names(model) is None:  # strings, numbered per batch
            raise ValueError(NO_CLASSES)
        images, clipped = aligned(model, with_bounds(as_images((x, y), names), bounds))
        if clipped and not warned:
            warnings.warn(f"{clipped}; later batches are clipped without a warning", stacklevel=2)
            warned = True
        yield images
        empty = False
    if empty:
        raise ValueError("data must have at least one image, got an empty DataLoader")


def sample_for(model: Any, data: Any, n: int | None) -> tuple[ImageData, int]:
    """The n images that an argument `n` means, converted as `images_for` does, and how many they were chosen from.

    They are those of `stratified`. Of a `DataLoader` only these are read; they are stratified if its dataset lists the
    labels, as `targets` or `labels`, and random otherwise. Of an `IterableDataset` they are the first n.
    """
    if n is None or not isinstance(data, DataLoader):
        images = images_for(model, data)
        return stratified(images, n), len(images)
    loader, total = _selected(data, check_count("n", n, 1))
    parts, count = [], 0
    for batch in loader:
        parts.append(as_pair(batch, "a batch of data"))
        count += len(parts[-1][1])
        if count >= n:
            break
    images = with_bounds(as_images(join_batches(parts), dataset_classes(data)), dataset_bounds(data))
    return images_for(model, images).subset(slice(n)), total or count


def _selected(loader: DataLoader[Any], n: int) -> tuple[DataLoader[Any], int]:
    """A loader of n of its images, and the number of all; itself and 0 if it cannot be read out of order."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return loader, 0
    order = [row for batch in loader.batch_sampler for row in batch]
    if n >= len(order):
        return loader, len(order)
    chosen = [order[k] for k in sample_rows(_labels(loader.dataset, order), n)]
    size = loader.batch_size or n
    batches = [chosen[start : start + size] for start in range(0, n, size)]
    smaller = DataLoader(
        loader.dataset,
        batch_sampler=batches,
        collate_fn=loader.collate_fn,
        num_workers=min(loader.num_workers, len(batches)),
        worker_init_fn=loader.worker_init_fn,
    )
    return smaller, len(order)


def _labels(dataset: Dataset[Any], order: Sequence[Any]) -> np.ndarray:
    """The classes at these positions, [N]; one class for all where the dataset does not list its labels."""
    rows = np.asarray(order)
    while isinstance(dataset, Subset) and rows.ndim == 1:
        rows, dataset = np.asarray(dataset.indices)[rows], dataset.dataset
    known = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        known = dataset.tensors[1]
    if rows.ndim != 1 or known is None or len(known) != len(dataset):  # type: ignore[arg-type]
        return np.zeros(len(order), np.int64)
    labels = np.asarray(known.cpu() if isinstance(known, Tensor) else known)[rows]
    return np.unique(labels, return_inverse=True)[1]
