"""Predictions of a network, and its accuracy overall, per class and balanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmlda._utils.checks import check_count
from mmlda._utils.device import Model, device_of, eval_mode, on_device
from mmlda.data import ImageData, images_for, stratified
from mmlda.data.alignment import from_one


@dataclass(frozen=True)
class Accuracy:
    """Shares of images whose class was predicted. `per_class` is NaN for a class without images."""

    accuracy: float
    balanced: float  # mean over the classes that have images
    per_class: tuple[float, ...]
    n: int

    @property
    def error(self) -> float:
        """The share of images whose class was not predicted: 1 - accuracy."""
        return 1.0 - self.accuracy


def accuracy(
    model: Model, data: Any, *, n: int | None = None, device: torch.device | str | None = None, batch_size: int = 1000
) -> Accuracy:
    """Accuracy of a model on data, in float32.

    Parameters
    ----------
    model
        Images in [0, 1] -> logits: a module or any function. Its device and mode do not change.
    data
        Anything `mmlda.data.as_images` takes: an `ImageData`, (x, y), a `Dataset`, a name, a path. Its class names
        are matched with those of the network (`mmlda.data.images_for`).
    n
        Number of images, a stratified sample (`mmlda.data.stratified`); all by default.
    device
        Where to compute; the model's own device by default.
    batch_size
        Images per forward pass.

    Returns
    -------
    Accuracy

    Raises
    ------
    ValueError
        If the data has a class that the network does not know, or the model does not return logits.

    Examples
    --------
    >>> x, y = torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1])
    >>> always_1 = lambda x: torch.tensor([[0.0, 1.0]]).expand(len(x), 2)
    >>> result = accuracy(always_1, (x, y))
    >>> round(result.accuracy, 3), result.balanced, result.per_class
    (0.667, 0.5, (0.0, 1.0))
    """
    images = stratified(images_for(model, data), n)
    guess = predictions(model, images, device=device, batch_size=batch_size)
    return shares(guess, images.labels.cpu(), images.num_classes)


def shares(guess: Tensor, labels: Tensor, num_classes: int) -> Accuracy:
    """Accuracy of predicted classes [N]."""
    right = (guess == labels).double()
    counts = torch.bincount(labels, minlength=num_classes).double()
    per_class = torch.bincount(labels, right, minlength=num_classes) / counts  # [L], NaN for 0 / 0
    return Accuracy(right.mean().item(), per_class[counts > 0].mean().item(), tuple(per_class.tolist()), len(labels))


@torch.no_grad()
def logits(model: Model, data: Any, *, device: torch.device | str | None = None, batch_size: int = 1000) -> Tensor:
    """The logits of every image, [N, L], on the CPU; the model is in eval mode meanwhile."""
    images, place, net = images_for(model, data), device_of(model, device), on_device(model, device)
    rows = torch.arange(len(images), device=images.device).split(check_count("batch_size", batch_size, 1))
    try:
        with eval_mode(net):
            z = torch.cat([net(images.pixels(part).to(place)) for part in rows]).cpu()
    except RuntimeError:
        first_logits(net, images)  # raises a clear error where one image fails too
        raise
    if z.ndim != 2 or z.shape[1] < images.num_classes:
        expected = f"[{len(images)}, {images.num_classes}]{from_one(images, z.shape[-1])}"
        raise ValueError(f"model must return logits {expected}, got {list(z.shape)}")
    return z


def predictions(model: Model, data: Any, *, device: torch.device | str | None = None, batch_size: int = 1000) -> Tensor:
    """The predicted class of every image, [N] int64, on the CPU."""
    return logits(model, data, device=device, batch_size=batch_size).argmax(1)


@torch.no_grad()
def first_logits(model: Model, data: ImageData) -> Tensor:
    """The logits of the first image, [1, L]; a ValueError if the model does not take it."""
    try:
        with eval_mode(model):
            return model(data.pixels(slice(1)).to(device_of(model)))
    except RuntimeError as error:
        size, why = " x ".join(map(str, data.shape)), str(error).splitlines()[0]
        what = f"rows of {size}" if data.is_table else f"images of {size}"
        raise ValueError(f"data must fit the network, got {what} in {data.name!r} ({why})") from None


def check_fits(model: Model, data: ImageData, *, spare: bool = False) -> None:
    """Raise a ValueError unless the model takes the images and has the classes of the data (or more, with `spare`)."""
    z = first_logits(model, data)
    if z.ndim != 2 or (z.shape[1] != data.num_classes and not (spare and z.shape[1] > data.num_classes)):
        wanted = f"the {z.shape[-1]} classes of the network"
        raise ValueError(f"data must have {wanted}, got {data.num_classes} classes in {data.name!r}")
