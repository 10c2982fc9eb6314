"""Results as the page handles them: numbered, in the page's order, with numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from mmlda._utils.text import eps_text
from mmlda.results import Result, label, network_label, plain_head

DATA = {"digits": "digits", "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
MODELS = ["SR", "SR (Adam)", "SR + SAT", "SR + HAT", "MM-LDA", "MM-LDA (Adam)", "MM-LDA, true priors"]
MODELS += ["SR, MM-LDA's recipe"]
ATTACKS = ("", "FGSM", "BIM", "ILCM", "JSMA")
ATTACK_WORDS = {"CarliniWagner": "C&W", "WorstCase": "worst case"}
UNITS = {"share": "%", "share difference": "points"}  # of a file, and of what is printed


@dataclass(frozen=True)
class Entry:
    """A result, the number the page knows it by, the folder that was read, and the file in it."""

    id: int
    result: Result
    folder: Path
    file: str

    def at(self, key: str) -> str:
        """A further coordinate, in words: a cell may hold anything."""
        return str(self.result.cell.get(key, ""))

    @property
    def data(self) -> str:
        """The dataset in words."""
        return DATA.get(self.result.dataset, str(self.result.dataset))

    @property
    def model(self) -> str:
        """The network in words, with its priors if they were exchanged; a claim is not about one."""
        return "" if self.result.kind == "claim" else label(self.result)

    @property
    def network(self) -> str:
        """The network alone, in words."""
        return "" if self.result.kind == "claim" else network_label(self.result)

    @property
    def plain_head(self) -> str:
        """The head of the two networks that the paper is about, SR and MM-LDA; "" for others."""
        return "" if self.result.kind == "claim" else plain_head(self.result)

    @property
    def attack(self) -> str:
        """The attack in words."""
        return ATTACK_WORDS.get(self.result.attack, str(self.result.attack))

    @property
    def target(self) -> str:
        return str(self.result.target)

    @property
    def eps(self) -> float | None:
        return number(self.result.eps)

    @property
    def value(self) -> float | None:
        """The number as it is printed: a share in percent."""
        return self._printed(self.result.value)

    @property
    def paper(self) -> float | None:
        return self._printed(self.result.paper)

    @property
    def difference(self) -> float | None:
        both = self.value is not None and self.paper is not None
        return self.value - self.paper if both else None  # type: ignore[operator]

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends as they are printed; None if they are not two numbers."""
        ends = self.result.interval
        both = [self._printed(end) for end in ends] if isinstance(ends, tuple) and len(ends) == 2 else []
        return (both[0], both[1]) if both and None not in both else None  # type: ignore[return-value]

    @property
    def unit(self) -> str:
        """The unit of the printed number."""
        return UNITS.get(self.result.unit, str(self.result.unit))

    def _printed(self, value: Any) -> float | None:
        found = number(value)
        return percent(found) if found is not None and self.result.unit in UNITS else found


def number(value: Any) -> float | None:
    """A finite number, or None for anything else a file may hold.

    >>> number(3), number("3"), number(float("nan")), number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def percent(share: float) -> float:
    """A share in percent, without the rounding of decimal fractions.

    >>> 100 * 0.07, percent(0.07)
    (7.000000000000001, 7.0)
    """
    return round(100 * share, 9)


def fixed(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """A number as text for a table, halves rounded up, with a true minus; a dash if there is none.

    >>> fixed(-0.04), fixed(-91.2, sign=True), fixed(0.15), fixed(None)
    ('0.0', '−91.2', '0.2', '–')
    """
    if value is None:
        return "–"
    if math.isfinite(value):
        value = float(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)) + 0.0  # not -0.0
    return f"{value:{'+' if sign and value else ''}.{digits}f}".replace("-", "−")


def plain(value: float | None) -> str:
    """A setting such as eps, in as few digits as it has: 0.2, not 0.20."""
    return "–" if value is None else f"{value:.4g}".replace("-", "−")


def size(eps: float | None) -> str:
    """A perturbation as it is usually written.

    >>> size(8 / 255), size(0.04), size(0.2)
    ('8/255', '0.04', '0.2')
    """
    return "–" if eps is None else eps_text(eps, 4)


def rank(order: Iterable[str]) -> Callable[[str], tuple[int, str]]:
    """A sorting key: names in the order given, then the others by name."""
    place = {name: k for k, name in enumerate(order)}
    return lambda name: (place.get(name, len(place)), name)


by_data, by_model, by_attack = rank(DATA.values()), rank(MODELS), rank(ATTACKS)


def of_kind(entries: list[Entry], kind: str) -> list[Entry]:
    """Those of one kind, in the page's order."""
    found = [entry for entry in entries if entry.result.kind == kind]
    return sorted(found, key=lambda e: (by_data(e.data), by_model(e.model), e.eps or 0.0, e.id))


def grouped(entries: list[Entry], key: Callable[[Entry], Any]) -> dict[Any, list[Entry]]:
    """Entries by key, with keys in order of first appearance."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def notes_of(entries: list[Entry], most: int = 4) -> list[str]:
    """The notes of results, which a reader must know before quoting them, such as their scale."""
    notes = []
    several = len({entry.data for entry in entries}) > 1
    for note, group in grouped([entry for entry in entries if entry.result.note], lambda e: str(e.result.note)).items():
        places = sorted({entry.data for entry in group if entry.data}, key=by_data)
        notes.append(f"{', '.join(places)}: {note}" if several and places else note)
    more = [f"{len(notes) - most} more notes are with the numbers."] if len(notes) > most else []
    return notes[:most] + more
