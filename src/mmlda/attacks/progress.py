"""Progress of an attack on standard error, shown after two seconds."""

from __future__ import annotations

import sys
import time

_PATIENCE = 2.0  # seconds before anything is shown
_WIDTH = 30


class Bar:
    """Progress of one call: a bar on a terminal, a line every 10 seconds elsewhere.

    Parameters
    ----------
    title : str
        What is shown in front.
    total : float
        Approximate largest number of steps of the call.
    show : bool or None
        None shows the bar on a terminal only.
    """

    def __init__(self, title: str, total: float, show: bool | None) -> None:
        self.title, self.total, self.done, self.weight = title, total, 0.0, 1.0
        self.terminal = sys.stderr.isatty()
        self.show = self.terminal if show is None else show
        self._begin = time.monotonic()
        self._next, self._every = self._begin + _PATIENCE, 0.2 if self.terminal else 10.0
        self._drawn = False

    def tick(self) -> None:
        """One step more."""
        self.done += self.weight
        if self.show and (now := time.monotonic()) >= self._next:
            self._next, share = now + self._every, min(self.done / self.total, 1.0)
            full = round(_WIDTH * share)
            text = f"{self.title} [{'#' * full}{'-' * (_WIDTH - full)}] {share:4.0%} {now - self._begin:.0f} s"
            print(
                f"\r{text}" if self.terminal else text, end="" if self.terminal else "\n", file=sys.stderr, flush=True
            )
            self._drawn = self.terminal

    def close(self) -> None:
        """Clear the bar's line."""
        if self._drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
