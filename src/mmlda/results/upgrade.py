"""Results of older schemas in the fields of this one.

Schema 1 had facts inside display strings (`cell["model"]` was "SR + SAT (BIM 0.04)") and shares in percent. This is
the only place that knows those strings.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["SCHEMA", "upgrade"]

SCHEMA = 2

# Rows of schema 1: the head and the end of the recipe's name.
ROWS = {
    "SR": ("softmax", "sr"),
    "SR (Adam)": ("softmax", "sr-adam"),
    "SR (PGD)": ("softmax", "sr-pgd"),
    "SR, MM-LDA's recipe": ("softmax", "mmlda"),
    "MM-LDA": ("mmlda", "mmlda"),
    "MM-LDA (Adam)": ("mmlda", "mmlda-adam"),
    "MM-LDA (PGD)": ("mmlda", "mmlda-pgd"),
    "MM-LDA, true priors": ("mmlda", "mmlda"),
}
VARIANTS = (
    "C = 10",
    "C = 1000",
    "C = 10000",
    "precision 2",
    "no weight decay",
    "four times the steps",
    "centre loss",
    "soft targets",
)
CLAIMS_OF_ONE_NETWORK = ("table1", "table2", "table3", "fig2", "latent")  # one for each recipe of MM-LDA
IN_NATS_OR_COSINES = ("gaps", "averaging")  # the tests of an audit whose value is not a share


def upgrade(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result in the current schema; those of a current result as they are."""
    if values["schema"] >= SCHEMA:
        return values
    old = dict(values)
    cell = old.pop("cell", {})
    if not isinstance(cell, dict):
        raise ValueError(f"cell must be names with values, got {cell!r}")
    cell = dict(cell)
    dataset = str(cell.pop("data", ""))
    row = cell.pop("model", None)
    cell.pop("seed", None)
    new: dict[str, Any] = {"dataset": "" if dataset == "theory" else dataset}
    new |= _network(old.pop("network", None), row)
    new |= _recipe(old.pop("recipe", None))
    new |= _attack(old.pop("attack", None), cell, str(old.get("kind")))
    new |= _steps(old.pop("steps", None), new)
    new |= _device(old)
    new["eps"] = cell.pop("eps", new.pop("eps", None))
    new["target"] = str(cell.pop("target", ""))
    if named := re.fullmatch(r"(BP\d)-(\d+)", str(cell.get("set", ""))):  # a class-biased set
        cell |= {"family": named[1], "index": int(named[2])}
    if "claim" in cell:
        new |= _claim(str(cell.pop("claim")), dataset, cell)
    elif row is not None:
        new |= _row(str(row), dataset, cell, str(old.get("kind")))
    elif old.get("kind") == "fig5":
        new |= {"head": "mmlda", "recipe": f"{dataset}-mmlda"}
    return _in_shares({**old, **new, "cell": cell, "schema": SCHEMA})


def _network(about: Any, row: Any) -> dict[str, Any]:
    about = about if isinstance(about, dict) else {}
    if "jobs" in about:  # several networks, one for each fold
        return {"network": "", "network_sha256": "", "jobs": about["jobs"]}
    name = about.get("name") or ""
    return {
        "network": str(name or ("" if row in ROWS else row or "")),
        "network_sha256": str(about.get("sha256") or ""),
    }


def _recipe(settings: Any) -> dict[str, Any]:
    if isinstance(settings, dict) and settings.get("loss") == "joint":
        settings = {**settings, "loss": "centre"}
    return {"recipe_settings": settings, "recipe": ""}


def _attack(about: Any, cell: dict[str, Any], kind: str) -> dict[str, Any]:
    place = str(cell.pop("attack", ""))
    place = "CarliniWagner" if place == "C&W" else place
    if not isinstance(about, dict):
        return {"attack": place, "attack_settings": None}
    if "name" not in about:  # an audit's settings
        return {"attack": place, "attack_settings": about, "eps": about.get("eps")}
    settings = about.get("settings")
    eps = settings.get("eps") if isinstance(settings, dict) else None
    name = place or str(about["name"])
    return {"attack": name, "attack_settings": settings, "compiled": bool(about.get("compiled")), "eps": eps}


def _steps(steps: Any, new: dict[str, Any]) -> dict[str, Any]:
    """One number with two meanings: training steps where there is a recipe, else those of an attack."""
    of_attack = (new["attack_settings"] or {}).get("steps") if isinstance(new["attack_settings"], dict) else None
    trained = new["recipe_settings"] is not None or new["attack_settings"] is None
    return {"train_steps": steps if trained else None, "attack_steps": of_attack if trained else steps}


def _device(old: dict[str, Any]) -> dict[str, Any]:
    """The device's name was repeated among the versions; the field was "cuda:0" in some audits."""
    versions = old.pop("versions", {})
    if not isinstance(versions, dict):
        raise ValueError(f"versions must be names with values, got {versions!r}")
    name = versions.get("device") or old.get("device", "")
    return {"device": name, "versions": {key: value for key, value in versions.items() if key != "device"}}


def _row(row: str, dataset: str, cell: dict[str, Any], kind: str) -> dict[str, Any]:
    """Head, recipe and fine-tuning of a row of a table."""
    plain = row.removesuffix(" (ships)")
    if plain != row:
        cell["shipped"] = True
    if kind == "suspect" or plain in VARIANTS:
        base = "mmlda-adam" if dataset == "cifar10" else "mmlda"  # the paper's recipe
        if "shipped" not in cell:
            cell["variant"] = plain if plain in VARIANTS else ""
            head, recipe = ROWS["SR"] if plain == "SR" else ("mmlda", base)
            return {"head": head, "recipe": f"{dataset}-{recipe}"}
    if tuned := re.match(r"SR \+ (SAT|HAT)", plain):
        kind = tuned[1].lower()
        return {"head": "softmax", "recipe": f"{dataset}-{kind}", "fine_tuning": kind}
    if plain not in ROWS:
        return {}
    if plain == "MM-LDA, true priors":
        cell["priors"] = "true"
    head, recipe = ROWS[plain]
    return {"head": head, "recipe": f"{dataset}-{recipe}"} if dataset else {"head": head}


def _claim(name: str, dataset: str, cell: dict[str, Any]) -> dict[str, Any]:
    """A claim's name had the target and the recipe in it: "table3-random-adam"."""
    if name == "fig3-recipe":
        return {"claim": name}
    if name == "adam":
        return {"claim": name, "head": "softmax", "recipe": f"{dataset}-sr-adam"}
    claim, *words = name.split("-")
    found: dict[str, Any] = {"claim": claim}
    if claim in CLAIMS_OF_ONE_NETWORK:
        found |= {"head": "mmlda", "recipe": f"{dataset}-mmlda" + ("-adam" if "adam" in words else "")}
    if "shipped" in words:
        cell["shipped"] = True
    if target := [word for word in words if word not in ("adam", "shipped")]:
        found["target"] = target[0]
    return found


def _in_shares(values: dict[str, Any]) -> dict[str, Any]:
    """Percents and percentage points as shares in [0, 1]."""
    values, kind = dict(values), values["kind"]
    numbers, series = dict(values.get("numbers") or {}), dict(values.get("series") or {})
    unit = values.get("unit", "")
    if unit in ("%", "points"):
        values["unit"] = "share" if unit == "%" else "share difference"
        for key in ("value", "paper"):
            values[key] = _share(values.get(key))
        if values.get("interval") is not None:
            values["interval"] = [_share(end) for end in values["interval"]]
    if counted := re.fullmatch(r"of (\d+) comparisons", unit):
        values["unit"], numbers["comparisons"] = "comparisons", int(counted[1])
    if jobs := values.pop("jobs", None):
        series["networks"] = jobs
    percents = {"fig5": ("std",), "table3": ("accuracy",), "claim": ("sr",)}.get(kind, ())
    if kind == "audit":
        percents = tuple(key for key in numbers if key != "median_gap")
        series = audit_in_shares(series)
    for key in percents:
        if key in numbers:
            numbers[key] = _share(numbers[key])
    if kind == "claim" and "verdicts" in series:
        series["verdicts"] = [_verdict(row, view, word, values["dataset"]) for row, view, word in series["verdicts"]]
    for key in ("errors", "differences"):
        if key in series:
            series[key] = [_share(value) for value in series[key]]
    return {**values, "numbers": numbers, "series": series}


def _verdict(row: str, view: str, verdict: str, dataset: str) -> dict[str, Any]:
    cell: dict[str, Any] = {}
    recipe = _row(row, dataset, cell, "suspect")["recipe"]
    return {"recipe": recipe, **cell, "view": view, "verdict": verdict}


def audit_in_shares(series: dict[str, Any]) -> dict[str, Any]:
    """The evidence, accuracies and curve of an audit with shares in place of percents."""
    series = dict(series)
    if "evidence" in series:
        series["evidence"] = [_evidence(item) for item in series["evidence"]]
    if "accuracies" in series:
        series["accuracies"] = [_scaled(row, ("accuracy", "low", "high")) for row in series["accuracies"]]
    if "curve" in series:
        curve = series["curve"]
        series["curve"] = {**curve, "accuracy": [_share(value) for value in curve["accuracy"]]}
    return series


def _evidence(item: Any) -> Any:
    if not isinstance(item, dict) or "unit" in item:
        return item
    if item.get("test") in IN_NATS_OR_COSINES:
        return {**item, "unit": ""}
    return {**_scaled(item, ("value", "limit")), "unit": "share"}


def _scaled(row: Any, keys: tuple[str, ...]) -> Any:
    return {**row, **{key: _share(row[key]) for key in keys if key in row}} if isinstance(row, dict) else row


def _share(percent: Any) -> Any:
    return round(percent / 100, 15) if isinstance(percent, int | float) and not isinstance(percent, bool) else percent
