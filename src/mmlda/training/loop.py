"""Algorithm 2, and the softmax baseline: one plain loop, everything on the device, resumable.

The host launches one step after another and waits for the device only to log and to save. The order of the data
and every random draw come from (seed, step), so a run killed at any moment resumes from its checkpoint to the
same weights.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from mmlda._utils.checks import invalid
from mmlda._utils.device import device_of
from mmlda._utils.progress import Report, progress
from mmlda._utils.training_data import class_names
from mmlda.data import ImageData, as_images
from mmlda.models.saved import fill
from mmlda.training import checkpoints, folder
from mmlda.training.batches import Batches, share
from mmlda.training.crafting import craft_once
from mmlda.training.folder import Run
from mmlda.training.interrupt import errors_as_stop, halt, interruptible, stop
from mmlda.training.journal import Journal
from mmlda.training.loader import LoaderBatches, batch_size
from mmlda.training.matching import check_shape, class_count, matched, warn_of_labels_from_1
from mmlda.training.recipes import Recipe, as_recipe
from mmlda.training.step import Average, Step, Tally, make_launch, make_optimizer, set_rate
from mmlda.training.validation import Validation


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is executed, which affects only rounding and speed.

    Parameters
    ----------
    device, eager, deterministic, amp, checkpoint_every, log_every, tensorboard
        As in `fit`.
    """

    device: torch.device | str | None = None
    eager: bool = False
    deterministic: bool = False
    amp: bool | None = None
    checkpoint_every: int | None = None
    log_every: int | None = None
    tensorboard: bool = False

    def uses_amp(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.amp is None else self.amp


def fit(
    model: nn.Module,
    data: Any,
    recipe: Recipe | str,
    *,
    teacher: nn.Module | None = None,
    validation: Any = None,
    keep_best: bool = False,
    patience: int | None = None,
    validate_every: int | None = None,
    out: str | Path | None = None,
    device: torch.device | str | None = None,
    eager: bool = False,
    deterministic: bool = False,
    amp: bool | None = None,
    checkpoint_every: int | None = None,
    log_every: int | None = None,
    tensorboard: bool = False,
    show: bool = True,
) -> Run:
    """Train `model` on `data`, in place: it is moved to `device` and comes back in eval mode.

    The network keeps the class names of the data (`model.classes`) and the bounds of a table (`model.bounds`), so that
    other data is matched with them; see `mmlda.data.images_for`.

    Parameters
    ----------
    model
        Pixels in [0, 1] -> logits; a `Classifier`, or any module with the loss "ce".
    data
        Anything `mmlda.data.as_images` takes: an `ImageData`, a pair (x, y), a `Dataset`, a name, a path. A
        `DataLoader` is read batch by batch, never whole, and its batch size (that of its first batch, where it does not
        state one) replaces the recipe's.
    recipe
        A `Recipe`, or the name of one in `mmlda.RECIPES`.
    teacher
        A trained network whose probabilities replace a share `recipe.distill` of the labels.
    validation
        Other images, in any form that `data` may have: the accuracy on them is measured along the way and recorded in
        `history`. A `DataLoader` is read again for each measurement, batch by batch. Do not use the test set with
        `keep_best` or `patience`.
    keep_best
        Return the network with the best validation accuracy, not the last one.
    patience
        Stop after this many validations in a row without improvement.
    validate_every
        Steps between validations; a twentieth of the run by default.
    out
        Folder for checkpoints, metrics and the network. An existing run is resumed, and one with fewer steps than the
        recipe is continued to that number.
    device
        Where to train; the model's own device by default.
    eager
        On CUDA, neither compile nor capture the step. The CPU is always eager.
    deterministic
        On CUDA, return the same bits for the same seed; slower. The CPU always does.
    amp
        Run the network in bfloat16 with a float32 loss. By default as the run in `out` does, otherwise on CUDA only.
        On a CPU with bfloat16 instructions it doubles the speed of a Resnet.
    checkpoint_every
        Steps between checkpoints; by default about a twentieth of the run, each with a line in the log, and at least
        ten seconds apart.
    log_every
        Steps between lines of the log; a hundredth of the run by default.
    tensorboard
        Also write event files to `out` (extra `mmlda[tensorboard]`).
    show
        Show a progress bar, or a line now and then if standard error is not a terminal.

    Returns
    -------
    Run
        The network, the steps taken, loss and accuracy on the training batches, `history`, and `validation`. Printing
        it shows a summary.

    Raises
    ------
    ValueError
        If an argument is out of range, model and data do not fit together, or `out` holds another run.
    Diverged
        If the loss or a weight is no longer finite.

    Examples
    --------
    >>> import mmlda
    >>> train, test = mmlda.data.load("digits")
    >>> model = mmlda.models.build({"backbone": "conv_net", "head": "mmlda"}, seed=0)
    >>> run = fit(model, train, Recipe(steps=30, optimizer="adam", lr=1e-3), show=False)
    >>> run.step, run.history[0]["loss"] > run.loss
    (30, True)
    """
    place, recipe = None if out is None else Path(out), as_recipe(recipe)
    images = data if isinstance(data, DataLoader) else as_images(data)
    if not isinstance(model, nn.Module):
        raise invalid("model", "a torch.nn.Module", model)
    if place is not None and place.is_file():
        raise invalid("out", "a folder", str(out))
    if isinstance(images, DataLoader):
        recipe = dataclasses.replace(recipe, batch_size=batch_size(images))
    else:
        warn_of_labels_from_1(model, images)
    held = make_validation(validation, keep_best, patience, validate_every, recipe, place)
    run = Run(model, recipe, place, teacher=teacher, validation=held)
    options = Options(
        device=device,
        eager=eager,
        deterministic=deterministic,
        amp=amp,
        checkpoint_every=checkpoint_every,
        log_every=log_every,
        tensorboard=tensorboard,
    )
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cuda), interruptible() as stopped:
        if isinstance(images, ImageData):  # before anything is written to `out`
            check_shape(run, images)
        torch.manual_seed(recipe.seed)  # dropout and the like
        with progress(run.out.name if run.out else "training", recipe.steps, show=show and share()[0] == 0) as report:
            for _ in training_steps(run, images, options, report=report, stopped=stopped):
                pass
    return run


def make_validation(
    data: Any,
    keep_best: bool | None,
    patience: int | None,
    validate_every: int | None,
    recipe: Recipe,
    out: Path | None,
) -> Validation | None:
    """The `Validation` that the arguments of `fit` ask for, if any."""
    if data is None:
        if keep_best or patience is not None or validate_every is not None:
            raise invalid("validation", "given with keep_best, patience and validate_every", None)
        return None
    every = validate_every
    if every is None and out is not None and (out / "run.json").is_file():  # a run that is continued keeps its rhythm
        every = (checkpoints.read_about(out).get("validation") or {}).get("every")
    every = max(1, recipe.steps // 20) if every is None else every
    held = data if isinstance(data, DataLoader) else as_images(data, split="test")
    return Validation(held, every, bool(keep_best), patience)


def training_steps(
    run: Run,
    data: ImageData | DataLoader[Any],
    options: Options,
    *,
    report: Report,
    stopped: threading.Event | None = None,
) -> Iterator[int]:
    """The training loop, as a generator that has launched one more step whenever it yields.

    `fit` exhausts one; `mmlda.fit_many` takes turns with several, each on its own CUDA stream.
    """
    model, out = run.model, run.out
    data = matched(run, data)
    device = device_of(model, options.device)
    model.to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if out is None:
        yield from _steps(run, data, options, device, report, stopped)
        return
    held = folder.lock(out)
    try:
        if options.amp is None and (out / "run.json").is_file():  # begun on another device, perhaps
            options = dataclasses.replace(options, amp=checkpoints.read_about(out).get("amp"))
        folder.open_run(run, data, device, amp=options.uses_amp(device))
        if (finished := checkpoints.final(out, checkpoints.read_about(out))) is not None:
            folder.reload(run, finished)
        else:
            yield from _steps(run, data, options, device, report, stopped)
    finally:  # also where the caller keeps the error, as a notebook does: the same call then resumes
        held.release()


def _steps(
    run: Run,
    data: ImageData | DataLoader[Any],
    options: Options,
    device: torch.device,
    report: Report,
    stopped: threading.Event | None,
) -> Iterator[int]:
    model, recipe = run.model, run.recipe
    model.train()
    batches: Batches
    if isinstance(data, ImageData):
        batches = Batches(data, recipe, device)
    else:
        bounds = getattr(model, "bounds", None)
        batches = LoaderBatches(data, recipe, device, class_count(model), class_names(model), bounds)
    optimizer = make_optimizer(model, recipe, device)
    if recipe.adversary is not None and recipe.adversary.craft == "once":
        _craft_from_the_start(run, batches)
    average = Average(model, recipe.average) if recipe.average else None
    if run.out is not None:
        folder.resume(run, optimizer, average)
    step, tally = run.step, Tally(device, run.step, run.loss)
    with errors_as_stop(run, stopped, lambda: None):
        batches.seek(step)
    if isinstance(batches, LoaderBatches):
        check_shape(run, batches.first())
    full_step = Step(model, batches, optimizer, tally, average, _teacher(run, device), amp=options.uses_amp(device))
    launch = make_launch(full_step, eager=options.eager, deterministic=options.deterministic)
    journal = Journal(run, options, tally, average, lambda: folder.save(run, optimizer, average), report)
    rate = math.nan

    def close() -> None:
        journal.close(step, rate)

    report(step, start=True)
    while step < recipe.steps:
        if step % batches.per_epoch == 0:
            with errors_as_stop(run, stopped, close):
                batches.seek(step)
        if recipe.rate(step) != rate:
            rate = recipe.rate(step)
            set_rate(optimizer, rate)
        launch()
        step += 1
        halted = halt(stopped, step % min(journal.log_every, 50) == 0, device)
        with errors_as_stop(run, stopped, close):
            done = journal.after(step, rate, halted)
        if halted and not done:
            stop(run)
        yield step
        if done:
            break
    run.step = step
    if average is not None:
        average.store()
    if run.validation is not None and run.validation.keep_best:
        model.load_state_dict(run.validation.weights)
    model.eval()
    if run.out is not None and share()[0] == 0:
        _save_weights(run, "model.safetensors")


def _teacher(run: Run, device: torch.device) -> nn.Module | None:
    """The run's teacher as a frozen copy on the device."""
    if (run.teacher is None) == (run.recipe.distill > 0):
        expected = "a network where distill > 0" if run.teacher is None else "None where distill is 0"
        raise invalid("teacher", expected, run.teacher)
    if run.teacher is None:
        return None
    teacher = copy.deepcopy(run.teacher).to(device).eval().requires_grad_(False)
    return teacher.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _save_weights(run: Run, name: str) -> None:
    """Write the network to a file of its run."""
    assert run.out is not None
    about = {"run": checkpoints.identity(checkpoints.read_about(run.out))}
    checkpoints.save_weights(run.out / name, run.model.state_dict(), about)


def _craft_from_the_start(run: Run, batches: Batches) -> None:
    """Craft on the network as it was given, also when the run is resumed: its weights are kept for that."""
    if run.out is not None:
        path = run.out / "start.safetensors"
        if path.is_file():
            fill(run.model, checkpoints.read_weights(path, checkpoints.read_about(run.out)), path)
        elif share()[0] == 0:
            _save_weights(run, path.name)
    craft_once(run.model, batches)
