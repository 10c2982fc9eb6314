"""Whether a committed number is true: recompute a part of the images behind it and compare, image by image."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from torch import Tensor, nn

from mmlda import attacks, zoo
from mmlda.checkpoints import packed
from mmlda.data import ImageData, load
from mmlda.models import build
from mmlda.outcomes import predictions
from mmlda.results import Result

__all__ = ["Verification", "verify"]

CLEAN = 0.99  # share of images that must have the same label without an attack: devices round differently
HELD = 0.97  # share that must hold or break alike: an attack's path depends on rounding too
COUNTED = 1e-3  # how far, as a share, the value may be from that of its outcomes, whose distances are in half precision
DISTANCE = 0.02  # how far the mean distance over images broken both times may be off, for minimum-norm attacks


@dataclass(frozen=True)
class Verification:
    """What came out of recomputing `n` of the images behind a result."""

    result: Result
    n: int
    counted: float | None  # the value again, from the outcomes of all the images
    same_label: float  # share of images with the same clean prediction
    same_outcome: float | None  # share that hold or break alike under the attack
    distance: float | None  # recomputed over claimed mean L2 of images broken both times

    @property
    def agrees(self) -> bool:
        value = self.result.value
        return (
            isinstance(value, int | float)
            and self.counted is not None
            and abs(self.counted - value) <= max(1e-6, COUNTED * abs(value))
            and self.same_label >= CLEAN
            and (self.same_outcome is None or self.same_outcome >= HELD)
            and (self.distance is None or abs(self.distance - 1) <= DISTANCE)
        )

    def __str__(self) -> str:
        text = f"{self.result.name}: {'agrees' if self.agrees else 'DOES NOT AGREE'} on {self.n} of its images; "
        text += f"claimed {_shown(self.result.value)}, counted {_shown(self.counted)} from its outcomes; "
        text += f"same label for {100 * self.same_label:.1f}%"
        if self.same_outcome is not None:
            text += f", same outcome under {self.result.attack['name']} for {100 * self.same_outcome:.1f}%"  # type: ignore[index]
        if self.distance is not None:
            text += f", mean L2 {self.distance:.4f} times the claimed one"
        return text


def verify(
    path: str | Path,
    *,
    n: int = 200,
    network: str | Path | None = None,
    root: str | Path | None = None,
    device: torch.device | str = "cpu",
) -> Verification:
    """Count a result's number again from the outcomes beside it, and recompute `n` of these, evenly spread.

    The network is the one that ships under the name in the result, or the one in `networks/` beside it, or `network`:
    whichever it is, its weights' hash must be the result's, and so must the data's.
    """
    path = Path(path)
    result = Result.load(path)
    claimed = {} if result.outcomes is None else load_tensors(result.read_outcomes(path.parent))
    if "clean" not in claimed or result.data is None or result.network is None:
        raise ValueError(f"{path}: expected a result with an outcome for each image: table1, table2, table3, worst "
                         f"or evaluation, not {result.kind}")  # fmt: skip
    if n < 1:
        raise ValueError(f"n = {n}: expected at least 1")
    model = _network(result, path.parent, network).to(device)
    data = _data(result, root)
    rows = torch.linspace(0, len(data) - 1, min(n, len(data))).round().long().unique()
    part = data.subset(rows)
    labels = part.labels
    clean = predictions(model, part, device=device)
    same_label = _share(clean == claimed["clean"][rows])
    counted = _value(result, claimed, data.labels)
    if result.attack is None:
        return Verification(result, len(rows), counted, same_label, None, None)
    attack = _attack(result.attack)
    again = attack(model, part.pixels().to(device), labels.to(device), index=rows.to(device))
    success, l2 = again.success.cpu(), again.l2.cpu().double()
    now = (clean == labels) & (again.prediction.cpu() == labels)
    then = (claimed["clean"][rows] == labels) & (claimed["prediction"][rows] == labels)
    both = success & claimed["success"][rows] & (clean == labels) & (claimed["clean"][rows] == labels)
    distance = None
    if isinstance(attack, attacks.CarliniWagner | attacks.FAB) and bool(both.any()):
        distance = float(l2[both].mean() / claimed["l2"][rows][both].double().mean())
    same_outcome = _share(now == then)
    return Verification(result, len(rows), counted, same_label, same_outcome, distance)


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
    kept = folder / "networks" / name
    if given is None and name not in zoo.names() and kept.with_name(kept.name + ".safetensors").is_file():
        config = json.loads(kept.with_name(kept.name + ".json").read_text())["model"]
        model: nn.Module = build(config).eval()
        model.load_state_dict(load_file(kept.with_name(kept.name + ".safetensors")))
    elif given is None and name not in zoo.names():
        model = zoo.load(kept)  # a run's folder, or a ValueError that says what was expected
    else:
        model = zoo.load(name)
    digest = hashlib.sha256(packed(model.state_dict())).hexdigest()
    if digest != result.network["sha256"]:
        raise ValueError(f"network {name!r} has other weights (SHA-256 {digest[:12]}...) than the one of {result.name} "
                         f"({str(result.network['sha256'])[:12]}...)")  # fmt: skip
    return model


def _data(result: Result, root: str | Path | None) -> ImageData:
    assert result.data is not None
    data = load(result.data["name"], root)[1].subset(slice(result.data["images"]))
    if data.digest() != result.data["sha256"]:
        raise ValueError(f"data {result.data['name']!r} has other test images than those {result.name} was measured on")
    return data


def _attack(about: dict[str, Any]) -> attacks.Attack:
    """The attack that `describe_attack` described."""
    kind = getattr(attacks, str(about["name"]), None)
    if not (isinstance(kind, type) and issubclass(kind, attacks.Attack)):
        raise ValueError(f"attack {about['name']!r}: expected one of this package")
    mine = {field.name for field in dataclasses.fields(kind) if field.init}  # FGSM's one step is none of its settings
    given = ((key, value) for key, value in about["settings"].items() if key in mine)
    settings: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given}
    if settings.get("attacks") is not None:
        settings["attacks"] = tuple(_attack(one) for one in settings["attacks"])
    return kind(**settings)
