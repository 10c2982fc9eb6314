"""A bar with rate, numbers and time left on a terminal; a line now and then everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress


class Report(Protocol):
    def __call__(self, done: int, *, start: bool = False, **numbers: float) -> None: ...


def _words(numbers: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _left(count: int, rate: float) -> str:
    """Time left, from the rate so far.

    >>> _left(90, 2.0), _left(90_000, 2.0), _left(1, 0.0)
    ('45 s left', '12 h 30 min left', '')
    """
    if rate <= 0:
        return ""
    seconds = count / rate
    if seconds < 120:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min left"


@contextmanager
def progress(
    title: str, total: int, *, unit: str = "steps", start: int = 0, every: float = 30.0, show: bool = True
) -> Iterator[Report]:
    """`report(done, loss=..., accuracy=...)` moves the bar. Standard error only, so that output can be piped.

    `report(done, start=True)` sets what an earlier run had done, which the rate leaves out.
    """
    if not show:
        yield lambda done, *, start=False, **numbers: None
        return
    begin = said = time.monotonic()
    first, bar = start, _bar(title, total, start) if sys.stderr.isatty() else None

    def report(done: int, *, start: bool = False, **numbers: float) -> None:
        nonlocal begin, first, said
        now = time.monotonic()
        if start:
            begin, first = now, done
            if bar is not None:
                bar.reset(bar.task_ids[0], completed=done)
            return
        rate = (done - first) / max(now - begin, 1e-9)
        words = f"{rate:.3g} {unit}/s  {_words(numbers)}  {_left(total - done, rate)}"
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, numbers=words)
        elif now - said >= every or done >= total:
            said = now
            print(f"{title}: {done}/{total} {unit}  {words}", file=sys.stderr, flush=True)

    with bar or nullcontext():
        yield report


def _bar(title: str, total: int, start: int) -> Progress:
    """A bar on the terminal, with one task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    name, numbers = TextColumn("{task.description}"), TextColumn("{task.fields[numbers]}")
    columns = (name, BarColumn(), MofNCompleteColumn(), numbers, TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task(title, total=total, completed=start, numbers="")
    return bar
