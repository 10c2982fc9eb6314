"""Algorithm 2, and the softmax baseline: one plain loop, everything on the device, resumable.

The host launches one step after another and waits for the device only to log and to save. The order of the data
and every random draw come from (seed, step), so a run killed at any moment goes on from its checkpoint to the
same weights.

`out` holds: run.json (recipe, network, data, versions), metrics.jsonl, the two newest checkpoints, and, when the
run is finished, model.safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import Tensor, nn

from mmlda._utils.files import write_json, write_whole
from mmlda._utils.progress import Report, progress
from mmlda.data import ImageData
from mmlda.models import Classifier, fast_convolutions
from mmlda.results import device_name, versions
from mmlda.training import checkpoints
from mmlda.training.recipes import Recipe
from mmlda.training.step import Average, Batches, Tally, craft_once, make_optimizer, make_step, set_rate, share

__all__ = ["Diverged", "Options", "Run", "fit", "interruptible", "sitting"]

PAUSE = 10.0  # seconds between checkpoints that nobody has asked for: the device waits while one is written


class Diverged(RuntimeError):
    """The loss became NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is carried out, which changes nothing but rounding and speed.

    Args:
        device: where to train; the model's own device by default.
        eager: on CUDA, neither compile nor capture the step. The CPU is always eager.
        deterministic: on CUDA, the same bits for the same seed; slower. The CPU always gives the same bits.
        amp: run the network in bfloat16 with a float32 loss; None: as the run in `out` has it, and otherwise on CUDA
            only. On a CPU with bfloat16 instructions it doubles the speed of a Resnet.
        checkpoint_every: steps; by default a twentieth of the run or somewhat more, so that there is a line in the log
            as well, though not within ten seconds of the one before.
        log_every: steps; a hundredth of the run by default.
        tensorboard: also write event files to `out` (extra `mmlda[tensorboard]`).
    """

    device: torch.device | str | None = None
    eager: bool = False
    deterministic: bool = False
    amp: bool | None = None
    checkpoint_every: int | None = None
    log_every: int | None = None
    tensorboard: bool = False


@dataclass
class Run:
    """What a training run did. `history` has one entry a log line, as `metrics.jsonl` does."""

    model: nn.Module
    recipe: Recipe
    out: Path | None = None
    step: int = 0
    loss: float = math.nan  # mean since the log line before
    accuracy: float = math.nan  # on the training batches since the log line before
    seconds: float = 0.0  # in the loop, over all sittings
    history: list[dict[str, float]] = field(default_factory=list)


def fit(
    model: nn.Module,
    data: ImageData,
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    device: torch.device | str | None = None,
    show: bool = True,
    **options: Any,
) -> Run:
    """Train `model` on `data`. The model given is the one trained; it comes back in eval mode.

    Args:
        model: pixels in [0, 1] -> logits; a `Classifier`, or any module with the loss "ce".
        data: images and labels, see `mmlda.data`.
        recipe: `mmlda.training.recipes.RECIPES` has the paper's.
        out: folder for checkpoints, metrics and the network. A run that is there already is gone on with.
        device: where to train; the model's own device by default.
        show: a progress bar, or a line now and then where standard error is not a terminal.
        options: see `Options`.

    >>> import mmlda
    >>> train, test = mmlda.data.load("digits")
    >>> model = mmlda.models.build({"backbone": "conv_net", "head": "mmlda"}, seed=0)
    >>> run = fit(model, train, Recipe(steps=30, optimizer="adam", lr=1e-3), show=False)
    >>> run.step, run.history[0]["loss"] > run.loss
    (30, True)
    """
    run = Run(model, recipe, None if out is None else Path(out))
    settings = Options(device=device, **options)
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cuda), interruptible() as stopped:
        torch.manual_seed(recipe.seed)  # dropout and the like
        with progress(run.out.name if run.out else "training", recipe.steps, show=show and share()[0] == 0) as report:
            for _ in sitting(run, data, settings, report=report, stopped=stopped):
                pass
    return run


def sitting(
    run: Run, data: ImageData, options: Options, *, report: Report, stopped: threading.Event | None = None
) -> Iterator[int]:
    """The training loop, as a generator that has launched one more step whenever it yields.

    `fit` exhausts one; `mmlda.training.sweeps.fit_many` takes turns with several, each on a CUDA stream of its own.
    """
    model, out = run.model, run.out
    if isinstance(model, Classifier) and model.num_classes < data.num_classes:
        raise ValueError(f"model has {model.num_classes} classes: expected at least the {data.num_classes} of the data")
    device = _device(model, options)
    model.to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if out is None:
        yield from _steps(run, data, options, device, report, stopped)
        return
    lock = _lock(out)
    try:
        if options.amp is None and (out / "run.json").is_file():  # begun on another device, perhaps
            options = dataclasses.replace(options, amp=checkpoints.read_about(out).get("amp"))
        _open(run, data, options, device)
        if (finished := checkpoints.final(out)) is not None:
            _reload(run, finished)
        else:
            yield from _steps(run, data, options, device, report, stopped)
    finally:  # also for one that keeps the error, as a notebook does: the same call then goes on
        lock.release()


def _steps(
    run: Run,
    data: ImageData,
    options: Options,
    device: torch.device,
    report: Report,
    stopped: threading.Event | None,
) -> Iterator[int]:
    model, recipe, out = run.model, run.recipe, run.out
    model.train()
    batches = Batches(data, recipe, device)
    optimizer = make_optimizer(model, recipe, device)
    if recipe.adversary is not None and recipe.adversary.craft == "once":
        _craft_from_the_start(run, batches)
    average = Average(model, recipe.average) if recipe.average else None
    if out is not None:
        _resume(run, optimizer, average)
    step, earlier, begin = run.step, run.seconds, time.perf_counter()
    tally = Tally(device, step, run.loss)
    modes = {"eager": options.eager, "deterministic": options.deterministic, "amp": _amp(options, device)}
    launch = make_step(model, batches, optimizer, tally, average, **modes)
    log_every = options.log_every or max(1, recipe.steps // 100)
    save_every = options.checkpoint_every or log_every * math.ceil(max(1, recipe.steps // 20) / log_every)
    writer = _event_writer(out) if options.tensorboard else None
    rate, logged, saved, written = math.nan, (step, begin), step if run.step else -1, begin
    pause = PAUSE if options.checkpoint_every is None and share()[1] == 1 else 0.0  # processes agree by steps alone
    batches.seek(step)
    report(step, start=True)
    while step < recipe.steps:
        if step % batches.per_epoch == 0:
            batches.seek(step)
        if recipe.rate(step) != rate:
            rate = recipe.rate(step)
            set_rate(optimizer, rate)
        launch()
        step += 1
        halt = _halt(stopped, step % min(log_every, 50) == 0, device)
        log = halt or step == recipe.steps or step % log_every == 0
        due = step % save_every == 0 and time.perf_counter() - written >= pause
        save = out is not None and (halt or step == recipe.steps or due)
        if log or save:
            loss, accuracy, bad, last = tally.read()  # waits for the device
            now = time.perf_counter()
            run.step, run.loss, run.accuracy, run.seconds = step, loss, accuracy, earlier + now - begin
            what = f"loss is not finite at step {bad}" if bad >= 0 else ""
            if save and not what and not _finite(model):
                what = f"weights are not finite after step {step}"
            if what:
                kept = f"the checkpoint of step {saved} is kept in {out}" if saved >= 0 else "no checkpoint was kept"
                before = f"the last finite loss was {last:.6g}" if math.isfinite(last) else "no loss before it was"
                raise Diverged(f"{what}; {before}; {kept}")
            speed = (step - logged[0]) / max(now - logged[1], 1e-9)
            logged = step, now
            entry = {"step": step, "loss": loss, "accuracy": accuracy, "lr": rate, "steps_per_second": speed,
                     "seconds": run.seconds}  # fmt: skip
            run.history.append(entry)
            _log(run, entry, writer)
            report(step, loss=loss, accuracy=accuracy)
        if save:
            _save(run, optimizer, average)
            saved, written = step, time.perf_counter()
        if halt and step < recipe.steps:
            if out is not None and share()[0] == 0:
                print(f"stopped at step {step} and saved; the same call with out={str(out)!r} goes on", file=sys.stderr)
            raise KeyboardInterrupt(f"stopped at step {step}")
        yield step
    run.step = step
    if average is not None:
        average.store()
    model.eval()
    fast_convolutions(model, False)
    if out is not None and share()[0] == 0:
        checkpoints.save_weights(out / "model.safetensors", model.state_dict())


def _device(model: nn.Module, options: Options) -> torch.device:
    if options.device is None:
        first = next(model.parameters(), None)
        return first.device if first is not None else torch.device("cpu")
    device = torch.device(options.device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _amp(options: Options, device: torch.device) -> bool:
    return device.type == "cuda" if options.amp is None else options.amp


def _halt(stopped: threading.Event | None, due: bool, device: torch.device) -> bool:
    """Whether to stop after this step. Several processes must stop after the same one: they agree when it is due."""
    asked = stopped is not None and stopped.is_set()
    if share()[1] == 1 or not due:
        return asked and share()[1] == 1
    flag = torch.tensor(float(asked), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _finite(model: nn.Module) -> bool:
    """Whether every weight is a number: a checkpoint that is none would be no use."""
    return bool(torch.stack([p.detach().isfinite().all() for p in model.parameters()]).all())


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, and the loop stops after the step it is in; a second one stops at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def handle(number: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------------- the run's folder


def describe(model: nn.Module, data: ImageData, recipe: Recipe) -> dict[str, Any]:
    """What decides a run's result but for the weights it starts from, as JSON: a folder is for one such description."""
    try:
        config = model.config
    except (AttributeError, ValueError):
        config = None  # a backbone of the user's own
    value = {
        "recipe": dataclasses.asdict(recipe),
        "model": config,
        "data": {"name": data.name, "images": len(data), "sha256": data.digest()},
        "processes": share()[1],
    }
    return json.loads(json.dumps(value))  # tuples as lists, as they come back from the file


def _lock(out: Path) -> FileLock:
    """Keep the folder to this process for as long as it trains there; a kill gives it back."""
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / f".lock-{share()[0]}")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"out = {str(out)!r}: another process is training there; expected a free folder") from None
    if share()[0] == 0:  # the one process that writes here: no other knows which files are still being written
        for stray in out.glob(".*.tmp"):  # of a process that was killed
            stray.unlink(missing_ok=True)
    return lock


def _open(run: Run, data: ImageData, options: Options, device: torch.device) -> None:
    """Write run.json, or check that the one there describes this very run."""
    assert run.out is not None
    path, about = run.out / "run.json", describe(run.model, data, run.recipe) | {"amp": _amp(options, device)}
    if path.is_file():
        there = {"amp": about["amp"], **checkpoints.read_about(run.out)}  # older ones do not say
        for part, value in about.items():
            if part == "recipe" and isinstance(there.get(part), dict):  # fields added since have their defaults
                there[part] = json.loads(json.dumps(dataclasses.asdict(Recipe.from_dict(there[part]))))
            if there.get(part) != value:
                what = difference(part, there.get(part), value)
                raise ValueError(f"out = {str(run.out)!r} holds another run: {what}; choose another folder")
    elif share()[0] == 0:
        write_json(path, {**about, "versions": {**versions(), "device": device_name(device)}})
    if share()[1] > 1:
        dist.barrier()


def difference(part: str, there: Any, asked: Any) -> str:
    """In words, where what was asked for is not what is there."""
    if isinstance(there, dict) and isinstance(asked, dict):
        for key in sorted({*there, *asked}):
            if there.get(key) != asked.get(key):
                return f"{part}.{key} is {there.get(key)!r} there, and {asked.get(key)!r} was asked for"
    return f"{part} is {there!r} there, and {asked!r} was asked for"


def _state(run: Run, optimizer: torch.optim.Optimizer, average: Average | None) -> dict[str, Tensor]:
    """Everything needed to go on, as named tensors: weights, their average, the moments, the global generators."""
    tensors = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    if average is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in average.tensors.items()}
    for number, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(value) for name, value in moments.items()
                    if value is not None}  # fmt: skip
    tensors["generator.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["generator.cuda"] = torch.cuda.get_rng_state()
    return tensors


def _save(run: Run, optimizer: torch.optim.Optimizer, average: Average | None) -> None:
    assert run.out is not None
    if share()[0] == 0:
        record = {"seconds": run.seconds, "loss": run.loss, "accuracy": run.accuracy}
        checkpoints.save(run.out, run.step, _state(run, optimizer, average), record)
    if share()[1] > 1:
        dist.barrier()


def _resume(run: Run, optimizer: torch.optim.Optimizer, average: Average | None) -> None:
    """Bring network, optimizer, generators and metrics back to the newest checkpoint, if there is one."""
    assert run.out is not None
    found = checkpoints.newest(run.out)
    metrics = run.out / "metrics.jsonl"
    text = metrics.read_text(errors="replace") if metrics.is_file() else ""
    if found is not None:
        tensors, record = found
        run.step, run.seconds = record["step"], record["seconds"]
        run.loss, run.accuracy = record["loss"], record["accuracy"]
        run.model.load_state_dict(_under("model.", tensors))
        if average is not None:
            average.load(_under("average.", tensors))
        state: dict[int, dict[str, Tensor]] = {}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for name, tensor in _under("optimizer.", tensors).items():
            number, moment = name.split(".", 1)
            like = parameters[int(number)]
            if tensor.shape == like.shape:  # the fused kernels take for granted that moments lie as parameters do
                tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
            state.setdefault(int(number), {})[moment] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["generator.cpu"])
        if "generator.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["generator.cuda"])
    run.history = [entry for entry in _entries(text) if entry["step"] <= run.step]
    kept = "".join(json.dumps(entry) + "\n" for entry in run.history)
    if share()[0] == 0 and kept != text:  # steps that will be done again, or a line without its end
        write_whole(metrics, kept.encode())


def _entries(text: str) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, without the half of one that a kill can leave."""
    entries = []
    for line in text.splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                entries.append(entry)
    return entries


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _reload(run: Run, weights: dict[str, Tensor]) -> None:
    """The network of a run that is finished already."""
    assert run.out is not None
    run.model.load_state_dict(weights)
    run.model.eval()
    run.step, metrics = run.recipe.steps, run.out / "metrics.jsonl"
    run.history = _entries(metrics.read_text(errors="replace")) if metrics.is_file() else []
    if run.history:
        run.loss, run.accuracy, run.seconds = (run.history[-1][name] for name in ("loss", "accuracy", "seconds"))


def _craft_from_the_start(run: Run, batches: Batches) -> None:
    """Craft on the network as it was given, also when the run is gone on with: its weights are kept for that."""
    if run.out is not None:
        path = run.out / "start.safetensors"
        if path.is_file():
            run.model.load_state_dict(checkpoints.read_weights(path))
        elif share()[0] == 0:
            checkpoints.save_weights(path, run.model.state_dict())
    craft_once(run.model, batches)


def _log(run: Run, entry: dict[str, float], writer: Any) -> None:
    if share()[0] != 0:
        return
    if run.out is not None:
        with open(run.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
    if writer is not None:
        for name in ("loss", "accuracy", "lr", "steps_per_second"):
            writer.add_scalar(name, entry[name], int(entry["step"]))
        writer.flush()


def _event_writer(out: Path | None) -> Any:
    if out is None:
        raise ValueError("tensorboard = True: expected a folder out= to write to")
    if share()[0] != 0:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard = True: expected the extra, pip install 'mmlda[tensorboard]'") from None
    return SummaryWriter(str(out))
