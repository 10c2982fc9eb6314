"""Data as a network numbers and scales it: a network keeps the class names and the bounds of its training set."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mmlda._utils.device import check_model
from mmlda._utils.training_data import class_names
from mmlda.data.convert import as_images, in_words, numbered
from mmlda.data.images import ImageData


def images_for(model: Any, source: Any, *, split: Literal["train", "test"] = "test") -> ImageData:
    """Convert data as `as_images` does, with the class numbers and table bounds of a network's training set.

    A dataset numbers its own classes, so one that lacks a class numbers the others differently. `mmlda.fit` keeps the
    class names with the network (`model.classes`) and the bounds of a table (`model.bounds`); here labels follow those
    names. Integer labels without names, and data for a model without names, keep their numbers; for a model whose names
    are other numbers, such as 1, 2 and 3, integer labels among them are names, too.

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
    data, clipped = aligned(model, as_images(source, split=split))
    if clipped:
        warnings.warn(clipped, stacklevel=2)
    return data


def aligned(model: Any, data: ImageData) -> tuple[ImageData, str]:
    """The data with the network's classes and bounds, and a warning for the user if values of a table are clipped."""
    names, L = class_names(model), getattr(model, "num_classes", None)
    if names is None and isinstance(L, int) and data.num_classes < L and not numbered(data.classes):
        why = f"the network keeps no class names, so the {data.num_classes} classes of the data"
        warnings.warn(f"{why} are taken as the first of its {L}; set model.classes to its names", stacklevel=1)
    return rescaled(relabelled(names, data), getattr(model, "bounds", None))


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
                words = f"{in_words(names)} become {in_words(data.classes)}"
                warnings.warn(f"the network is trained on other classes than before: {words}", stacklevel=5)
    if names is not None or getattr(model, "classes", None) is None:  # not an attribute that means something else
        model.classes = data.classes
    data, clipped = rescaled(data, learn_bounds(model, data.bounds))
    if clipped:
        warnings.warn(clipped, stacklevel=5)
    return data


def learn_bounds(model: Any, bounds: Tensor | None) -> Tensor | None:
    """The bounds to which a training table with these bounds is rescaled: the network keeps its own, if it has any."""
    own = getattr(model, "bounds", None)
    if bounds is None or (isinstance(own, Tensor) and own.shape == bounds.shape):
        return own
    model.bounds = bounds.cpu()
    return bounds


def from_one(data: ImageData, num_classes: int) -> str:
    """A hint for error messages where labels begin at 1, as they then exceed a network's classes; else empty."""
    first = data.num_classes == num_classes + 1 and not int(data.counts[0])
    return " (labels begin at 1: subtract 1)" if first else ""


def scaled(values: np.ndarray, bounds: Tensor) -> tuple[Tensor, str]:
    """Rows of a table in [0, 1] by their bounds, [N, D] float32, and a warning if values outside are clipped."""
    low, high = bounds.numpy()
    rows = (values - low) / (high - low)
    clipped, outside = "", (rows < -1e-6) | (rows > 1 + 1e-6)  # more than rounding
    if outside.any():
        d = int(np.abs(rows - 0.5).max(0).argmax())
        worst = f"{values[:, d].min():g} to {values[:, d].max():g} for {low[d]:g} to {high[d]:g} in column {d}"
        many = f"{int(outside.sum())} of {outside.size} values, {worst},"
        clipped = f"{many} are outside the table's bounds and clipped to them"
    return torch.from_numpy(rows).float().clamp(0, 1), clipped


def relabelled(names: tuple[str, ...] | None, data: ImageData, whose: str = "the network") -> ImageData:
    """The data with the classes `names`: matched by name, or by position where one side has only numbers from 0."""
    if names is None or names == data.classes:
        return data
    present = [data.classes[k] for k in data.labels.unique().tolist()]
    unknown = [name for name in present if name not in names]
    named = all(name.isdecimal() for name in names) and not numbered(names) and not unknown  # such as 1, 2 and 3
    if numbered(data.classes) and not named:
        return replace(data, classes=names) if len(names) >= data.num_classes else data
    if not unknown:
        number = {name: k for k, name in enumerate(names)}
        order = torch.tensor([number.get(name, 0) for name in data.classes], device=data.device)
        return replace(data, labels=order[data.labels], classes=names)
    if numbered(names) and len(names) == data.num_classes and len(unknown) == len(present):
        return data
    raise ValueError(f"data must have classes of {whose}, {in_words(names)}, got {unknown[0]!r}")


def rescaled(data: ImageData, bounds: Any) -> tuple[ImageData, str]:
    """A table rescaled to these bounds, and a warning if values are clipped; other data is returned unchanged."""
    if data.bounds is None or not isinstance(bounds, Tensor) or bounds.shape != data.bounds.shape:
        return data, ""
    bounds = bounds.cpu()
    if torch.equal(bounds, data.bounds.cpu()):
        return data, ""
    rows, clipped = scaled(data.in_units(data.pixels()).cpu().numpy(), bounds)
    return replace(data, images=rows.to(data.device), bounds=bounds), clipped
