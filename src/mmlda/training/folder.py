"""The folder of a training run: its description, log, checkpoints and finished network.

A folder holds run.json (recipe, network, data, versions), metrics.jsonl, the two newest checkpoints and, once the run
has finished, model.safetensors. It belongs to one run: another description is rejected, except for more steps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmlda._utils.checks import damaged
from mmlda._utils.device import device_of
from mmlda._utils.files import parse_json, write_whole
from mmlda._utils.training_data import remembered
from mmlda.data import ImageData
from mmlda.results import device_name, versions, weights_digest
from mmlda.training import checkpoints
from mmlda.training.batches import share
from mmlda.training.checkpoints import under
from mmlda.training.loader import describe_loader
from mmlda.training.recipes import Recipe
from mmlda.training.step import Average
from mmlda.training.validation import Validation


@dataclass(repr=False)
class Run:
    """A training run. Printing it shows a summary.

    Parameters
    ----------
    model
        The network.
    recipe
        How it was trained.
    out
        Folder of the run.
    step
        Steps taken.
    loss
        Mean training loss since the previous log line.
    accuracy
        Accuracy on the training batches since the previous log line.
    seconds
        Time spent in the loop, also before the run was resumed.
    history
        One entry per log line, as in `metrics.jsonl`.
    teacher
        The teacher of a recipe with `distill`.
    validation
        The best validation accuracy, and when it was reached.
    """

    model: nn.Module
    recipe: Recipe
    out: Path | None = None
    step: int = 0
    loss: float = math.nan
    accuracy: float = math.nan
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    teacher: nn.Module | None = None
    validation: Validation | None = None

    def __repr__(self) -> str:
        lines = [f"{self.step} of {self.recipe.steps} steps in {self.seconds:.0f} s"]
        lines.append(f"loss {self.loss:.4g}, accuracy {self.accuracy:.2%} on the latest training batches")
        if self.validation is not None:
            lines.append(f"best validation accuracy {self.validation.best:.2%} at step {self.validation.best_step}")
        if self.out is not None:
            lines.append(f"the network is in {self.out}")
        return f"{type(self.model).__name__} trained: " + "\n  ".join(lines)


def describe(model: nn.Module, data: ImageData | DataLoader[Any], recipe: Recipe) -> dict[str, Any]:
    """What determines a run's result except its initial weights, as JSON; a folder belongs to one description."""
    try:
        config = model.config
    except (AttributeError, ValueError):
        config = None  # a custom backbone
    about = {"name": data.name, "images": len(data), "sha256": data.digest()} if isinstance(data, ImageData) else None
    value = {
        "recipe": dataclasses.asdict(recipe),
        "model": config,
        "data": about or describe_loader(data),  # type: ignore[arg-type]
        "processes": share()[1],
        **remembered(model),
    }
    return json.loads(json.dumps(value))  # tuples as lists, as they come back from the file


def lock(out: Path) -> FileLock:
    """Lock the folder while this process trains in it; the lock is released if the process is killed."""
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / f".lock-{share()[0]}")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"out must be a folder in which no other process trains, got {str(out)!r}") from None
    if share()[0] == 0:  # the one process that writes here: no other knows which files are still being written
        for stray in out.glob(".*.tmp"):  # of a process that was killed
            stray.unlink(missing_ok=True)
    return lock


def open_run(run: Run, data: ImageData | DataLoader[Any], device: torch.device, *, amp: bool) -> None:
    """Write run.json, or check that the existing one describes this run."""
    assert run.out is not None
    path, about = run.out / "run.json", describe(run.model, data, run.recipe) | {"amp": amp}
    if run.teacher is not None:
        about["teacher"] = weights_digest(run.teacher.state_dict())
    if run.validation is not None:
        about["validation"] = run.validation.describe()
    if path.is_file():
        written = checkpoints.read_about(run.out)
        there = {"amp": about["amp"], **remembered(run.model), **written}  # older ones do not say
        steps = max(written["recipe"]["steps"], run.recipe.steps)  # a run can be lengthened
        if (what := difference(_with_steps(there, steps), about)) is not None:
            raise ValueError(f"out must be a folder without another run, got {str(run.out)!r}: {what}")
        if steps > written["recipe"]["steps"] and share()[0] == 0:
            checkpoints.write_about(run.out, _with_steps(written, steps), sealed="sha256" in written)
            (run.out / "model.safetensors").unlink(missing_ok=True)  # its last checkpoint is continued
        _compare_versions(run.out, written, device)
    elif share()[0] == 0:
        start = weights_digest(run.model.state_dict())
        checkpoints.write_about(run.out, {**about, "start": start, "versions": _versions(device)})
    if share()[1] > 1:
        dist.barrier()


def _versions(device: torch.device) -> dict[str, str]:
    return {**versions(), "device": device_name(device)}


def _compare_versions(out: Path, written: dict[str, Any], device: torch.device) -> None:
    """Warn if a run is resumed with other software, threads or another device than it began with."""
    if (out / "model.safetensors").is_file() or not any(out.glob("step-*.json")):
        return
    now, then = _versions(device), written.get("versions", {})
    names = [name for name in ("mmlda", "torch", "device", "threads") if then.get(name, now[name]) != now[name]]
    if changed := [f"{name} {then[name]}, now {now[name]}" for name in names]:
        what = "; ".join(changed)
        warnings.warn(f"the run in {out} was begun with {what}: its weights may differ by rounding", stacklevel=5)


def _with_steps(about: dict[str, Any], steps: int) -> dict[str, Any]:
    """A run's description with another number of steps."""
    return {**about, "recipe": {**about["recipe"], "steps": steps}}


def difference(there: dict[str, Any], asked: dict[str, Any]) -> str | None:
    """In words, the first part of a description that differs from the request; newer recipe fields have defaults."""
    for part, value in asked.items():
        old = there.get(part)
        if part == "recipe" and isinstance(old, dict):
            old = json.loads(json.dumps(dataclasses.asdict(Recipe.from_dict(old))))
        if old == value:
            continue
        if isinstance(old, dict) and isinstance(value, dict):
            key = next(key for key in sorted({*old, *value}) if old.get(key) != value.get(key))
            part, old, value = f"{part}.{key}", old.get(key), value.get(key)
        return f"{part} is {old!r} there, but {value!r} was requested"
    return None


def _state(run: Run, optimizer: torch.optim.Optimizer, average: Average | None) -> dict[str, Tensor]:
    """Everything needed to resume, as named tensors: weights, their average, the moments, the global generators."""
    tensors = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    if average is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in average.tensors.items()}
    for number, moments in optimizer.state_dict()["state"].items():
        given = {name: torch.as_tensor(value) for name, value in moments.items() if value is not None}
        tensors |= {f"optimizer.{number}.{name}": value for name, value in given.items()}
    if run.validation is not None:
        tensors |= {f"best.{name}": tensor for name, tensor in run.validation.weights.items()}
    tensors["generator.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["generator.cuda"] = torch.cuda.get_rng_state()
    return tensors


def save(run: Run, optimizer: torch.optim.Optimizer, average: Average | None) -> None:
    assert run.out is not None
    if share()[0] == 0:
        record: dict[str, Any] = {"seconds": run.seconds, "loss": run.loss, "accuracy": run.accuracy}
        if run.validation is not None:
            record["validation"] = run.validation.state()
        record["run"] = checkpoints.identity(checkpoints.read_about(run.out))
        checkpoints.save(run.out, run.step, _state(run, optimizer, average), record)
    if share()[1] > 1:
        dist.barrier()


def resume(run: Run, optimizer: torch.optim.Optimizer, average: Average | None) -> None:
    """Bring network, optimizer, generators and metrics back to the newest checkpoint, if there is one."""
    assert run.out is not None
    found = checkpoints.newest(run.out, checkpoints.read_about(run.out))
    metrics = run.out / "metrics.jsonl"
    text = metrics.read_text(errors="replace") if metrics.is_file() else ""
    if found is not None:
        try:
            _continue(run, optimizer, average, *found)
        except (KeyError, IndexError, TypeError, RuntimeError, ValueError) as error:
            raise damaged(run.out, "a run whose checkpoint fits it", f"one that does not ({error})") from None
    run.history = [entry for entry in _entries(text) if entry["step"] <= run.step]
    kept = "".join(json.dumps(entry) + "\n" for entry in run.history)
    if share()[0] == 0 and kept != text:  # steps that will be done again, or a line without its end
        write_whole(metrics, kept.encode())


def _continue(
    run: Run,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    tensors: dict[str, Tensor],
    record: dict[str, Any],
) -> None:
    """Bring network, optimizer and generators back to a checkpoint."""
    run.step, run.seconds = record["step"], record["seconds"]
    run.loss, run.accuracy = record["loss"], record["accuracy"]
    run.model.load_state_dict(under("model.", tensors))
    if average is not None:
        average.load(under("average.", tensors))
    if run.validation is not None and "validation" in record:
        device = device_of(run.model)
        run.validation = dataclasses.replace(run.validation, **record["validation"])
        run.validation.weights = {name: tensor.to(device) for name, tensor in under("best.", tensors).items()}
    state: dict[int, dict[str, Tensor]] = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in under("optimizer.", tensors).items():
        number, moment = name.split(".", 1)
        like = parameters[int(number)]
        if tensor.shape == like.shape:  # fused kernels assume that moments have the layout of parameters
            tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
        state.setdefault(int(number), {})[moment] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["generator.cpu"])
    if "generator.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["generator.cuda"])


def _entries(text: str) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, without the incomplete one that a kill can leave."""
    entries = []
    for line in text.splitlines():
        with suppress(ValueError):
            entry = parse_json(line)
            numbers = isinstance(entry, dict) and all(isinstance(value, int | float) for value in entry.values())
            if numbers and {"step", "loss", "accuracy", "seconds"} <= entry.keys():
                entries.append(entry)
    return entries


def reload(run: Run, weights: dict[str, Tensor]) -> None:
    """The network of a finished run."""
    assert run.out is not None
    run.model.load_state_dict(weights)
    run.model.eval()
    run.step, metrics = run.recipe.steps, run.out / "metrics.jsonl"  # fewer where it has stopped early
    run.history = _entries(metrics.read_text(errors="replace")) if metrics.is_file() else []
    if run.history:
        run.loss, run.accuracy, run.seconds = (run.history[-1][name] for name in ("loss", "accuracy", "seconds"))
        run.step = int(run.history[-1]["step"])
    measured = [entry for entry in run.history if "validation" in entry]
    if run.validation is not None and measured:
        best = max(measured, key=lambda entry: entry["validation"])  # the first of equals, as in the loop
        run.validation.best, run.validation.best_step = best["validation"], int(best["step"])


def log(run: Run, entry: dict[str, float], writer: Any) -> None:
    if share()[0] != 0:
        return
    if run.out is not None:
        with open(run.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
    if writer is not None:
        for name in ("loss", "accuracy", "validation", "lr", "steps_per_second"):
            if name in entry:
                writer.add_scalar(name, entry[name], int(entry["step"]))
        writer.flush()


def event_writer(out: Path | None) -> Any:
    if out is None:
        raise ValueError("out must be a folder where tensorboard=True, got None")
    if share()[0] != 0:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard=True needs the extra: pip install 'mmlda[tensorboard]'") from None
    return SummaryWriter(str(out))
