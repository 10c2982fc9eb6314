"""One training run from names: load the data, choose recipe and network, train, and measure on the test set."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmlda._utils.checks import check_choice, invalid
from mmlda.data import ImageData, load
from mmlda.evaluation.accuracy import Accuracy, accuracy, check_fits
from mmlda.models import SoftmaxHead, build
from mmlda.training.loop import Run, fit
from mmlda.training.recipes import RECIPES, Recipe, network

__all__ = ["choose_recipe", "train"]


def train(
    data: str | Path = "digits",
    *,
    head: str | None = None,
    recipe: str | None = None,
    start: nn.Module | None = None,
    steps: int | None = None,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    out: str | Path | None = None,
    root: str | Path | None = None,
    device: torch.device | str | None = None,
    eager: bool = False,
    deterministic: bool = False,
    amp: bool | None = None,
    tensorboard: bool = False,
    show: bool = True,
) -> tuple[Run, Accuracy | None]:
    """Train a network on a named dataset or a folder, and measure its test accuracy.

    Under torchrun, the processes train together and only the first one measures; the others return None.

    Args:
        data: a name or a folder, see `mmlda.data.load`.
        head: "mmlda" or "softmax"; by default that of `start`, else "mmlda".
        recipe: a name in `RECIPES`; by default the paper's for the data and the head.
        start: a network to fine-tune instead of a new one.
        steps: another number of steps, with the schedule in proportion.
        seed: of the weights, the order of the data and the augmentation.
        changes: fields of the recipe to replace.
        model: settings of the new network, see `mmlda.models.build`.
        out: folder for checkpoints and the network; an existing run is resumed.
        root: where the datasets are, see `mmlda.data.load`.
        device, eager, deterministic, amp, tensorboard: see `Options`.

    >>> run, test = train("digits", steps=40, model={"width": 8}, show=False)
    >>> run.step, test.accuracy > 0.2
    (40, True)
    """
    if start is not None and model:
        raise invalid("model", "None where a network to start from is given", model)
    head = _head(head, start)
    chosen = choose_recipe(data, head, name=recipe, steps=steps, changes={"seed": seed, **(changes or {})})
    train_set, test_set = load(data, root)
    with _processes(device) as place:
        net = start if start is not None else _build(head, str(data), train_set, model or {}, chosen.seed)
        check_fits(net.to(place), train_set, spare=True)
        options: dict[str, Any] = {"eager": eager, "deterministic": deterministic, "amp": amp}
        run = fit(net, train_set, chosen, out=out, device=place, tensorboard=tensorboard, show=show, **options)
        first = not dist.is_initialized() or dist.get_rank() == 0
        return run, accuracy(net, test_set, device=place) if first else None


def choose_recipe(
    data: str | Path,
    head: str,
    *,
    name: str | None = None,
    steps: int | None = None,
    changes: dict[str, Any] | None = None,
) -> Recipe:
    """The recipe `name`, or the paper's for the data and the head, with other steps and fields where given.

    >>> choose_recipe("cifar10", "softmax", steps=900).milestones
    (400, 600, 800)
    """
    if name is None:
        known = data if f"{data}-sr" in RECIPES else "mnist"
        name = f"{known}-{'mmlda' if head == 'mmlda' else 'sr'}"
    check_choice("recipe", name, RECIPES)
    recipe = RECIPES[name] if steps is None else RECIPES[name].scaled(steps)
    return dataclasses.replace(recipe, **(changes or {}))


def _head(head: str | None, start: nn.Module | None) -> str:
    if start is None:
        head = head or "mmlda"
        check_choice("head", head, ("mmlda", "softmax"))
        return head
    own = "softmax" if isinstance(getattr(start, "head", None), SoftmaxHead) else "mmlda"
    if head not in (None, own):
        raise invalid("head", f"{own!r}, that of the network to start from", head)
    return own


def _build(head: str, data: str, train_set: ImageData, settings: dict[str, Any], seed: int) -> nn.Module:
    size = {"num_classes": train_set.num_classes, "channels": train_set.shape[0]}
    try:
        return build({**network(head, data), **size, **settings}, seed=seed)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"model must be valid settings, got {settings!r} ({str(error).splitlines()[0]})") from None


@contextmanager
def _processes(device: torch.device | str | None) -> Iterator[torch.device | str | None]:
    """Join the other processes if torchrun started this one; the device of this process."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield device
        return
    if str(device) == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if str(device).startswith("cuda") else "gloo")
    try:
        yield device
        dist.barrier()  # no process leaves while another still needs it
    finally:
        dist.destroy_process_group()
