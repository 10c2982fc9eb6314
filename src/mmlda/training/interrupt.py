"""Ctrl-C: a run stops after the step it is in and is saved; the same call resumes it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from mmlda.training.batches import share
from mmlda.training.folder import Run


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, and the loop stops after the step it is in; a second one stops at once."""
    stopped = threading.Event()
    before: dict[int, Any] = {}
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def handle(number: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()
        if hasattr(signal, "SIGCHLD"):  # PyTorch's handler raises, in the middle of a step, if a loader's worker dies
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)

    before[signal.SIGINT] = signal.signal(signal.SIGINT, handle)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def halt(stopped: threading.Event | None, due: bool, device: torch.device) -> bool:
    """Whether to stop after this step. Several processes must stop after the same one, so they agree when due."""
    asked = stopped is not None and stopped.is_set()
    if share()[1] == 1 or not due:
        return asked and share()[1] == 1
    flag = torch.tensor(float(asked), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def stop(run: Run) -> NoReturn:
    """Leave the loop after Ctrl-C; the run has been saved, unless it has no step yet."""
    if run.out is not None and run.step > 0 and share()[0] == 0:
        print(f"stopped at step {run.step} and saved; the same call with out={str(run.out)!r} resumes", file=sys.stderr)
    raise KeyboardInterrupt(f"stopped at step {run.step}") from None


@contextmanager
def errors_as_stop(run: Run, stopped: threading.Event | None, save: Callable[[], None]) -> Iterator[None]:
    """After Ctrl-C, save and stop where a loader's workers are gone: the signal has ended them unless they ignore it.

    Workers that were started before `interruptible`, or by spawning, do not. Several processes raise the error, as they
    have not agreed on a step.
    """
    try:
        yield
    except RuntimeError as error:
        gone = "DataLoader worker" in str(error)  # and not an error of the dataset
        if not gone or stopped is None or not stopped.is_set() or share()[1] > 1:
            raise
        save()
        stop(run)
