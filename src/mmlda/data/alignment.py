"""Data as a network numbers and scales it: a network keeps the class names and the bounds of its training set."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mmlda._utils.device import check_model
from mmlda._utils.training_data import class_names
from mmlda.data.convert import as_images
from mmlda.data.images import ImageData


def images_for(model: Any, source: Any, *, split: Literal["train", "test"] = "test") -> ImageData:
    """Convert data as `as_images` does, with the class numbers and table bounds of a network's training set.

    A dataset numbers its own classes, so one that lacks a class numbers the others differently. `mmlda.fit` keeps the
    class names with the network (`model.classes`) and the bounds of a table (`model.bounds`); here labels follow those
    names. Integer labels without names, and data for a model without names, keep their numbers.

    Parameters
    ----------
    model
        A function from images to logits; those trained by `mmlda.fit` have `classes`, and `bounds` for a table.
    source
        Anything `as_images` takes.
    split
        Which part to use of a source that has a train and a test set.

    Returns
    -------
    ImageData
        The data, with the network's classes and bounds.

    Raises
    ------
    ValueError
        If an image has a class that the network does not know, or `model` is not callable.

    Examples
    --------
    >>> model = torch.nn.Flatten()
    >>> model.classes = ("ant", "bee", "cat")
    >>> images_for(model, (torch.zeros(2, 1, 8, 8), ["cat", "bee"])).labels
    tensor([2, 1])
    """
    check_model(model)
    names, data, L = class_names(model), as_images(source, split=split), getattr(model, "num_classes", None)
    if names is None and isinstance(L, int) and data.num_classes < L and not numbered(data.classes):
        why = f"the network keeps no class names, so the {data.num_classes} classes of the data"
        warnings.warn(f"{why} are taken as the first of its {L}; set model.classes to its names", stacklevel=1)
    return _rescaled(model, relabelled(names, data))


def learn(model: Any, data: ImageData) -> ImageData:
    """The training set with the network's class numbers; the network keeps its class names and bounds.

    A network that already knows these classes keeps its numbers; other classes replace the ones it knows.
    """
    names = class_names(model)
    if names is not None:
        try:
            data = relabelled(names, data)
        except ValueError:
            if not numbered(names):
                words = f"{_listed(names)} become {_listed(data.classes)}"
                warnings.warn(f"the network is trained on other classes than before: {words}", stacklevel=5)
    if names is not None or getattr(model, "classes", None) is None:  # not an attribute that means something else
        model.classes = data.classes
    data = _rescaled(model, data)
    if data.bounds is not None:
        model.bounds = data.bounds.cpu()
    return data


def from_one(data: ImageData, num_classes: int) -> str:
    """A hint for error messages where labels begin at 1, as they then exceed a network's classes; else empty."""
    first = data.num_classes == num_classes + 1 and not int(data.counts[0])
    return " (labels begin at 1: subtract 1)" if first else ""


def scaled(values: np.ndarray, bounds: Tensor) -> Tensor:
    """Rows of a table in [0, 1] by their bounds, [N, D] float32; values outside are clipped, with a warning."""
    low, high = bounds.numpy()
    rows = (values - low) / (high - low)
    outside = (rows < -1e-6) | (rows > 1 + 1e-6)  # more than rounding
    if outside.any():
        d = int(np.abs(rows - 0.5).max(0).argmax())
        worst = f"{values[:, d].min():g} to {values[:, d].max():g} for {low[d]:g} to {high[d]:g} in column {d}"
        many = f"{int(outside.sum())} of {outside.size} values, {worst},"
        warnings.warn(f"{many} are outside the table's bounds and clipped to them", stacklevel=3)
    return torch.from_numpy(rows).float().clamp(0, 1)


def relabelled(names: tuple[str, ...] | None, data: ImageData, whose: str = "the network") -> ImageData:
    """The data with the classes `names`: matched by name, or by number where one side has only numbers."""
    if names is None or names == data.classes:
        return data
    if numbered(data.classes):
        return replace(data, classes=names) if len(names) >= data.num_classes else data
    present = [data.classes[k] for k in data.labels.unique().tolist()]
    unknown = [name for name in present if name not in names]
    if not unknown:
        number = {name: k for k, name in enumerate(names)}
        order = torch.tensor([number.get(name, 0) for name in data.classes], device=data.device)
        return replace(data, labels=order[data.labels], classes=names)
    if numbered(names) and len(names) == data.num_classes and len(unknown) == len(present):
        return data
    raise ValueError(f"data must have classes of {whose}, {_listed(names)}, got {unknown[0]!r}")


def _rescaled(model: Any, data: ImageData) -> ImageData:
    """A table rescaled to the network's bounds."""
    own = getattr(model, "bounds", None)
    if data.bounds is None or not isinstance(own, Tensor) or own.shape != data.bounds.shape:
        return data
    if torch.equal(own.cpu(), data.bounds.cpu()):
        return data
    rows = scaled(data.in_units(data.images).cpu().numpy(), own.cpu())
    return replace(data, images=rows.to(data.device), bounds=own.cpu())


def numbered(names: Sequence[str]) -> bool:
    """Whether these are the names of classes that have only numbers."""
    return list(names) == [str(k) for k in range(len(names))]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 10 else f"{', '.join(names[:8])}, ... ({len(names)})"
