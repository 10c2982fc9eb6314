"""Whether a committed number is true: recompute a part of the images behind it and compare, image by image."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from torch import Tensor, nn

from mmlda import attacks, zoo
from mmlda._utils.tensors import packed
from mmlda.data import ImageData, load
from mmlda.evaluation.robustness import predictions
from mmlda.models import build
from mmlda.results import Result, wilson

__all__ = ["Verification", "verify"]

CLEAN = 0.99  # share of images that must have the same label without an attack: devices round differently
HELD = 0.9  # share that must hold or break alike: an attack's path depends on rounding, TF32's above all
CHOSEN = 0.8  # the same for JSMA, which chooses a pixel a step: where rounding makes it another, so is all that follows
CHANCE = 1e-3  # how improbable it may be that images change sides as often one way as the other
COUNTED = 1e-3  # how far, as a share, the value may be from that of its outcomes, whose distances are in half precision
DISTANCE = 0.02  # how far the mean distance over images broken both times may be off, for minimum-norm attacks
ATTACKED = ("table2", "table3", "worst")  # kinds of results that are about an attack
NAMES = {"C&W": "CarliniWagner"}  # attacks that a table calls by another name


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
        alike = CHOSEN if self.result.attack is not None and self.result.attack["name"] == "JSMA" else HELD
        return (
            not self.faults
            and isinstance(value, int | float)
            and self.counted is not None
            and abs(self.counted - value) <= max(1e-6, COUNTED * abs(value))
            and self.same_label >= CLEAN
            and (self.same_outcome is None or self.same_outcome >= alike)
            and one_sided(*self.changed) >= CHANCE
            and (self.distance is None or abs(self.distance - 1) <= DISTANCE)
        )

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DOES NOT AGREE"
        text = f"{self.result.name}: {verdict} on {self.n} of its images (drawn with seed {self.seed}); "
        text += f"claimed {_shown(self.result.value)}, counted {_shown(self.counted)} from its outcomes; "
        text += f"same label for {100 * self.same_label:.1f}%"
        if self.same_outcome is not None:
            text += f", same outcome under {self.result.attack['name']} for {100 * self.same_outcome:.1f}%"  # type: ignore[index]
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

    `seed` says which; without one they are others every time, so that nobody can know which outcomes must be true. The
    network is the one that ships with these weights, or the one in `networks/` beside it, or `network`: whichever it
    is, its weights' hash must be the result's, and so must the data's. What the result says of itself
    (its place in the table, its interval) must fit the attack, the network and the outcomes.
    """
    path = Path(path)
    result = Result.load(path)
    if n < 1:
        raise ValueError(f"n = {n}: expected at least 1")
    claimed = _outcomes(result, path)
    model = _network(result, path.parent, network).to(device)
    data = _data(result, root)
    if any(len(column) != len(data) for column in claimed.values()):
        sizes = sorted({len(column) for column in claimed.values()})
        raise ValueError(f"{path}: outcomes of {sizes} images, expected one for each of the {len(data)}")
    seed = secrets.randbelow(2**31) if seed is None else seed
    drawn = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:n]
    rows = drawn.sort().values
    part = data.subset(rows)
    labels = part.labels
    clean = predictions(model, part, device=device)
    same_label = _share(clean == claimed["clean"][rows])
    counted, faults = _value(result, claimed, data.labels), _faults(result, model, claimed, data.labels)
    if result.attack is None:
        return Verification(result, len(rows), seed, faults, counted, same_label, None, (0, 0), None)
    attack = _attack(result.attack)
    again = attack(model, part.pixels().to(device), labels.to(device), index=rows.to(device))
    success, l2 = again.success.cpu(), again.l2.cpu().double()
    now = (clean == labels) & (again.prediction.cpu() == labels)
    then = (claimed["clean"][rows] == labels) & (claimed["prediction"][rows] == labels)
    both = success & claimed["success"][rows] & (clean == labels) & (claimed["clean"][rows] == labels)
    distance = None
    if isinstance(attack, attacks.CarliniWagner | attacks.FAB) and bool(both.any()):
        distance = float(l2[both].mean() / claimed["l2"][rows][both].double().mean())
    changed = int((then & ~now).sum()), int((now & ~then).sum())
    return Verification(result, len(rows), seed, faults, counted, same_label, _share(now == then), changed, distance)


def _outcomes(result: Result, path: Path) -> dict[str, Tensor]:
    """The outcomes beside a result; a ValueError where it has none, or not those that its kind needs."""
    claimed = {} if result.outcomes is None else load_tensors(result.read_outcomes(path.parent))
    if "clean" not in claimed or result.data is None or result.network is None:
        raise ValueError(f"{path}: expected a result with an outcome for each image: table1, table2, table3, worst "
                         f"or evaluation, not {result.kind}")  # fmt: skip
    if result.attack is None and result.kind in ATTACKED:
        raise ValueError(f"{path}: a result of kind {result.kind} without an attack; expected the one it is about")
    needed = () if result.attack is None else ("success", "prediction", "l2", "distortion")
    if missing := [name for name in needed if name not in claimed]:
        raise ValueError(f"{path}: outcomes without {', '.join(missing)}; expected them where there was an attack")
    for part, fields in (("data", ("name", "images", "sha256")), ("network", ("name", "sha256"))):
        if lacking := [name for name in fields if not (getattr(result, part) or {}).get(name)]:
            raise ValueError(f"{path}: {part} without {', '.join(lacking)}")
    return claimed


def _faults(result: Result, model: nn.Module, outcomes: dict[str, Tensor], labels: Tensor) -> tuple[str, ...]:
    """Where what a result says of itself is not what its attack, network and outcomes say."""
    faults, cell = [], result.cell
    if result.attack is not None:
        name, eps = result.attack.get("name"), (result.attack.get("settings") or {}).get("eps")
        if cell.get("attack", name) not in (name, *(short for short, long in NAMES.items() if long == name)):
            faults.append(f"its place is under {cell['attack']}, its attack is {name}")
        if cell.get("eps", eps) != eps:
            faults.append(f"its place is at eps {cell['eps']}, its attack has {eps}")
    head = getattr(model, "config", {}).get("head")
    for word, expected in (("MM-LDA", "mmlda"), ("SR", "softmax")):
        if str(cell.get("model", "")).split(" ")[0].rstrip(",") == word and head not in (None, expected):
            faults.append(f"its place is in the row {cell['model']}, its network has the head {head!r}")
    if cell.get("data", result.data["name"]) != result.data["name"]:  # type: ignore[index]
        faults.append(f"its place is under {cell['data']}, its images are of {result.data['name']}")  # type: ignore[index]
    if result.unit == "%" and result.interval is not None and result.n == len(labels):
        value = _value(result, outcomes, labels)
        low, high = wilson(round((value or 0.0) * len(labels) / 100), len(labels))
        if max(abs(100 * low - result.interval[0]), abs(100 * high - result.interval[1])) > 1e-6:
            faults.append(f"its interval is {result.interval[0]:.2f} to {result.interval[1]:.2f}, that of its outcomes "
                          f"{100 * low:.2f} to {100 * high:.2f}")  # fmt: skip
    return tuple(faults)


def _value(result: Result, outcomes: dict[str, Tensor], labels: Tensor) -> float | None:
    """The number that the outcomes of all images make: an error, an accuracy, or a mean distortion."""
    right = outcomes["clean"] == labels
    if len(right) != result.n:
        return None
    if result.attack is None:
        share = 100 * _share(right)
        return 100 - share if result.kind == "table1" else share
    if result.kind == "table3":
        broken = outcomes["distortion"][right & outcomes["success"]].double()
        return float(broken.mean()) if len(broken) else None
    return 100 * _share(right & (outcomes["prediction"] == labels))


def _shown(value: float | str | None) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "nothing"


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def _network(result: Result, folder: Path, given: str | Path | None) -> nn.Module:
    assert result.network is not None
    name = str(given if given is not None else result.network["name"])
    if given is None and name not in zoo.names():  # one that ships may have had another name where it was made
        name = next((ships for ships in zoo.names() if _digest(zoo.load(ships)) == result.network["sha256"]), name)
    kept = folder / "networks" / name
    if given is None and name not in zoo.names() and kept.with_name(kept.name + ".safetensors").is_file():
        config = json.loads(kept.with_name(kept.name + ".json").read_text())["model"]
        model: nn.Module = build(config).eval()
        model.load_state_dict(load_file(kept.with_name(kept.name + ".safetensors")))
    elif given is None and name not in zoo.names() and not (Path(name) / "run.json").is_file():
        if not (kept / "run.json").is_file():
            what = f"the network of {result.name}, {name!r}, does not ship and is not in {kept.parent}"
            raise ValueError(f"{what}: expected its place as `network` (--network)")
        model = zoo.load(kept)
    else:
        model = zoo.load(name)
    digest = _digest(model)
    if digest != result.network["sha256"]:
        raise ValueError(f"network {name!r} has other weights (SHA-256 {digest[:12]}...) than the one of {result.name} "
                         f"({str(result.network['sha256'])[:12]}...)")  # fmt: skip
    return model


def _digest(model: nn.Module) -> str:
    return hashlib.sha256(packed(model.state_dict())).hexdigest()


def _data(result: Result, root: str | Path | None) -> ImageData:
    assert result.data is not None
    if not isinstance(result.data["images"], int):
        raise ValueError(f"data of {result.name} has images = {result.data['images']!r}: expected a whole number")
    data = load(str(result.data["name"]), root)[1].subset(slice(result.data["images"]))
    if data.digest() != result.data["sha256"]:
        raise ValueError(f"data {result.data['name']!r} has other test images than those {result.name} was measured on")
    return data


def _attack(about: dict[str, Any]) -> attacks.Attack:
    """The attack that `describe_attack` described."""
    name, settings = str(about.get("name")), about.get("settings")
    kind = getattr(attacks, name, None) if name in attacks.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, attacks.Attack)) or kind is attacks.Attack:
        raise ValueError(f"attack {name!r}: expected one of this package")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(settings, dict) or (unknown := sorted(set(settings) - set(fields))):
        what = "none" if not isinstance(settings, dict) else ", ".join(unknown)
        raise ValueError(f"settings of the attack {name}: {what}; expected some of {', '.join(fields)}")
    # FGSM's one step is none of its settings.
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
                             if fields[key].init}  # fmt: skip
    if given.get("attacks") is not None:
        given["attacks"] = tuple(_attack(one) for one in given["attacks"])
    return kind(**given)
