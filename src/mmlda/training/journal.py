"""The journal of a run: its log, validations and checkpoints, each when it is due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mmlda._utils.progress import Report
from mmlda.training import folder
from mmlda.training.batches import share
from mmlda.training.folder import Run
from mmlda.training.step import Average, Tally

if TYPE_CHECKING:
    from mmlda.training.loop import Options

PAUSE = 10.0  # seconds between checkpoints by default: the device waits while one is written


class Diverged(RuntimeError):
    """The loss became NaN or infinite."""


class Journal:
    """Logs, validates and saves when it is due; the loop waits for the device only here."""

    def __init__(
        self,
        run: Run,
        options: Options,
        tally: Tally,
        average: Average | None,
        save: Callable[[], None],
        report: Report,
    ):
        self.run, self.tally, self.average, self.save, self.report = run, tally, average, save, report
        steps = run.recipe.steps
        self.log_every = options.log_every or max(1, steps // 100)
        self.save_every = options.checkpoint_every or self.log_every * math.ceil(max(1, steps // 20) / self.log_every)
        # Processes must agree when to save, which they do by steps alone.
        self.pause = PAUSE if options.checkpoint_every is None and share()[1] == 1 else 0.0
        self.writer = folder.event_writer(run.out) if options.tensorboard else None
        self.begin = self.written = self.logged = time.perf_counter()
        self.earlier, self.logged_step, self.saved_step = run.seconds, run.step, run.step or -1

    def after(self, step: int, rate: float, halt: bool) -> bool:
        """Log, validate and save if due; return whether the run is done."""
        done, validation = step == self.run.recipe.steps, self.run.validation
        due = step % self.save_every == 0 and time.perf_counter() - self.written >= self.pause
        save = self.run.out is not None and (halt or done or due)
        validate = validation is not None and (done or step % validation.every == 0)
        if halt or done or save or validate or step % self.log_every == 0:
            self._log(step, rate, save, validate)
        if validate and validation is not None and validation.exhausted:
            done = True
            save = self.run.out is not None
        if save:
            self.save()
            self.saved_step, self.written = step, time.perf_counter()
        return done

    def close(self, step: int, rate: float) -> None:
        """Log and save the last step, unless that is done; its validation, if one was due, is left out."""
        if step != self.logged_step:
            self._log(step, rate, True, False)
        if self.run.out is not None and step > max(self.saved_step, 0):
            self.save()

    def _log(self, step: int, rate: float, save: bool, validate: bool) -> None:
        run = self.run
        loss, accuracy, bad, last = self.tally.read()  # waits for the device
        now = time.perf_counter()
        run.step, run.loss, run.accuracy, run.seconds = step, loss, accuracy, self.earlier + now - self.begin
        self._check(step, bad, last, save or validate)
        speed = (step - self.logged_step) / max(now - self.logged, 1e-9)
        self.logged_step, self.logged = step, now
        entry = {"step": step, "loss": loss, "accuracy": accuracy, "lr": rate, "steps_per_second": speed}
        entry["seconds"] = run.seconds
        measured = {}
        if validate and run.validation is not None:
            measured["validation"] = run.validation.measure(run.model, self.average, step)
        entry |= measured
        run.history.append(entry)
        folder.log(run, entry, self.writer)
        self.report(step, start=False, loss=loss, accuracy=accuracy, **measured)

    def _check(self, step: int, bad: int, last: float, save: bool) -> None:
        """Raise where the loss or, before a checkpoint, a weight is not finite."""
        what = f"loss is not finite at step {bad}" if bad >= 0 else ""
        weights = [p.detach().isfinite().all() for p in self.run.model.parameters()] if save and not what else []
        if weights and not bool(torch.stack(weights).all()):  # such a checkpoint would be useless
            what = f"weights are not finite after step {step}"
        if what:
            saved = f"the checkpoint of step {self.saved_step} is kept in {self.run.out}"
            kept = saved if self.saved_step >= 0 else "no checkpoint was kept"
            before = f"the last finite loss was {last:.6g}" if math.isfinite(last) else "no loss before it was"
            raise Diverged(f"{what}; {before}; {kept}")
