"""One result, one JSON file: a number, the paper's number beside it, and everything needed to judge and check it.

The seam between what runs on a device and what reads the outcome: standard library only. What lies behind a number
image by image (outcomes, distances, adversarial images) is a safetensors file beside the JSON file, named and
hashed in it.
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

__all__ = ["SCHEMA", "Result", "difference_interval", "load_all", "result_files", "wilson"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """A number with its provenance.

    Args:
        name: of the file.
        kind: which table or figure it belongs to: "table1", ..., "fig5", "worst", "audit", "evaluation", "theory".
        what: the number in words.
        cell: its place there: data, model, attack, eps, seed, ...
        value: the number; a word for an audit; None where it is not defined.
        interval: 95% confidence.
        paper: the paper's number, or its sentence.
        holds: whether the paper's claim holds here; None where this result does not decide it.
        note: what to know before quoting it; the scale, where it is not the paper's.
        numbers: what else was measured, by name.
        series: what a figure is drawn from, by name.
        network: the network's name, where there is one, and the SHA-256 of its weights.
        outcomes: the safetensors file beside this one: its name, SHA-256 and size.
    """

    name: str
    kind: str
    what: str
    cell: dict[str, Any]
    value: float | str | None
    unit: str = ""
    interval: tuple[float, float] | None = None
    paper: float | str | None = None
    holds: bool | None = None
    note: str = ""
    n: int | None = None
    seed: int | None = None
    steps: int | None = None
    seconds: float | None = None
    numbers: dict[str, float | str | None] = field(default_factory=dict)
    series: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] | None = None
    network: dict[str, Any] | None = None
    attack: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    outcomes: dict[str, Any] | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+-]+", self.name) or self.name.startswith("."):
            raise ValueError(f"name = {self.name!r}: expected letters, digits and . _ + - only, as it names files")
        if isinstance(self.value, float) and not math.isfinite(self.value):
            raise ValueError(f"value = {self.value}: expected a finite number, or None where it is not defined")

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, where both are numbers."""
        both = isinstance(self.value, int | float) and isinstance(self.paper, int | float)
        return float(self.value) - float(self.paper) if both else None  # type: ignore[arg-type]

    def save(self, folder: str | Path, outcomes: bytes | None = None) -> Result:
        """Write `folder/name.json`, and `outcomes` beside it; the result as it was written.

        The outcomes come first: a result never names a file that is not there.
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
        """Read one file; fields that a later schema adds to have their defaults in older files."""
        if not Path(path).is_file():
            raise ValueError(f"{path}: expected the JSON file of a result, and no file is there")
        try:
            values = json.loads(Path(path).read_text())
        except (ValueError, UnicodeDecodeError):
            raise ValueError(f"{path}: expected a JSON file of a result") from None
        if not isinstance(values, dict) or not {"schema", "name", "kind"} <= values.keys():
            raise ValueError(f"{path}: expected a result, with its schema, name and kind")
        if not isinstance(values["schema"], int) or values["schema"] > SCHEMA:
            raise ValueError(f"{path}: schema is {values['schema']!r}, expected at most {SCHEMA}: a newer mmlda's")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        missing = [name for name, f in fields.items() if name not in values and f.default is dataclasses.MISSING
                   and f.default_factory is dataclasses.MISSING]  # fmt: skip
        if missing:
            raise ValueError(f"{path}: {missing[0]} is missing, expected it in every result")
        known = {name: value for name, value in values.items() if name in fields}
        if isinstance(known.get("interval"), list):
            known["interval"] = tuple(known["interval"])
        return cls(**known)

    def read_outcomes(self, folder: str | Path) -> bytes:
        """The safetensors file beside the result; a ValueError where it is missing, truncated or altered."""
        if self.outcomes is None:
            raise ValueError(f"{self.name}: expected a result with outcomes beside it")
        name = str(self.outcomes["file"])
        if Path(name).name != name:
            raise ValueError(f"{self.name}: outcomes are in {name!r}, expected a file beside it")
        path = Path(folder) / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: expected the outcomes of {self.name}")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.outcomes["sha256"]:
            raise ValueError(f"{path} is truncated or altered (SHA-256 differs from the one in {self.name}.json)")
        return content


def load_all(folder: str | Path) -> list[Result]:
    """The results in a folder and below it, in the order of their paths."""
    return [Result.load(path) for path in result_files(folder)]


def result_files(folder: str | Path) -> list[Path]:
    """The files of results in a folder and below it; JSON files of another kind are left alone.

    So are those in folders of work under way further down: what came of that lies above.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"folder = {str(folder)!r}: expected a folder of results")
    paths = sorted(Path(folder).rglob("*.json"))
    working = {path.parent for path in paths if path.name == "work.json"} - {Path(folder)}
    return [path for path in paths if path.parent not in working and _is_result(path)]


def _is_result(path: Path) -> bool:
    """Whether a JSON file says that it is a result."""
    try:
        values = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError):
        return False
    return isinstance(values, dict) and {"schema", "name", "kind", "cell"} <= values.keys()


def wilson(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's 95% interval for a share, as shares.

    >>> low, high = wilson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)
    >>> wilson(0, 100)[0]
    0.0
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"successes = {successes}, n = {n}: expected 0 <= successes <= n, n >= 1")
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return (0.0 if successes == 0 else max(middle - half, 0.0), 1.0 if successes == n else min(middle + half, 1.0))


def difference_interval(k1: int, n1: int, k2: int, n2: int) -> tuple[float, float]:
    """A 95% interval for the difference of two shares k1 / n1 - k2 / n2 (Newcombe 1998, from Wilson's).

    >>> low, high = difference_interval(56, 70, 48, 80)
    >>> round(low, 4), round(high, 4)
    (0.0524, 0.3339)
    """
    p1, p2 = k1 / n1, k2 / n2
    (l1, u1), (l2, u2) = wilson(k1, n1), wilson(k2, n2)
    return p1 - p2 - math.hypot(p1 - l1, u2 - p2), p1 - p2 + math.hypot(u1 - p1, p2 - l2)
