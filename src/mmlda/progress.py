"""A bar with rate, numbers and time left on a terminal; a line now and then everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Report", "progress"]


class Report(Protocol):
    def __call__(self, done: int, *, start: bool = False, **numbers: float) -> None: ...


def _words(numbers: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


@contextmanager
def progress(
    title: str, total: int, *, unit: str = "steps", start: int = 0, every: float = 30.0, show: bool = True
) -> Iterator[Report]:
    """`report(done, loss=..., accuracy=...)` moves the bar. Standard error only, so that output can be piped.

    `report(done, start=True)` says what was done in an earlier sitting, which the rate leaves out.
    """
    if not show:
        yield lambda done, *, start=False, **numbers: None
        return
    begin, first = time.monotonic(), start
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TextColumn("{task.fields[numbers]}"), TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total, completed=start, numbers="")

            def report(done: int, *, start: bool = False, **numbers: float) -> None:
                nonlocal begin, first
                if start:
                    begin, first = time.monotonic(), done
                    bar.reset(task, completed=done)
                    return
                rate = (done - first) / max(time.monotonic() - begin, 1e-9)
                bar.update(task, completed=done, numbers=f"{rate:.1f} {unit}/s  {_words(numbers)}")

            yield report
        return

    said = begin

    def line(done: int, *, start: bool = False, **numbers: float) -> None:
        nonlocal begin, first, said
        now = time.monotonic()
        if start:
            begin, first = now, done
            return
        if now - said < every and done < total:
            return
        said = now
        rate = (done - first) / max(now - begin, 1e-9)
        left = (total - done) / rate if rate else float("inf")
        print(f"{title}: {done}/{total} {unit}  {rate:.1f} {unit}/s  {_words(numbers)}  {left:.0f} s left",
              file=sys.stderr, flush=True)  # fmt: skip

    yield line
