"""Results of schema 1 in the fields of schema 2.

Schema 1 stored facts in display strings (`cell["model"]` was "SR + SAT (BIM 0.04)") and shares in percent. Only this
module knows those strings.
"""

from __future__ import annotations

import re
from typing import Any

SCHEMA = 2

ROW = re.compile(r"(SR|MM-LDA)(?: \((Adam|PGD)\)|(, MM-LDA's recipe)|(, true priors))?")
VARIANT = re.compile(r"C = 10+|precision 2|no weight decay|four times the steps|centre loss|soft targets")
UNITS = {"%": "share", "points": "share difference"}
CLAIMS_OF_ONE_NETWORK = ("table1", "table2", "table3", "fig2", "latent")  # one for each recipe of MM-LDA
IN_NATS_OR_COSINES = ("gaps", "averaging")  # the audit's tests whose value is not a share


def upgrade(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result in the current schema; `values` may be modified."""
    if values["schema"] >= SCHEMA:
        return values
    try:
        return _in_shares(_in_fields(values))
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ValueError("fields must be those of schema 1, got others") from None


def _in_fields(old: dict[str, Any]) -> dict[str, Any]:
    """Facts of the cell, and renamed fields, as typed fields."""
    cell, kind, versions = {**old.get("cell", {})}, old["kind"], old.get("versions", {})
    network, recipe, settings = old.pop("network", None) or {}, old.pop("recipe", None), old.get("attack")
    dataset, row, _ = str(cell.pop("data", "")), cell.pop("model", None), cell.pop("seed", None)
    about, name = settings or {}, cell.pop("attack", "")
    if "name" in about:  # otherwise the settings of an audit
        settings, name = about["settings"], name or about["name"]
    if recipe and recipe.get("loss") == "joint":
        recipe["loss"] = "centre"
    steps, of_training = old.get("steps"), recipe is not None or settings is None  # "steps" had two meanings
    new: dict[str, Any] = {
        "schema": SCHEMA,
        "dataset": "" if dataset == "theory" else dataset,
        "recipe_settings": recipe,
        "attack": "CarliniWagner" if name == "C&W" else name,
        "attack_settings": settings,
        "compiled": bool(about.get("compiled")),
        "train_steps": steps if of_training else None,
        "attack_steps": (settings or {}).get("steps") if of_training else steps,
        "device": versions.pop("device", "") or old.get("device", ""),  # the field was "cuda:0" in some audits
        "eps": cell.pop("eps", (settings or {}).get("eps")),
        "target": cell.pop("target", ""),
        "network_sha256": network.get("sha256") or "",
        "cell": cell,
        "series": old.get("series", {}),
        "numbers": old.get("numbers", {}),
    }
    if "jobs" in network:  # one for each fold
        new["series"]["networks"] = network["jobs"]
    else:
        new["network"] = network.get("name") or ("" if ROW.fullmatch(row or "") else row or "")
    if biased := re.fullmatch(r"(BP\d)-(\d+)", cell.get("set", "")):
        cell |= {"family": biased[1], "index": int(biased[2])}
    if "claim" in cell:
        new |= _claim(cell.pop("claim"), dataset, cell)
    elif row is not None:
        new |= _row(row, dataset, cell, kind)
    elif kind == "fig5":
        new |= {"head": "mmlda", "recipe": f"{dataset}-mmlda"}
    return {**old, **new}


def _row(row: str, dataset: str, cell: dict[str, Any], kind: str) -> dict[str, Any]:
    """Head, recipe and fine-tuning of a table's row."""
    plain = row.removesuffix(" (ships)")
    if plain != row:
        cell["shipped"] = True
    elif kind == "suspect" or VARIANT.fullmatch(plain):
        cell["variant"] = plain if VARIANT.fullmatch(plain) else ""
        if plain != "SR":  # the paper's recipe
            return {"head": "mmlda", "recipe": f"{dataset}-mmlda" + ("-adam" if dataset == "cifar10" else "")}
    if tuned := re.match(r"SR \+ (SAT|HAT)", plain):
        tuning = tuned[1].lower()
        return {"head": "softmax", "recipe": f"{dataset}-{tuning}", "fine_tuning": tuning}
    if not (known := ROW.fullmatch(plain)):
        return {}
    name, optimiser, swapped, true_priors = known.groups()
    if true_priors:
        cell["priors"] = "true"
    recipe = ("sr" if name == "SR" and not swapped else "mmlda") + (f"-{optimiser.lower()}" if optimiser else "")
    head = {"head": "softmax" if name == "SR" else "mmlda"}
    return {**head, "recipe": f"{dataset}-{recipe}"} if dataset else head


def _claim(name: str, dataset: str, cell: dict[str, Any]) -> dict[str, Any]:
    """Fields of a claim, whose name included the target and the recipe: "table3-random-adam"."""
    if name == "fig3-recipe":
        return {"claim": name}
    if name == "adam":
        return {"claim": name, "head": "softmax", "recipe": f"{dataset}-sr-adam"}
    claim, *words = name.split("-")
    fields = {"claim": claim}
    if claim in CLAIMS_OF_ONE_NETWORK:
        fields |= {"head": "mmlda", "recipe": f"{dataset}-mmlda" + ("-adam" if "adam" in words else "")}
    if "shipped" in words:
        cell["shipped"] = True
    if target := [word for word in words if word not in ("adam", "shipped")]:
        fields["target"] = target[0]
    return fields


def _in_shares(new: dict[str, Any]) -> dict[str, Any]:
    """Percents and percentage points as shares in [0, 1]."""
    kind, unit, numbers, series = new["kind"], new.get("unit", ""), new["numbers"], new["series"]
    if unit in UNITS:
        new["unit"] = UNITS[unit]
        _scale(new, "value", "paper", "interval")
    if counted := re.fullmatch(r"of (\d+) comparisons", unit):
        new["unit"], numbers["comparisons"] = "comparisons", int(counted[1])
    _scale(numbers, {"fig5": "std", "table3": "accuracy", "claim": "sr"}.get(kind, ""))
    _scale(series, "errors", "differences")
    if kind == "audit":
        _scale(numbers, *(numbers.keys() - {"median_gap"}))
        for row in (*series.get("accuracies", []), series.get("curve", {})):
            _scale(row, "accuracy", "low", "high")
        for item in series.get("evidence", []):
            if item.setdefault("unit", "" if item.get("test") in IN_NATS_OR_COSINES else "%") == "%":
                item["unit"] = "share"
                _scale(item, "value", "limit")
    elif kind == "claim" and "verdicts" in series:
        series["verdicts"] = [_verdict(item, new["dataset"]) for item in series["verdicts"]]
    return new


def _verdict(item: list[str], dataset: str) -> dict[str, Any]:
    (row, view, verdict), cell = item, dict[str, Any]()
    return {"recipe": _row(row, dataset, cell, "suspect")["recipe"], **cell, "view": view, "verdict": verdict}


def _scale(values: dict[str, Any], *keys: str) -> None:
    """Replace the percents of some keys by shares."""
    values |= {key: _share(values[key]) for key in keys if key in values}


def _share(percent: Any) -> Any:
    if isinstance(percent, list):
        return [_share(one) for one in percent]
    return round(percent / 100, 15) if isinstance(percent, int | float) and not isinstance(percent, bool) else percent
