"""Where the page's numbers come from: data, networks, devices, versions, and every field of each result."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from mmlda.report.entries import Entry, by_data, grouped, number, rank
from mmlda.report.summary import TITLES

MOST = 8  # lines of each kind of source


def unplaced(entries: list[Entry], markup: str) -> list[tuple[str, tuple[int, ...]]]:
    """Results that the page does not show, counted by kind and dataset, with the results behind."""
    shown = {int(k) for ids in re.findall(r'data-results="([\d ]+)"', markup) for k in ids.split()}
    rest = sorted((e for e in entries if e.id not in shown), key=lambda e: (str(e.result.kind), by_data(e.data)))
    groups = grouped(rest, lambda e: f"{TITLES.get(e.result.kind, e.result.kind)}{f' on {e.data}' if e.data else ''}")
    return [(f"{name} ({len(group)})", tuple(e.id for e in group)) for name, group in groups.items()]


def scale(entries: list[Entry], most: int = 6) -> list[tuple[str, str]]:
    """The notes of the results, each with its subject, such as a scale that is not the paper's."""
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


OWN = ("holds", "n", "seed", "train_steps", "attack_steps", "seconds", "numbers", "network", "network_sha256")
POOLED = ("recipe_settings", "attack_settings", "data", "versions", "device", "commit", "note")


def provenance(entries: list[Entry]) -> dict[str, Any]:
    """Everything the page shows about each number. What many results share (recipes, versions, ...) is stored once."""
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
        own = {
            "name": r.name,
            "part": TITLES.get(r.kind, str(r.kind)),
            "what": r.what,
            "place": _place_in_words(entry),
            "value": r.value if entry.value is None else entry.value,
            "unit": entry.unit,
            "interval": entry.interval,
            "paper": r.paper if entry.paper is None else entry.paper,
            "difference": entry.difference,
        }
        own |= {key: getattr(r, key) for key in OWN}
        own["outcomes"] = r.outcomes and str(r.outcomes.get("file", ""))
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
