"""What the page says first: the verdict, the paper's claims, the key numbers, and where all of it comes from."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mmlda.report.entries import Entry, by_data, fixed, grouped, number, of_kind, percent, plain, rank, size
from mmlda.report.tables import Cell, agreement, ours, papers

__all__ = [
    "Claim",
    "Evidence",
    "Finding",
    "Group",
    "Tile",
    "Verdict",
    "claims",
    "headline",
    "key_numbers",
    "provenance",
    "scale",
    "sources",
    "verdicts",
]

TITLES = {
    "table1": "Table 1",
    "table2": "Table 2",
    "table3": "Table 3",
    "worst": "Worst case",
    "fig2": "Figure 2",
    "fig3": "Figure 3",
    "fig4": "Figure 4",
    "fig5": "Figure 5",
    "theory": "Theory",
    "audit": "Audit",
    "evaluation": "Evaluation",
    "claim": "Claims",
}
# Where the paper makes a claim.
CLAIMED = {
    "table1": "table1",
    "adam": "table1",
    "table2": "table2",
    "table3": "table3",
    "success": "table3",
    "suspects": "table2",
    "fig2": "fig2",
    "latent": "fig2",
    "fig3": "fig3",
    "fig3-recipe": "fig3",
    "priors": "fig3",
    "fig4": "fig4",
    "fig5": "fig5",
}
MOST = 8  # lines of each kind of source
TONES = {"real": "good", "none": "bad", "masked": "bad", "mixed": "open"}
PHRASES = {
    "real": "{who}’s robustness is real on {where}",
    "none": "{who} has no robustness on {where}",
    "masked": "{who} only looks robust on {where}, where its gradients are masked",
    "mixed": "the evidence on {who} is mixed on {where}",
}
TABLE_CLAIMS = {
    "table1": "Each test error in the paper’s table is reproduced, by every seed and recipe.",
    "table2": "Each accuracy under attack in the paper’s table is reproduced, in every reading of what the paper "
    "leaves open.",
    "table3": "Each C&W distortion in the paper’s table is reproduced, in every reading of what the paper leaves open.",
}


MANY = 8  # verdicts: more are not told one by one


@dataclass(frozen=True)
class Evidence:
    """One test of an audit."""

    test: str
    words: str
    numbers: str
    passed: bool | None


@dataclass(frozen=True)
class Verdict:
    """An audit: its word, its sentence, and what they rest on."""

    entry: Entry
    data: str
    model: str
    eps: str
    word: str
    tone: str
    sentence: str
    evidence: list[Evidence]


@dataclass(frozen=True)
class Finding:
    """Whether a claim holds in one place, what was found there, and by which rule it was judged."""

    where: str
    holds: bool | None
    words: str
    rule: str
    ids: tuple[int, ...]
    judged: bool = True  # False for an answer to a question of ours


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and what became of it."""

    part: str
    sentence: str
    findings: list[Finding]


@dataclass(frozen=True)
class Tile:
    """A key number, and in a line what to compare it with."""

    label: str
    cell: Cell
    unit: str
    beside: str


@dataclass(frozen=True)
class Group:
    """The key numbers of one data set."""

    title: str
    tiles: list[Tile]


def verdicts(entries: list[Entry]) -> list[Verdict]:
    """The audits, in the page's order."""
    made = []
    for entry in of_kind(entries, "audit"):
        word = str(entry.result.value)
        eps = size(entry.eps) if entry.eps is not None else ""
        made.append(
            Verdict(
                entry,
                entry.data,
                entry.model,
                eps,
                word,
                TONES.get(word, "open"),
                str(entry.result.what),
                _evidence(entry),
            )
        )
    return made


def told(found: list[Verdict]) -> list[Verdict]:
    """The verdicts that are told one by one: all, or where they are many those of networks trained as usual.

    The others, of networks trained on adversarial examples, are a table's.
    """
    usual = [v for v in found if not (v.entry.result.recipe_settings or {}).get("adversary")]
    return usual if usual and len(found) > MANY else found


def _evidence(entry: Entry) -> list[Evidence]:
    """The tests of an audit, with their numbers in words."""
    made = []
    for item in entry.result.series.get("evidence") or []:
        if not isinstance(item, dict):
            raise ValueError(f"{entry.result.name}: evidence holds {item!r}, expected a record of a test")
        value, limit = (_printed(item.get(key), item.get("unit")) for key in ("value", "limit"))
        both = f"{plain(value)} (limit {plain(limit)})" if limit is not None else plain(value)
        passed = item.get("passed")
        made.append(
            Evidence(
                str(item.get("test", "")),
                str(item.get("words", "")),
                both if value is not None else "",
                passed if isinstance(passed, bool) else None,
            )
        )
    return made


def _printed(value: Any, unit: Any) -> float | None:
    """A number of an audit as it is printed: a share in percent."""
    found = number(value)
    return percent(found) if found is not None and unit == "share" else found


def headline(found: list[Verdict]) -> str:
    """The verdicts in a sentence: about MM-LDA, which the paper is about, where there is an audit of it."""
    focus = [v for v in found if v.entry.result.head == "mmlda" and "variant" not in v.entry.result.cell] or found
    places: dict[tuple[str, str], list[str]] = {}
    for v in focus:
        where = f"{v.data} at ε = {v.eps}" if v.eps else v.data
        here = places.setdefault((v.model or "the network", v.word), [])
        if where not in here:
            here.append(where)
    said = []
    for (model, word), sites in places.items():
        phrase = PHRASES.get(word)
        said.append(
            phrase.format(who=model, where=_listed(sites)) if phrase else f"{model} on {_listed(sites)}: {word}"
        )
    text = "; ".join(said).replace("-", "\u2011")  # MM-LDA and CIFAR-10 stay in one piece
    return text[:1].upper() + text[1:] + "." if text else ""


def _listed(names: list[str]) -> str:
    """Names in a sentence.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def claims(entries: list[Entry]) -> list[Claim]:
    """The paper's claims: its sentences as the results quote them, then its tables, data set by data set."""
    made = []
    for kind, part in TITLES.items():
        here = of_kind(entries, kind)
        said = [e for e in here if kind != "claim" and isinstance(e.result.paper, str) and e.result.paper]
        said += [e for e in of_kind(entries, "claim") if CLAIMED.get(e.result.claim, "claim") == kind]
        for sentence, group in grouped(said, lambda e: str(e.result.paper)).items():
            made.append(Claim(part, sentence, [_finding(e) for e in group]))
        if kind in TABLE_CLAIMS:
            counted = [e for e in here if e.paper is not None]
            findings = [_tally(data, group) for data, group in grouped(counted, lambda e: e.data).items()]
            if findings:
                made.append(Claim(part, TABLE_CLAIMS[kind], findings))
    return made


def _finding(entry: Entry) -> Finding:
    result, value = entry.result, entry.value
    where = " · ".join(word for word in (entry.data, entry.model) if word)
    what = str(result.what).rstrip(".")
    text = what[:1].upper() + what[1:]
    if result.kind != "claim" and value is not None:  # a claim's sentence has its numbers in it
        text += f": {plain(value)}{_unit(entry.unit)}"
    holds = result.holds if isinstance(result.holds, bool) else None
    judged = result.claim != "suspects"
    return Finding(where, holds, text + ".", str(result.series.get("rule", "")), (entry.id,), judged)


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
    rules = {str(e.result.series.get("rule", "")) for e in group}
    return Finding(data, holds, text[:1].upper() + text[1:] + ".", ", ".join(sorted(rules)), tuple(e.id for e in group))


def key_numbers(entries: list[Entry]) -> list[Group]:
    """A handful of numbers a data set: those of MM-LDA, or of the first network where it is not there."""
    made = []
    for data in sorted({e.data for e in entries if e.data}, key=by_data):
        tiles: list[Tile] = []
        here = [e for e in entries if e.data == data]
        for kind, label, digits, unit in (
            ("table1", "Test error", 2, "%"),
            ("table2", "Accuracy under {attack}, ε\u00a0=\u00a0{eps}", 1, "%"),
            ("worst", "Accuracy in the worst case, ε\u00a0=\u00a0{eps}", 1, "%"),
            ("table3", "Mean distortion under C&W", 2, ""),
            ("fig4", "Semantic noises", 1, "%"),
            ("evaluation", "Accuracy", 1, "%"),
        ):
            if kind == "evaluation" and tiles:
                continue
            chosen = _representative(of_kind(here, kind))
            if not chosen:
                continue
            cell = ours(chosen, digits)
            others = [e for e in of_kind(here, kind) if e.plain_head == "softmax" and _place(e) == _place(chosen[0])]
            paper = papers(chosen)
            said = [
                f"paper {fixed(paper, digits)}" if paper is not None else "",
                f"SR {ours(others, digits).text}" if others and chosen[0].plain_head != "softmax" else "",
            ]
            name = label.format(attack=chosen[0].attack, eps=size(chosen[0].eps))
            title = f"{chosen[0].model}: {name[:1].lower()}{name[1:]}" if chosen[0].model else name
            aside = " · ".join(word for word in said if word)
            tiles.append(Tile(title, cell, unit if cell.sort is not None else "", aside))
        best = [e for e in of_kind(here, "claim") if e.result.claim == "fig5"]
        if best:
            tiles.append(Tile("MM-LDA: best log₁₀ C", ours(best, 1), "", ""))
        if tiles:
            made.append(Group(data, tiles))
    return made


def _place(entry: Entry) -> tuple[Any, ...]:
    return entry.result.attack, entry.result.eps, entry.at("surface"), entry.target


def _representative(found: list[Entry]) -> list[Entry]:
    """One cell of a table, all its runs: MM-LDA, BIM where there are attacks, the smallest perturbation."""
    if not found:
        return []
    found = [e for e in found if e.plain_head == "mmlda"] or [e for e in found if e.model == found[0].model]
    found = [e for e in found if e.result.attack == "BIM"] or found
    first = min(found, key=lambda e: (e.eps or 0.0, e.target != "untargeted", e.id))
    return [e for e in found if _place(e) == _place(first)]


def scale(entries: list[Entry], most: int = 6) -> list[tuple[str, str]]:
    """What the results' notes say, each with what it is about: the scale, where it is not the paper's."""
    made = []
    names = list(TITLES.values())
    noted = sorted((e for e in entries if e.result.note and e.result.kind != "claim"), key=lambda e: by_data(e.data))
    for note, group in grouped(noted, lambda e: str(e.result.note)).items():
        where = sorted({e.data for e in group if e.data}, key=by_data)
        parts = sorted({TITLES.get(e.result.kind, str(e.result.kind)) for e in group}, key=rank(names))
        about = [", ".join(where), ", ".join(parts) if len(parts) < 4 else ""]
        made.append((" · ".join(word for word in about if word), note))
    more = [("", f"{len(made) - most} more notes are with the numbers.")] if len(made) > most else []
    return made[:most] + more


def sources(entries: list[Entry]) -> list[tuple[str, list[str]]]:
    """Data, networks, devices, versions and commits behind the page, each with how many results rest on it."""

    def tally(words: list[str]) -> list[str]:
        counts = Counter(word for word in words if word)
        rows = [f"{word} ({count})" for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        return rows if len(rows) <= MOST else [*rows[: MOST - 1], f"and {len(rows) - MOST + 1} more, with the numbers"]

    def hashed(name: Any, sha256: Any) -> str:
        digest = f"sha256 {str(sha256)[:16]}…" if sha256 else ""
        return " ".join(word for word in (str(name or ""), digest) if word)

    results = [e.result for e in entries]
    seconds = sum(s for s in (number(r.seconds) for r in results) if s is not None)
    rows = [
        ("Data", tally([hashed(r.data.get("name"), r.data.get("sha256")) for r in results if r.data])),
        ("Networks", tally([hashed(r.network, r.network_sha256) for r in results])),
        ("Devices", tally([str(r.device) for r in results])),
        ("Versions", tally([", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in results])),
        ("Commits", tally([str(r.commit) for r in results])),
        ("Time", [f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds:.0f} seconds"] if seconds else []),
    ]
    return [(name, words) for name, words in rows if words]


POOLED = ("recipe_settings", "attack_settings", "data", "versions", "device", "commit", "note")


def provenance(entries: list[Entry]) -> dict[str, Any]:
    """All that the page can say of each number. What many results share (recipes, versions, ...) is there once."""
    pool: list[Any] = []
    seen: dict[str, int] = {}

    def once(value: Any) -> int:
        key = json.dumps(value, sort_keys=True, default=str)
        if key not in seen:
            seen[key] = len(pool)
            pool.append(json.loads(key))
        return seen[key]

    rows = {}
    for entry in entries:
        r = entry.result
        part = TITLES.get(r.kind, str(r.kind))
        own = {
            "name": r.name,
            "part": part,
            "what": r.what,
            "place": _place_in_words(entry),
            "value": r.value if entry.value is None else entry.value,
            "unit": entry.unit,
            "interval": entry.interval,
            "paper": r.paper if entry.paper is None else entry.paper,
            "difference": entry.difference,
            "holds": r.holds,
            "n": r.n,
            "seed": r.seed,
            "train_steps": r.train_steps,
            "attack_steps": r.attack_steps,
            "seconds": r.seconds,
            "numbers": r.numbers,
            "network": r.network,
            "network_sha256": r.network_sha256,
            "outcomes": r.outcomes and str(r.outcomes.get("file", "")),
        }
        kept = {key: _finite(value) for key, value in own.items() if value not in (None, "", {}, ())}
        rows[str(entry.id)] = kept | {key: once(_finite(getattr(r, key))) for key in POOLED if getattr(r, key)}
    return {"pool": pool, "shared": list(POOLED), "results": rows}


def _place_in_words(entry: Entry) -> dict[str, Any]:
    """Where a result belongs: its dataset, network, attack, and further coordinates."""
    r = entry.result
    place = {"data": r.dataset, "model": entry.model, "recipe": r.recipe, "attack": r.attack, "eps": r.eps}
    place |= {"target": r.target, "claim": r.claim, **r.cell}
    return {key: value for key, value in place.items() if value not in (None, "")}


def _finite(value: Any) -> Any:
    """JSON has no NaN: None in its place, and 4 digits are enough to read a difference."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        found = number(value)
        return None if found is None else float(f"{found:.6g}")
    return value
