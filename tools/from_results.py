"""Results as Markdown: what tools/make_reproduction.py and tools/make_model_cards.py have in common."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mmlda import report
from mmlda.paper import numbers
from mmlda.paper.rows import Row
from mmlda.report.entries import Entry
from mmlda.report.tables import ours
from mmlda.results import Result

RESULTS = Path(__file__).parent.parent / "results"
END = "<!-- end -->\n"
MISSING = "not measured yet"
FIELDS = {field.name for field in dataclasses.fields(Result)}


def load(folder: str | Path) -> list[Entry]:
    """The results on the paper's data, with their places below the folder; a ValueError where there is no folder."""
    found = [dataclasses.replace(e, folder=e.folder.relative_to(folder)) for e in report.load(folder)]
    return [e for e in found if e.result.dataset in numbers.DATASETS or e.result.kind == "theory"]


def at(entries: Iterable[Entry], kind: str, **fields: Any) -> list[Entry]:
    """The runs of one cell of a kind, by fields of a result, further coordinates, the `row` and `tuned_on`."""
    return [e for e in entries if e.result.kind == kind and all(_is(e.result, k, v) for k, v in fields.items())]


def _is(result: Result, name: str, wanted: Any) -> bool:
    if isinstance(wanted, Row):
        return wanted.has(result)
    if name == "tuned_on":  # (attack, eps or None for any)
        adversary = (result.recipe_settings or {}).get("adversary") or {}
        attack, eps = wanted
        return adversary.get("attack") == attack.lower() and eps in (None, adversary.get("eps"))
    there = getattr(result, name) if name in FIELDS else result.cell.get(name)
    return math.isclose(there or 0.0, wanted) if isinstance(wanted, float) else there == wanted


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; bars in a cell are no columns."""
    lines = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in [head, *rows]]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def link(entry: Entry) -> str:
    return f"../results/{(entry.folder / entry.result.name).as_posix()}.json"


def value(group: list[Entry], digits: int = 2) -> str:
    """Our number with a link to its file and its interval; over several seeds the mean and standard deviation."""
    if not group:
        return MISSING
    cell = ours(group, digits)
    if len(group) == 1:
        return f"[{cell.text}]({link(group[0])}){cell.mark}" + (f" ({cell.small})" if cell.small else "")
    return f"{cell.text}{cell.mark} {cell.small}: {files(group)}"


def files(group: Iterable[Entry]) -> str:
    """Links to results, by their seeds where these tell them apart."""
    group = list(group)
    seeds = [e.result.seed for e in group]
    apart = None not in seeds and len(set(seeds)) == len(seeds)
    words = [f"seed {s}" for s in seeds] if apart else range(1, len(group) + 1)
    return ", ".join(f"[{word}]({link(e)})" for word, e in zip(words, group))


def images(group: Iterable[Entry]) -> str:
    """How many images are behind each number."""
    counts = sorted({e.result.n for e in group if e.result.n is not None})
    return " to ".join(f"{n:,}" for n in dict.fromkeys([counts[0], counts[-1]])) if counts else "–"


def notes(entries: Iterable[Entry]) -> str:
    """What results say has to be known before quoting them, each once."""
    found = dict.fromkeys(f"{e.data}: {e.result.note}" for e in entries if e.result.note)
    return "".join(f"- {note}\n" for note in found)


def begin(script: str, part: str) -> str:
    return f"<!-- begin: tools/{script}: {part} -->\n"


def put(page: str, script: str, parts: dict[str, str]) -> str:
    """The page with each part between the script's markers for it; a ValueError where one has no place."""
    for part, text in parts.items():
        marker = begin(script, part)
        before, found, rest = page.partition(marker)
        if not found or END not in rest or "<!-- begin" in rest.partition(END)[0]:
            raise ValueError(f"part = {part!r}: expected {marker.strip()} and {END.strip()} in the page")
        page = before + marker + text + END + rest.partition(END)[2]
    return page
