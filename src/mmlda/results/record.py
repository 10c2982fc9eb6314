"""A result: a number, the paper's number beside it, and everything needed to judge and check it.

Results connect measurements with their readers, so this module needs only the standard library. A job writes one
JSON file per result, with the outcome of every image (predictions, distances, adversarial images) in a safetensors file
beside it. `mmlda.results.pack` gathers the results of a table in one file of each kind. `Result.load` reads both
layouts.

Facts are typed fields; `mmlda.results.label` words them for tables. Shares are numbers in [0, 1].
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import typing
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmlda._utils.checks import damaged
from mmlda._utils.files import JSON_BYTES, open_regular, parse_json, write_whole
from mmlda._utils.settings import typed
from mmlda.results.columns import join_columns, read_columns
from mmlda.results.intervals import wilson
from mmlda.results.upgrade import SCHEMA, upgrade

OUTCOMES = {"file": str, "sha256": str, "bytes": int}
SHARED = ("recipe_settings", "attack_settings", "data", "versions", "series")  # stored once where results are packed


@dataclass(frozen=True, kw_only=True)
class Result:
    """A number with its provenance.

    Parameters
    ----------
    name
        File name, without its extension.
    kind
        Table or figure: "table1", ..., "fig5", "worst", "audit", "evaluation", "theory", "suspect" or "claim".
    what
        The number in words.
    value
        The number; a word for an audit; None if undefined.
    unit
        "share" (of images, in [0, 1]), "share difference", "distortion", ... or "" (default).
    interval
        95% confidence interval, in the unit of `value`.
    paper
        The paper's number in the unit of `value`, or its sentence.
    holds
        Whether the paper's claim holds here; None if this result does not decide it.
    note
        What to know before quoting the number, such as a scale that differs from the paper's.
    n
        Number of images, or of whatever `value` is computed from.
    seed
        Seed of the network.
    dataset
        "cifar10", "mnist", "digits" or "".
    head
        "softmax", "mmlda" or "".
    recipe, recipe_settings
        Name and settings of the training recipe.
    fine_tuning
        "", "sat" or "hat" (Sec. 4.3).
    attack, attack_settings
        Class name of the attack, such as "BIM", and its settings.
    eps
        Perturbation, on pixels in [0, 1].
    target
        What the attack aims at, for attacks with several modes: "untargeted", "random" or "least-likely".
    claim
        Key of the paper's sentence, for results of kind "claim".
    cell
        Further coordinates: the surface of JSMA, the class-biased set, log10(C), ...
    train_steps, attack_steps
        Steps of training and of the attack.
    seconds
        Duration of the measurement.
    numbers
        Other measurements by name; shares are in [0, 1].
    series
        Data of a figure, by name.
    network, network_sha256
        Name of the network and SHA-256 of its weights.
    compiled
        Whether the network was compiled for the attack.
    priors
        Class priors that replaced the network's own, such as "uniform"; None if it kept them.
    temperature
        Whether a temperature was fitted to the logits.
    data
        Name, number and SHA-256 of the images.
    device, versions, commit
        Device, software versions (with the number of threads), and commit of the code.
    outcomes
        Name, SHA-256 and size of the safetensors file beside this one.

    Raises
    ------
    ValueError
        If `name` cannot name a file, or `value` is NaN or infinite.

    Examples
    --------
    >>> result = Result(name="x", kind="table1", what="test error", value=0.12, paper=0.1)
    >>> round(result.difference, 2)
    0.02
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
    priors: str | None = None
    temperature: bool = False
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
        """A share of images with Wilson's 95% interval.

        Parameters
        ----------
        count, n
            `count` of `n` images.
        **fields
            Further fields of the result; `value`, `unit`, `interval` and `n` are set here.

        Returns
        -------
        Result
            The result.

        Examples
        --------
        >>> Result.counted(8, 10, name="x", kind="table2", what="accuracy").value
        0.8
        """
        return cls(value=count / n, unit="share", interval=wilson(count, n), n=n, **fields)

    @property
    def difference(self) -> float | None:
        """`value` minus `paper`; None unless both are numbers."""
        both = isinstance(self.value, int | float) and isinstance(self.paper, int | float)
        return float(self.value) - float(self.paper) if both else None  # type: ignore[arg-type]

    @property
    def number(self) -> float:
        """`value` as a float; raises ValueError if it is not a number."""
        if not isinstance(self.value, int | float):
            raise ValueError(f"value of {self.name} must be a number, got {self.value!r}")
        return float(self.value)

    def save(self, folder: str | Path, outcomes: bytes | None = None) -> Result:
        """Write `folder/name.json`, with the outcomes beside it.

        The outcomes are written first, so a result never names a file that does not exist.

        Parameters
        ----------
        folder
            Created if missing.
        outcomes
            Content of a safetensors file with one row per image (default: none).

        Returns
        -------
        Result
            The result as written, with `outcomes` filled in.

        Examples
        --------
        >>> import tempfile
        >>> Result(name="x", kind="theory", what="a bound", value=7.45).save(tempfile.mkdtemp()).value
        7.45
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
        """Read one result.

        Parameters
        ----------
        path
            `name.json`, or `table.jsonl#name` for a packed result.

        Returns
        -------
        Result
            The result.

        Raises
        ------
        ValueError
            If there is no such result, if it is damaged, or if a newer version of mmlda wrote it.

        Examples
        --------
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> saved = Result(name="x", kind="theory", what="a bound", value=7.45).save(folder)
        >>> Result.load(f"{folder}/x.json") == saved
        True
        """
        table, packed, name = str(path).rpartition("#")
        file = Path(table if packed else path)
        found = read_file(file, name if packed else None) if file.is_file() else {}
        if len(found) != 1:
            raise ValueError(f"path must be the JSON of a result, or table.jsonl#name, got {str(path)!r}")
        return next(iter(found.values()))

    def read_outcomes(self, folder: str | Path) -> bytes:
        """Read the outcome of every image.

        Parameters
        ----------
        folder
            Folder that the result was read from.

        Returns
        -------
        bytes
            A safetensors file.

        Raises
        ------
        ValueError
            If the result has no outcomes, or if they are missing, truncated or altered.

        Examples
        --------
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> Result(name="x", kind="theory", what="", value=None).save(folder, b"bytes").read_outcomes(folder)
        b'bytes'
        """
        if self.outcomes is None:
            raise ValueError(f"{self.name} must be a result with outcomes beside it, got one without")
        file, packed, part = self.outcomes["file"].partition("#")
        path = Path(folder) / file
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"{self.name}: outcomes must be in a file beside it, got {file!r}")
        if not path.is_file():
            raise damaged(path, f"the outcomes of {self.name}", "no such file")
        if packed:
            content = join_columns(read_columns(path, f"{part}/"))
        else:
            with open_regular(path) as opened:
                content = opened.read()
        if hashlib.sha256(content).hexdigest() != self.outcomes["sha256"]:
            raise damaged(path, f"the outcomes of {self.name}", "truncated or altered ones (SHA-256 differs)")
        return content


def read_file(path: Path, name: str | None = None) -> dict[str, Result]:
    """Read the results in a file by name, or only the one called `name`; {} for a file of another kind.

    A `.json` file is one result. In a `.jsonl` file, the first line is `{"schema": ..., "shared": {...}}` and every
    other line is a result without the fields that have their default. A string in a field of `SHARED` is a key of
    "shared", which stores values that several results have in common. The outcomes are in the safetensors file beside
    it, in columns "<name of the result>/<column>".
    """
    packed = path.suffix == ".jsonl"
    if not path.is_file():
        return {}
    with open_regular(path, JSON_BYTES) as file:
        try:
            header = parse_json(file.readline() if packed else file.read())
            schema, shared = header["schema"], header["shared" if packed else "cell"]
        except ValueError as error:
            warnings.warn(f"skipped {path}, which is damaged: {error}", stacklevel=3)
            return {}
        except (TypeError, KeyError):
            return {}
        if not packed:
            results = [_from_values(header, str(path))]
        else:
            start = b"" if name is None else f'{{"name": {json.dumps(name)},'.encode()
            places = ((line, f"{path}, line {number}") for number, line in enumerate(file, 2) if line.startswith(start))
            results = [_from_values({"schema": schema, **_unpacked(line, shared, path, at)}, at) for line, at in places]
    return {result.name: result for result in results}


def _unpacked(line: bytes, shared: dict[str, Any], table: Path, where: str) -> dict[str, Any]:
    """The fields of a packed result."""
    try:
        values = parse_json(line)
        values |= {key: shared[values[key]] for key in SHARED if isinstance(values.get(key), str)}
        if "outcomes" in values:
            values["outcomes"] = {**values["outcomes"], "file": f"{table.stem}.safetensors#{values['name']}"}
        return values
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged(where, "a packed result", "another line") from None


def _from_values(values: dict[str, Any], where: str) -> Result:
    """A result from the fields in a file, of this schema or an older one."""
    schema = values["schema"]
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ValueError(f"{where}: schema must be 1 to {SCHEMA}, got {str(schema)[:80]}: made by a newer mmlda?")
    try:
        known = {name: value for name, value in upgrade(values).items() if name in Result.__dataclass_fields__}
        for name in ("name", "kind", "what", "value"):
            if name not in known:
                raise ValueError(f"{name} must be in every result, got none")
        typed(typing.get_type_hints(Result), known)
        typed(OUTCOMES, known.get("outcomes") or {})
        if (outcomes := known.get("outcomes")) is not None and not {"file", "sha256"} <= outcomes.keys():
            raise ValueError(f"outcomes must be given with file and sha256, got {sorted(outcomes)}")
        if isinstance(known.get("interval"), list):
            known["interval"] = tuple(known["interval"])
        return Result(**known)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
