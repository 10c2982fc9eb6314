"""Several networks trained on one device at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmlda._utils.device import device_of
from mmlda._utils.progress import progress
from mmlda.data import ImageData, as_images
from mmlda.training.folder import Run
from mmlda.training.interrupt import interruptible
from mmlda.training.loop import Options, make_validation, training_steps
from mmlda.training.matching import check_shape, warn_of_labels_from_1
from mmlda.training.recipes import Recipe, as_recipe


def fit_many(
    models: Sequence[nn.Module],
    data: Any,
    recipes: Recipe | str | Sequence[Recipe | str],
    *,
    teacher: nn.Module | None = None,
    validation: Any = None,
    keep_best: bool = False,
    patience: int | None = None,
    validate_every: int | None = None,
    out: Sequence[str | Path | None] | None = None,
    device: torch.device | str | None = None,
    eager: bool = False,
    deterministic: bool = False,
    amp: bool | None = None,
    show: bool = True,
) -> list[Run]:
    """Train several networks on one GPU at the same time: each has a stream and a graph, and they take turns.

    A small network leaves most of a large GPU idle; several at once fill it. On the CPU the networks take turns too,
    and each ends with the weights that `fit` would have given it. If one fails, by diverging for example, the others
    are trained to their end before its error is raised.

    Parameters
    ----------
    models
        The networks, which are trained in place.
    data
        One training set for all, or a list with one per network; each is anything `mmlda.data.as_images` takes.
    recipes
        One for all, or a list with one per network; recipes or their names in `mmlda.RECIPES`.
    teacher
        A trained network, for the recipes that distil.
    validation, keep_best, patience, validate_every
        As in `fit`; one validation set for all.
    out
        A list with the folder of each run, or None.
    device, eager, deterministic, amp, show
        As in `fit`.

    Returns
    -------
    list of Run
        In the order of the networks.

    Raises
    ------
    ValueError
        If a list does not have one entry per network, or as in `fit`.

    Examples
    --------
    >>> from mmlda.models import build
    >>> models = [build({"backbone": "conv_net", "width": 4}, seed=seed) for seed in (0, 1)]
    >>> runs = fit_many(models, "digits", Recipe(steps=10, optimizer="adam", lr=1e-3), show=False)
    >>> [run.step for run in runs]
    [10, 10]
    """
    if not isinstance(models, list | tuple) or not all(isinstance(model, nn.Module) for model in models):
        raise ValueError(f"models must be a list of networks, got a {type(models).__name__}")
    n = len(models)
    sets = [as_images(one) for one in data] if isinstance(data, list) else [as_images(data)] * n
    listed = [recipes] * n if isinstance(recipes, Recipe | str) else recipes
    values = [as_recipe(recipe) for recipe in listed]
    outs = [None] * n if out is None else [None if o is None else Path(o) for o in out]
    for name, given in (("data", sets), ("recipes", values), ("out", outs)):
        if len(given) != n:
            raise ValueError(f"{name} must have one entry per model, {n}, got {len(given)}")
    held = None if validation is None else as_images(validation, split="test")
    runs = []
    for model, images, recipe, folder in zip(models, sets, values, outs):
        warn_of_labels_from_1(model, images)
        measured = make_validation(held, keep_best, patience, validate_every, recipe, folder)
        runs.append(Run(model, recipe, folder, teacher=teacher if recipe.distill else None, validation=measured))
        check_shape(runs[-1], images)
    options = Options(device=device, eager=eager, deterministic=deterministic, amp=amp)
    for error in together(runs, sets, options, show=show).values():
        raise error
    return runs


def together(runs: list[Run], sets: list[ImageData], options: Options, *, show: bool) -> dict[int, Exception]:
    """Train in turn, one step each, and return the errors of those that fail, by number; the others go on.

    Ctrl-C stops each after its step and saves it as `fit` would; a second one stops at once.
    """
    failures: dict[int, Exception] = {}
    if not runs:
        return failures
    device = device_of(runs[0].model, options.device)
    cuda, interrupted = device.type == "cuda", None
    copies = {id(s): s.to(device) for s in sets}  # the same images serve all networks
    with (
        interruptible() as stopped,
        torch.random.fork_rng(devices=[torch.cuda.current_device()] if cuda else []),
        progress(f"{len(runs)} networks", sum(run.recipe.steps for run in runs), show=show) as report,
    ):

        def tell(done: int, *, start: bool = False, **numbers: float) -> None:
            report(sum(run.step for run in runs), start=start, **numbers)

        generators = []  # each network's own state of the global one: dropout and the like, as `fit` has it
        for run in runs:
            torch.manual_seed(run.recipe.seed)
            generators.append(torch.get_rng_state())
        streams = [torch.cuda.Stream() if cuda else None for _ in runs]
        turns = {
            n: training_steps(run, copies[id(s)], options, report=tell, stopped=stopped)
            for n, (run, s) in enumerate(zip(runs, sets))
        }
        if cuda:
            torch.cuda.synchronize()  # what the streams read has arrived
        while turns:
            for n, steps in list(turns.items()):
                with torch.cuda.stream(streams[n]) if cuda else nullcontext():
                    if not cuda:
                        torch.set_rng_state(generators[n])
                    try:
                        if next(steps, None) is not None:
                            continue
                    except KeyboardInterrupt as error:
                        if not error.args:  # not the loop's own words: the second Ctrl-C
                            raise
                        interrupted = error
                    except Exception as error:
                        failures[n] = error
                    finally:
                        generators[n] = torch.get_rng_state()
                    del turns[n]
        if cuda:
            torch.cuda.synchronize()
    if interrupted is not None:
        raise interrupted
    return failures
