"""Whether a network, its training set and its validation set fit together: shapes and classes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from mmlda.data import ImageData, images_for
from mmlda.data.alignment import from_one, learn, learn_bounds
from mmlda.data.convert import dataset_bounds, numbered
from mmlda.data.loaders import batches_for, listed_classes, loader_sampler
from mmlda.evaluation.accuracy import first_logits
from mmlda.models import SwappedHead
from mmlda.training.batches import share
from mmlda.training.folder import Run


def class_count(model: nn.Module) -> int | None:
    """Number of classes L of a network; None if only its logits tell."""
    ends = [module for module in model.modules() if isinstance(module, SwappedHead)]
    # A swapped network may also have a num_classes of its own: that of the layer that was replaced.
    L = getattr(ends[0].head if len(ends) == 1 else model, "num_classes", None)
    return L if isinstance(L, int) and L > 0 else None


def check_shape(run: Run, data: ImageData) -> None:
    """Raise a ValueError unless network and teacher take the images."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        first_logits(run.model, data)
        if run.teacher is not None:
            first_logits(run.teacher, data, "the teacher")


def warn_of_labels_from_1(model: nn.Module, data: ImageData) -> None:
    """Warn where class 0 alone of all the network's classes has no images, and classes have no names."""
    L = class_count(model) or data.num_classes
    alone = (data.counts == 0).nonzero().flatten().tolist() == [0]
    if alone and L == data.num_classes > 2 and numbered(data.classes):
        warnings.warn(f"class 0 of {L} has no images: subtract 1 if the labels begin at 1", stacklevel=3)


def matched(run: Run, data: ImageData | DataLoader[Any]) -> ImageData | DataLoader[Any]:
    """The training set as the network numbers and scales it, and the validation set likewise; both must fit.

    The network keeps class names and bounds. A loader is not read here: `LoaderBatches` numbers its labels, and
    rescales a table if the network already has other bounds.
    """
    model, L = run.model, class_count(run.model)
    images = data if isinstance(data, ImageData) else listed_classes(data)
    if images is not None:
        if L is not None and L < images.num_classes:
            count, hint = images.num_classes, from_one(images, L)
            raise ValueError(f"model must have at least the {count} classes of the data, got {L}{hint}")
        images = learn(model, images)
    if isinstance(data, ImageData) and images is not None:
        data = images
    learn_bounds(model, dataset_bounds(data))
    if run.validation is not None:
        if run.validation.data is data and isinstance(data, DataLoader) and data.persistent_workers:
            raise ValueError("validation must be another DataLoader than data if workers persist, got the same")
        _match_validation(run, None if isinstance(data, DataLoader) else data.shape, L)
    return data


def _match_validation(run: Run, shape: tuple[int, ...] | None, L: int | None) -> None:
    """The validation set as the network numbers it; a ValueError unless it has this shape and at most L classes."""
    assert run.validation is not None
    given = run.validation.data
    if isinstance(given, DataLoader):
        if share()[1] > 1 and isinstance(loader_sampler(given), DistributedSampler):
            raise ValueError("validation must be a DataLoader without a DistributedSampler, as one process measures it")
        with torch.random.fork_rng(devices=[]):  # a loader draws a seed for its workers
            held = next(batches_for(run.model, given))
    else:
        held = run.validation.data = images_for(run.model, given)
    if shape is not None and held.shape != shape:
        raise ValueError(f"validation must have the shape {shape} of the training data, got {held.shape}")
    if L is not None and held.num_classes > L:
        raise ValueError(f"validation must have at most the {L} classes of the network, got {held.num_classes}")
