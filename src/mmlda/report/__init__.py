"""Results as one self-contained HTML page, made without a model, data or a GPU and readable offline::

    build("results", "report.html")

`entries.py` puts results in the page's order; `tables.py`, `summary.py`, `provenance.py` and `gallery.py` make plain
records of them, `figures.py` draws, `glossary.py` defines abbreviations, `page.html` is the layout. The content of
result files is treated as text: the template escapes it, and the page's security policy runs only its own script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmlda._utils.checks import damaged
from mmlda._utils.files import write_whole
from mmlda.report import figures, gallery, provenance, summary, tables
from mmlda.report.entries import Entry, fixed, grouped, notes_of, number, of_kind, percent
from mmlda.report.glossary import Glossary
from mmlda.results import find_results

__all__ = ["build"]

TITLE = "Max-Mahalanobis LDA networks, measured"


@dataclass(frozen=True)
class Plot:
    """A drawing, its text alternative, and the results it is drawn from."""

    svg: str
    label: str
    caption: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its drawings, the findings in words, and the notes under it."""

    id: str
    title: str
    about: str
    plots: list[Plot]
    findings: list[str]
    notes: list[str]


def build(results: str | Path, out: str | Path, *, title: str | None = None) -> Path:
    """Write a page about all results in a folder and its subfolders.

    The same results give the same bytes. Parts without results are left out; trained networks without results are
    listed.

    Parameters
    ----------
    results : path
        Folder of result files.
    out : path
        The HTML file, written whole or not at all.
    title : str, optional
        Title of the page; by default the networks and datasets, or that of the paper’s page.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        If the folder has no results.
    """
    entries = load(results)
    page = render(entries, title, unmeasured(Path(results), entries))
    return write_whole(out, page.encode("utf-8", "replace"))


def load(folder: str | Path) -> list[Entry]:
    """The results, numbered in the order of their names."""
    found = find_results(folder).items()
    entries = [Entry(number, result, Path(folder), file) for number, (file, result) in enumerate(found)]
    if not entries:
        runs = unmeasured(Path(folder), [])
        hint = f"; measure the network in it with mmlda evaluate {runs[0]} --out {runs[0]}/evaluation" if runs else ""
        raise ValueError(f"results must be a folder with result files, got {str(folder)!r} without any{hint}")
    return entries


def unmeasured(folder: Path, entries: list[Entry]) -> list[str]:
    """The folders of trained networks (with a run.json) that no result names and that hold no result."""
    named = {Path(str(entry.result.network)).resolve() for entry in entries if entry.result.network}
    files = [(folder / entry.file).resolve() for entry in entries]
    runs = sorted(path.parent for path in folder.rglob("run.json"))
    return [
        run.as_posix()
        for run in runs
        if run.resolve() not in named and not any(file.is_relative_to(run.resolve()) for file in files)
    ]


def render(entries: list[Entry], title: str | None = None, runs: Sequence[str] = ()) -> str:
    """The page as text; `runs` are trained networks without results."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (here / "page.js").read_text(encoding="utf-8")
    # Allowed by its hash: a script inside a result would not run, even if it slipped through the escaping.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    found, groups = summary.verdicts(entries), summary.key_numbers(entries)
    audits = [(verdict, _audit(verdict.entry)) for verdict in found]
    glossary = Glossary()
    quoted = any(entry.result.paper is not None for entry in entries)
    return environment.get_template("page.html").render(
        title=title or (TITLE if quoted else summary.title(entries)),
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        count=len(entries),
        beside=any(entry.paper is not None for entry in entries),
        headline=summary.headline(entries, found),
        unjudged=not found and any(entry.result.attack for entry in entries),
        curve=_curves(entries),
        glance=_compared(entries),
        cards=summary.cards(found),
        audits=audits,
        claims=summary.claims(entries),
        groups=groups,
        group_notes=tables.mark_notes(tile.cell for _, tiles in groups for tile in tiles),
        scale=provenance.scale(entries),
        tables=tables.tables(entries),
        figures=[*_latent(entries), *_biased(entries), *_chosen(entries), *_theory(entries)],
        panels=gallery.panels(entries),
        picture_notes=notes_of(of_kind(entries, "fig4")),
        sources=provenance.sources(entries),
        runs=runs,
        unplaced=partial(provenance.unplaced, entries),
        define=glossary.define,
        glossary=glossary.all,
        provenance=provenance.provenance(entries),
    )


def _drawn(entries: list[Entry], key: str, draw: Callable[[str], str], label: str, caption: str) -> Plot:
    """A plot by a function of its prefix, which must be unique on the page; the error names an invalid series."""
    from markupsafe import Markup

    try:
        svg = draw(f"{key}-{entries[0].id}")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        name = entries[0].result.name
        what = "what its figure is drawn from"
        raise damaged(f"series of {name}", what, f"{type(error).__name__}: {error}") from None
    return Plot(Markup(svg), label, caption, tuple(entry.id for entry in entries))


def _figure(
    key: str, title: str, about: str, plots: list[Plot], findings: list[str], found: list[Entry]
) -> list[Figure]:
    """A figure with drawings; none without."""
    return [Figure(key, title, about, plots, findings, notes_of(found))] if plots else []


def _found(entries: list[Entry], *names: str) -> list[str]:
    """The findings on some claims, in words."""
    claims = [e for e in of_kind(entries, "claim") if e.result.claim in names]
    return [f"{e.data}: {str(e.result.what).rstrip('.')}." for e in claims]


def _audit(entry: Entry) -> list[Plot]:
    """The drawings of an audit for which it has numbers."""
    where, series, made = f"{entry.model} on {entry.data}" if entry.model else entry.data, entry.result.series, []
    if rows := series.get("accuracies"):
        label = f"Bar chart: accuracy of {where} by loss and surface"
        draw = partial(figures.accuracies, rows, entry.model)
        made.append(_drawn([entry], "accuracies", draw, label, "Accuracy by attack"))
    if line := series.get("curve"):
        label = f"Line chart: accuracy of {where} by perturbation"
        made.append(
            _drawn(
                [entry],
                "curve",
                lambda k: figures.robustness([(entry.model, tables.points(line), {})], k),
                label,
                "Accuracy by perturbation",
            )
        )
    return made


def _curves(entries: list[Entry]) -> list[Figure]:
    """Accuracy against the perturbation, dataset by dataset."""
    attack, found = tables.curves(entries)
    plots = []
    for data, lines in found.items():
        ids = {k for line in lines for k in line.ids}
        draw = partial(figures.robustness, [(line.model, line.ours, line.paper) for line in lines])
        label = f"Line chart: accuracy on {data} under {attack} against the perturbation, by network"
        plots.append(_drawn([e for e in entries if e.id in ids], "robustness", draw, label, f"{data}, under {attack}."))
    return _figure("robustness", "Accuracy against the perturbation", "", plots, [], [])


def _compared(entries: list[Entry]) -> list[Figure]:
    """Table 2 drawn, for the two networks the paper is about."""
    plots = []
    for (data, model), rows in tables.compared([e for e in entries if e.plain_head]).items():
        ids = {k for row in rows for k in row[3]}
        label = f"Dot plot: accuracy of {model} on {data} under attack, ours and the paper’s"
        draw = partial(figures.compared, [row[:3] for row in rows], model)
        plots.append(_drawn([e for e in entries if e.id in ids], "compared", draw, label, f"{data} · {model}"))
    about = (
        "Accuracy under each attack and ε, in the paper and in our runs. Several dots of ours are readings of what the "
    )
    about += "paper leaves open."
    return _figure("table2-drawn", "Table 2 at a glance", about, plots, [], [])


def _latent(entries: list[Entry]) -> list[Figure]:
    """Fig. 2."""
    found = [e for e in of_kind(entries, "fig2") if e.result.series.get("x")]
    plots = []
    for e in found:
        caption = f"{e.data} · {e.model}" + (f", silhouette {fixed(e.value, 2)}" if e.value is not None else "")
        label = f"Scatter plot: latent features of {e.model} on {e.data}, one colour per class"
        plots.append(_drawn([e], "latent", partial(figures.latent, e.result.series), label, caption))
    about = "Features of test images in two dimensions (t-SNE); each class’s number stands at its median."
    return _figure("fig2", "Figure 2. Latent features", about, plots, _found(entries, "fig2", "latent"), found)


def _biased(entries: list[Entry]) -> list[Figure]:
    """Fig. 3."""
    found = of_kind(entries, "fig3")
    plots = []
    for data, group in grouped([e for e in found if e.value is not None], lambda e: e.data).items():
        group.sort(key=lambda e: (e.at("family"), number(e.result.cell.get("index")) or 0.0))
        values: dict[str, dict[str, float]] = {e.model: {} for e in of_kind(group, "fig3")}
        for (model, name), same in grouped(group, lambda e: (e.model, e.at("set"))).items():
            values[model][name] = sum(e.value or 0.0 for e in same) / len(same)
        families = {e.at("set"): e.at("family") for e in group}
        label = f"Dot plot: accuracy on the class-biased sets of {data}, by network"
        plots.append(_drawn(group, "biased", partial(figures.biased, values, families), label, data))
    about = "Accuracy where classes are unequally frequent in training and testing."
    findings = _found(entries, "fig3", "fig3-recipe", "priors")
    return _figure("fig3", "Figure 3. Class-biased data", about, plots, findings, found)


def _chosen(entries: list[Entry]) -> list[Figure]:
    """Fig. 5."""
    found = of_kind(entries, "fig5")
    best = {e.data: e.value for e in of_kind(entries, "claim") if e.result.claim == "fig5"}
    plots = []
    for data, group in grouped(found, lambda e: e.data).items():
        points = [
            (c, e) for e in group if (c := number(e.result.cell.get("log10_C"))) is not None and e.value is not None
        ]
        points.sort(key=lambda point: point[0])
        if points:
            x, each = [c for c, _ in points], [e for _, e in points]
            spread = [percent(number(e.result.numbers.get("std")) or 0.0) for e in each]
            label = f"Line chart: cross-validated error on {data} against log10 of C"
            draw = partial(figures.cross_validation, x, [e.value or 0.0 for e in each], spread, best.get(data))
            plots.append(_drawn(each, "folds", draw, label, data))
    about = (
        "Cross-validated error of MM-LDA against C, the squared norm of its means; the band is a standard deviation."
    )
    return _figure("fig5", "Figure 5. The choice of C", about, plots, _found(entries, "fig5"), found)


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
    return _figure("theory", "Theory", about, plots, [], found)
