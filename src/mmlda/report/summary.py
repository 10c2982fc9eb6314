"""The top of the page: the verdict, the paper's claims, and the key numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmlda._utils.checks import damaged
from mmlda.report.entries import Entry, by_data, fixed, grouped, number, of_kind, percent, plain, rank, size
from mmlda.report.tables import Cell, agreement, attack_name, evaluated, mean_number, ours, papers

TITLES = {f"table{k}": f"Table {k}" for k in (1, 2, 3)} | {"worst": "Worst case"}
TITLES |= {f"fig{k}": f"Figure {k}" for k in (2, 3, 4, 5)}
TITLES |= {"theory": "Theory", "audit": "Audit", "evaluation": "Evaluation", "claim": "Claims"}
# Where the paper makes claims that are not named after their place.
CLAIMED = {"adam": "table1", "success": "table3", "suspects": "table2", "latent": "fig2"}
CLAIMED |= {"fig3-recipe": "fig3", "priors": "fig3"}
# An audit's verdict in plain words, its colour, and what the headline says; the order is that of the cards.
VERDICTS = {
    "real": ("robust", "good", "is robust on"),
    "masked": ("only looks robust", "bad", "only looks robust on"),
    "mixed": ("undecided", "open", "may or may not be robust on"),
    "none": ("not robust", "bad", "is not robust on"),
}
TABLE_CLAIMS = {
    "table1": "Each test error in the paper’s table is reproduced, by every seed and recipe.",
    "table2": "Each accuracy under attack in the paper’s table is reproduced, in every reading of what the paper "
    "leaves open.",
    "table3": "Each C&W distortion in the paper’s table is reproduced, in every reading of what the paper leaves open.",
}


@dataclass(frozen=True)
class Evidence:
    """One test of an audit."""

    test: str
    words: str
    numbers: str
    passed: bool | None


@dataclass(frozen=True)
class Verdict:
    """An audit: the perturbation, its verdict in plain words, and the tests behind it."""

    entry: Entry
    eps: str
    word: str
    tone: str
    evidence: list[Evidence]


@dataclass(frozen=True)
class Card:
    """The networks with one verdict on one dataset; each with its accuracy clean, under standard and all attacks."""

    where: str
    word: str
    tone: str
    rows: list[tuple[Verdict, list[Cell]]]


@dataclass(frozen=True)
class Finding:
    """Whether a claim holds on one dataset, and the finding there."""

    where: str
    holds: bool | None
    words: str
    ids: tuple[int, ...]
    judged: bool = True  # False if the question is ours, not the paper's


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and its verdicts."""

    part: str
    sentence: str
    findings: list[Finding]
    rules: list[str]

    @property
    def outcomes(self) -> dict[str, dict[tuple[bool | None, bool], None]]:
        """Whether it holds and was judged, each once, by place."""
        made: dict[str, dict[tuple[bool | None, bool], None]] = {}
        for f in self.findings:
            made.setdefault(f.where, {})[f.holds, f.judged] = None
        return made


@dataclass(frozen=True)
class Tile:
    """A key number, with a line of numbers to compare it with."""

    label: str
    cell: Cell
    beside: str
    images: str = ""  # how many, where the number is of a user's own evaluation
    leads: bool = True  # whether the headline may name it


def verdicts(entries: list[Entry]) -> list[Verdict]:
    """The audits, in the page's order."""
    made = []
    for entry in of_kind(entries, "audit"):
        value, eps = str(entry.result.value), size(entry.eps) if entry.eps is not None else ""
        word, tone, _ = VERDICTS.get(value, (value, "open", ""))
        made.append(Verdict(entry, eps, word, tone, _evidence(entry)))
    return made


def cards(found: list[Verdict]) -> list[Card]:
    """All verdicts, robust networks first, dataset by dataset."""
    order = rank([word for word, _, _ in VERDICTS.values()])
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for v in sorted(found, key=lambda v: (by_data(v.entry.data), order(v.word), v.entry.eps or 0.0)):
        groups.setdefault((f"{v.entry.data}, ε = {v.eps}" if v.eps else v.entry.data, v.word), []).append(v)
    shown = ("clean_accuracy", "standard_accuracy", "worst_accuracy")
    return [
        Card(where, word, each[0].tone, [(v, [mean_number([v.entry], name, 1, 100.0) for name in shown]) for v in each])
        for (where, word), each in groups.items()
    ]


def _evidence(entry: Entry) -> list[Evidence]:
    """The tests of an audit, with their numbers in words."""
    made = []
    for item in entry.result.series.get("evidence") or []:
        if not isinstance(item, dict):
            raise damaged(f"evidence of {entry.result.name}", "records of tests", repr(item))
        value, limit = (_printed(item.get(key), item.get("unit")) for key in ("value", "limit"))
        both = f"{plain(value)} (limit {plain(limit)})" if limit is not None else plain(value)
        passed = item["passed"] if isinstance(item.get("passed"), bool) else None
        words = str(item.get("words", ""))
        made.append(Evidence(str(item.get("test", "")), words, both if value is not None else "", passed))
    return made


def _printed(value: Any, unit: Any) -> float | None:
    """A number of an audit as it is printed: a share in percent."""
    found = number(value)
    return percent(found) if found is not None and unit == "share" else found


def title(entries: list[Entry]) -> str:
    """The title of a page without numbers of the paper: which networks were measured on which data."""
    models = list(dict.fromkeys(e.network for e in entries if e.network))
    data = list(dict.fromkeys(e.data for e in entries if e.data))
    who = _listed(models) if 0 < len(models) < 3 else f"{len(models)} networks" if models else "Results"
    return f"{who} on {_listed(data)}" if 0 < len(data) < 4 else who


def headline(entries: list[Entry], found: list[Verdict]) -> str:
    """The verdicts in a sentence, on MM-LDA where it was audited; without audits, accuracy clean and under attack."""
    focus = [v for v in found if v.entry.plain_head == "mmlda"] or found
    places: dict[tuple[str, str], dict[str, None]] = {}  # where, each once
    for v in focus:
        where = f"{v.entry.data} at ε = {v.eps}" if v.eps else v.entry.data
        places.setdefault((v.entry.model or "The network", str(v.entry.result.value)), {})[where] = None
    unknown = ("", "", "is neither robust nor broken on")
    said = [f"{who} {VERDICTS.get(v, unknown)[2]} {_listed(list(sites))}." for (who, v), sites in places.items()]
    if not found:
        said = []
        for _, tiles in key_numbers(entries):
            for tile in [tile for tile in tiles if tile.leads][:6]:
                said.append(f"{tile.label}: {tile.cell.text}%{f' ({tile.images})' if tile.images else ''}.")
    return " ".join(said).replace("-", "\u2011")  # MM-LDA and CIFAR-10 stay in one piece


def _listed(names: list[str]) -> str:
    """Names in a sentence.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def claims(entries: list[Entry]) -> list[Claim]:
    """The paper's claims: its sentences as the results quote them, then its tables, dataset by dataset."""
    made = []
    for kind, part in TITLES.items():
        here = of_kind(entries, kind)
        said = [e for e in here if kind != "claim" and isinstance(e.result.paper, str) and e.result.paper]
        said += [e for e in of_kind(entries, "claim") if _claimed(e) == kind]
        for sentence, group in grouped(said, lambda e: str(e.result.paper)).items():
            made.append(Claim(part, sentence, [_finding(e) for e in group], _rules(group)))
        if kind in TABLE_CLAIMS:
            counted = [e for e in here if e.paper is not None]
            findings = [_tally(data, group) for data, group in grouped(counted, lambda e: e.data).items()]
            if findings:
                made.append(Claim(part, TABLE_CLAIMS[kind], findings, _rules(counted)))
    return made


def _claimed(entry: Entry) -> str:
    """The kind of results that a claim is about."""
    name = str(entry.result.claim)
    return CLAIMED.get(name, name if name in TITLES else "claim")


def _rules(entries: list[Entry]) -> list[str]:
    """The rules that findings were judged by, each once."""
    return list(dict.fromkeys(rule for e in entries if (rule := str(e.result.series.get("rule", "")))))


def _finding(entry: Entry) -> Finding:
    result, value = entry.result, entry.value
    where = " · ".join(word for word in (entry.data, entry.model) if word)
    what = str(result.what).rstrip(".")
    text = what[:1].upper() + what[1:]
    if result.kind != "claim" and value is not None:  # a claim's sentence has its numbers in it
        text += f": {plain(value)}{_unit(entry.unit)}"
    holds = result.holds if isinstance(result.holds, bool) else None
    judged = result.claim != "suspects"
    return Finding(where, holds, text + ".", (entry.id,), judged)


def _unit(unit: str) -> str:
    return unit if unit in ("", "%") else f" {unit}"


def _tally(data: str, group: list[Entry]) -> Finding:
    """A table's cells together: the claim holds where every cell that decides it holds."""
    decided = [e.result.holds for e in group if isinstance(e.result.holds, bool)]
    holds = all(decided) if decided else None
    apart = [d for d in (e.difference for e in group) if d is not None]
    said = [f"it holds for {sum(decided)} of {len(decided)} numbers" if decided else "", agreement(group).rstrip(".")]
    if apart:
        said.append(f"the largest difference is {fixed(max(apart, key=abs), 2, sign=True)}")
    text = "; ".join(word[:1].lower() + word[1:] for word in said if word)
    return Finding(data, holds, text[:1].upper() + text[1:] + ".", tuple(e.id for e in group))


# The kinds of the paper's results with a key number: in words, the digits and the unit.
KEY_NUMBERS = {
    "table1": ("clean test error", 2),
    "table2": ("accuracy under {attack}, ε\u00a0=\u00a0{eps}", 1),
    "worst": ("accuracy in the worst case, ε\u00a0=\u00a0{eps}", 1),
}


def key_numbers(entries: list[Entry]) -> list[tuple[str, list[Tile]]]:
    """For each dataset: MM-LDA in the paper's tables, and every evaluated network, clean and at its worst."""
    made = []
    for data in sorted({e.data for e in entries if e.data}, key=by_data):
        here = [e for e in entries if e.data == data]
        tiles = [tile for kind in KEY_NUMBERS for tile in _tiles(here, kind)] + _evaluated(here)
        if tiles:
            made.append((data, tiles))
    return made


def _tiles(entries: list[Entry], kind: str) -> list[Tile]:
    """The key number of a table, with the paper's and SR's beside it; none where there are no results."""
    found = of_kind(entries, kind)
    if not (chosen := _representative(found, [{e.eps for e in of_kind(entries, k)} for k in ("audit", "table2")])):
        return []
    words, digits = KEY_NUMBERS[kind]
    cell, paper, first = ours(chosen, digits), papers(chosen), chosen[0]
    others = [e for e in found if e.plain_head == "softmax" != first.plain_head and _place(e) == _place(first)]
    said = [f"paper {fixed(paper, digits)}"] if paper is not None else []
    said += [f"SR {ours(others, digits).text}"] if others else []
    name = words.format(attack=first.attack, eps=size(first.eps))
    return [Tile(_named(first, name), cell, " · ".join(said))]


def _evaluated(entries: list[Entry]) -> list[Tile]:
    """For each network that was evaluated: clean accuracy, and at each perturbation the lowest under an attack."""
    made = []
    for group in grouped(of_kind(entries, "evaluation"), lambda e: e.model).values():
        unattacked = evaluated([e for e in group if not e.attack])
        clean = max(unattacked, key=lambda runs: number(runs[0].result.n) or 0.0, default=[])
        attacked = [e for e in group if e.attack and e.value is not None]
        before = ours(clean) if clean else mean_number(group, "clean_accuracy", 1, 100.0)
        images = _images(clean or group)
        if before.sort is not None:
            made.append(Tile(_named(group[0], "clean accuracy"), before, images, images))
        attacked.sort(key=lambda e: (e.eps is None, _norm(e) == "l2", e.eps or 0.0))
        sizes = grouped(attacked, lambda e: (_norm(e), e.eps))
        for place, ((norm, eps), each) in enumerate(sizes.items()):
            tried = evaluated(each)
            lowest = min(tried, key=lambda runs: float(ours(runs).sort or 0.0))
            worst, bound = lowest[0].result.attack == "WorstCase", ", any distance"
            if eps is not None:
                bound = f", ε\u00a0=\u00a0{size(eps)}" + (" (L2)" if norm == "l2" else "")
            name = f"accuracy {'in the' if worst else 'under'} {attack_name(lowest[0], each)}{bound}"
            images = _images(lowest)
            beside = [images, f"the lowest of {len(tried)} attacks at this ε" if len(tried) > 1 else ""]
            said = " · ".join(word for word in beside if word)
            made.append(Tile(_named(lowest[0], name), ours(lowest), said, images, place < 2))
    return made


def _norm(entry: Entry) -> str:
    return str((entry.result.attack_settings or {}).get("norm", "linf"))


def _images(entries: list[Entry]) -> str:
    n = number(entries[0].result.n)
    return "" if n is None else f"{n:,.0f} images"


def _named(entry: Entry, name: str) -> str:
    """A key number's label; on a page about one dataset the network comes first."""
    return f"{entry.model}: {name}" if entry.model else name[:1].upper() + name[1:]


def _place(entry: Entry) -> tuple[Any, ...]:
    return entry.result.attack, entry.result.eps, entry.at("surface"), entry.target


def _representative(found: list[Entry], sizes: list[set[float | None]]) -> list[Entry]:
    """One cell of a table, all its runs: MM-LDA, BIM where there are attacks, the audit's perturbation or Table 2's."""
    if not found:
        return []
    found = [e for e in found if e.plain_head == "mmlda"] or [e for e in found if e.model == found[0].model]
    found = [e for e in found if e.result.attack == "BIM"] or found
    for some in sizes:
        found = [e for e in found if e.eps in some] or found
    first = min(found, key=lambda e: (e.eps or 0.0, e.target != "untargeted", e.id))
    return [e for e in found if _place(e) == _place(first)]
