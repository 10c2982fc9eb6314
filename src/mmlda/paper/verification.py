"""Whether a committed number is true: recompute a part of the images behind it and compare, image by image."""

from __future__ import annotations

import dataclasses
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmlda import attacks, zoo
from mmlda._utils.checks import check_choice, check_count
from mmlda._utils.files import read_json
from mmlda._utils.tensors import read_tensors, unpacked
from mmlda.data import CLASSES, ImageData, load, stratified
from mmlda.evaluation.robustness import predictions
from mmlda.models.saved import restore
from mmlda.results import Result, head_of, weights_digest, wilson

CLEAN = 0.99  # share of images that must have the same label without an attack: devices round differently
HELD = 0.9  # share that must hold or break alike: an attack's path depends on rounding, TF32's above all
CHOSEN = 0.8  # the same for JSMA, which chooses a pixel a step: where rounding makes it another, so is all that follows
CHANCE = 1e-3  # how improbable it may be that images change sides as often one way as the other
COUNTED = 1e-3  # how far, as a share, the value may be from that of its outcomes, whose distances are in half precision
DISTANCE = 0.02  # how far the mean distance over images broken both times may be off, for minimum-norm attacks
Outcomes = dict[str, Tensor]  # the columns behind a result
ATTACKED = ("table2", "table3", "worst")  # kinds of results that are about an attack


@dataclass(frozen=True)
class Verification:
    """What came out of recomputing `n` of the images behind a result, drawn at random with `seed`."""

    result: Result
    n: int
    seed: int
    faults: tuple[str, ...]  # where what the result says of itself does not fit
    counted: float | None  # the value again, from the outcomes of all the images
    same_label: float  # share of images with the same clean prediction
    same_outcome: float | None  # share that hold or break alike under the attack
    changed: tuple[int, int]  # images that held and are broken now, and that were broken and hold now
    distance: float | None  # recomputed over claimed mean L2 of images broken both times

    @property
    def agrees(self) -> bool:
        value = self.result.value
        alike = CHOSEN if self.result.attack == "JSMA" else HELD
        return (
            not self.faults
            and isinstance(value, int | float)
            and self.counted is not None
            and abs(self.counted - value) <= max(1e-8, COUNTED * abs(value))
            and self.same_label >= CLEAN
            and (self.same_outcome is None or self.same_outcome >= alike)
            and one_sided(*self.changed) >= CHANCE
            and (self.distance is None or abs(self.distance - 1) <= DISTANCE)
        )

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DOES NOT AGREE"
        text = f"{self.result.name}: {verdict} on {self.n} of its images (drawn with seed {self.seed}); "
        claimed, counted = (_shown(value, self.result.unit) for value in (self.result.value, self.counted))
        text += f"claimed {claimed}, counted {counted} from its outcomes; "
        text += f"same label for {100 * self.same_label:.1f}%"
        if self.same_outcome is not None:
            text += f", same outcome under {self.result.attack} for {100 * self.same_outcome:.1f}%"
        if self.distance is not None:
            text += f", mean L2 {self.distance:.4f} times the claimed one"
        return text + "".join(f"; {fault}" for fault in self.faults)


def one_sided(there: int, back: int) -> float:
    """The probability that of so many images that change sides so few, or fewer, go the rarer way (McNemar's test).

    >>> round(one_sided(11, 10), 2), one_sided(11, 0) < CHANCE
    (1.0, True)
    """
    both = there + back
    few = sum(math.comb(both, k) for k in range(min(there, back) + 1)) / 2**both
    return min(1.0, 2 * few)


def verify(
    path: str | Path,
    *,
    n: int = 200,
    seed: int | None = None,
    network: str | Path | None = None,
    root: str | Path | None = None,
    device: torch.device | str = "cpu",
) -> Verification:
    """Count a result's number again from the outcomes beside it, and recompute `n` of these, drawn at random.

    The SHA-256 of the network's weights and of the data must be the result's. The fields of the result (attack, eps,
    head, dataset, interval) must fit its attack's settings, the network and the outcomes.

    Parameters
    ----------
    path
        The JSON file of a result, or `table.jsonl#name`.
    n
        Number of images to recompute.
    seed
        Random seed of the draw; by default a new one each time, so that nobody can know which outcomes must be true.
    network
        The network's path or name; by default the one that ships with these weights, or that in `networks/` beside
        the result.
    root
        Folder of the dataset.
    device
        Where to recompute.

    Returns
    -------
    Verification
        `agrees` is the conclusion; printing it shows the numbers.

    Raises
    ------
    ValueError
        If the result has no outcomes, or its network or data are not found or are others.
    """
    result, folder = Result.load(path), Path(path).parent
    check_count("n", n, 1)
    claimed = _outcomes(result, folder)
    model = _network(result, folder, network).to(device)
    data = _data(result, root)
    if any(len(column) != len(data) for column in claimed.values()):
        sizes = sorted({len(column) for column in claimed.values()})
        raise ValueError(f"{result.name}: outcomes must be of {len(data)} images, got {sizes}")
    seed = secrets.randbelow(2**31) if seed is None else seed
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:n].sort().values
    drawn = {name: column[rows] for name, column in claimed.items()}
    again = _recompute(result, model, data.subset(rows), rows, drawn, device)
    return Verification(
        result=result,
        n=len(rows),
        seed=seed,
        faults=_faults(result, model, claimed, data.labels),
        counted=_value(result, claimed, data.labels),
        **again,
    )


def _recompute(
    result: Result, model: nn.Module, part: ImageData, rows: Tensor, claimed: Outcomes, device: torch.device | str
) -> dict[str, Any]:
    """Attack some images again and compare with their claimed outcomes: fields of `Verification`."""
    labels, clean = part.labels, predictions(model, part, device=device)
    again: dict[str, Any] = {"same_label": _share(clean == claimed["clean"]), "same_outcome": None}
    again |= {"changed": (0, 0), "distance": None}
    if not result.attack:
        return again
    attack = _attack(result.attack, result.attack_settings)
    found = attack(model, part.pixels().to(device), labels.to(device), index=rows.to(device))
    right, claimed_right = clean == labels, claimed["clean"] == labels
    now, then = right & (found.prediction.cpu() == labels), claimed_right & (claimed["prediction"] == labels)
    both = found.success.cpu() & claimed["success"] & right & claimed_right
    if isinstance(attack, attacks.CarliniWagner | attacks.FAB) and bool(both.any()):
        again["distance"] = float(found.l2.cpu().double()[both].mean() / claimed["l2"][both].double().mean())
    again["changed"] = int((then & ~now).sum()), int((now & ~then).sum())
    return {**again, "same_outcome": _share(now == then)}


def _outcomes(result: Result, folder: Path) -> Outcomes:
    """The outcomes beside a result; a ValueError where it has none, or not those that its kind needs."""
    claimed = {} if result.outcomes is None else unpacked(result.read_outcomes(folder))
    if "clean" not in claimed or result.data is None:
        raise ValueError(
            f"{result.name} must be a result with an outcome for each image (table1, table2, table3, worst or "
            f"evaluation), got {result.kind}"
        )
    if not result.attack and result.kind in ATTACKED:
        raise ValueError(f"{result.name}: attack must be the one it is about, got none")
    needed = ("success", "prediction", "l2", "distortion") if result.attack else ()
    if missing := [name for name in needed if name not in claimed]:
        raise ValueError(f"{result.name}: outcomes must have {', '.join(missing)} where there was an attack, got none")
    if lacking := [name for name in ("name", "images", "sha256") if not result.data.get(name)]:
        raise ValueError(f"{result.name}: data must have {', '.join(lacking)}, got {result.data!r}")
    if not result.network_sha256:
        raise ValueError(f"{result.name}: network_sha256 must be that of its weights, got none")
    return claimed


def _faults(result: Result, model: nn.Module, outcomes: Outcomes, labels: Tensor) -> tuple[str, ...]:
    """Where the fields of a result do not fit its attack's settings, its network, its data and its outcomes."""
    assert result.data is not None
    faults = []
    eps = (result.attack_settings or {}).get("eps")
    if result.attack and result.eps != eps:
        faults.append(f"its eps is {result.eps}, that of its attack's settings {eps}")
    head = head_of(model)
    if result.head and head and result.head != head:
        faults.append(f"its head is {result.head!r}, that of its network {head!r}")
    if result.dataset != result.data["name"]:
        faults.append(f"its dataset is {result.dataset!r}, its images are of {result.data['name']!r}")
    if result.unit == "share" and result.interval is not None and result.n == len(labels):
        (low, high), n = result.interval, len(labels)
        ends = wilson(round((_value(result, outcomes, labels) or 0.0) * n), n)
        if max(abs(low - ends[0]), abs(high - ends[1])) > 1e-8:
            own = f"that of its outcomes {ends[0]:.4f} to {ends[1]:.4f}"
            faults.append(f"its interval is {low:.4f} to {high:.4f}, {own}")
    return tuple(faults)


def _value(result: Result, outcomes: Outcomes, labels: Tensor) -> float | None:
    """The number that the outcomes of all images make: an error, an accuracy, or a mean distortion."""
    right = outcomes["clean"] == labels
    if len(right) != result.n:
        return None
    if not result.attack:
        return _share(~right if result.kind == "table1" else right)
    if result.kind == "table3":
        broken = outcomes["distortion"][right & outcomes["success"]].double()
        return float(broken.mean()) if len(broken) else None
    return _share(right & (outcomes["prediction"] == labels))


def _shown(value: float | str | None, unit: str) -> str:
    if not isinstance(value, int | float):
        return "nothing"
    return f"{100 * value:.4g}%" if unit == "share" else f"{value:.4g}"


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def _network(result: Result, folder: Path, given: str | Path | None) -> nn.Module:
    """The network of a result; a ValueError where it is not found, or has other weights."""
    model = zoo.load(str(given)) if given is not None else _find_network(result, folder)
    digest, wanted = weights_digest(model.state_dict()), result.network_sha256
    if digest != wanted:
        expected = f"one with weights of SHA-256 {wanted[:12]}..., as {result.name} has"
        raise ValueError(f"network must be {expected}, got {digest[:12]}... ({given or result.network})")
    return model


def _find_network(result: Result, folder: Path) -> nn.Module:
    """The network by its name or weights: one that ships, one in `networks/` beside the result, or a run's folder."""
    name = result.network
    for ships in sorted(zoo.names(), key=lambda one: one != name):  # it may have had another name where it was made
        model = zoo.load(ships)
        if ships == name or weights_digest(model.state_dict()) == result.network_sha256:
            return model
    places = [parent / "networks" for parent in (folder, folder.parent)]  # packed results lie one folder below
    for place in places:
        if (place / f"{name}.safetensors").is_file():  # left by a sweep
            config, path = read_json(place / f"{name}.json").get("model"), place / f"{name}.safetensors"
            return restore(config, read_tensors(path)[0], path).eval()
    for run in (Path(name), *(place / name for place in places)):
        if name and (run / "run.json").is_file():
            return zoo.load(run)
    expected = f"the path of {name!r}, which does not ship and is not in {places[0]}"
    raise ValueError(f"network (--network) must be {expected}, got none")


def _data(result: Result, root: str | Path | None) -> ImageData:
    assert result.data is not None
    if not isinstance(result.data["images"], int):
        raise ValueError(f"images in the data of {result.name} must be a whole number, got {result.data['images']!r}")
    check_choice("dataset of a result", result.data["name"], CLASSES)  # never a path: files there are not trusted
    test, n = load(result.data["name"], root)[1], result.data["images"]
    parts = (sample() for sample in (lambda: test.subset(slice(n)), lambda: stratified(test, n)))
    data = next((part for part in parts if part.digest() == result.data["sha256"]), None)
    if data is None:
        raise ValueError(f"data must be the test images that {result.name} was measured on, got others")
    return data


def _attack(name: str, settings: Any) -> attacks.Attack:
    """The attack that `describe_attack` described."""
    kind = getattr(attacks, name, None) if name in attacks.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, attacks.Attack)) or kind is attacks.Attack:
        raise ValueError(f"attack must be one of this package, got {name!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(settings, dict) or not set(settings) <= set(fields):
        raise ValueError(f"settings of {name} must be some of {', '.join(fields)}, got {settings!r}")
    # FGSM's one step is not among its arguments.
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items() if fields[key].init
    }
    if given.get("attacks") is not None:
        given["attacks"] = tuple(_attack(str(one.get("name")), one.get("settings")) for one in given["attacks"])
    return kind(**given)
