"""Results as Markdown: what the scripts that write pages share."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mmlda._utils.files import write_whole
from mmlda.paper import numbers
from mmlda.paper.setup import TUNING
from mmlda.report.entries import fixed, size
from mmlda.results import Result, load_all
from mmlda.training.recipes import RECIPES

__all__ = [
    "DATA",
    "RESULTS",
    "ROOT",
    "fixed",
    "load",
    "mean",
    "on_all_images",
    "percent",
    "select",
    "size",
    "source",
    "table",
    "write",
]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
END = "<!-- end -->\n"
FIELDS = {field.name for field in dataclasses.fields(Result)}


def load(folder: str | Path = RESULTS) -> list[Result]:
    """The results on the paper's datasets, and those of the theory."""
    return [r for r in load_all(folder) if r.dataset in numbers.DATASETS or r.kind == "theory"]


def select(results: Iterable[Result], kind: str, **wanted: Any) -> list[Result]:
    """The results of a kind with these values of fields or cell coordinates, about the network `row`."""
    return [r for r in results if r.kind == kind and all(_has(r, name, value) for name, value in wanted.items())]


def _has(result: Result, name: str, wanted: Any) -> bool:
    if name == "row":
        return bool(wanted.has(result))
    value = getattr(result, name) if name in FIELDS else result.cell.get(name)
    return math.isclose(value or 0.0, wanted) if isinstance(wanted, float) else value == wanted


def percent(share: float | None, digits: int = 1) -> str:
    return fixed(None if share is None else round(100 * share, 9), digits)


def mean(results: Sequence[Result]) -> float | None:
    """The mean over seeds; None where nothing was measured."""
    return statistics.fmean(r.number for r in results) if results else None


def on_all_images(about: dict[str, Any], attack: str) -> dict[float, float]:
    """Accuracy of a network that ships under an attack on all test images, by eps: measured before it was released."""
    found = sorted((r for r in about.get("robust", ()) if r["attack"] == attack), key=lambda r: r["eps"])
    return {r["eps"]: r["robust"] / r["n"] for r in found}


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the columns' titles are separated by bars."""
    titles = head.split(" | ")
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def source(results: Sequence[Result], up: str = "..") -> str:
    """One line below a table: images, seeds, device and versions, the scale, and the files with every number."""
    results = sorted(results, key=lambda r: r.dataset, reverse=True)
    counts, seeds = sorted({r.n for r in results if r.n}), sorted({r.seed for r in results if r.seed is not None})
    words = [" to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1]))) + " images"]
    words.append(f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}")
    words += [f"{r.device}, torch {r.versions.get('torch', '').split('+')[0]}" for r in results]
    words += [f"{DATA[r.dataset]}: {text}" for r in results if (text := _training_scale(r))]
    files = dict.fromkeys(f"{r.dataset}/{r.kind}.jsonl" for r in results)
    links = ", ".join(f"[{file}]({up}/results/{file})" for file in files)
    return f"\n*{'; '.join(dict.fromkeys(words))}. Results: {links}.*\n"


def _training_scale(result: Result) -> str:
    """The training steps in words, where they are not the paper's; networks trained on PGD are not the paper's."""
    full, kind = RECIPES[f"{result.dataset}-sr"].steps, "training steps"
    if result.fine_tuning:
        full, kind = round(full * TUNING[result.dataset]), "steps of fine-tuning"
    elif (result.recipe_settings or {}).get("adversary"):
        return ""
    return "" if result.train_steps in (None, full) else f"{result.train_steps} {kind}, not {full}"


def write(script: str, pages: dict[Path, dict[str, str]]) -> None:
    """Write the generated parts of pages."""
    for page, parts in pages.items():
        write_whole(page, put(page.read_text(), script, parts).encode())


def put(page: str, script: str, parts: dict[str, str]) -> str:
    """The page with each part between the script's markers for it."""
    for part, text in parts.items():
        marker = f"<!-- begin: tools/{script}: {part} -->\n"
        before, found, rest = page.partition(marker)
        old, end, after = rest.partition(END)
        if not found or not end or "<!-- begin" in old:
            raise ValueError(f"page must have {marker.strip()} and {END.strip()}, got neither or one of them")
        page = before + marker + text + END + after
    return page
