"""One result, one JSON file: a number, the paper's number beside it, and everything needed to judge and check it.

Results connect what runs on a device with what reads the outcome, so this module needs only the standard library.
The outcome of every image (predictions, distances, adversarial images) is stored in a safetensors file beside the
JSON file, which records its name and SHA-256.

Facts are typed fields; `mmlda.results.label` makes the words of a table from them. Shares are numbers in [0, 1].
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmlda._utils.files import write_whole
from mmlda.results.intervals import wilson
from mmlda.results.upgrade import SCHEMA, upgrade

__all__ = ["Result", "load_all", "result_files"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A number with its provenance.

    Args:
        name: name of the file, without its ending.
        kind: the table or figure it belongs to: "table1", ..., "fig5", "worst", "audit", "evaluation", "theory",
            "suspect" or "claim".
        what: the number in words.
        value: the number; a word for an audit; None where it is not defined.
        unit: "share" (of images, in [0, 1]), "share difference", "distortion", ... or "".
        interval: 95% confidence interval, in the unit of `value`.
        paper: the paper's number, in the unit of `value`, or its sentence.
        holds: whether the paper's claim holds here; None where this result does not decide it.
        note: what to know before quoting it, such as the scale, where it is not the paper's.
        n: number of images, or of whatever `value` is computed from.
        seed: seed of the network.
        dataset: "cifar10", "mnist", "digits" or "".
        head: "softmax", "mmlda" or "".
        recipe: name of the training recipe; `recipe_settings` are its settings.
        fine_tuning: "", "sat" or "hat" (Sec. 4.3).
        attack: class name of the attack, such as "BIM"; `attack_settings` are its settings.
        eps: the perturbation, on pixels in [0, 1].
        target: what the attack aims at, where an attack has several: "untargeted", "random", "least-likely".
        claim: key of the paper's sentence, for results of kind "claim".
        cell: further coordinates: the surface of JSMA, the class-biased set, log10(C), ...
        train_steps: training steps of the network.
        attack_steps: steps of the attack.
        seconds: how long the measurement took.
        numbers: what else was measured, by name; shares are in [0, 1].
        series: what a figure is drawn from, by name.
        network: the network's name; `network_sha256` is the SHA-256 of its weights.
        compiled: whether the network was compiled for the attack.
        data: name, number and SHA-256 of the images used.
        device: name of the device it was measured on.
        versions: versions of the software, and the number of threads.
        commit: commit of the code.
        outcomes: name, SHA-256 and size of the safetensors file beside this one.
    """

    name: str
    kind: str
    what: str
    value: float | str | None
    unit: str = ""
    interval: tuple[float, float] | None = None
    paper: float | str | None = None
    holds: bool | None = None
    note: str = ""
    n: int | None = None
    seed: int | None = None
    dataset: str = ""
    head: str = ""
    recipe: str = ""
    fine_tuning: str = ""
    attack: str = ""
    eps: float | None = None
    target: str = ""
    claim: str = ""
    cell: dict[str, Any] = field(default_factory=dict)
    train_steps: int | None = None
    attack_steps: int | None = None
    seconds: float | None = None
    numbers: dict[str, float | str | None] = field(default_factory=dict)
    series: dict[str, Any] = field(default_factory=dict)
    network: str = ""
    network_sha256: str = ""
    recipe_settings: dict[str, Any] | None = None
    attack_settings: dict[str, Any] | None = None
    compiled: bool = False
    data: dict[str, Any] | None = None
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    outcomes: dict[str, Any] | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+-]+", self.name) or self.name.startswith("."):
            raise ValueError(f"name must be letters, digits and . _ + - only, as it names files, got {self.name!r}")
        if isinstance(self.value, float) and not math.isfinite(self.value):
            raise ValueError(f"value must be finite, or None where it is not defined, got {self.value!r}")

    @classmethod
    def counted(cls, count: int, n: int, **fields: Any) -> Result:
        """The share of `count` among `n` images, with Wilson's 95% interval.

        >>> Result.counted(8, 10, name="x", kind="table2", what="accuracy").value
        0.8
        """
        return cls(value=count / n, unit="share", interval=wilson(count, n), n=n, **fields)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, where both are numbers."""
        both = isinstance(self.value, int | float) and isinstance(self.paper, int | float)
        return float(self.value) - float(self.paper) if both else None  # type: ignore[arg-type]

    @property
    def number(self) -> float:
        """The value of a result that has a number."""
        if not isinstance(self.value, int | float):
            raise ValueError(f"value of {self.name} must be a number, got {self.value!r}")
        return float(self.value)

    def save(self, folder: str | Path, outcomes: bytes | None = None) -> Result:
        """Write `folder/name.json`, and `outcomes` beside it; return the result as it was written.

        The outcomes are written first: a result never names a file that does not exist.
        """
        result = self
        if outcomes is not None:
            beside = f"{self.name}.safetensors"
            write_whole(Path(folder) / beside, outcomes)
            about = {"file": beside, "sha256": hashlib.sha256(outcomes).hexdigest(), "bytes": len(outcomes)}
            result = dataclasses.replace(self, outcomes=about)
        values = dataclasses.asdict(result)
        lines = ",\n".join(f' "{key}": {json.dumps(value, allow_nan=False)}' for key, value in values.items())
        write_whole(Path(folder) / f"{self.name}.json", f"{{\n{lines}\n}}\n".encode())
        return result

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read one file, of this schema or an older one."""
        values = _read(Path(path))
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for name, f in fields.items():
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and name not in values:
                raise ValueError(f"{path}: {name} must be in every result, got none")
        known = {name: value for name, value in values.items() if name in fields}
        for name in ("cell", "numbers", "series", "versions"):
            if not isinstance(known.get(name, {}), dict):
                raise ValueError(f"{path}: {name} must be names with values, got {known[name]!r}")
        if isinstance(known.get("interval"), list):
            known["interval"] = tuple(known["interval"])
        return cls(**known)

    def read_outcomes(self, folder: str | Path) -> bytes:
        """The safetensors file beside the result; a ValueError where it is missing, truncated or altered."""
        if self.outcomes is None:
            raise ValueError(f"{self.name} must be a result with outcomes beside it, got one without")
        name = str(self.outcomes["file"])
        if Path(name).name != name:
            raise ValueError(f"{self.name}: outcomes must be in a file beside it, got {name!r}")
        path = Path(folder) / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: it has the outcomes of {self.name}")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.outcomes["sha256"]:
            raise ValueError(f"{path} is truncated or altered (SHA-256 differs from the one in {self.name}.json)")
        return content


def _read(path: Path) -> dict[str, Any]:
    """The fields of a result in a file, by the names of this schema."""
    if not path.is_file():
        raise ValueError(f"{path} must be the JSON file of a result, got no file there")
    try:
        values = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError):
        raise ValueError(f"{path} must be the JSON file of a result, got another file") from None
    if not isinstance(values, dict) or not {"schema", "name", "kind"} <= values.keys():
        raise ValueError(f"{path} must be a result, with its schema, name and kind, got another file")
    if not isinstance(values["schema"], int) or values["schema"] > SCHEMA:
        raise ValueError(f"{path}: schema must be at most {SCHEMA}, got {values['schema']!r}: made by a newer mmlda")
    try:
        return upgrade(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_all(folder: str | Path) -> list[Result]:
    """The results in a folder and below it, in the order of their paths."""
    return [Result.load(path) for path in result_files(folder)]


def result_files(folder: str | Path) -> list[Path]:
    """The files of results in a folder and below it; JSON files of another kind are skipped.

    So are those in subfolders of unfinished work (with a `work.json`): their results are stored above them.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"folder must be a folder of results, got {str(folder)!r}")
    paths = sorted(Path(folder).rglob("*.json"))
    working = {path.parent for path in paths if path.name == "work.json"} - {Path(folder)}
    return [path for path in paths if path.parent not in working and _is_result(path)]


def _is_result(path: Path) -> bool:
    """Whether a JSON file declares itself a result."""
    try:
        values = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError):
        return False
    return isinstance(values, dict) and {"schema", "name", "kind", "cell"} <= values.keys()
