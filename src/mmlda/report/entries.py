"""Results as the page handles them: numbered, in the page's order, and numbers as they are set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmlda.results import Result

__all__ = [
    "Entry",
    "by_attack",
    "by_data",
    "by_model",
    "counted",
    "fixed",
    "grouped",
    "notes_of",
    "number",
    "of_kind",
    "plain",
    "rank",
    "size",
]

DATA = {"digits": "digits", "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
MODELS = ("SR", "SR (Adam)", "SR + SAT", "SR + HAT", "MM-LDA", "MM-LDA (Adam)", "MM-LDA, true priors",
          "SR, MM-LDA's recipe")  # fmt: skip
ATTACKS = ("", "FGSM", "BIM", "ILCM", "JSMA")


@dataclass(frozen=True)
class Entry:
    """A result, the number the page knows it by, and the folder its outcomes lie in."""

    id: int
    result: Result
    folder: Path

    def at(self, key: str) -> str:
        """Its place, in words: a cell may hold anything."""
        return str(self.result.cell.get(key, ""))

    @property
    def data(self) -> str:
        return DATA.get(self.at("data"), self.at("data"))

    @property
    def model(self) -> str:
        return self.at("model")

    @property
    def eps(self) -> float | None:
        return number(self.result.cell.get("eps"))


def number(value: Any) -> float | None:
    """A finite number, or None for whatever else a file may hold.

    >>> number(3), number("3"), number(float("nan")), number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def fixed(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """A number as it is set in a table, with a true minus; a dash where there is none.

    >>> fixed(-0.04), fixed(-91.2, sign=True), fixed(None)
    ('0.0', '−91.2', '–')
    """
    if value is None:
        return "–"
    value = round(value, digits) + 0.0  # no minus zero
    return f"{value:{'+' if sign and value else ''}.{digits}f}".replace("-", "−")


def plain(value: float | None) -> str:
    """A setting such as eps, in as few digits as it has: 0.2, not 0.20."""
    return "–" if value is None else f"{value:.4g}".replace("-", "−")


def size(eps: float | None) -> str:
    """A perturbation as it is usually written.

    >>> size(8 / 255), size(0.04), size(0.2)
    ('8/255', '0.04', '0.2')
    """
    text = plain(eps)
    steps = 0 if eps is None else round(255 * eps)
    return f"{steps}/255" if eps is not None and len(text) > 5 and abs(255 * eps - steps) < 1e-6 else text


def rank(order: Iterable[str]) -> Callable[[str], tuple[int, str]]:
    """A sorting key: names in the order given, then the others by name."""
    place = {name: k for k, name in enumerate(order)}
    return lambda name: (place.get(name, len(place)), name)


by_data, by_model, by_attack = rank(DATA.values()), rank(MODELS), rank(ATTACKS)


def of_kind(entries: list[Entry], kind: str) -> list[Entry]:
    """Those of one kind, in the page's order."""
    found = [entry for entry in entries if entry.result.kind == kind]
    return sorted(found, key=lambda e: (by_data(e.data), by_model(e.model), e.eps or 0.0, e.id))


def counted(name: str) -> tuple[str, int]:
    """A key to sort names by that end in a number.

    >>> sorted(["BP1-10", "BP1-2", "BP2-1"], key=counted)
    ['BP1-2', 'BP1-10', 'BP2-1']
    """
    family, _, count = name.rpartition("-")
    return (family, int(count)) if count.isdecimal() else (name, 0)


def grouped(entries: list[Entry], key: Callable[[Entry], Any]) -> dict[Any, list[Entry]]:
    """Entries by key, keys in the order they first come."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def notes_of(entries: list[Entry], most: int = 4) -> list[str]:
    """What the results say has to be known before quoting them: their scale, above all."""
    notes = []
    several = len({entry.data for entry in entries}) > 1
    for note, group in grouped([entry for entry in entries if entry.result.note], lambda e: str(e.result.note)).items():
        places = sorted({entry.data for entry in group if entry.data}, key=by_data)
        notes.append(f"{', '.join(places)}: {note}" if several and places else note)
    more = [f"{len(notes) - most} more notes are with the numbers."] if len(notes) > most else []
    return notes[:most] + more
