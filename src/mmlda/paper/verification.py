"""Verify a stored result: recompute some of the images behind it, and compare all of its fields."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmlda import attacks, zoo
from mmlda._utils.checks import check_choice, check_count, invalid
from mmlda._utils.files import read_json
from mmlda._utils.tensors import read_tensors, unpacked
from mmlda.data import CLASSES, ImageData, load, stratified
from mmlda.evaluation.robustness import predictions
from mmlda.models.saved import restore
from mmlda.paper.agreement import Agreement, honest_rate
from mmlda.paper.expected import Outcomes, Record, attack_of, faults_and_unchecked
from mmlda.paper.suspects import attacked_in_view
from mmlda.results import Result, weights_digest

KINDS = ("table1", "table2", "table3", "worst", "suspect", "evaluation")  # with an outcome for each image
FAST = ("FGSM", "BIM", "ILCM")
MINIMUM_NORM = (attacks.CarliniWagner, attacks.FAB)
LABELS, DISTANCES = (torch.uint8, torch.int32, torch.int64), (torch.float16, torch.float32, torch.float64)
COLUMNS = {  # of the outcomes
    **{"clean": LABELS, "prediction": LABELS, "success": (torch.bool,)},
    **{"linf": DISTANCES, "l2": DISTANCES, "distortion": DISTANCES},
}
DISTANCE = 0.02  # how far their mean distance over images broken both times may be off
FAR = 0.1  # and that of one image, which else counts as another outcome


@dataclass(frozen=True)
class Verification:
    """The outcome of recomputing images behind a result, drawn at random with `seed`.

    Attributes
    ----------
    labels, outcomes
        How the clean labels and the outcomes under the attack agree; no outcomes without an attack.
    distance
        Recomputed over claimed mean distance of images broken both times, for minimum-norm attacks: of L2 and of the
        distortion, the factor further from 1.
    faults
        Fields that do not follow from the result's table, network, data and outcomes.
    unchecked
        What was not compared.
    """

    result: Result
    seed: int
    labels: Agreement
    outcomes: Agreement | None
    distance: float | None
    faults: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def n(self) -> int:
        """Number of recomputed images."""
        return self.labels.n

    @property
    def limit(self) -> float:
        """The smallest false change, as a share of the images, that would be noticed with a probability of 95%."""
        return (self.outcomes or self.labels).limit

    @property
    def agrees(self) -> bool:
        """Whether rounding explains every difference."""
        alike = self.labels.holds and (self.outcomes is None or self.outcomes.holds)
        return alike and not self.faults and (self.distance is None or abs(self.distance - 1) <= DISTANCE)

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "DOES NOT AGREE"
        text = f"{self.result.name}: {verdict} on {self.n} of its {self.labels.images} images (seed {self.seed})\n"
        text += f"  claimed {_shown(self.result)}; same label for {_alike(self.labels)}"
        if self.outcomes is not None:
            text += f"; same outcome under {self.result.attack} for {_alike(self.outcomes)}"
        if self.distance is not None:
            text += f"; mean distance {self.distance:.4f} times the claimed one, of which {DISTANCE:.0%} are allowed"
        text += "".join(f"\n  {fault}" for fault in self.faults)
        what = "outcomes or distances" if self.distance is not None else "outcomes"
        found = f"false {what} of {100 * self.limit:.2g}% of the images would be noticed with a probability of 95%"
        if self.limit == 1:
            found = f"none: false {what} are noticed only with more images (--n)"
        return f"{text}\n  detection limit: {found}\n  not checked: {', '.join(self.unchecked)}"


def verify(
    path: str | Path,
    *,
    n: int | None = None,
    seed: int | None = None,
    network: str | Path | None = None,
    root: str | Path | None = None,
    device: torch.device | str = "cpu",
) -> Verification:
    """Recompute `n` of the images behind a result, drawn at random, and compare all of its fields.

    The SHA-256 of the network's weights and of the data must be the result's. The attack is that of the table, and the
    result's settings must describe it. What follows from the outcomes, the table and the paper (value, interval,
    numbers, verdict, words) must be as this code computes it. A true result fails by chance in at most one of 1,000
    verifications.

    Parameters
    ----------
    path
        The JSON file of a result, or `table.jsonl#name`.
    n
        Number of images to recompute (default: all without an attack, 1,000 for FGSM, BIM and ILCM, otherwise 200).
    seed
        Random seed of the draw (default: a new one each time, so the checked outcomes cannot be known in advance).
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
        `agrees` is the conclusion; printing it shows the numbers, the detection limit, and what was not checked.

    Raises
    ------
    ValueError
        If the result has no outcomes, or its network, data or attack are not found or differ.
    """
    result, folder = Result.load(path), Path(path).parent
    if n is not None:
        check_count("n", n, 1)
    claimed, attack = _outcomes(result, folder), attack_of(result)
    if n is None:
        n = len(claimed["clean"]) if attack is None else 1000 if result.attack in FAST else 200
    model, ships = _network(result, folder, network)
    model, data = model.to(device), _data(result, root)
    if any(len(column) != len(data) for column in claimed.values()):
        sizes = sorted({len(column) for column in claimed.values()})
        raise ValueError(f"{result.name}: outcomes must be of {len(data)} images, got {sizes}")
    seed = secrets.randbelow(2**31) if seed is None else seed
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:n].sort().values
    record = Record(result, model, ships, data, claimed, None if root is None else str(root))
    faults, unchecked = faults_and_unchecked(record, attack)
    labels, outcomes, distance = _recompute(record, attack, rows, device)
    return Verification(result, seed, labels, outcomes, distance, faults, unchecked)


def _recompute(
    record: Record, attack: attacks.Attack | None, rows: Tensor, device: torch.device | str
) -> tuple[Agreement, Agreement | None, float | None]:
    """Attack some images again and compare with their claimed outcomes: fields of `Verification`."""
    result, model, part = record.result, record.model, record.data.subset(rows)
    claimed, labels = {name: column[rows] for name, column in record.outcomes.items()}, part.labels
    clean = predictions(model, part, device=device)
    right, claimed_right = clean == labels, claimed["clean"] == labels

    def compared(then: Tensor, now: Tensor, differ: Tensor, name: str) -> Agreement:
        count, lost, won = (int(flags.sum()) for flags in (differ, then & ~now, now & ~then))
        return Agreement(len(rows), len(record.data), count, lost, won, honest_rate(name))

    alike = compared(claimed_right, right, clean != claimed["clean"], "")
    if attack is None:
        return alike, None, None
    if result.kind == "suspect":
        x_adv, _ = attacked_in_view(model, part, attack, result.cell["view"], device, rows.to(device))
        moved = predictions(model, dataclasses.replace(part, images=x_adv), device=device)
        then, now = claimed["prediction"] == labels, moved == labels
        return alike, compared(then, now, then != now, result.attack), None
    found = attack(model, part.pixels().to(device), labels.to(device), index=rows.to(device))
    broken, claimed_broken = found.success.cpu() & right, claimed["success"] & claimed_right
    then, now = claimed_right & (claimed["prediction"] == labels), right & (found.prediction.cpu() == labels)
    differ, both, distance = (then != now) | (broken != claimed_broken), broken & claimed_broken, None
    if isinstance(attack, MINIMUM_NORM) and bool(both.any()):
        factors = []
        for key in ("l2", "distortion"):
            ours, theirs = getattr(found, key).cpu().double(), claimed[key].double()
            differ |= both & ~((ours / theirs - 1).abs() <= FAR)  # NaN is far too
            factors.append(ours[both].mean() / theirs[both].mean())
        distance = float(max(factors, key=lambda factor: (factor - 1).abs().nan_to_num(torch.inf)))
    if result.kind == "table3":  # about the images that are broken
        then, now = claimed_broken, broken
    return alike, compared(then, now, differ, result.attack), distance


def _outcomes(result: Result, folder: Path) -> Outcomes:
    """The outcomes beside a result; a ValueError if it has none, or not those that its kind needs."""
    claimed = {} if result.outcomes is None else unpacked(result.read_outcomes(folder))
    if result.kind not in KINDS or "clean" not in claimed or result.data is None:
        kinds = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        raise ValueError(f"{result.name} must be a result with an outcome for each image ({kinds}), got {result.kind}")
    needed = {"table1": (), "suspect": ("prediction",)}.get(result.kind, tuple(COLUMNS)[1:])
    if result.kind == "evaluation" and not result.attack:
        needed = ()
    if missing := [name for name in needed if name not in claimed]:
        raise ValueError(f"{result.name}: outcomes must have {', '.join(missing)} where there was an attack, got none")
    for name, column in claimed.items():
        dtypes = COLUMNS.get(name, (column.dtype,))
        if column.ndim != 1 or column.dtype not in dtypes:
            expected = f"one of {', '.join(map(str, dtypes))} for each image"
            raise invalid(f"{name} in the outcomes of {result.name}", expected, f"{column.dtype} {list(column.shape)}")
    if lacking := [name for name in ("name", "images", "sha256") if not result.data.get(name)]:
        raise ValueError(f"{result.name}: data must have {', '.join(lacking)}, got {result.data!r}")
    if not result.network_sha256:
        raise ValueError(f"{result.name}: network_sha256 must be that of its weights, got none")
    return claimed


def _shown(result: Result) -> str:
    if not isinstance(result.value, int | float):
        return "nothing"
    return f"{100 * result.value:.4g}%" if result.unit == "share" else f"{result.value:.4g}"


def _alike(found: Agreement) -> str:
    text = f"{found.n - found.differ}"
    return text + (f" ({found.lost} right only in the record, {found.won} only now)" if found.differ else "")


def _network(result: Result, folder: Path, given: str | Path | None) -> tuple[nn.Module, str]:
    """The network of a result, and the name under which it ships or ""; a ValueError if it has other weights."""
    wanted = result.network_sha256
    for ships in zoo.names():  # it may have had another name where it was made
        if _shipped_digest(ships) == wanted:
            return zoo.load(ships), ships
    model = zoo.load(str(given)) if given is not None else _find_network(result, folder)
    if (digest := weights_digest(model.state_dict())) != wanted:
        expected = f"one with weights of SHA-256 {wanted[:12]}..., as {result.name} has"
        raise ValueError(f"network must be {expected}, got {digest[:12]}... ({given or result.network})")
    return model, ""


@functools.cache
def _shipped_digest(name: str) -> str:
    return weights_digest(zoo.load(name).state_dict())


def _find_network(result: Result, folder: Path) -> nn.Module:
    """The network in `networks/` beside the result. Its name comes from a file, so that it must not act as a path."""
    name, places = result.network, [parent / "networks" for parent in (folder, folder.parent)]  # packed: one below
    for place in places if name not in ("", "..") and Path(name).name == name else []:
        if (place / f"{name}.safetensors").is_file():  # left by a sweep
            config, path = read_json(place / f"{name}.json").get("model"), place / f"{name}.safetensors"
            return restore(config, read_tensors(path)[0], path).eval()
        if (place / name / "run.json").is_file():
            return zoo.load(place / name)
    expected = f"the path of {name!r}, which does not ship and is not in {places[0]}"
    raise ValueError(f"network (--network) must be {expected}, got none")


def _data(result: Result, root: str | Path | None) -> ImageData:
    """The images of a result, by their digest. The dataset must be a known name; a result's text is never a path."""
    about: dict[str, Any] = result.data or {}
    check_choice("dataset", about["name"], CLASSES)
    if not isinstance(about["images"], int):
        raise ValueError(f"images in the data of {result.name} must be a whole number, got {about['images']!r}")
    test, n = load(about["name"], root)[1], about["images"]
    parts = (sample() for sample in (lambda: test.subset(slice(n)), lambda: stratified(test, n)))
    data = next((part for part in parts if part.digest() == about["sha256"]), None)
    if data is None:
        raise ValueError(f"data must be the test images that {result.name} was measured on, got others")
    return data
