"""Many independent jobs: one after another, several at once on one GPU, or over a Ray cluster.

A sweep is a list of `Job`s and a folder. Each finished job is one file, `<name>.json`, with its network beside it;
a rerun does only what is missing. A job describes itself completely, so it does not matter where it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mmlda import data as datasets
from mmlda._utils.checks import check_count, check_positive, invalid
from mmlda._utils.files import read_json, write_json, write_whole
from mmlda._utils.progress import progress
from mmlda._utils.tensors import packed
from mmlda.data import ImageData, as_images
from mmlda.evaluation.accuracy import accuracy
from mmlda.models import build
from mmlda.results import device_name, versions
from mmlda.training.folder import Run, difference
from mmlda.training.loop import Options
from mmlda.training.many import together
from mmlda.training.matching import check_shape
from mmlda.training.recipes import Recipe, as_recipe, network_for


@dataclass(frozen=True, kw_only=True)
class Job:
    """One network to train and to measure.

    Parameters
    ----------
    name
        Name of its files.
    model
        A config for `mmlda.models.build`.
    recipe
        How to train.
    data
        A name or folder for `mmlda.data.load`, or a training set, of which `part` selects the images to measure on.
    part
        None for train and test set as they are, ("fold", k, of, seed) for cross-validation on the training set, or
        ("biased", (alpha, ...), seed) for class-biased subsets of both.
    root
        Folder of the datasets on the machine the job runs on.

    Raises
    ------
    ValueError
        If the name cannot name a file, or `part` does not fit the data.
    """

    name: str
    model: dict[str, Any]
    recipe: Recipe
    data: str | ImageData
    part: tuple[Any, ...] | None = None
    root: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "part", _tuples(self.part))  # lists, as in JSON, cannot be hashed
        if not re.fullmatch(r"[\w.=+-]+", self.name):
            raise invalid("name", "letters, digits and . _ = + - only, as it names files", self.name)
        if not isinstance(self.data, str) and (self.part is None or self.part[0] == "biased"):
            raise invalid("part", "a fold where data is a training set without a test set", self.part)
        kinds = {"fold": 4, "biased": 3}
        if self.part is not None and kinds.get(self.part[0]) != len(self.part):
            raise invalid("part", f"None or one of {kinds}, with that many entries", self.part)

    def sets(self) -> tuple[ImageData, ImageData]:
        """Load the data of the job.

        Returns
        -------
        tuple of ImageData
            The training set, and the images to measure on.
        """
        train, test = _loaded(self.data, self.root) if isinstance(self.data, str) else (self.data, self.data)
        if self.part is None:
            return train, test
        kind, *values = self.part
        if kind == "fold":
            k, of, seed = values
            return datasets.folds(train, of, seed)[k]
        return datasets.biased(train, *values), datasets.biased(test, *values)


def _tuples(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=1)
def _loaded(data: str, root: str | None) -> tuple[ImageData, ImageData]:
    """Read a dataset once: most lists of jobs use one."""
    return datasets.load(data, root)


def run_jobs(jobs: Sequence[Job], *, device: str = "cpu", folder: Path | None = None) -> list[dict[str, Any]]:
    """Run some jobs at the same time; their records, each with its `network` in the safetensors format.

    The record of a job that failed has its name and the `error`.
    """
    loaded: dict[Any, tuple[ImageData, ImageData]] = {}
    runs: dict[int, Run] = {}
    failures: dict[int, Exception] = {}
    for n, job in enumerate(jobs):
        try:
            if (key := (job.data, job.part, job.root)) not in loaded:  # jobs on the same data share one copy of it
                loaded[key] = job.sets()
            out = None if folder is None else folder / "runs" / job.name
            run = Run(build(job.model, seed=job.recipe.seed), job.recipe, out)
            check_shape(run, loaded[key][0])
            runs[n] = run
        except Exception as error:
            failures[n] = error
    sets = {n: loaded[jobs[n].data, jobs[n].part, jobs[n].root] for n in runs}
    trains = [train for train, _ in sets.values()]
    stopped = together(list(runs.values()), trains, Options(device=device), show=False)
    failures |= {list(runs)[turn]: error for turn, error in stopped.items()}
    records = []
    for n, job in enumerate(jobs):
        try:
            if n in failures:
                raise failures[n]
            records.append(_record(job, runs[n], *sets[n], device))
        except Exception as error:
            records.append({"name": job.name, "error": f"{type(error).__name__}: {error}"})
    return records


def _record(job: Job, run: Run, train: ImageData, test: ImageData, device: str) -> dict[str, Any]:
    result = accuracy(run.model, test, device=device)
    return {
        **_about(job),
        "train_images": len(train),
        "test_images": len(test),
        "train_sha256": train.digest(),
        "test_sha256": test.digest(),
        "loss": run.loss if math.isfinite(run.loss) else None,
        "accuracy": result.accuracy,
        "balanced_accuracy": result.balanced,
        "per_class": [value if math.isfinite(value) else None for value in result.per_class],
        "seconds": run.seconds,
        "versions": {**versions(), "device": device_name(device)},
        "network": packed(run.model.state_dict()),
    }


def _about(job: Job) -> dict[str, Any]:
    """The job itself as JSON, without `root`, which depends on the machine."""
    data = job.data if isinstance(job.data, str) else {"name": job.data.name, "sha256": job.data.digest()}
    value = dataclasses.asdict(dataclasses.replace(job, data="")) | {"data": data}
    value.pop("root")
    return json.loads(json.dumps({"format": 1, **value}))


def _finished(job: Job, folder: Path) -> dict[str, Any] | None:
    """A job's record; None if there is none, if its network is missing or, with a warning, if it is damaged."""
    path = folder / f"{job.name}.json"
    if not path.is_file():
        return None
    try:
        record = read_json(path)
    except ValueError as error:
        warnings.warn(f"result refused: {error}; doing the job again", stacklevel=2)
        return None
    if (what := difference(record, _about(job))) is not None:
        raise ValueError(
            f"{path} must be the result of this job, got that of another: {what}; choose another folder or name"
        )
    return record if path.with_suffix(".safetensors").is_file() else None


def _keep(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write a job's files: the network first, since the record marks the job as done."""
    record = dict(record)
    network = record.pop("network", None)
    if network is not None:
        write_whole(folder / f"{record['name']}.safetensors", network)
    write_json(folder / f"{record['name']}.json", record)
    return record


def in_hand(folder: Path, name: str) -> FileLock:
    """Lock a job, or wait until the process that is running it has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{name}: waiting for another process that is running it", file=sys.stderr, flush=True)
        lock.acquire()
    return lock


class JobsFailed(RuntimeError):
    """Some jobs of a sweep failed; the results of the others are kept."""


def sweep(
    jobs: Iterable[Job],
    out: str | Path,
    *,
    device: str = "cpu",
    at_once: int = 1,
    ray: str | None = None,
    show: bool = True,
) -> list[dict[str, Any]]:
    """Run the jobs whose result is not in `out` yet.

    A job that was killed resumes from its checkpoint. A job that fails does not stop the others. Two processes may
    sweep the same list in the same folder: each waits for the jobs that the other is running.

    Parameters
    ----------
    jobs
        The jobs; their names must differ.
    out
        Folder for the results: `<name>.json` and `<name>.safetensors` per job.
    device
        Where to train.
    at_once
        Networks to train at the same time, see `fit_many`.
    ray
        An address, "local" or "auto": run on the workers of a Ray cluster instead (extra `mmlda[ray]`), with one CPU
        per job, or one GPU if `device` is "cuda". The files are written here as jobs end.
    show
        Show progress.

    Returns
    -------
    list of dict
        The records of all jobs, in the order of the list.

    Raises
    ------
    JobsFailed
        At the end, if jobs failed; it names them.
    ValueError
        If two jobs have the same name, or `out` holds the result of another job of this name.
    """
    folder, jobs = Path(out), list(jobs)
    if len({job.name for job in jobs}) != len(jobs):
        raise ValueError("jobs must have different names, got the same name twice")
    check_count("at_once", at_once, 1)
    records = {job.name: record for job in jobs if (record := _finished(job, folder)) is not None}
    failed: list[str] = []
    missing = [job for job in jobs if job.name not in records]
    done = _here(missing, folder, device, at_once) if ray is None else _on_ray(missing, device, ray)
    with progress("jobs", len(jobs), unit="jobs", start=len(records), every=10.0, show=show) as report:
        for record in done:
            if "error" in record:
                failed.append(f"{record['name']}: {record['error']}")
                continue
            records[record["name"]] = _keep(record, folder)
            report(len(records), accuracy=record["accuracy"])
    if failed:
        names = "; ".join(failed)
        raise JobsFailed(
            f"{len(failed)} of {len(jobs)} jobs failed; the results of the others are in {folder}. {names}"
        )
    return [records[job.name] for job in jobs]


def _here(jobs: list[Job], folder: Path, device: str, at_once: int) -> Iterable[dict[str, Any]]:
    """Run jobs; wait for one that another process is running, and use its result."""
    for start in range(0, len(jobs), at_once):
        part = jobs[start : start + at_once]
        with ExitStack() as stack:
            for name in sorted(job.name for job in part):  # in one order everywhere, to avoid deadlock
                stack.callback(in_hand(folder, name).release)
            done = {job.name: record for job in part if (record := _finished(job, folder)) is not None}
            yield from done.values()
            yield from run_jobs([job for job in part if job.name not in done], device=device, folder=folder)


def _on_ray(jobs: list[Job], device: str, address: str) -> Iterable[dict[str, Any]]:
    if not jobs:
        return
    try:
        import ray
    except ImportError:
        raise ValueError("ray needs the extra: pip install 'mmlda[ray]'") from None
    with ExitStack() as stack:
        if not ray.is_initialized():
            ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
            stack.callback(ray.shutdown)
        work: Any = ray.remote(run_jobs).options(num_cpus=1, num_gpus=int(device == "cuda"), max_retries=3)
        waiting = [work.remote([job], device=device) for job in jobs]
        while waiting:
            (ready,), waiting = ray.wait(waiting, num_returns=1)
            yield from ray.get(ready)


def fold_jobs(
    data: str | ImageData, recipe: Recipe, C: Sequence[float], folds: int, *, model: dict[str, Any], root: str | None
) -> list[Job]:
    """The jobs of a cross-validation of C: all folds of the first value, then of the next."""
    jobs = []
    for c, k in itertools.product(map(float, C), range(folds)):
        settings, part = {**model, "head": "mmlda", "C": c}, ("fold", k, folds, recipe.seed)
        jobs.append(Job(name=f"C={c!r}-fold={k}", model=settings, recipe=recipe, data=data, part=part, root=root))
    return jobs


def cross_validate(
    data: Any,
    recipe: Recipe | str,
    C: float | Iterable[float],
    folds: int = 5,
    *,
    model: dict[str, Any] | None = None,
    out: str | Path | None = None,
    root: str | None = None,
    device: str = "cpu",
    at_once: int = 1,
    ray: str | None = None,
    show: bool = True,
) -> list[dict[str, Any]]:
    """Measure the error for each C on held-out folds of the training set (Fig. 5).

    Parameters
    ----------
    data
        A name or folder for `mmlda.data.load`, or a training set: an `ImageData`, a pair (x, y), a `Dataset`.
    recipe
        How to train: a `Recipe`, or the name of one in `mmlda.RECIPES`.
    C
        The values to try, or one.
    folds
        Number of folds, at least 2.
    model
        A config for `mmlda.models.build`; by default the paper's network for images of this size.
    out
        Folder of the sweep, which makes it resumable.
    root
        Where the datasets are, see `mmlda.data.load`.
    device, at_once, ray, show
        As in `sweep`.

    Returns
    -------
    list of dict
        Per C: "C", "log10_C", "errors" (shares of the held-out images, one per fold), "mean", "std", "folds", "steps".

    Raises
    ------
    ValueError
        If C is not positive, or there are fewer than 2 folds.
    JobsFailed
        If a training fails.

    Examples
    --------
    >>> recipe = Recipe(steps=5, optimizer="adam", lr=1e-3)
    >>> [row["C"] for row in cross_validate("digits", recipe, C=[10, 100], folds=2, show=False)]
    [10.0, 100.0]
    """
    check_count("folds", folds, 2)
    recipe, values = as_recipe(recipe), C if isinstance(C, Iterable) and not isinstance(C, str) else [C]
    C = [check_positive("C", c) for c in values]
    data = str(data) if isinstance(data, str | Path) else as_images(data)
    if model is None:
        train = datasets.load(data, root)[0] if isinstance(data, str) else data
        model = network_for("mmlda", train)
    jobs = fold_jobs(data, recipe, C, folds, model=model, root=root)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out
        records = iter(sweep(jobs, folder, device=device, at_once=at_once, ray=ray, show=show))
    table = []
    for c in C:
        errors = [1 - next(records)["accuracy"] for _ in range(folds)]
        mean, std = statistics.mean(errors), statistics.stdev(errors)
        row = {"C": c, "log10_C": math.log10(c), "errors": errors, "mean": mean, "std": std}
        table.append(row | {"folds": folds, "steps": recipe.steps})
    return table
