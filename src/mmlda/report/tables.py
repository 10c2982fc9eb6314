"""The tables of the page: results gathered into rows, ours beside the paper's. Plain records, no HTML."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from mmlda.report.entries import (
    Entry,
    by_attack,
    by_data,
    by_model,
    fixed,
    grouped,
    notes_of,
    number,
    of_kind,
    size,
)

__all__ = ["Cell", "Column", "Table", "agreement", "audited", "compared", "ours", "papers", "tables"]

STANDS_STILL = 0.1  # share of exactly-zero gradients from which a number is marked


@dataclass(frozen=True)
class Cell:
    """What one cell of a table shows.

    Args:
        sort: what its column sorts by; None comes last either way.
        small: the interval, or the spread over seeds.
        ids: the results behind it; with none it is plain text.
        mark: a sign that a note under the table explains.
    """

    text: str
    sort: float | str | None = None
    small: str = ""
    ids: tuple[int, ...] = ()
    mark: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Column:
    """A column's name, and that of the group of columns it stands in."""

    label: str
    group: str = ""
    words: bool = False  # set to the left
    muted: bool = False


@dataclass(frozen=True)
class Table:
    """A table as it stands on the page; rows have one cell a column."""

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
        return Cell("none" if word is None else str(word), None, ids=ids, hint=hint(entries))
    mean = statistics.fmean(values)
    small = ""
    if len(values) > 1:
        small = f"± {fixed(statistics.stdev(values), digits)}, {len(values)} runs"
    elif entries[0].interval is not None:
        small = " to ".join(fixed(end, digits) for end in entries[0].interval)
    still = [number(entry.result.numbers.get("zero_gradient")) for entry in entries]
    mark = "†" if any(share is not None and share >= STANDS_STILL for share in still) else ""
    return Cell(fixed(mean, digits), mean, small, ids, mark, hint(entries))


def hint(entries: list[Entry]) -> str:
    """The provenance in a line, shown on hover; all of it comes with a click."""
    first = entries[0].result
    words = [
        f"n = {first.n}" if first.n is not None else "",
        f"seed {first.seed}" if first.seed is not None else "",
        f"{first.train_steps} training steps" if first.train_steps is not None else "",
        str(first.device),
    ]
    if len(entries) > 1:
        words[1] = f"{len(entries)} runs"
    return " · ".join(word for word in words if word)


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
    """How often the paper's number lies in our interval, in words; "" where that cannot be said."""
    inside = [e.interval[0] <= e.paper <= e.interval[1] for e in entries if e.paper is not None and e.interval]
    if not inside:
        return ""
    return f"The paper’s number lies inside our 95% interval in {sum(inside)} of {len(inside)} results."


def below(entries: list[Entry], rows: list[list[Cell]] | None = None) -> list[str]:
    """The notes under a table."""
    marked = any(cell.mark for row in rows or [] for cell in row)
    still = (
        f"† The gradient was exactly zero for at least {STANDS_STILL:.0%} of the images: there the attack stood still, "
        "which is not robustness."
    )
    return [line for line in [agreement(entries), still if marked else "", *notes_of(entries)] if line]


def words(text: str, rank: Callable[[str], tuple[int, str]] | None = None) -> Cell:
    """A cell of words; with a rank it sorts in the page's order (SR before MM-LDA), not by the alphabet."""
    return Cell(text, "{:03d} {}".format(*rank(text)) if rank else text)


def table1(entries: list[Entry]) -> list[Table]:
    """Test errors of the heads."""
    found = of_kind(entries, "table1")
    if not found:
        return []
    columns = [
        Column("data", words=True),
        Column("network", words=True),
        Column("ours"),
        Column("paper", muted=True),
        Column("difference"),
        Column("runs", muted=True),
        Column("images", muted=True),
    ]
    rows = []
    for (data, model), group in grouped(found, lambda e: (e.data, e.model)).items():
        n = number(group[0].result.n)
        rows.append(
            [
                words(data, by_data),
                words(model, by_model),
                *beside(group, 2),
                Cell(str(len(group)), float(len(group))),
                Cell(fixed(n, 0), n),
            ]
        )
    return [
        Table(
            "table1",
            "Table 1. Test error",
            "Percent of the test images that are misclassified, lower is better.",
            columns,
            rows,
            below(found),
        )
    ]


def variant(entry: Entry) -> str:
    """An attack, with what tells it from others of its name."""
    more = [word for word in (entry.at("surface"), entry.target) if word]
    return entry.attack + (f" ({', '.join(more)})" if more else "")


def table2(entries: list[Entry]) -> list[Table]:
    """Accuracy under the attacks, one table per dataset, the worst case in the last column."""
    found, (worst, apart) = of_kind(entries, "table2"), _worst(entries)
    groups = grouped(sorted(found + worst, key=lambda e: by_data(e.data)), lambda e: e.data)
    made = [_table2(f"table2-{k}", data, group) for k, (data, group) in enumerate(groups.items())]
    return made + _tuned(apart)


@dataclass(frozen=True)
class _Attack:
    """A column, or group of columns, of Table 2: an attack in one of its variants."""

    words: str
    entries: list[Entry]
    in_paper: bool  # whether the paper has numbers for it


def _table2(key: str, data: str, group: list[Entry]) -> Table:
    """The table of one dataset."""
    attacked, beaten = ([e for e in group if e.result.kind == kind] for kind in ("table2", "worst"))
    attacks = [
        _Attack(words, each, papers(each) is not None)
        for words, each in grouped(sorted(attacked, key=lambda e: (by_attack(e.attack), variant(e))), variant).items()
    ]
    places = sorted({(_eps(e), e.model) for e in group}, key=lambda place: (place[0], by_model(place[1])))
    rows = [_table2_row(place, attacks, beaten) for place in places]
    title = "Table 2. Accuracy under attack" if attacked else "Accuracy in the worst case"
    about = "Percent of the test images right before the attack and after it, within a perturbation of ε"
    about += " (JSMA’s steps are of that size). Higher is better."
    if beaten:
        about += " The worst case is the strongest of many attacks, image by image; the paper has none."
    return Table(key, f"{title}: {data}", about, _table2_columns(attacks, bool(beaten)), rows, below(group, rows))


def _table2_columns(attacks: list[_Attack], worst: bool) -> list[Column]:
    columns = [Column("network", words=True), Column("ε"), *([Column("worst case")] if worst else [])]
    for attack in attacks:
        if attack.in_paper:
            columns += [Column("ours", attack.words), Column("paper", attack.words, muted=True)]
            columns += [Column("diff.", attack.words)]
        else:
            columns += [Column(attack.words)]
    return columns


def _table2_row(place: tuple[float, str], attacks: list[_Attack], beaten: list[Entry]) -> list[Cell]:
    """One network at one perturbation."""
    eps, model = place

    def here(group: list[Entry]) -> list[Entry]:
        return [e for e in group if (_eps(e), e.model) == place]

    row = [words(model, by_model), Cell(size(eps if eps >= 0 else None), eps)]
    row += [ours(here(beaten))] if beaten else []
    for attack in attacks:
        three = beside(here(attack.entries))
        row += three if attack.in_paper else three[:1]
    return row


def _eps(entry: Entry) -> float:
    """The perturbation; -1 without one, which sorts first."""
    return -1.0 if entry.eps is None else entry.eps


def _worst(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Worst cases of networks with a row in Table 2, or where it has none; and those of the others.

    A fine-tuned row of Table 2 is several networks, one for each attack: their worst cases do not fit into it.
    """
    rows = {(e.data, e.model) for e in of_kind(entries, "table2")}
    data = {data for data, _ in rows}
    worst = of_kind(entries, "worst")
    apart = [e for e in worst if e.data in data and (e.data, e.model) not in rows]
    return [e for e in worst if e not in apart], apart


def _tuned(entries: list[Entry]) -> list[Table]:
    """What the worst case leaves networks that are no row of Table 2."""
    if not entries:
        return []
    sizes = sorted({e.eps for e in entries if e.eps is not None})
    columns = [Column("data", words=True), Column("network", words=True)]
    columns += [Column(f"ε = {size(eps)}", "worst case, accuracy") for eps in sizes]
    rows = []
    ranked = sorted(entries, key=lambda e: (by_data(e.data), by_model(e.model)))
    for (data, model), group in grouped(ranked, lambda e: (e.data, e.model)).items():
        row = [words(data, by_data), words(model, by_model)]
        rows.append(row + [ours([e for e in group if e.eps == eps]) for eps in sizes])
    about = "What the worst case leaves to networks trained on adversarial examples. A fine-tuned row of Table 2 (SAT, "
    about += "HAT) is several networks, one for each attack, of SAT also for each ε; those trained on PGD from the "
    about += "start are not in the paper."
    title = "The worst case of networks trained on adversarial examples"
    return [Table("tuned", title, about, columns, rows, below(entries, rows))]


def compared(entries: list[Entry]) -> dict[tuple[str, str], list[tuple[str, float, float, tuple[int, ...]]]]:
    """Table 2 to be drawn: for each data set and network the attack in words, ours, the paper's, the results behind."""
    made: dict[tuple[str, str], list[tuple[str, float, float, tuple[int, ...]]]] = {}
    found = sorted(of_kind(entries, "table2"), key=lambda e: (by_data(e.data), by_model(e.model), by_attack(e.attack)))
    variants = {(e.attack, variant(e)) for e in found}
    only = [attack for attack, _ in variants]
    for (data, model, name, eps), group in grouped(found, lambda e: (e.data, e.model, variant(e), e.eps)).items():
        cell, paper = ours(group), papers(group)
        if paper is not None and isinstance(cell.sort, float):
            attack = group[0].attack
            said = attack if only.count(attack) == 1 else name  # "JSMA" is enough where there is one
            said += f", ε = {size(eps)}" if eps is not None else ""
            made.setdefault((data, model), []).append((said, cell.sort, paper, cell.ids))
    return made


def table3(entries: list[Entry]) -> list[Table]:
    """Carlini & Wagner's distortions; beside them what the worst case leaves."""
    found = of_kind(entries, "table3")
    if not found:
        return []
    worst = of_kind(entries, "worst")
    places = {(e.data, e.model) for e in found}
    sizes = sorted({e.eps for e in worst if e.eps is not None and (e.data, e.model) in places})
    columns = [
        Column("data", words=True),
        Column("network", words=True),
        Column("target", words=True),
        Column("ours", "mean"),
        Column("paper", "mean", muted=True),
        Column("difference", "mean"),
        Column("median"),
        Column("broken, %"),
        Column("L∞ ≤ 0.04, %"),
    ]
    columns += [Column(f"ε = {size(eps)}", "worst case, accuracy") for eps in sizes]
    rows = []
    for (data, model, target), group in grouped(found, lambda e: (e.data, e.model, e.target)).items():
        left = [e for e in worst if (e.data, e.model) == (data, model)]
        rows.append(
            [
                words(data, by_data),
                words(model, by_model),
                words(target),
                *beside(group, 2),
                mean_number(group, "median_distortion", 2),
                mean_number(group, "success_rate", 1, 100.0),
                mean_number(group, "share_linf_0.04", 1, 100.0),
                *(ours([e for e in left if e.eps == eps]) for eps in sizes),
            ]
        )
    about = (
        "Root mean square change of a pixel, on 0..255, that Carlini & Wagner’s attack needs: over the images that it "
        "breaks; higher is better."
    )
    return [Table("table3", "Table 3. Distortion under C&W", about, columns, rows, below(found))]


def audited(entries: list[Entry]) -> list[Table]:
    """Audits that are not told one by one."""
    if not entries:
        return []
    shown = (("clean_accuracy", "clean"), ("standard_accuracy", "standard attacks"), ("worst_accuracy", "all attacks"))
    columns = [Column("data", words=True), Column("network", words=True), Column("ε"), Column("verdict", words=True)]
    columns += [Column(label, "accuracy, %") for _, label in shown]
    rows = []
    for e in sorted(entries, key=lambda e: (by_data(e.data), by_model(e.model))):
        verdict = Cell(str(e.result.value), str(e.result.value), ids=(e.id,))
        row = [words(e.data, by_data), words(e.model, by_model), Cell(size(e.eps), e.eps), verdict]
        rows.append([*row, *(mean_number([e], name, 1, 100.0) for name, _ in shown)])
    about = "What standard gradient attacks leave each network, what all attacks of the audit leave, and the verdict."
    return [Table("audits", "Audit of the adversarially trained networks", about, columns, rows, below(entries))]


def evaluations(entries: list[Entry]) -> list[Table]:
    """What `mmlda evaluate` measured."""
    found = of_kind(entries, "evaluation")
    if not found:
        return []
    extra = [
        ("balanced_accuracy", "balanced, %", 1, 100.0),
        ("nll", "NLL", 3, 1.0),
        ("ece", "ECE", 3, 1.0),
        ("mean_distortion", "distortion", 2, 1.0),
    ]
    extra = [item for item in extra if any(number(e.result.numbers.get(item[0])) is not None for e in found)]
    columns = [
        Column("data", words=True),
        Column("network", words=True),
        Column("attack", words=True),
        Column("ε"),
        Column("accuracy, %"),
        *(Column(label, muted=True) for _, label, _, _ in extra),
    ]
    rows = []
    groups = grouped(
        sorted(found, key=lambda e: (by_data(e.data), by_model(e.model), by_attack(variant(e)), e.eps or 0.0)),
        lambda e: (e.data, e.model, variant(e), e.eps),
    )
    for (data, model, attack, eps), group in groups.items():
        rows.append(
            [
                words(data, by_data),
                words(model, by_model),
                Cell(attack or "clean", attack),
                Cell(size(eps), eps),
                ours(group),
                *(mean_number(group, name, digits, scale) for name, _, digits, scale in extra),
            ]
        )
    return [
        Table(
            "evaluation",
            "Evaluation",
            "Accuracy with its 95% interval, and how well the probabilities are calibrated.",
            columns,
            rows,
            below(found, rows),
        )
    ]


def tables(entries: list[Entry]) -> list[Table]:
    """Every table that there are results for."""
    return [*table1(entries), *table2(entries), *table3(entries), *evaluations(entries)]
