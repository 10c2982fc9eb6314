"""Results -> one self-contained HTML page. Needs no model, no data, no GPU and, to be read, no network.

    build("results", "report.html")

`entries.py` puts results in the page's order; `tables.py`, `summary.py` and `gallery.py` make plain records of them,
`figures.py` draws, `page.html` sets them out. Whatever a result file holds is text to the page: the template escapes
it, and the page's security policy runs no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmlda._utils.files import write_whole
from mmlda.report import figures, gallery, summary, tables
from mmlda.report.entries import Entry, fixed, grouped, notes_of, number, of_kind, percent
from mmlda.results import Result, result_files

__all__ = ["build"]

TITLE = "Max-Mahalanobis LDA networks, measured"


@dataclass(frozen=True)
class Plot:
    """A drawing, what it shows for those who cannot see it, and the results it is drawn from."""

    svg: str
    label: str
    caption: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its drawings, what was found in words, and the notes under it."""

    id: str
    title: str
    about: str
    plots: list[Plot]
    findings: list[str]
    notes: list[str]


def build(results: str | Path, out: str | Path, *, title: str | None = None) -> Path:
    """Write the page about all results in a folder and below it.

    The same results give the same bytes. Parts without results are left out.

    Args:
        results: folder of result files; a ValueError where it has none.
        out: the HTML file, written whole or not at all.
        title: of the page.
    """
    entries = load(results)
    return write_whole(out, render(entries, title or TITLE).encode("utf-8", "replace"))


def load(folder: str | Path) -> list[Entry]:
    """The results, numbered in the order of their paths, each with the folder it lies in."""
    entries: list[Entry] = []
    for path in result_files(folder):
        entries.append(Entry(len(entries), Result.load(path), path.parent))
    if not entries:
        raise ValueError(f"results must be a folder with result files, got {str(folder)!r} without any")
    return entries


def render(entries: list[Entry], title: str) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (here / "page.js").read_text(encoding="utf-8")
    # Runs by its hash: a script that came in with a result would not, even if one slipped through the escaping.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    found = summary.verdicts(entries)
    told = summary.told(found)
    others = [verdict.entry for verdict in found if verdict not in told]
    attacked = any(entry.result.kind in ("table2", "table3", "worst") for entry in entries)
    return environment.get_template("page.html").render(
        title=title,
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        count=len(entries),
        headline=summary.headline(found),
        unjudged=attacked and not found,
        verdicts=[(verdict, _audit(verdict.entry)) for verdict in told],
        others=len(others),
        claims=summary.claims(entries),
        groups=summary.key_numbers(entries),
        scale=summary.scale(entries),
        tables=[*tables.tables(entries), *tables.audited(others)],
        figures=[*_compared(entries), *_latent(entries), *_biased(entries), *_chosen(entries), *_theory(entries)],
        panels=gallery.panels(entries),
        picture_notes=notes_of(of_kind(entries, "fig4")),
        sources=summary.sources(entries),
        provenance=summary.provenance(entries),
    )


def _drawn(entries: list[Entry], key: str, draw: Callable[[str], str], label: str, caption: str) -> Plot:
    """A plot by a function of its prefix, which no other drawing on the page has; a series that is no good is named."""
    from markupsafe import Markup

    try:
        svg = draw(f"{key}-{entries[0].id}")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        name = entries[0].result.name
        raise ValueError(f"{name}: its series cannot be drawn ({type(error).__name__}: {error})") from None
    return Plot(Markup(svg), label, caption, tuple(entry.id for entry in entries))


def _audit(entry: Entry) -> list[Plot]:
    """The drawings of an audit, those that it has the numbers for."""
    where = f"{entry.model} on {entry.data}" if entry.model else entry.data
    bars, line, gap = (entry.result.series.get(name) for name in ("accuracies", "curve", "gaps"))
    plots = []
    if bars:
        plots.append(
            _drawn(
                [entry],
                "bars",
                lambda prefix: figures.accuracies(bars, entry.model, prefix),
                f"Bar chart: accuracy of {where} by loss and surface",
                "Accuracy by attack",
            )
        )
    if line:
        plots.append(
            _drawn(
                [entry],
                "curve",
                lambda prefix: figures.curve(line["eps"], line["accuracy"], entry.model, prefix),
                f"Line chart: accuracy of {where} by perturbation",
                "Accuracy by perturbation",
            )
        )
    if gap:
        plots.append(
            _drawn(
                [entry],
                "gaps",
                lambda prefix: figures.gaps(gap["edges"], gap["counts"], entry.model, prefix),
                f"Histogram: gap between the two largest logits of {where}",
                "Logit gaps",
            )
        )
    return plots


def _compared(entries: list[Entry]) -> list[Figure]:
    """Table 2 drawn, for the two networks the paper is about."""
    plots = []
    for (data, model), rows in tables.compared([e for e in entries if e.plain_head]).items():
        ids = {k for row in rows for k in row[3]}
        label = f"Dot plot: accuracy of {model} on {data} under attack, ours and the paper’s"
        draw = partial(figures.compared, [row[:3] for row in rows], model)
        plots.append(_drawn([e for e in entries if e.id in ids], "compared", draw, label, f"{data} · {model}"))
    about = "Each attack’s accuracy in our hands and in the paper’s: where the two part, the table was not reproduced."
    return [Figure("table2-drawn", "Table 2 at a glance", about, plots, [], [])] if plots else []


def _latent(entries: list[Entry]) -> list[Figure]:
    """Fig. 2."""
    found = [e for e in of_kind(entries, "fig2") if e.result.series.get("x")]
    plots = []
    for e in found:
        score = e.value
        caption = f"{e.data} · {e.model}" + (f", silhouette {fixed(score, 2)}" if score is not None else "")
        label = f"Scatter plot: latent features of {e.model} on {e.data}, a colour a class"
        plots.append(_drawn([e], "latent", partial(figures.latent, e.result.series), label, caption))
    about = "Features of test images in two dimensions (t-SNE); each class’s number stands at its median."
    findings = _found(entries, "fig2", "latent")
    return [Figure("fig2", "Figure 2. Latent features", about, plots, findings, notes_of(found))] if plots else []


def _found(entries: list[Entry], *names: str) -> list[str]:
    """What was found on some claims, in words."""
    claims = [e for e in of_kind(entries, "claim") if e.result.claim in names]
    return [f"{e.data}: {str(e.result.what).rstrip('.')}." for e in claims]


def _biased(entries: list[Entry]) -> list[Figure]:
    """Fig. 3."""
    found = of_kind(entries, "fig3")
    plots = []
    for data, group in grouped(found, lambda e: e.data).items():
        sets = sorted((e for e in group if e.value is not None), key=_set_order)
        values = {
            model: {
                name: sum(e.value or 0.0 for e in same) / len(same)
                for name, same in grouped([e for e in sets if e.model == model], lambda e: e.at("set")).items()
            }
            for model in dict.fromkeys(e.model for e in group)
        }
        families = {e.at("set"): e.at("family") for e in sets}
        if sets:
            label = f"Dot plot: accuracy on the class-biased sets of {data}, by network"
            plots.append(_drawn(sets, "biased", partial(figures.biased, values, families), label, data))
    about = "Accuracy where classes are unequally frequent in training and testing: BP1 graded, BP2 one class ahead."
    findings = _found(entries, "fig3", "fig3-recipe", "priors")
    made = Figure("fig3", "Figure 3. Class-biased data", about, plots, findings, notes_of(found))
    return [made] if plots else []


def _set_order(entry: Entry) -> tuple[str, float]:
    return entry.at("family"), number(entry.result.cell.get("index")) or 0.0


def _chosen(entries: list[Entry]) -> list[Figure]:
    """Fig. 5."""
    found = of_kind(entries, "fig5")
    best = {e.data: e.value for e in of_kind(entries, "claim") if e.result.claim == "fig5"}
    plots = []
    for data, group in grouped(found, lambda e: e.data).items():
        points = [e for e in group if None not in (number(e.result.cell.get("log10_C")), e.value)]
        points.sort(key=lambda e: float(e.result.cell["log10_C"]))
        if points:
            x = [float(e.result.cell["log10_C"]) for e in points]
            y = [e.value or 0.0 for e in points]
            spread = [percent(number(e.result.numbers.get("std")) or 0.0) for e in points]
            label = f"Line chart: cross-validated error on {data} against log10 of C"
            draw = partial(figures.cross_validation, x, y, spread, best.get(data))
            plots.append(_drawn(points, "folds", draw, label, data))
    about = (
        "Cross-validated error of MM-LDA against C, the squared norm of its means; the band is a standard deviation."
    )
    made = Figure("fig5", "Figure 5. The choice of C", about, plots, _found(entries, "fig5"), notes_of(found))
    return [made] if plots else []


def _theory(entries: list[Entry]) -> list[Figure]:
    """E[d], RB and the bound."""
    plots = []
    found = of_kind(entries, "theory")
    for e in found:
        panels: dict[str, list[Any]] = {}
        for line in e.result.series.get("curves") or []:
            panels.setdefault(str(line.get("panel", "")) if isinstance(line, dict) else "", []).append(line)
        for k, (name, lines) in enumerate(panels.items()):
            label = f"Line chart: {name or 'theory'}"
            plots.append(_drawn([e], f"theory{k}", partial(figures.curves, lines), label, name))
    about = "Expected distance to the boundary, robustness and its bound, as the theorems give them."
    return [Figure("theory", "Theory", about, plots, [], notes_of(found))] if plots else []
