"""Predictions of a network, and its accuracy overall, per class and balanced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmlda._utils.checks import check_count
from mmlda._utils.device import Model, device_of, eval_mode, on_device
from mmlda.attacks.checks import warn_caller
from mmlda.attacks.surface import PASSES, first_answer, is_random
from mmlda.data import CLASSES, ImageData, images_for, load
from mmlda.data.alignment import from_one
from mmlda.data.loaders import batches_for, sample_for
from mmlda.models import Classifier
from mmlda.models.swap import structured_end


@dataclass(frozen=True)
class Accuracy:
    """Shares of images whose class was predicted.

    Parameters
    ----------
    accuracy
        Share of all images.
    balanced
        Mean of `per_class` over the classes that have images.
    per_class
        Share of each class; NaN for a class without images.
    n
        Number of images.
    """

    accuracy: float
    balanced: float
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

    With a head of many classes the logits `[N, L]` of a batch are never stored, unless the model is random.

    Parameters
    ----------
    model
        Images in [0, 1] -> logits: a module or any function. Its device and mode do not change.
    data
        Anything `mmlda.data.as_images` takes: an `ImageData`, (x, y), a `Dataset`, a name, a path. A `DataLoader` is
        read batch by batch, and with `n` only for that sample. Class names are matched with those of the network
        (`mmlda.data.images_for`).
    n
        Number of images, a stratified sample (`mmlda.data.stratified`); all by default.
    device
        Where to compute; the model's own device by default.
    batch_size
        Images per forward pass.

    Returns
    -------
    Accuracy
        Overall, balanced and per class.

    Raises
    ------
    ValueError
        If the data has a class that the network does not know, or the model does not return logits or returns NaN.

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
    images, _ = sample_for(model, data, n)
    guess = predictions(model, images, device=device, batch_size=batch_size)
    return shares(guess, images.labels.cpu(), images.num_classes)


def _from_loader(model: Model, loader: DataLoader[Any], device: torch.device | str | None) -> Accuracy:
    """Accuracy on a loader's images, one batch in memory at a time."""
    net, passes, L = on_device(model, device), None, 0
    guesses, labels = [], []
    for images in batches_for(model, loader):
        guess, passes = answers(net, images, device=device, batch_size=len(images), passes=passes, classes=True)
        guesses.append(guess)
        labels.append(images.labels)
        L = max(L, images.num_classes)
    _warn_if_random(passes or 1)
    return shares(torch.cat(guesses), torch.cat(labels), L)


def _warn_if_random(passes: int) -> None:
    if passes > 1:
        warn_caller(
            "the model is random, since two passes over the same images differ (is dropout still on?): "
            f"its predictions are those of the mean probabilities of {passes} passes"
        )


def shares(guess: Tensor, labels: Tensor, num_classes: int) -> Accuracy:
    """Accuracy of predicted classes.

    Parameters
    ----------
    guess
        Predicted classes [N], int64.
    labels
        True classes [N], int64.
    num_classes
        Number of classes L.

    Returns
    -------
    Accuracy
        Overall, balanced and per class.
    """
    right = (guess == labels).double()
    counts = torch.bincount(labels, minlength=num_classes).double()
    per_class = torch.bincount(labels, right, minlength=num_classes) / counts  # [L], NaN for 0 / 0
    return Accuracy(right.mean().item(), per_class[counts > 0].mean().item(), tuple(per_class.tolist()), len(labels))


def logits(model: Model, data: Any, *, device: torch.device | str | None = None, batch_size: int = 1000) -> Tensor:
    """The logits of every image, [N, L], on the CPU; warns if the model is random (see `answers`)."""
    z, passes = answers(model, images_for(model, data), device=device, batch_size=batch_size)
    _warn_if_random(passes)
    return z


@torch.no_grad()
def answers(
    model: Model,
    images: ImageData,
    *,
    device: torch.device | str | None = None,
    batch_size: int = 1000,
    passes: int | None = None,
    classes: bool = False,
) -> tuple[Tensor, int]:
    """The logits of every image, [N, L], on the CPU, and how many passes they are from; the model is in eval mode.

    One pass, or 16 of a random model: then the logits are the logarithms of the mean probabilities. With `classes`, the
    predicted classes [N] instead, so that the logits of one batch at a time are in memory, or not even these where a
    structured head ends the model.
    """
    place, net = device_of(model, device), on_device(model, device)
    rows = torch.arange(len(images), device=images.device).split(check_count("batch_size", batch_size, 1))
    found = []
    with eval_mode(net):
        if passes is None:
            passes = PASSES if is_random(net, images.pixels(slice(16)).to(place)) else 1
        end = _structured_end(net, images.pixels(slice(2)).to(place)) if classes and passes == 1 else None
        for part in rows:
            x = images.pixels(part).to(place)
            if end is None:
                z = _mean_answer(net, x, passes)
                L = z.shape[1]
            else:
                features, head = end
                z, top = head.topk(first_answer(features, x), 1)  # [n, 1]
                L = head.num_classes
            if L < images.num_classes:
                expected = f"[{len(part)}, {images.num_classes}]{from_one(images, L)}"
                raise ValueError(f"model must return logits {expected}, got {[len(part), L]}")
            if classes and bool(z.isnan().any()):  # argmax would make a class of it
                bad = int(z.isnan().any(1).sum())
                raise ValueError(f"model must return finite logits, got NaN for {bad} of {len(part)} images")
            found.append(z if not classes else z.argmax(1) if end is None else top[:, 0])
    return torch.cat(found).cpu(), passes


def _structured_end(model: Model, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Any] | None:
    """Function to the features, and the structured head whose logits of them the model returns; None without one."""
    if isinstance(model, nn.Module) and any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return None  # a hook may change the logits
    if isinstance(model, Classifier):
        own = getattr(model.forward, "__func__", None) is Classifier.forward
        return (model.features, model.head) if own and getattr(model.head, "structured", False) else None
    if not isinstance(model, nn.Module) or (end := structured_end(model)) is None or not end.is_last(model, x):
        return None
    return partial(end.features, model), end.head


def _mean_answer(model: Model, x: Tensor, passes: int) -> Tensor:
    z = first_answer(model, x)
    if passes == 1:
        return z
    total = z.double().softmax(1)
    for _ in range(passes - 1):
        total += model(x).double().softmax(1)
    return (total / passes).log()


def predictions(model: Model, data: Any, *, device: torch.device | str | None = None, batch_size: int = 1000) -> Tensor:
    """Predict the class of every image; warns if the model is random (see `accuracy`).

    Parameters
    ----------
    model, data, device, batch_size
        As in `accuracy`.

    Returns
    -------
    Tensor
        Classes [N], int64, on the CPU.
    """
    found, passes = answers(model, images_for(model, data), device=device, batch_size=batch_size, classes=True)
    _warn_if_random(passes)
    return found


@torch.no_grad()
def first_logits(model: Model, data: ImageData, name: str = "the network") -> Tensor:
    """The logits of the first image, [1, L]; a ValueError if the model does not take it."""
    try:
        with eval_mode(model):
            return model(data.pixels(slice(1)).to(device_of(model)))
    except RuntimeError as error:
        size, why = " x ".join(map(str, data.shape)), str(error).splitlines()[0]
        what = f"rows of {size}" if data.is_table else f"images of {size}"
        raise ValueError(f"data must fit {name}, got {what} in {data.name!r} ({why})") from None


def check_fits(model: Model, data: ImageData, *, spare: bool = False) -> None:
    """Raise a ValueError unless the model takes the images and has the classes of the data (or more, with `spare`)."""
    z = first_logits(model, data)
    if z.ndim != 2 or (z.shape[1] != data.num_classes and not (spare and z.shape[1] > data.num_classes)):
        wanted = f"the {z.shape[-1]} classes of the network"
        raise ValueError(f"data must have {wanted}, got {data.num_classes} classes in {data.name!r}")


def own_test_set(
    model: Model, source: Any, trained_on: dict[str, Any] | None, root: str | Path | None = None
) -> ImageData:
    """The test set of a source, by default of the dataset a network was trained on; a ValueError unless it fits.

    `trained_on` is that dataset as `mmlda.zoo.trained_on` returns it; its name alone does not make it the same images.
    """
    own = trained_on or {"name": None}
    name = own["name"]
    if source is None and name not in CLASSES:
        known = f"the network was trained on {name!r}" if name else "the network's dataset is not known"
        raise ValueError(f"data must be given, as {known}, got none")
    train, test = load(name if source is None else source, root)
    images = own.get("images", 0)  # fewer may be a part of the dataset
    if source is None and (images > len(train) or (images == len(train) and own["sha256"] != train.digest())):
        raise ValueError(f"data must be given, as the network was trained on other images called {name!r}, got none")
    test = images_for(model, test)
    check_fits(model, test)
    return test
