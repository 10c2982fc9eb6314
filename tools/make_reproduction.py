"""Write the tables of docs/reproduction.md from the files in results/: `python tools/make_reproduction.py`.

Each part of the page stands between markers that name it; the text around them is written by hand. Every number and
verdict comes from a result: a new file in results/ and another run fill its place, and what is missing is listed.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reproduction_tables as tables
from from_results import MISSING, RESULTS, at, files, images, link, load, markdown, put, value
from reproduction_tables import GRADIENT, PLAIN, TARGETS, WORST_EPS, of

from mmlda._utils.files import write_whole
from mmlda.paper import fig5, numbers
from mmlda.paper.biased import CONTROL, MODELS, SETS
from mmlda.paper.comparisons import difference
from mmlda.paper.hardened import HARDENED
from mmlda.paper.rows import ADAM, HAT, MMLDA, SR, SR_ADAM, Row, plain_rows
from mmlda.paper.setup import tuned_cells
from mmlda.paper.suspects import ATTACKS as SUSPECT_ATTACKS
from mmlda.paper.suspects import VIEWS, WORST, suspect_rows
from mmlda.paper.tables import JSMA
from mmlda.report.entries import DATA, Entry, fixed, grouped, number, percent, plain
from mmlda.report.summary import CLAIMED, TITLES, headline, verdicts
from mmlda.report.tables import ours

PAGE = Path(__file__).parents[1] / "docs" / "reproduction.md"
SCRIPT = Path(__file__).name
WORDS = {True: "**holds**", False: "**does not hold**", None: "not decided"}
SEEDS = (0, 1, 2)  # of Table 1: fewer say nothing about chance
HEAD = ("where", "the paper", "data", "ours", "verdict", "evidence")


@dataclass(frozen=True)
class Sentence:
    """A sentence of the paper: the claim's key, where the paper makes it and on which data, and about what."""

    claim: str
    where: str
    data: tuple[str, ...] = numbers.DATASETS
    row: Row | None = None
    target: str = ""


CIFAR10 = ("cifar10",)
CLAIMS = (
    Sentence("table1", "Table 1, Sec. 4.2", row=MMLDA),
    Sentence("table1", "Table 1, Sec. 4.2", CIFAR10, ADAM),
    Sentence("adam", "footnote in Sec. 4.2"),
    Sentence("fig2", "Fig. 2, Sec. 4.2", CIFAR10, MMLDA),
    Sentence("fig2", "Fig. 2, Sec. 4.2", CIFAR10, ADAM),
    Sentence("fig5", "Fig. 5, Sec. 4.2", CIFAR10),
    Sentence("table2", "Table 2, Sec. 4.3", row=MMLDA),
    Sentence("table2", "Table 2, Sec. 4.3", CIFAR10, ADAM),
    Sentence("table3", "Table 3, Sec. 4.3", row=MMLDA, target="untargeted"),
    Sentence("table3", "Table 3, Sec. 4.3", CIFAR10, ADAM, "untargeted"),
    Sentence("table3", "Table 3, Sec. 4.3", row=MMLDA, target="random"),
    Sentence("table3", "Table 3, Sec. 4.3", CIFAR10, ADAM, "random"),
    Sentence("success", "Sec. 4.3"),
    Sentence("fig4", "Fig. 4, Sec. 4.3"),
    Sentence("latent", "Sec. 4.3", row=MMLDA),
    Sentence("latent", "Sec. 4.3", CIFAR10, ADAM),
    Sentence("fig3", "Fig. 3, Sec. 4.4", CIFAR10),
    Sentence("priors", "Sec. 4.4", CIFAR10),
)
# A claim of the text for which no rule was written down: its numbers are told, and it stays undecided.
FINETUNED = "both SAT and HAT can effectively enhance the original baselines to stronger ones"
DISTANCE = "|E[d] / Delta - 1/2| < 1e-7 for Delta > 10"
BAYES = "If C is too small, the conditional Gaussian components in MMD will largely overlap to each other, which makes "
BAYES += "the optimal Bayes error rate be high"

Line = list[str]


# ------------------------------------------------------------------------------------------------- sentences


def sentences(entries: list[Entry]) -> list[Line]:
    """The paper's sentences, each with what was found, the verdict by its rule, and the evidence."""
    made = []
    for sentence in CLAIMS:
        for data in numbers.DATASETS:
            found = at(entries, "claim", dataset=data, claim=sentence.claim, target=sentence.target)
            found = found if sentence.row is None else of(found, sentence.row)
            place = [DATA[data], "" if data in sentence.data else "not in the paper", sentence.target]
            place.append("the paper's recipe" if sentence.row == ADAM else "")
            words = ", ".join(word for word in place if word)
            start = [sentence.where, f"“{numbers.SENTENCES[sentence.claim]}”", words]
            for e in found:
                made.append([*start, _found(e, entries), WORDS[e.result.holds], _evidence(e)])
            if not found and data in sentence.data:
                made.append([*start, "–", MISSING, "–"])
    made += [_finetuned(entries, data) for data in numbers.DATASETS]
    return [*made, *_theory(entries)]


def _found(entry: Entry, entries: list[Entry]) -> str:
    """What a claim's file says, with its interval, n, seeds and scale."""
    r, behind = entry.result, _behind(entry, entries)
    words = [r.what[:1].upper() + r.what[1:]]
    if entry.interval is not None and "95% interval" not in r.what:
        low, high = (plain(end) for end in entry.interval)
        words.append(f"{plain(entry.value)} {entry.unit}".strip() + f" (95% interval {low} to {high})")
    words.append(f"n = {r.n:,}" if r.n is not None else f"n = {images(behind)}" if behind else "")
    seeds = sorted({e.result.seed for e in behind if e.result.seed is not None})
    words.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}" if seeds else "")
    words.append(r.note)
    words.append("**the numbers behind it have changed since it was judged**" if _outdated(entry, behind) else "")
    return "; ".join(word for word in words if word)


def _behind(entry: Entry, entries: list[Entry]) -> list[Entry]:
    """The results a claim was made from."""
    claim, dataset = entry.result.claim, entry.result.dataset
    found = at(entries, "worst" if claim == "table2" else CLAIMED.get(claim, claim), dataset=dataset)
    about = _about(entry)
    pair = (SR, about) if about is not None and (claim != "table2" or about == ADAM) else None
    found = found if pair is None else [e for e in found if any(row.has(e.result) for row in pair)]
    return [e for e in found if entry.target in ("", e.target)]


def _about(entry: Entry) -> Row | None:
    """The network that a claim compares with SR."""
    return next((row for row in (MMLDA, ADAM, SR_ADAM) if row.has(entry.result)), None)


def _outdated(entry: Entry, behind: list[Entry]) -> bool:
    """Whether a difference of means is no longer that of the results, as when seeds were added afterwards."""
    about = _about(entry)
    if about is None or entry.result.claim not in ("table1", "adam", "fig2") or entry.value is None:
        return False
    means = [number(ours(of(behind, row)).sort) for row in (about, SR)]
    if means[0] is None or means[1] is None:
        return True
    return not math.isclose(means[0] - means[1], entry.value, abs_tol=1e-3)


def _evidence(entry: Entry) -> str:
    return f"[{entry.result.name}]({link(entry)})"


def _unjudged(said: str, data: str, words: str, group: list[Entry]) -> Line:
    """A row of a claim that nobody has written a rule for."""
    if not group:
        return ["Sec. 4.3", f"“{said}”", DATA[data], "–", MISSING, "–"]
    return ["Sec. 4.3", f"“{said}”", DATA[data], words, f"{WORDS[None]}: no rule was written", files(group)]


def _finetuned(entries: list[Entry], data: str) -> Line:
    better = worse = measured = 0
    group: list[Entry] = []
    for row, attack, eps in tuned_cells():
        tuned, base = (at(entries, "table2", dataset=data, row=one, attack=attack, eps=eps) for one in (row, SR))
        if tuned and base:
            measured, group = measured + 1, group + tuned
            low, high = difference([e.result for e in tuned], [e.result for e in base])
            better, worse = better + (low > 0), worse + (high < 0)
    words = f"Above SR in {better} and below it in {worse} of {measured} cells by the 95% interval of the difference"
    words += f"; n = {images(group)}"
    return _unjudged(FINETUNED, data, words, group)


def _theory(entries: list[Entry]) -> list[Line]:
    """Two statements that need no network."""
    e = next((e for e in entries if e.result.kind == "theory"), None)
    if e is None:
        said = (("Sec. 3.1", DISTANCE), ("Sec. 4.2", BAYES))
        return [[where, f"“{sentence}”", "–", "–", MISSING, "–"] for where, sentence in said]
    words = f"{e.result.what[:1].upper()}{e.result.what[1:]}: {plain(e.value)}"
    made = [["Sec. 3.1", f"“{DISTANCE}”", "–", words, WORDS[e.result.holds], _evidence(e)]]
    curves = [c for c in e.result.series.get("curves", []) if c["panel"] == "Bayes error"]
    falls = bool(curves) and all(a > b or a == b == 0 for c in curves for a, b in zip(c["y"], c["y"][1:]))
    ends = [f"{c['name']}: " + " and ".join(f"{plain(c['y'][k] or 1e-6)} at C = {plain(c['x'][k])}" for k in (0, -1))
            for c in curves]  # fmt: skip
    words = f"Bayes error (1e-6 if less), {'; '.join(ends)}; it {'falls' if falls else 'does not fall'} all the way"
    return [*made, ["Sec. 4.2", f"“{BAYES}”", "–", words, WORDS[falls], _evidence(e)]]


def claims(entries: list[Entry]) -> str:
    """All sentences; one that is told on several data sets is written out once."""
    rows, before = sentences(entries), ""
    for row in rows:
        same, before = row[1] == before, row[1]
        row[:2] = ["″", "″"] if same else row[:2]
    return markdown(HEAD, rows)


# ------------------------------------------------------------------------------------------------- numbers


def against(group: list[Entry]) -> dict[str, tuple[float, bool, str]]:
    """Each number of a row beside the paper's: how far apart, whether that is near enough, and by which rule."""
    found = {}
    for place, runs in grouped(group, _place).items():
        values, first = [e.result.number for e in runs if e.value is not None], runs[0]
        mean, paper = number(ours(runs).sort), first.paper
        if mean is not None and paper is not None:
            apart = statistics.fmean(values), first.result.paper
            held, rule = numbers.reproduced(first.result.kind, first.result.dataset, *apart)
            found[place] = mean - paper, bool(held), rule
    return found


def tally(group: list[Entry], wanted: int) -> tuple[str, bool | None]:
    """How many numbers of a row are the paper's, near enough, in words; over several seeds by their mean.

    Holds where all are, does not where one is not; not decided where some of those wanted are missing and none fails.
    """
    found = against(group)
    near, rule = [held for _, held, _ in found.values()], next((rule for _, _, rule in found.values()), "")
    apart = {place: gap for place, (gap, _, _) in found.items()}
    if not near:
        return "", None
    place = max(apart, key=lambda name: abs(apart[name]))
    most = fixed(apart[place], 2, sign=True)
    words = f"{sum(near)} of {len(near)} {rule}; the largest difference is {most} ({place})"
    if not place:  # a table of one number a row
        words = f"{'' if near[0] else 'not '}{rule} ({most})"
    if len(near) < wanted:
        words += f"; {len(near)} of {wanted} measured"
    return words, all(near) if not all(near) or len(near) >= wanted else None


def reading(group: list[Entry]) -> tuple[str, list[Entry]]:
    """Of the settings that the paper leaves open, those that fit a row's numbers best, in words, and their results."""
    ways = list(dict.fromkeys((e.at("surface"), e.target) for e in group if e.target))
    if not ways:
        return "", group
    found = {way: [e for e in group if not e.target or (e.at("surface"), e.target) == way] for way in ways}

    def misses(way: tuple[str, str]) -> tuple[int, float]:
        cells = against(found[way]).values()
        return sum(not held for _, held, _ in cells), sum(abs(gap) for gap, _, _ in cells)

    best = min(ways, key=misses)
    surface, target = best
    return (f"JSMA on {surface}, {target} target" if surface else target), found[best]


def _place(entry: Entry) -> str:
    """Where in its row a number stands."""
    eps = "" if entry.result.eps is None else str(entry.result.eps)
    return " ".join(word for word in (entry.attack, eps, entry.at("surface"), entry.target) if word)


def tallies(entries: list[Entry]) -> list[Line]:
    """The tables' numbers as claims of their own, row by row."""
    made = []
    for data in numbers.DATASETS:
        rows = [("table1", "test error", row, 1) for row in plain_rows(data)]
        rows += [("table2", "accuracies", row, 12 if row in plain_rows(data) else 9)
                 for row in dict.fromkeys((*numbers.ROWS, *plain_rows(data)))]  # fmt: skip
        rows += [("table3", "C&W distortion", row, 1) for row in plain_rows(data)]
        for kind, said, row, many in rows:
            way, group = reading(at(entries, kind, dataset=data, row=row))
            words, holds = tally(group, many)
            found = f"{words}; {f'read as {way}; ' if way else ''}n = {images(group)}" if words else "–"
            alone = f"{value(group)}; " if kind == "table1" and words else ""
            what, verdict = f"the {said} of {row.label(data)}", WORDS[holds] if words else MISSING
            made.append([TITLES[kind], what, DATA[data], alone + found, verdict, files(group) or "–"])
    return sorted(made, key=lambda row: row[0])  # stable: data sets stay together


# ------------------------------------------------------------------------------------------------- in short


def short(entries: list[Entry]) -> str:
    """The outcome in a few sentences."""
    lines = []
    if audited := verdicts(entries):
        lines.append("By the audit: " + headline(audited).replace("\u2011", "-"))
    for data in reversed(numbers.DATASETS):
        here = [at(entries, "table2", dataset=data, row=row, attack="BIM", eps=0.04) for row in (MMLDA, SR)]
        said = [f"{ours(group, 2).text}% for {group[0].model} (paper: {group[0].paper}%)" for group in here if group]
        if said:
            lines.append(f"BIM at 0.04 on {DATA[data]} leaves {' and '.join(said)}.")
    for row in (*numbers.ROWS, ADAM):
        found = [(data, at(entries, "table2", dataset=data, row=row)) for data in numbers.DATASETS]
        said = [f"on {DATA[data]} {tally(reading(group)[1], 0)[0]}" for data, group in found if group]
        if said:
            lines.append(f"The numbers of Table 2 for {row.label('cifar10')}: {'; '.join(said)}.")
    lines += [_sides(entries, data, row) for data in numbers.DATASETS for row in plain_rows(data)[1:]]
    lines.append(_gradients(entries))
    rows = [row[4].strip("*").split(":")[0] for row in sentences(entries) if "not in the paper" not in row[2]]
    words = "; ".join(f"{word}: {rows.count(word)}" for word in ("holds", "does not hold", "not decided", MISSING))
    lines.append(f"The verdicts on the paper's sentences, one for each data set, target and recipe: {words}.")
    return "".join(f"- {line}\n" for line in lines if line)


def _sides(entries: list[Entry], data: str, row: Row) -> str:
    """In how many cells of Table 2 an MM-LDA network is above SR, and in how many below."""
    above = below = cells = 0
    for group in grouped(at(entries, "table2", dataset=data), _place).values():
        mine, base = ([e.result for e in of(group, one)] for one in (row, SR))
        if mine and base:
            low, high = difference(mine, base)
            above, below, cells = above + (low > 0), below + (high < 0), cells + 1
    words = f"Under the paper's own attacks on {DATA[data]}, {row.label(data)} is above SR in {above} and below it in "
    return words + f"{below} of {cells} cells (95% interval of the difference)." if cells else ""


def _gradients(entries: list[Entry]) -> str:
    """Whether attacks could stand still, from the attacked cells and the audits."""
    shares = [s for e in at(entries, "table2") if (s := number(e.result.numbers.get("zero_gradient"))) is not None]
    mine = {e.result.network_sha256 for e in at(entries, "table2")}
    audited = [e.result.numbers for e in at(entries, "audit") if e.result.network_sha256 in mine]
    gaps = [g for one in audited if (g := number(one.get("median_gap"))) is not None]
    high = [g for one in audited if (g := number(one.get("gaps_above_104"))) is not None]
    if not shares:
        return ""
    share = f"up to {100 * max(shares):.2f}% of the images" if max(shares) else "no image"
    words = f"In the {len(shares)} results of Table 2 the gradient at the start was exactly zero for {share}"
    if gaps and high:
        many = f"up to {percent(max(high)):.1f}% of the images have" if max(high) else "no image has"
        words += f"; in the audits of its networks the median gap of the top two logits is {min(gaps):.1f} to "
        words += f"{max(gaps):.1f} nats, and {many} one above 104, where float32's cross-entropy loses its gradient"
    return words + "."


# ------------------------------------------------------------------------------------------------- what is missing


def wanted() -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Every result the paper asks for: part in words, kind, cells."""
    both, jsma = numbers.DATASETS, [{"surface": s, "target": t} for s, t in JSMA]
    tuned = tuned_cells()
    audited = list(dict.fromkeys((row, (kind, None if row == HAT else eps)) for row, kind, eps in tuned))
    looks = [(WORST, "WorstCase"), *((view, kind) for view in VIEWS for kind in SUSPECT_ATTACKS)]
    scales = inspect.signature(fig5).parameters["log10_C"].default
    return [
        ("Table 1, SR and MM-LDA, three seeds", "table1", [
            {"dataset": d, "row": m, "seed": s} for d in both for m in PLAIN for s in SEEDS]),
        ("Table 1, SR with Adam, three seeds", "table1", [
            {"dataset": d, "row": SR_ADAM, "seed": s} for d in both for s in SEEDS]),
        ("Table 1, MM-LDA with Adam as the paper names it, three seeds", "table1", [
            {"dataset": "cifar10", "row": ADAM, "seed": s} for s in SEEDS]),
        ("Table 2, SR and MM-LDA under FGSM, BIM and ILCM", "table2", [
            {"dataset": d, "row": m, "attack": k, "eps": e}
            for d in both for m in PLAIN for k in GRADIENT for e in numbers.EPS]),
        ("Table 2, SR and MM-LDA under JSMA", "table2", [
            {"dataset": d, "row": m, "attack": "JSMA", "eps": e, **v}
            for d in both for m in PLAIN for e in numbers.EPS for v in jsma]),
        ("Table 2, fine-tuned networks", "table2", [
            {"dataset": d, "row": r, "attack": k, "eps": e} for d in both for r, k, e in tuned]),
        ("Table 2, MM-LDA with Adam", "table2", [
            {"dataset": "cifar10", "row": ADAM, "attack": k, "eps": e}
            for k in GRADIENT for e in numbers.EPS]),
        ("Table 2, MM-LDA with Adam under JSMA", "table2", [
            {"dataset": "cifar10", "row": ADAM, "attack": "JSMA", "eps": e, **v}
            for e in numbers.EPS for v in jsma]),
        ("Worst case of MM-LDA with Adam", "worst", [
            {"dataset": "cifar10", "row": ADAM, "eps": e} for e in WORST_EPS]),
        ("Audit of MM-LDA with Adam", "audit", [{"dataset": "cifar10", "row": ADAM}]),
        ("Table 3", "table3", [{"dataset": d, "row": m, "target": t} for d in both for m in PLAIN for t in TARGETS]),
        ("Table 3, MM-LDA with Adam", "table3", [
            {"dataset": "cifar10", "row": ADAM, "target": t} for t in TARGETS]),
        ("Worst case of SR and MM-LDA", "worst", [
            {"dataset": d, "row": m, "eps": e} for d in both for m in PLAIN for e in WORST_EPS]),
        ("Worst case of the fine-tuned networks", "worst", [
            {"dataset": d, "row": r, "tuned_on": (k, None), "eps": e}
            for d in both for r, k, e in tuned_cells(eps=WORST_EPS)]),
        ("Audit of SR and MM-LDA", "audit", [{"dataset": d, "row": m} for d in both for m in PLAIN]),
        ("Audit of the fine-tuned networks", "audit", [
            {"dataset": d, "row": r, "tuned_on": on} for d in both for r, on in audited]),
        ("Fig. 2", "fig2", [{"dataset": "cifar10", "row": m} for m in plain_rows("cifar10")]),
        ("Fig. 3", "fig3", [{"dataset": "cifar10", "row": m, "set": s} for m in MODELS for s in SETS]),
        ("Fig. 3, the control", "fig3", [{"dataset": "cifar10", "row": CONTROL, "set": s} for s in SETS]),
        ("Fig. 4", "fig4", [{"dataset": d, "row": m} for d in both for m in PLAIN]),
        ("Fig. 5", "fig5", [{"dataset": "cifar10", "log10_C": c} for c in scales]),
        ("Worst case of networks trained on PGD", "worst", [
            {"dataset": "cifar10", "row": m, "eps": k / 255} for m in HARDENED for k in (2, 4, 8)]),
        ("Audits of networks trained on PGD", "audit", [
            {"dataset": "cifar10", "row": m, "eps": 8 / 255} for m in HARDENED]),
        ("Suspects behind Table 2", "suspect", [
            {"dataset": d, "row": m, "view": v, "attack": k, "eps": e}
            for d in both for m in suspect_rows(d) for v, k in looks for e in numbers.EPS]),
    ]  # fmt: skip


def missing(entries: list[Entry]) -> str:
    """What the paper asks for and the results do not have, part by part."""
    rows = []
    for part, kind, cells in wanted():
        here = [e for e in entries if e.result.kind == kind and not tables.one_sided(e)]
        absent = [cell for cell in cells if not at(here, kind, **cell)]
        if absent:
            rows.append([part, f"{len(cells) - len(absent)} of {len(cells)}", _which(absent)])
    fits = {e.result.dataset for e in entries if e.result.kind == "latent"}
    if absent := [{"dataset": data} for data in numbers.DATASETS if data not in fits]:
        rows.append(["Latent fit of the trained networks", f"{len(fits)} of {len(numbers.DATASETS)}", _which(absent)])
    return markdown(("part", "results", MISSING), rows) if rows else "Nothing is missing.\n"


def _value(key: str, cell: dict[str, Any]) -> str:
    """A coordinate in words."""
    value = cell[key]
    if isinstance(value, Row):
        return value.label(cell["dataset"])
    if key == "tuned_on":
        return " ".join(str(word) for word in value if word is not None)
    return f"{value:.4g}" if isinstance(value, float) else DATA.get(value, str(value))


def _which(cells: list[dict[str, Any]]) -> str:
    """The missing cells in outline: each coordinate's values."""
    words = []
    for key in cells[0]:
        named = list(dict.fromkeys(_value(key, cell) for cell in cells))
        if len(named) > 7:
            named = [*named[:3], "...", f"{named[-1]} ({len(named)})"]
        words.append({"seed": "seeds ", "eps": "eps ", "log10_C": "log10(C) "}.get(key, "") + " / ".join(named))
    return "; ".join(words)


MAKERS: dict[str, Callable[[list[Entry]], str]] = {
    "short": short,
    "claims": claims,
    "numbers": lambda entries: markdown(HEAD, tallies(entries)),
    "table1": tables.table1,
    "table2": tables.table2,
    "table3": tables.table3,
    "worst": tables.worst,
    "audits": tables.audits,
    "figures": tables.figures,
    "suspects": tables.suspects,
    "other": tables.other,
    "missing": missing,
    "measured on": tables.measured_on,
}


def parts(folder: str | Path = RESULTS) -> dict[str, str]:
    """Every part of the page, made from the results in a folder."""
    entries = load(folder)
    return {name: make(entries) for name, make in MAKERS.items()}


if __name__ == "__main__":
    write_whole(PAGE, put(PAGE.read_text(), SCRIPT, parts()).encode())
