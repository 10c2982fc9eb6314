"""One training run from names: load the data, choose recipe and network, train, and measure on the test set."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmlda._utils.checks import check_choice, damaged, invalid
from mmlda._utils.files import read_json, write_json
from mmlda._utils.settings import typed
from mmlda._utils.training_data import recall
from mmlda.data import ImageData, holdout, load, stratified
from mmlda.data.alignment import learn
from mmlda.evaluation.accuracy import Accuracy, accuracy, check_fits
from mmlda.models import Classifier, SoftmaxHead, build
from mmlda.training import checkpoints
from mmlda.training.folder import Run
from mmlda.training.loop import fit, make_validation
from mmlda.training.recipes import RECIPES, Recipe, network

# The dataset of the paper, or digits, whose recipe a named dataset takes; others take that of mnist.
TRAINED_LIKE = {"digits": "digits", "cifar10": "cifar10", "cifar100": "cifar10", "cifar100-coarse": "cifar10"}
SOURCE: dict[str, Any] = {  # train.json
    **{"data": str, "n": int | None, "validation": int | None, "priors": str | None, "fine_tuned": bool},
    **{"keep_best": bool | None, "patience": int | None, "validate_every": int | None},
}


def train(
    data: str | Path | None = None,
    *,
    n: int | None = None,
    validation: int | None = None,
    keep_best: bool = False,
    patience: int | None = None,
    validate_every: int | None = None,
    priors: str | None = None,
    head: str | None = None,
    recipe: str | None = None,
    start: nn.Module | None = None,
    steps: int | None = None,
    seed: int | None = None,
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

    Under torchrun, the processes train together and only the first one measures; the others return None. Unless
    `show=False`, a line on standard error reports whether the run is new or resumed, and on which images.

    Parameters
    ----------
    data
        A name or a folder, see `mmlda.data.load`; by default that of the run in `out`, else "digits".
    n
        Train on a stratified sample of this many training images, at least one per class.
    validation
        Hold out this many training images, stratified, to validate on.
    keep_best, patience, validate_every
        As in `mmlda.fit`.
    priors
        Class priors of the head: "uniform" or "empirical" for the shares in the training set; by default those of
        `start`, else uniform.
    head
        "mmlda" or "softmax"; by default that of `start` or of the run in `out`, else "mmlda".
    recipe
        A name in `RECIPES`; by default the paper's for the data and the head.
    start
        A network to fine-tune instead of a new one.
    steps
        Another number of steps, with the schedule in proportion; more steps than those of the run in `out` continue
        it, with its schedule unchanged.
    seed
        Seed of the weights, the order of the data and the augmentation; 0 by default.
    changes
        Fields of the recipe to replace.
    model
        Settings of the new network, see `mmlda.models.build`.
    out
        Folder for checkpoints and the network; an existing run is resumed, with its own data, recipe and network
        unless others are given.
    root
        Where the datasets are, see `mmlda.data.load`.
    device, eager, deterministic, amp, tensorboard, show
        As in `mmlda.fit`.

    Returns
    -------
    run, accuracy : Run, Accuracy or None
        The run, and its accuracy on the test set.

    Raises
    ------
    ValueError
        If an argument is out of range or does not fit the run in `out`.

    Examples
    --------
    >>> run, test = train("digits", steps=40, model={"width": 8}, show=False)
    >>> run.step, test.accuracy > 0.2
    (40, True)
    """
    if start is not None and model:
        raise invalid("model", "None where a network to start from is given", model)
    if priors is not None:
        check_choice("priors", priors, ("uniform", "empirical"))
    before = _earlier(out)
    if before and before["fine_tuned"] and start is None and not any(Path(out or "").glob("step-*.json")):
        raise invalid("start", f"the network to fine-tune, as the run in {out} has no checkpoint yet", None)
    asked: dict[str, Any] = {"data": data, "n": n, "validation": validation, "priors": priors}
    asked |= {"keep_best": keep_best or None, "patience": patience, "validate_every": validate_every}
    source: dict[str, Any] = {key: before.get(key) if value is None else value for key, value in asked.items()}
    source["data"] = name = str(source["data"] or "digits")
    source["keep_best"] = bool(source["keep_best"])
    own = _head(head, start, before)
    if before and recipe is None:
        chosen = _continued(before["recipe"], steps, seed, changes or {}, out)
    else:
        chosen = choose_recipe(name, own, name=recipe, steps=steps, **{"seed": seed or 0, **(changes or {})})
    train_set, held, test_set = _images(name, root, source["n"], source["validation"])
    kept, waited, every = (source[key] for key in ("keep_best", "patience", "validate_every"))
    make_validation(held, kept, waited, every, chosen, None)  # raises before `out` is written
    settings = dict(model or {})
    if source["priors"] == "empirical":
        settings["priors"] = train_set.priors.tolist()
    with _processes(device) as place:
        if start is not None:
            net = _with_priors(start, source["priors"], train_set)
        elif before and not model and before["model"] is not None and head in (None, before["model"].get("head")):
            changed = {} if priors is None else {"priors": settings.get("priors")}
            net = build({**before["model"], **changed}, seed=chosen.seed)
            if before["fine_tuned"]:  # the data may lack a class that the network knows
                recall(net, before)
        else:
            net = _build(own, name, train_set, settings, chosen.seed)
        check_fits(net.to(place), train_set, spare=True)
        first = not dist.is_initialized() or dist.get_rank() == 0
        if out is not None and not before and first:
            write_json(Path(out) / "train.json", {**source, "fine_tuned": start is not None})
        if out is not None and first and show:
            _announce(Path(out), before, chosen, train_set)
        run = fit(
            net,
            train_set,
            chosen,
            validation=held,
            keep_best=kept,
            patience=waited,
            validate_every=every,
            out=out,
            device=place,
            eager=eager,
            deterministic=deterministic,
            amp=amp,
            tensorboard=tensorboard,
            show=show,
        )
        return run, accuracy(net, test_set, device=place) if first else None


def _earlier(out: str | Path | None) -> dict[str, Any]:
    """What the run in a folder was trained on and how; empty if there is no run."""
    if out is None or not (Path(out) / "run.json").is_file():
        return {}
    about, path = checkpoints.read_about(Path(out)), Path(out) / "train.json"
    try:
        source = read_json(path) if path.is_file() else {"data": about["data"]["name"]}
        typed(SOURCE, source)
    except ValueError as error:
        raise damaged(path, "as a run writes it (or choose another folder)", f"a damaged one ({error})") from None
    kept = {key: about.get(key) for key in ("model", "classes", "bounds")}
    return {"fine_tuned": False, **source, "recipe": Recipe.from_dict(about["recipe"]), **kept}


def _images(
    name: str, root: str | Path | None, n: int | None, validation: int | None
) -> tuple[ImageData, ImageData | None, ImageData]:
    """What to train on, to validate on and to test on."""
    train_set, test_set = load(name, root)
    classes = len(train_set.labels.unique())
    if n is not None and n < classes:
        raise invalid("n", f"at least {classes}, one image per class", n)
    train_set = stratified(train_set, n)
    if validation is None:
        return train_set, None, test_set
    if not 0 < validation < len(train_set):
        raise invalid("validation", f"an integer from 1 to {len(train_set) - 1}", validation)
    return *holdout(train_set, validation), test_set


def _announce(out: Path, before: dict[str, Any], recipe: Recipe, data: ImageData) -> None:
    """Report on standard error whether a run is new, resumed or finished, since a mistyped folder starts a new one."""
    step = checkpoints.last_step(out)
    what = f"{len(data):,} images of {data.name}, {int((data.counts > 0).sum())} of {data.num_classes} classes"
    if not before:
        state = f"new run, {recipe.steps:,} steps on {what}"
    elif (out / "model.safetensors").is_file() and before["recipe"].steps >= recipe.steps:
        state = f"finished before, {step or recipe.steps:,} steps on {what}"  # fewer where it stopped early
    else:
        state = f"resumed after step {step:,} of {recipe.steps:,}, on {what}"
    print(f"{out}: {state}", file=sys.stderr)


def _continued(
    recipe: Recipe, steps: int | None, seed: int | None, changes: dict[str, Any], out: str | Path | None
) -> Recipe:
    """The recipe of a run that is resumed, or continued to more steps."""
    if steps is not None and steps < recipe.steps:
        raise invalid("steps", f"at least {recipe.steps}, those of the run in {out}", steps)
    given: dict[str, Any] = {"steps": steps, "seed": seed}
    return dataclasses.replace(recipe, **{k: v for k, v in given.items() if v is not None}, **changes)


def choose_recipe(
    data: str | Path, head: str, *, name: str | None = None, steps: int | None = None, **changes: Any
) -> Recipe:
    """The recipe `name`, or the paper's for the data and the head, with other steps and fields if given.

    Examples
    --------
    >>> choose_recipe("cifar10", "softmax", steps=900).milestones
    (400, 600, 800)
    """
    if name is None:
        name = f"{TRAINED_LIKE.get(str(data), 'mnist')}-{'mmlda' if head == 'mmlda' else 'sr'}"
    check_choice("recipe", name, RECIPES)
    recipe = RECIPES[name] if steps is None else RECIPES[name].scaled(steps)
    return dataclasses.replace(recipe, **changes)


def _head(head: str | None, start: nn.Module | None, before: dict[str, Any]) -> str:
    """The head that was asked for, or else that of the network to start from, or of the run that is resumed."""
    if start is None:
        head = head or (before.get("model") or {}).get("head", "mmlda")
        check_choice("head", head, ("mmlda", "softmax"))
        return head
    own = "softmax" if isinstance(getattr(start, "head", None), SoftmaxHead) else "mmlda"
    if head not in (None, own):
        raise invalid("head", f"{own!r}, that of the network to start from", head)
    return own


def _with_priors(start: nn.Module, priors: str | None, data: ImageData) -> nn.Module:
    """The network to fine-tune with the class priors asked for, those of the data as the network numbers it."""
    if priors is None:
        return start
    if not isinstance(start, Classifier):
        raise invalid("priors", "None for a network to start from that is not an mmlda.Classifier", priors)
    return start.with_priors(None) if priors == "uniform" else start.with_priors(priors, learn(start, data).labels)


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
