"""The tables of the page: results gathered into rows, ours beside the paper's. Plain records, no HTML."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mmlda.report.entries import Entry, by_attack, by_data, by_model, fixed, grouped, notes_of, number, of_kind, size
from mmlda.results import differing

STANDS_STILL = 0.1  # share of exactly-zero gradients from which a number is marked
MARKS = {
    "†": f"† The gradient was exactly zero for at least {STANDS_STILL:.0%} of the images: "
    "there the attack stood still, which is not robustness.",
    "‡": "‡ The network is random: judged by the mean probabilities of several passes.",
    "§": "§ The network has no gradient: only the attacks that need none, such as Square, were run.",
}


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    sort: float | str | None = None  # what its column sorts by; None comes last either way
    small: str = ""  # the interval, or the spread over seeds
    ids: tuple[int, ...] = ()  # the results behind it; with none it is plain text
    mark: str = ""  # a sign that a note under the table explains


@dataclass(frozen=True)
class Column:
    """A column's name, and that of the group of columns it stands in."""

    label: str
    group: str = ""
    words: bool = False  # set to the left
    muted: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the page; rows have one cell per column."""

    id: str
    title: str
    about: str
    columns: list[Column]
    rows: list[list[Cell]]
    notes: list[str]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The upper row of the head: each group and how many columns it spans; [] without groups."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and column.group and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return spans if any(group for group, _ in spans) else []


def ours(entries: list[Entry], digits: int = 1) -> Cell:
    """Our number: with its interval, or over several runs its mean and standard deviation."""
    if not entries:
        return Cell("–")
    ids = tuple(entry.id for entry in entries)
    values = [v for v in (entry.value for entry in entries) if v is not None]
    if not values:
        word = entries[0].result.value
        return Cell("none" if word is None else str(word), None, ids=ids)
    mean = statistics.fmean(values)
    small = ""
    if len(values) > 1:
        small = f"± {fixed(statistics.stdev(values), digits)}, {len(values)} runs"
    elif entries[0].interval is not None:
        small = " to ".join(fixed(end, digits) for end in entries[0].interval)
    return Cell(fixed(mean, digits), mean, small, ids, _mark(entries))


def _mark(entries: list[Entry]) -> str:
    """The signs in `MARKS` that belong to a number."""

    def most(name: str) -> float:
        return max(number(entry.result.numbers.get(name)) or 0.0 for entry in entries)

    marked = {"†": most("zero_gradient") >= STANDS_STILL, "‡": most("passes") > 1, "§": most("black_box") > 0}
    return "".join(mark for mark in marked if marked[mark])


def mark_notes(cells: Iterable[Cell]) -> list[str]:
    """What the marks of these cells mean."""
    seen = {mark for cell in cells for mark in cell.mark}
    return [note for mark, note in MARKS.items() if mark in seen]


def papers(entries: list[Entry]) -> float | None:
    """The paper's number for these, where it has one."""
    return next((entry.paper for entry in entries if entry.paper is not None), None)


def beside(entries: list[Entry], digits: int = 1) -> list[Cell]:
    """Three cells: ours, the paper's, and the difference."""
    cell, paper = ours(entries, digits), papers(entries)
    apart = cell.sort - paper if paper is not None and isinstance(cell.sort, float) else None
    return [cell, Cell(fixed(paper, digits), paper), Cell(fixed(apart, digits, sign=True), apart)]


def mean_number(entries: list[Entry], name: str, digits: int, scale: float = 1.0) -> Cell:
    """The mean of something else that was measured."""
    values = [v for v in (number(entry.result.numbers.get(name)) for entry in entries) if v is not None]
    mean = round(scale * statistics.fmean(values), 9) if values else None
    return Cell(fixed(mean, digits), mean)


def agreement(entries: list[Entry]) -> str:
    """How often the paper's number lies in our interval, in words; "" if that cannot be decided."""
    inside = [e.interval[0] <= e.paper <= e.interval[1] for e in entries if e.paper is not None and e.interval]
    if not inside:
        return ""
    return f"The paper’s number lies inside our 95% interval in {sum(inside)} of {len(inside)} results."


def below(entries: list[Entry], rows: list[list[Cell]] | None = None) -> list[str]:
    """The notes under a table."""
    marks = mark_notes(cell for row in rows or [] for cell in row)
    return [line for line in [agreement(entries), *marks, *notes_of(entries)] if line]


def words(text: str, rank: Callable[[str], tuple[int, str]] | None = None) -> Cell:
    """A cell of words; with a rank it sorts in the page's order (SR before MM-LDA), not by the alphabet."""
    return Cell(text, "{:03d} {}".format(*rank(text)) if rank else text)


WHO = [Column("data", words=True), Column("network", words=True)]
COMPARED = ["ours", "paper", "difference"]


def who(data: str, model: str) -> list[Cell]:
    """The cells of the columns `WHO`."""
    return [words(data, by_data), words(model, by_model)]


def ranked(entries: list[Entry]) -> list[Entry]:
    """In the page's order of data and networks."""
    return sorted(entries, key=lambda e: (by_data(e.data), by_model(e.model)))


def table1(entries: list[Entry]) -> list[Table]:
    """Test errors of the heads."""
    found, rows = of_kind(entries, "table1"), []
    for (data, model), group in grouped(found, lambda e: (e.data, e.model)).items():
        n = number(group[0].result.n)
        runs = Cell(str(len(group)), float(len(group)))
        rows.append([*who(data, model), *beside(group, 2), runs, Cell(fixed(n, 0), n)])
    muted = ("paper", "runs", "images")
    columns = [*WHO, *(Column(name, muted=name in muted) for name in (*COMPARED, "runs", "images"))]
    about = "Percent of the test images that are misclassified, lower is better."
    return [Table("table1", "Table 1. Test error", about, columns, rows, below(found))] if found else []


def variant(entry: Entry) -> str:
    """An attack, with what distinguishes it from others of its name."""
    more = [word for word in (entry.at("surface"), entry.target) if word]
    return entry.attack + (f" ({', '.join(more)})" if more else "")


def table2(entries: list[Entry]) -> list[Table]:
    """Accuracy under the attacks, one table per dataset, and the worst case at every perturbation."""
    found, worst = of_kind(entries, "table2"), of_kind(entries, "worst")
    places = {(e.data, e.model, e.eps) for e in found}
    here = [e for e in worst if (e.data, e.model, e.eps) in places]
    groups = grouped(sorted(found + here, key=lambda e: by_data(e.data)), lambda e: e.data)
    made = [_table2(f"table2-{k}", data, group) for k, (data, group) in enumerate(groups.items())]
    return made + (_worst(worst) if len(here) < len(worst) else [])


_Attack = tuple[str, list[Entry], bool]  # in words, its results, and whether the paper has numbers for it


def _table2(key: str, data: str, group: list[Entry]) -> Table:
    """The table of one dataset."""
    attacked, beaten = ([e for e in group if e.result.kind == kind] for kind in ("table2", "worst"))
    attacks = [
        (words, each, papers(each) is not None)
        for words, each in grouped(sorted(attacked, key=lambda e: (by_attack(e.attack), variant(e))), variant).items()
    ]
    places = sorted({(_eps(e), e.model) for e in group}, key=lambda place: (place[0], by_model(place[1])))
    rows = [_table2_row(place, attacks, beaten) for place in places]
    about = "Percent of the test images right before the attack and after it, within a perturbation of ε"
    about += " (JSMA’s steps are of that size). Higher is better."
    if beaten:
        about += " The worst case is the strongest of many attacks, image by image; the paper has none."
    return Table(
        key,
        f"Table 2. Accuracy under attack: {data}",
        about,
        _table2_columns(attacks, bool(beaten)),
        rows,
        below(group, rows),
    )


def _table2_columns(attacks: list[_Attack], worst: bool) -> list[Column]:
    columns = [Column("network", words=True), Column("ε"), *([Column("worst case")] if worst else [])]
    for name, _, in_paper in attacks:
        three = [Column("ours", name), Column("paper", name, muted=True), Column("diff.", name)]
        columns += three if in_paper else [Column(name)]
    return columns


def _table2_row(place: tuple[float, str], attacks: list[_Attack], beaten: list[Entry]) -> list[Cell]:
    """One network at one perturbation."""
    eps, model = place

    def here(group: list[Entry]) -> list[Entry]:
        return [e for e in group if (_eps(e), e.model) == place]

    row = [words(model, by_model), Cell(size(eps if eps >= 0 else None), eps)]
    row += [ours(here(beaten))] if beaten else []
    for _, each, in_paper in attacks:
        row += beside(here(each))[: 3 if in_paper else 1]
    return row


def _eps(entry: Entry) -> float:
    """The perturbation; -1 without one, which sorts first."""
    return -1.0 if entry.eps is None else entry.eps


def _worst(entries: list[Entry]) -> list[Table]:
    """The worst case of every network at every perturbation."""
    sizes = sorted({e.eps for e in entries if e.eps is not None})
    rows = []
    for (data, model), group in grouped(ranked(entries), lambda e: (e.data, e.model)).items():
        rows.append([*who(data, model), *(ours([e for e in group if e.eps == eps]) for eps in sizes)])
    about = "Percent of the test images that withstand every attack tried. A fine-tuned row of Table 2 (SAT, HAT) is "
    about += "several networks, one per attack; networks trained on PGD from the start are not in the paper."
    columns = [*WHO, *(Column(f"ε = {size(eps)}", "accuracy, %") for eps in sizes)]
    return [Table("worst", "Accuracy in the worst case", about, columns, rows, below(entries, rows))]


@dataclass(frozen=True)
class Line:
    """A network's accuracy by perturbation, ours and the paper's, in percent."""

    model: str
    ours: dict[float, float]
    paper: dict[float, float]
    ids: tuple[int, ...]


def curves(entries: list[Entry]) -> tuple[str, dict[str, list[Line]]]:
    """Accuracy against the perturbation: the attack, and for each dataset a line per network.

    From Table 2 under BIM, or without it from the audits.
    """
    found = [e for e in of_kind(entries, "table2") if e.value is not None and e.eps is not None]
    found = [e for e in found if e.plain_head or e.result.fine_tuning]  # the rows of the paper
    attack = "BIM" if not found or any(e.attack == "BIM" for e in found) else found[0].attack
    made: dict[str, list[Line]] = {}
    for (data, model), group in grouped([e for e in found if e.attack == attack], lambda e: (e.data, e.model)).items():
        ours_: dict[float, float] = {}
        paper: dict[float, float] = {}
        if len({e.result.network_sha256 for e in group}) == 1:  # SAT is another network at each perturbation
            clean, errors = mean_number(group, "clean_accuracy", 1, 100.0).sort, of_kind(entries, "table1")
            error = papers([e for e in errors if (e.data, e.model) == (data, model)])
            ours_ |= {0.0: clean} if isinstance(clean, float) else {}
            paper |= {0.0: 100.0 - error} if error is not None else {}
        for eps, each in grouped(group, lambda e: e.eps).items():
            ours_[eps] = statistics.fmean(e.value or 0.0 for e in each)
            paper |= {eps: theirs} if (theirs := papers(each)) is not None else {}
        made.setdefault(data, []).append(Line(model, ours_, paper, tuple(e.id for e in group)))
    if not found:
        attack = "the audit’s gradient attacks"
        for e in of_kind(entries, "audit"):
            if line := e.result.series.get("curve"):
                made.setdefault(e.data, []).append(Line(e.model, points(line), {}, (e.id,)))
    return attack, made


def points(curve: dict[str, list[float]]) -> dict[float, float]:
    """An audit's curve, percent by perturbation; without the unbounded attack, which would squeeze the axis."""
    return {eps: 100 * share for eps, share in zip(curve["eps"], curve["accuracy"]) if eps < 1}


def compared(entries: list[Entry]) -> dict[tuple[str, str], list[tuple[str, list[float], float, tuple[int, ...]]]]:
    """Table 2 to be drawn: for each dataset and network the attack, ours in each variant, the paper's, the results."""
    made: dict[tuple[str, str], list[tuple[str, list[float], float, tuple[int, ...]]]] = {}
    found = sorted(of_kind(entries, "table2"), key=lambda e: (by_data(e.data), by_model(e.model), by_attack(e.attack)))
    for (data, model, attack, eps), group in grouped(found, lambda e: (e.data, e.model, e.attack, e.eps)).items():
        cells, paper = [ours(each) for each in grouped(group, variant).values()], papers(group)
        values = [cell.sort for cell in cells if isinstance(cell.sort, float)]
        if paper is not None and values:
            ids = tuple(e.id for e in group)
            made.setdefault((data, model), []).append((f"{attack} {size(eps)}", values, paper, ids))
    return made


def table3(entries: list[Entry]) -> list[Table]:
    """Carlini & Wagner's distortions."""
    found = of_kind(entries, "table3")
    shown = [("median", "median_distortion", 2, 1.0), ("broken, %", "success_rate", 1, 100.0)]
    shown += [("L∞ ≤ 0.04, %", "share_linf_0.04", 1, 100.0)]
    columns = [*WHO, Column("target", words=True)]
    columns += [Column(name, "mean", muted=name == "paper") for name in COMPARED]
    columns += [Column(item[0]) for item in shown]
    rows = []
    for (data, model, target), group in grouped(found, lambda e: (e.data, e.model, e.target)).items():
        row = [*who(data, model), words(target), *beside(group, 2)]
        rows.append(row + [mean_number(group, *item[1:]) for item in shown])
    about = "Root mean square change of a pixel, on 0..255, that Carlini & Wagner’s attack needs: over the images that "
    about += "it breaks; higher is better."
    return [Table("table3", "Table 3. Distortion under C&W", about, columns, rows, below(found))] if found else []


def evaluated(entries: list[Entry]) -> list[list[Entry]]:
    """Evaluations in the page's order; repeats of one attack (another seed) on as many images are together."""
    order = ranked(sorted(entries, key=lambda e: (by_attack(variant(e)), e.eps or 0.0)))
    key = lambda e: (e.data, e.model, variant(e), e.eps, e.result.n, json.dumps(_settings(e), sort_keys=True))  # noqa: E731
    return list(grouped(order, key).values())


def _settings(entry: Entry) -> dict[str, Any]:
    """The settings that affect what an attack measures."""
    neutral = ("seed", "batch_size", "memory_limit")
    return {key: value for key, value in (entry.result.attack_settings or {}).items() if key not in neutral}


def attack_name(entry: Entry, entries: list[Entry]) -> str:
    """An attack in words, with the settings that distinguish it from others of its name and eps; "" without one."""
    place = lambda e: (e.data, e.model, variant(e), e.eps)  # noqa: E731
    same = [_settings(e) for e in entries if place(e) == place(entry)]
    return ", ".join([variant(entry), *differing(_settings(entry), same)])


def evaluations(entries: list[Entry]) -> list[Table]:
    """What `mmlda evaluate` and `mmlda attack` measured."""
    found = of_kind(entries, "evaluation")
    extra = [("balanced_accuracy", "balanced, %", 1, 100.0), ("nll", "NLL", 3, 1.0), ("ece", "ECE", 3, 1.0)]
    extra += [("nll_scaled", "NLL, scaled", 3, 1.0), ("ece_scaled", "ECE, scaled", 3, 1.0)]
    extra += [("mean_distortion", "distortion", 2, 1.0)]
    extra = [item for item in extra if any(number(e.result.numbers.get(item[0])) is not None for e in found)]
    columns = [*WHO, Column("attack", words=True), Column("ε"), Column("accuracy, %"), Column("images", muted=True)]
    columns += [Column(label, muted=True) for _, label, _, _ in extra]
    rows = []
    for group in evaluated(found):
        first, attack, n = group[0], attack_name(group[0], found), number(group[0].result.n)
        row = [*who(first.data, first.model), Cell(attack or "clean", attack), Cell(size(first.eps), first.eps)]
        row += [ours(group), Cell(fixed(n, 0), n)]
        rows.append([*row, *(mean_number(group, name, digits, scale) for name, _, digits, scale in extra)])
    about = "Accuracy with its 95% interval, and how well the probabilities are calibrated."
    return [Table("evaluation", "Evaluation", about, columns, rows, below(found, rows))] if found else []


def tables(entries: list[Entry]) -> list[Table]:
    """Every table for which there are results."""
    return [*table1(entries), *table2(entries), *table3(entries), *evaluations(entries)]
