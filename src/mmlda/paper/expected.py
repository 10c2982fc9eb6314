"""The fields that a result must have, recomputed by the code that makes them and from its outcomes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmlda import attacks, zoo
from mmlda._utils.checks import check_choice, invalid
from mmlda._utils.settings import checked, typed
from mmlda.data import ImageData
from mmlda.evaluation import shares
from mmlda.evaluation.robustness import DISTANCES, describe_attack, summary
from mmlda.models import Classifier, build
from mmlda.paper import numbers
from mmlda.paper.rows import ADAM, HAT, MMLDA, MMLDA_ROBUST, SAT, SR, SR_ADAM, SR_ROBUST, Fields, Row, plain_rows
from mmlda.paper.setup import Net, Setup, beside, tuning_recipe
from mmlda.paper.suspects import ATTACKS, VARIANTS, VIEWS, WORST, suspect_fields, suspect_job, suspect_rows, twin_note
from mmlda.paper.tables import PAPERS_SEARCH, cw_attack, smallest_distances, table1_fields, table2_fields, table3_fields
from mmlda.paper.worst import worst_fields
from mmlda.results import HEADS, Result, head_of
from mmlda.training.recipes import RECIPES, Recipe, network

Outcomes = dict[str, Tensor]  # the columns behind a result
ROWS = (SR, SR_ADAM, SR_ROBUST, MMLDA, ADAM, MMLDA_ROBUST, SAT, HAT)
EXACT = 1e-6  # shares are counts
HALVES = 1e-3  # distances are stored in half precision
ROUGH = {f"{how}_{distance}" for how in ("mean", "median") for distance in DISTANCES}  # computed before that rounding
TWINS = (*HEADS.values(), *VARIANTS)  # networks whose weights a suspect may share
MEASURED = (  # numbers that the outcomes do not contain
    *("mean_steps", "zero_gradient", "blind", "passes"),
    *("nll", "ece", "temperature", "nll_scaled", "ece_scaled"),
)
TRAINING = "that the network was trained as recipe_settings says"


@dataclass(frozen=True)
class Record:
    """A result with its network, data and outcomes; `ships` is the name under which the network ships, or ""."""

    result: Result
    model: torch.nn.Module
    ships: str
    data: ImageData
    outcomes: Outcomes
    root: str | None = None


def attack_of(result: Result) -> attacks.Attack | None:
    """The attack that a result is about: the table's own; for an evaluation, that of its settings.

    Raises
    ------
    ValueError
        If the table has no such attack.
    """
    kind, eps = result.kind, result.eps
    if kind == "table1" or (kind == "evaluation" and not result.attack):
        return None
    if kind == "table3":
        given = result.attack_settings or {}
        search = given.get("search_steps"), given.get("steps")
        if not all(isinstance(v, int) and 1 <= v <= most for v, most in zip(search, PAPERS_SEARCH)):
            raise invalid("search_steps and steps", "at most the paper's {} and {}".format(*PAPERS_SEARCH), search)
        check_choice("target", result.target, ("untargeted", "random"))
        return cw_attack(result.target, search)  # type: ignore[arg-type]
    if kind == "evaluation":
        return built_attack(result.attack, result.attack_settings)
    allowed = {"table2": numbers.ATTACKS, "worst": ("WorstCase",), "suspect": (*ATTACKS, "WorstCase")}[kind]
    check_choice("attack", result.attack, allowed)
    if not isinstance(eps, int | float):
        raise invalid("eps", "the attack's", eps)
    if result.attack == "JSMA":
        return attacks.JSMA(eps=eps, surface=result.cell.get("surface", ""), target=result.target)
    if kind == "suspect":
        check_choice("view", result.cell.get("view"), (WORST,) if result.attack == "WorstCase" else VIEWS)
    return getattr(attacks, result.attack)(eps=eps)


def built_attack(name: str, settings: Any) -> attacks.Attack:
    """The attack that `describe_attack` described."""
    kind = getattr(attacks, name, None) if name in attacks.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, attacks.Attack)) or kind is attacks.Attack:
        raise ValueError(f"attack must be one of this package, got {name!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(settings, dict) or not set(settings) <= set(fields):
        raise ValueError(f"settings of {name} must be some of {', '.join(fields)}, got {settings!r}")
    given = {key: value for key, value in settings.items() if fields[key].init}  # FGSM's one step is no argument
    parts = given.pop("attacks", None)
    given = checked(kind, given, name)
    if parts is not None:
        typed({"attacks": Sequence[dict[str, Any]]}, {"attacks": parts})
        given["attacks"] = tuple(built_attack(str(one.get("name")), one.get("settings")) for one in parts)
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"settings of {name} must be complete, got {sorted(settings)} ({error})") from None


def faults_and_unchecked(record: Record, attack: attacks.Attack | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a result that are not as expected, in words, and what was not compared."""
    result, expect = record.result, _evaluation if record.result.kind == "evaluation" else _of_paper
    try:
        expected, unchecked = expect(record, attack)
    except ValueError as error:  # it is in no table, so that no field can be compared
        return (str(error),), ("its other fields",)
    if result.kind == "suspect" and result.note in (twin_note(expected["note"], other) for other in TWINS):
        expected["note"] = result.note
        unchecked.append("note: of which other network it has the weights")
    faults = [*_differences(result, expected)]
    for field in dataclasses.fields(Result):
        if field.name not in (*expected, "network_sha256", "outcomes", "schema"):  # these were compared on loading
            unchecked.append(field.name)
    unchecked += [f"numbers: {key}" for key in MEASURED if key in result.numbers]
    if attack is not None:
        only = "L-inf " if isinstance(attack, attacks.CarliniWagner | attacks.FAB) else ""
        unchecked.append(f"the {only}distances of adversarial images")
    if "confidence" in record.outcomes:
        unchecked.append("the confidences")
    return tuple(faults), tuple(unchecked)


def _differences(result: Result, expected: Fields) -> Iterator[str]:
    for name, wanted in expected.items():
        given, loose = getattr(result, name), result.kind == "table3" and name in ("value", "interval")
        if name == "attack_settings" and wanted is not None:
            if not _same_attack(result, wanted):
                changed = {
                    key: value for key, value in (given or {}).items() if key not in wanted or wanted[key] != value
                }
                own = {key: wanted.get(key) for key in changed}
                yield f"attack_settings must be those of the table's {result.attack}, {own}, got {changed}"
        elif name == "recipe_settings" and wanted is not None:
            if not _same_recipe(given, wanted):
                yield f"recipe_settings must be {wanted}, got {given}"
        elif name == "numbers":
            for key in {**wanted, **given}:
                if key not in MEASURED and not (key in wanted and _same(given.get(key), wanted[key], key in ROUGH)):
                    yield f"numbers: {key} must be {wanted.get(key, 'absent')}, got {given.get(key, 'none')}"
        elif not _same(given, wanted, loose):
            yield f"{name} must be {wanted!r}, got {given!r}"


def _same(given: Any, wanted: Any, loose: bool = False) -> bool:
    """Equality, but for the rounding of numbers; `loose` for those from values in half precision."""
    if isinstance(wanted, tuple | list) and isinstance(given, tuple | list):
        return len(given) == len(wanted) and all(_same(a, b, loose) for a, b in zip(given, wanted))
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (given, wanted)):
        return type(given) is type(wanted) and given == wanted
    return math.isclose(given, wanted, rel_tol=HALVES if loose else EXACT, abs_tol=EXACT)


def _same_attack(result: Result, wanted: dict[str, Any]) -> bool:
    """Whether settings describe the attack; those of older versions lack some, which have their default."""
    try:
        given = built_attack(result.attack, result.attack_settings)
    except ValueError:
        return False
    return _described(given) == wanted


def _described(attack: attacks.Attack) -> dict[str, Any]:
    return json.loads(json.dumps(describe_attack(attack)["settings"]))


def _same_recipe(given: Any, wanted: dict[str, Any]) -> bool:
    try:
        return Recipe.from_dict(given) == Recipe.from_dict(wanted)
    except (ValueError, TypeError, AttributeError):
        return False


def _evaluation(record: Record, attack: attacks.Attack | None) -> tuple[Fields, list[str]]:
    """The fields of a result of `evaluate`. The attack is the user's choice, so it is not compared with a table."""
    result, data = record.result, record.data
    about = f"on {len(data)} images of {data.name}"
    blank = Result(name="x", kind="", what="", value=None)
    names = ("paper", "holds", "note", "recipe", "fine_tuning", "target", "claim", "cell", "train_steps")
    fields: Fields = {name: getattr(blank, name) for name in (*names, "recipe_settings")}
    fields |= {"kind": "evaluation", "dataset": data.name, "head": head_of(record.model), **_counts(record, attack)}
    if attack is not None:
        fields |= {"what": f"accuracy under {result.attack} {about}", "seed": attack.seed, "series": {}}
        return fields, [*_chosen(attack)]
    found = shares(record.outcomes["clean"], data.labels, data.num_classes)
    per_class = [value if math.isfinite(value) else None for value in found.per_class]
    fields["series"] = {"per_class": per_class, "classes": list(data.classes)}
    return {**fields, "what": f"accuracy {about}", "seed": None}, []


def _chosen(attack: attacks.Attack) -> Iterator[str]:
    """The settings of an attack that are not its defaults, but for the perturbation."""
    for field in dataclasses.fields(attack):
        value = getattr(attack, field.name)
        if field.init and field.name != "eps" and value != field.default:
            yield f"whether {field.name}={value!r}, which is not the default, is a fair choice"


def _of_paper(record: Record, attack: attacks.Attack | None) -> tuple[Fields, list[str]]:
    """The fields of a result of the paper's tables or of what stands beside them."""
    result, n, unchecked = record.result, len(record.data), []
    row = _row(result, record.ships)
    recipe, steps = _recipe(record, row)
    setup = Setup(data=record.data.name, steps=steps, root=record.root)
    if not record.ships:
        unchecked.append(TRAINING)
    assert isinstance(record.model, Classifier)
    net = Net(record.model, result.network, row, 0 if record.ships else recipe.seed, recipe)
    fields = net.fields(setup.data) | {"claim": "", "target": "", "series": {}} | _counts(record, attack)
    cell, paper = fields["cell"], None
    if result.kind == "table1":
        fields |= table1_fields(setup, net)
        paper = numbers.TABLE1.get((setup.data, row))
    elif result.kind == "table2":
        assert attack is not None
        fields |= table2_fields(setup, net, attack, n)
        paper = numbers.table2(setup.data, row, result.attack, result.eps)
    elif result.kind == "table3":
        assert isinstance(attack, attacks.CarliniWagner)
        fields |= table3_fields(setup, net, result.target, (attack.search_steps, attack.steps), n)
        paper = numbers.TABLE3.get((setup.data, row))
    elif result.kind == "worst":
        fields |= worst_fields(setup, net, float(result.eps or 0), n)
    else:
        assert attack is not None
        fields |= suspect_fields(setup, net, result.cell["view"], attack, float(result.eps or 0), n)
        paper = fields["paper"]
    fields["cell"] = {**cell, **fields["cell"]}
    judged = Result(**{"name": "x", "kind": result.kind, "what": "", "value": fields["value"]}, dataset=setup.data)
    judged = beside(judged, paper if result.kind in ("table1", "table2", "table3") else None)
    fields |= {"paper": paper, "holds": judged.holds, "series": judged.series}
    if row.fine_tuning:  # it also has the steps of the network before, which the result does not record
        del fields["note"]
    if not record.ships and (config := _config(row, setup.data)) != record.model.config:
        raise ValueError(f"network must be {config}, got {record.model.config}")
    return fields, unchecked


def _row(result: Result, ships: str) -> Row:
    """The row of a table that a result is in."""
    rows: tuple[Row, ...] = ROWS
    if result.kind == "suspect":
        plain = [dataclasses.replace(row, shipped=True) for row in plain_rows(result.dataset)]
        rows = tuple(plain) if ships else suspect_rows(result.dataset)
    found = next((row for row in rows if row.has(result)), None)
    if found is None or (ships and f"{result.dataset}-{found.recipe}" != ships):
        given = {"head": result.head, "recipe": result.recipe, "fine_tuning": result.fine_tuning, "cell": result.cell}
        expected = f"those of {ships}, whose weights it has" if ships else "those of a row"
        raise ValueError(f"head, recipe, fine_tuning and cell must be {expected}, got {given}")
    return found


def _recipe(record: Record, row: Row) -> tuple[Recipe, int | None]:
    """The recipe that a network of a row is trained by, and the training steps of the setup; None for the paper's."""
    result = record.result
    if record.ships:
        return Recipe.from_dict(zoo.about(record.ships)["recipe"]), None
    steps, seed = result.train_steps, result.seed
    if any(isinstance(v, bool) or not isinstance(v, int) or v < least for v, least in ((steps, 1), (seed, 0))):
        raise ValueError(f"train_steps and seed must be those of its training, got {steps!r} and {seed!r}")
    assert steps is not None and seed is not None
    if row.fine_tuning:
        adversary = (result.recipe_settings or {}).get("adversary") or {}
        kind = result.attack.lower() if result.kind == "table2" else str(adversary.get("attack"))
        check_choice("attack in recipe_settings", kind, ("fgsm", "bim", "ilcm"))
        base = RECIPES[f"{result.dataset}-sr"]
        return tuning_recipe(base, row, kind, float(result.eps or 0), steps=steps, seed=seed), None
    if result.kind == "suspect":
        steps //= VARIANTS.get(row.variant or "", ({}, {}))[1].get("steps", 1)
        setup = Setup(data=result.dataset, steps=max(1, steps))
        return suspect_job(setup, row, seed).recipe, steps
    return Setup(data=result.dataset, steps=steps).recipe(row, seed), steps


def _config(row: Row, dataset: str) -> dict[str, Any]:
    """The settings of a row's network."""
    return build({**network(row.head, dataset), **VARIANTS.get(row.variant or "", ({}, {}))[0]}).config


def _counts(record: Record, attack: attacks.Attack | None) -> Fields:
    """The fields that follow from the outcomes and the attack."""
    result, labels, columns = record.result, record.data.labels, record.outcomes
    right, n = columns["clean"] == labels, len(record.data)
    if attack is None:
        counted = ~right if result.kind == "table1" else right
        more: Fields = {"attack": "", "eps": None, "attack_settings": None, "attack_steps": None}
        balanced = shares(columns["clean"], labels, record.data.num_classes).balanced
        more["numbers"] = {"balanced_accuracy": balanced}
    else:
        held = columns["prediction"] == labels
        counted, settings = held if result.kind == "suspect" else held & right, _described(attack)
        more = {"attack": type(attack).__name__, "eps": settings.get("eps")}
        more |= {"attack_settings": settings, "attack_steps": settings.get("steps"), "numbers": {}}
        if result.kind != "suspect":
            steps = torch.zeros(n)  # not among the outcomes
            more["numbers"] = summary({**columns, "steps": steps}, right, labels)
    about = Result.counted(int(counted.sum()), n, name="x", kind="", what="")
    fields = {"value": about.value, "interval": about.interval, "unit": "share", "n": n, **more}
    fields["data"] = {"name": record.data.name, "images": n, "sha256": record.data.digest()}
    if result.kind == "table3":
        mean, interval, near = smallest_distances(columns, labels)
        fields["numbers"] |= {"accuracy": about.value, "share_linf_0.04": near}
        fields |= {"value": mean, "interval": interval, "unit": "distortion"}
    return fields
