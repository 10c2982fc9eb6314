"""Predictions of a network, and its accuracy overall, per class and balanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mmlda._utils.checks import check_count
from mmlda._utils.device import Model, device_of, eval_mode, on_device
from mmlda.attacks.checks import warn_caller
from mmlda.attacks.surface import PASSES, first_answer, is_random
from mmlda.data import ImageData, as_images, stratified
from mmlda.data.convert import as_batch, class_names


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

    Warns if the model is random (two passes over the same images differ, as with dropout left on): its predictions are
    then those of the mean probabilities of 16 passes, as under attack.

    Parameters
    ----------
    model : callable
        Images in [0, 1] -> logits: a module or any function. Its device and mode do not change.
    data : ImageData or pair or Dataset or str or path
        Anything that `mmlda.data.as_images` takes. A `DataLoader` is read batch by batch unless `n` is given.
    n : int, optional
        How many images, a stratified sample (`mmlda.data.stratified`); all by default.
    device : torch.device or str, optional
        Where to compute; the model's own device by default.
    batch_size : int
        Images per batch.

    Returns
    -------
    Accuracy

    Raises
    ------
    ValueError
        Bad arguments, or a model that does not return logits for the classes of the data.

    Examples
    --------
    >>> x, y = torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1])
    >>> always_1 = lambda x: torch.tensor([[0.0, 1.0]]).expand(len(x), 2)
    >>> result = accuracy(always_1, (x, y))
    >>> round(result.accuracy, 3), result.balanced, result.per_class
    (0.667, 0.5, (0.0, 1.0))
    """
    if isinstance(data, DataLoader) and n is None:
        return _from_loader(model, data, device)
    images = stratified(as_images(data, split="test"), n)
    guess = predictions(model, images, device=device, batch_size=batch_size)
    return shares(guess, images.labels.cpu(), images.num_classes)


@torch.no_grad()
def _from_loader(model: Model, loader: DataLoader[Any], device: torch.device | str | None) -> Accuracy:
    """Accuracy on a loader's images, one batch in memory at a time."""
    place, net, names = device_of(model, device), on_device(model, device), class_names(loader)
    guesses, labels, L, passes = [], [], 0, 0
    with eval_mode(net):
        for batch in loader:
            x, y = as_batch(batch, names, L or getattr(model, "num_classes", None))
            x = (x.float() / 255 if x.dtype == torch.uint8 else x).to(place, non_blocking=True)
            passes = passes or (PASSES if is_random(net, x[:16]) else 1)
            z = _mean_answer(net, x, passes)
            L = z.shape[1]
            guesses.append(z.argmax(1))
            labels.append(y)
    if not labels:
        raise ValueError("data must have at least one image, got an empty DataLoader")
    _warn_if_random(passes)
    return shares(torch.cat(guesses).cpu(), torch.cat(labels), len(names or range(L)))


def _warn_if_random(passes: int) -> None:
    if passes > 1:
        warn_caller(
            "the model is random, since two passes over the same images differ (is dropout still on?): "
            f"its predictions are those of the mean probabilities of {passes} passes"
        )


def shares(guess: Tensor, labels: Tensor, num_classes: int) -> Accuracy:
    """Accuracy of predicted classes [N]."""
    right = (guess == labels).double()
    counts = torch.bincount(labels, minlength=num_classes).double()
    per_class = torch.bincount(labels, right, minlength=num_classes) / counts  # [L], NaN for 0 / 0
    return Accuracy(right.mean().item(), per_class[counts > 0].mean().item(), tuple(per_class.tolist()), len(labels))


def logits(model: Model, data: Any, *, device: torch.device | str | None = None, batch_size: int = 1000) -> Tensor:
    """The logits of every image, [N, L], on the CPU; warns if the model is random (see `answers`)."""
    z, passes = answers(model, as_images(data, split="test"), device=device, batch_size=batch_size)
    _warn_if_random(passes)
    return z


@torch.no_grad()
def answers(
    model: Model, images: ImageData, *, device: torch.device | str | None = None, batch_size: int = 1000
) -> tuple[Tensor, int]:
    """The logits of every image, [N, L], on the CPU, and how many passes they are from; the model is in eval mode.

    One pass, or 16 of a random model: then the logits are the logarithms of the mean probabilities.
    """
    place, net = device_of(model, device), on_device(model, device)
    rows = torch.arange(len(images), device=images.device).split(check_count("batch_size", batch_size, 1))
    with eval_mode(net):
        passes = PASSES if is_random(net, images.pixels(slice(16)).to(place)) else 1
        z = torch.cat([_mean_answer(net, images.pixels(part).to(place), passes) for part in rows]).cpu()
    if z.shape[1] < images.num_classes:
        raise ValueError(f"model must return logits [{len(images)}, {images.num_classes}], got {list(z.shape)}")
    return z, passes


def _mean_answer(model: Model, x: Tensor, passes: int) -> Tensor:
    z = first_answer(model, x)
    if passes == 1:
        return z
    total = z.double().softmax(1)
    for _ in range(passes - 1):
        total += model(x).double().softmax(1)
    return (total / passes).log()


def predictions(model: Model, data: Any, *, device: torch.device | str | None = None, batch_size: int = 1000) -> Tensor:
    """The predicted class of every image, [N] int64, on the CPU."""
    return logits(model, data, device=device, batch_size=batch_size).argmax(1)


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
