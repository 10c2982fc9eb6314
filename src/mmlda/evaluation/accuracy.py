"""Predictions of a network, and its accuracy overall, per class and balanced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmlda._utils.checks import check_count
from mmlda._utils.device import Model, device_of, eval_mode, on_device
from mmlda.data import ImageData, as_images, stratified


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

    Args:
        model: images in [0, 1] -> logits: a module or any function. Its device and mode do not change.
        data: anything `mmlda.data.as_images` takes: an `ImageData`, (x, y), a `Dataset`, a name, a path.
        n: how many images, a stratified sample (`mmlda.data.stratified`); all by default.
        device: where to compute; the model's own device by default.

    >>> x, y = torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1])
    >>> always_1 = lambda x: torch.tensor([[0.0, 1.0]]).expand(len(x), 2)
    >>> result = accuracy(always_1, (x, y))
    >>> round(result.accuracy, 3), result.balanced, result.per_class
    (0.667, 0.5, (0.0, 1.0))
    """
    images = stratified(as_images(data, split="test"), n)
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
    return torch.cat([z.cpu() for z in _batches(model, as_images(data, split="test"), device, batch_size)])


def _batches(model: Model, images: ImageData, device: torch.device | str | None, batch_size: int) -> Iterator[Tensor]:
    """The logits of one batch after the other, [n, L], on the device."""
    place, net = device_of(model, device), on_device(model, device)
    rows = torch.arange(len(images), device=images.device).split(check_count("batch_size", batch_size, 1))
    with eval_mode(net):
        for part in rows:
            z = net(images.pixels(part).to(place))
            if z.ndim != 2 or z.shape[1] < images.num_classes:
                raise ValueError(f"model must return logits [{len(part)}, {images.num_classes}], got {list(z.shape)}")
            yield z


@torch.no_grad()
def predictions(model: Model, data: Any, *, device: torch.device | str | None = None, batch_size: int = 1000) -> Tensor:
    """The predicted class of every image, [N] int64, on the CPU."""
    images = as_images(data, split="test")  # a batch's logits at a time: there may be many classes
    return torch.cat([z.argmax(1) for z in _batches(model, images, device, batch_size)]).cpu()


@torch.no_grad()
def check_fits(model: Model, data: ImageData, *, spare: bool = False) -> None:
    """Raise a ValueError unless the model takes the images and has the classes of the data (or more, with `spare`)."""
    try:
        with eval_mode(model):
            z = model(data.pixels(slice(1)).to(device_of(model)))
    except RuntimeError as error:
        size, why = " x ".join(map(str, data.shape)), str(error).splitlines()[0]
        raise ValueError(f"data must fit the network, got images of {size} in {data.name!r} ({why})") from None
    if z.ndim != 2 or (z.shape[1] != data.num_classes and not (spare and z.shape[1] > data.num_classes)):
        wanted = f"the {z.shape[-1]} classes of the network"
        raise ValueError(f"data must have {wanted}, got {data.num_classes} classes in {data.name!r}")
