"""Whether a committed number is true: recompute a part of the images behind it and compare, image by image."""

from __future__ import annotations

import dataclasses
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
from mmlda.data import ImageData, load
from mmlda.evaluation.robustness import predictions
from mmlda.models import build
from mmlda.results import Result, head_of, weights_digest, wilson

__all__ = ["Verification", "verify"]

CLEAN = 0.99  # share of images that must have the same label without an attack: devices round differently
HELD = 0.9  # share that must hold or break alike: an attack's path depends on rounding, TF32's above all
CHOSEN = 0.8  # the same for JSMA, which chooses a pixel a step: where rounding makes it another, so is all that follows
CHANCE = 1e-3  # how improbable it may be that images change sides as often one way as the other
COUNTED = 1e-3  # how far, as a share, the value may be from that of its outcomes, whose distances are in half precision
DISTANCE = 0.02  # how far the mean distance over images broken both times may be off, for minimum-norm attacks
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

    Without a `seed` other images are drawn every time, so that nobody can know which outcomes must be true. The network
    is the one that ships with these weights, or the one in `networks/` beside the result, or `network`; the SHA-256 of
    its weights must be the result's, and so must that of the data. The fields of the result (attack, eps, head,
    dataset, interval) must fit its attack's settings, the network and the outcomes.
    """
    path = Path(path)
    result = Result.load(path)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n!r}")
    claimed = _outcomes(result, path)
    model = _network(result, path.parent, network).to(device)
    data = _data(result, root)
    if any(len(column) != len(data) for column in claimed.values()):
        sizes = sorted({len(column) for column in claimed.values()})
        raise ValueError(f"{path}: outcomes must be of {len(data)} images, got {sizes}")
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
    result: Result,
    model: nn.Module,
    part: ImageData,
    rows: Tensor,
    claimed: dict[str, Tensor],
    device: torch.device | str,
) -> dict[str, Any]:
    """Attack some images again and compare with their claimed outcomes: fields of `Verification`."""
    labels = part.labels
    clean = predictions(model, part, device=device)
    same_label = _share(clean == claimed["clean"])
    if not result.attack:
        return {"same_label": same_label, "same_outcome": None, "changed": (0, 0), "distance": None}
    attack = _attack(result.attack, result.attack_settings)
    again = attack(model, part.pixels().to(device), labels.to(device), index=rows.to(device))
    success, l2 = again.success.cpu(), again.l2.cpu().double()
    now = (clean == labels) & (again.prediction.cpu() == labels)
    then = (claimed["clean"] == labels) & (claimed["prediction"] == labels)
    both = success & claimed["success"] & (clean == labels) & (claimed["clean"] == labels)
    distance = None
    if isinstance(attack, attacks.CarliniWagner | attacks.FAB) and bool(both.any()):
        distance = float(l2[both].mean() / claimed["l2"][both].double().mean())
    changed = int((then & ~now).sum()), int((now & ~then).sum())
    return {"same_label": same_label, "same_outcome": _share(now == then), "changed": changed, "distance": distance}


def _outcomes(result: Result, path: Path) -> dict[str, Tensor]:
    """The outcomes beside a result; a ValueError where it has none, or not those that its kind needs."""
    claimed = {} if result.outcomes is None else load_tensors(result.read_outcomes(path.parent))
    if "clean" not in claimed or result.data is None:
        raise ValueError(
            f"{path} must be a result with an outcome for each image (table1, table2, table3, worst or evaluation), "
            f"got {result.kind}"
        )
    if not result.attack and result.kind in ATTACKED:
        raise ValueError(f"{path}: attack must be the one it is about, got none")
    needed = ("success", "prediction", "l2", "distortion") if result.attack else ()
    if missing := [name for name in needed if name not in claimed]:
        raise ValueError(f"{path}: outcomes must have {', '.join(missing)} where there was an attack, got none")
    if lacking := [name for name in ("name", "images", "sha256") if not result.data.get(name)]:
        raise ValueError(f"{path}: data must have {', '.join(lacking)}, got {result.data!r}")
    if not result.network_sha256:
        raise ValueError(f"{path}: network_sha256 must be that of its weights, got none")
    return claimed


def _faults(result: Result, model: nn.Module, outcomes: dict[str, Tensor], labels: Tensor) -> tuple[str, ...]:
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
    return (*faults, *_interval_fault(result, outcomes, labels))


def _interval_fault(result: Result, outcomes: dict[str, Tensor], labels: Tensor) -> list[str]:
    """Whether the interval of a share is that of its outcomes."""
    if result.unit != "share" or result.interval is None or result.n != len(labels):
        return []
    ends = wilson(round((_value(result, outcomes, labels) or 0.0) * len(labels)), len(labels))
    if max(abs(a - b) for a, b in zip(ends, result.interval)) <= 1e-8:
        return []
    (low, high), (claimed_low, claimed_high) = ends, result.interval
    return [f"its interval is {claimed_low:.4f} to {claimed_high:.4f}, that of its outcomes {low:.4f} to {high:.4f}"]


def _value(result: Result, outcomes: dict[str, Tensor], labels: Tensor) -> float | None:
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
    digest = weights_digest(model.state_dict())
    if digest != result.network_sha256:
        raise ValueError(
            f"network of {result.name} must have weights of SHA-256 {result.network_sha256[:12]}..., got "
            f"{digest[:12]}... ({given or result.network})"
        )
    return model


def _find_network(result: Result, folder: Path) -> nn.Module:
    """The network by its name or weights: one that ships, one in `networks/` beside the result, or a run's folder."""
    name = result.network
    if name in zoo.names():
        return zoo.load(name)
    for ships in zoo.names():  # one that ships may have had another name where it was made
        model = zoo.load(ships)
        if weights_digest(model.state_dict()) == result.network_sha256:
            return model
    weights, described = (folder / "networks" / f"{name}{end}" for end in (".safetensors", ".json"))
    if weights.is_file():  # left by a sweep
        model = build(json.loads(described.read_text())["model"]).eval()
        model.load_state_dict(load_file(weights))
        return model
    for run in (Path(name), folder / "networks" / name):
        if name and (run / "run.json").is_file():
            return zoo.load(run)
    raise ValueError(
        f"network (--network) must be the path of {name!r}, the network of {result.name}, got none: it does not ship "
        f"and is not in {folder / 'networks'}"
    )


def _data(result: Result, root: str | Path | None) -> ImageData:
    assert result.data is not None
    if not isinstance(result.data["images"], int):
        raise ValueError(f"images in the data of {result.name} must be a whole number, got {result.data['images']!r}")
    data = load(str(result.data["name"]), root)[1].subset(slice(result.data["images"]))
    if data.digest() != result.data["sha256"]:
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
