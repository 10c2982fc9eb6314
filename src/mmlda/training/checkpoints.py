"""Checkpoints: tensors as safetensors, the rest as JSON, each file written atomically; nothing is unpickled.

A checkpoint is `step-00001000.safetensors` and, written after it, `step-00001000.json` with the tensors' SHA-256:
the JSON file completes it. The two newest are kept, so that a damaged one costs little. `run.json` has a SHA-256 of
itself, and checkpoints and networks have that of the run they belong to (`identity`). Files of older versions have
neither and are accepted without.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmlda._utils.checks import damaged, invalid
from mmlda._utils.files import json_digest, open_regular, read_json, write_json, write_whole
from mmlda._utils.settings import typed
from mmlda._utils.tensors import packed, read_tensors, save_tensors, unpacked
from mmlda._utils.training_data import recall
from mmlda.models.saved import check_config, fill, restore
from mmlda.training.recipes import Recipe

FORMAT = 1
KEEP = 2
RECORD: dict[str, Any] = {
    **{"format": int, "step": int, "sha256": str, "run": str, "validation": dict[str, float]},
    **{"seconds": float, "loss": float, "accuracy": float},
}
DATA: dict[str, Any] = {"name": str, "images": int | None, "sha256": str | None}  # of a DataLoader: None
VALIDATION = DATA | {"every": int, "keep_best": bool, "patience": int | None}
RUN: dict[str, Any] = {
    **{"recipe": dict[str, Any], "model": dict[str, Any] | None, "data": dict[str, Any], "processes": int},
    **{"amp": bool, "teacher": str, "start": str, "validation": dict[str, Any], "versions": dict[str, str]},
    **{"classes": Sequence[str], "bounds": Sequence[Sequence[float]], "sha256": str},
}


def save(folder: str | Path, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> Path:
    """Write the checkpoint of a step; then remove all but the newest two."""
    folder = Path(folder)
    content = packed(tensors)
    path = write_whole(folder / f"step-{step:08d}.safetensors", content)
    record = {"format": FORMAT, "step": step, "sha256": hashlib.sha256(content).hexdigest(), **record}
    write_json(path.with_suffix(".json"), {**record, "record": json_digest(record)})
    kept = [record.stem for record in _records(folder)[:KEEP]]
    for old in sorted(
        folder.glob("step-*")
    ):  # .json before .safetensors: without its record, a checkpoint is incomplete
        if old.stem not in kept:
            old.unlink(missing_ok=True)
    return path


def _records(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.json"), reverse=True)  # newest first


def last_step(folder: Path) -> int:
    """The step of the newest checkpoint whose record can be read; 0 if there is none."""
    for path in _records(folder):
        try:
            record = read_json(path)
            typed(RECORD, record)
            return int(record["step"])
        except (OSError, ValueError, KeyError):
            continue
    return 0


def newest(folder: str | Path, about: dict[str, Any] | None = None) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is complete, unaltered and of the run `about`, as (tensors, record); None if none is.

    A damaged one causes a warning, and the previous one is used. If all are damaged, a ValueError is raised, since
    starting again silently would lose them.
    """
    failures = []
    for path in _records(Path(folder)):
        try:
            return _checkpoint(path, about)
        except (OSError, ValueError) as error:
            failures.append(f"{path}: {error}")
            warnings.warn(f"checkpoint refused: {path}: {error}; trying the one before it", stacklevel=2)
    if failures:
        raise damaged(folder, "a folder with a whole checkpoint (remove it to start afresh)", "; ".join(failures))
    return None


def _checkpoint(path: Path, about: dict[str, Any] | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise invalid("format", str(FORMAT), record.get("format"))
    digest = record.pop("record", None)
    typed(RECORD, record)
    if digest != json_digest(record) or path.stem != f"step-{record.get('step', -1):08d}":
        raise damaged("record", "as it was written", "an altered one")
    _same_run(record, about)
    with open_regular(path.with_suffix(".safetensors")) as file:
        content = file.read()
    if hashlib.sha256(content).hexdigest() != record.get("sha256"):
        raise damaged("tensors", "as they were written", "truncated or altered ones (SHA-256 differs)")
    return unpacked(content), record


def _same_run(header: dict[str, Any], about: dict[str, Any] | None) -> None:
    """Raise if a checkpoint or a network belongs to another run."""
    if about is None:
        return
    own = identity(about)
    if header.get("run", None if "sha256" in about else own) != own:  # an older run's checkpoints do not say
        raise damaged("it", "part of this run", "one of another run")


def final(folder: str | Path, about: dict[str, Any] | None = None) -> dict[str, Tensor] | None:
    """The weights of a finished run; None if it is not finished or, with a warning, if they are damaged."""
    path = Path(folder) / "model.safetensors"
    if not path.is_file():
        return None
    try:
        return read_weights(path, about)
    except ValueError as error:
        warnings.warn(f"network refused: {error}; trying the newest checkpoint", stacklevel=2)
        return None


def read_weights(path: Path, about: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Weights that `save_weights` wrote; a ValueError if they are truncated, altered or not of the run `about`."""
    weights, header = read_tensors(path)
    try:
        _same_run(header, about)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return weights


def save_weights(path: Path, weights: dict[str, Tensor], about: dict[str, str] | None = None) -> Path:
    """A network's weights, with their SHA-256 (and `about`) in the file's header."""
    return save_tensors(path, weights, about)


def read_about(folder: Path) -> dict[str, Any]:
    """A run's run.json, every part of which is checked; a ValueError if it is damaged or altered."""
    path = folder / "run.json"
    about = read_json(path)
    try:
        typed(RUN, about)
        described = {key: value for key, value in about.items() if key != "sha256"}
        if about.get("sha256") not in (None, json_digest(described)):
            raise damaged("it", "as it was written", "an altered one (SHA-256 differs)")
        for name, hints in (("data", DATA), ("validation", VALIDATION)):
            typed(hints, about.get(name, {}))
        if missing := {"recipe", "data"} - about.keys() or DATA.keys() - about["data"].keys():
            raise invalid("it", f"given with {', '.join(sorted(missing))}", sorted(about))
        Recipe.from_dict(about["recipe"])
        if about.get("model") is not None:
            check_config(about["model"])
    except ValueError as error:
        raise damaged(path, "as a run writes it (or choose another folder)", f"a damaged one ({error})") from None
    return about


def write_about(folder: Path, about: dict[str, Any], *, sealed: bool = True) -> None:
    """Write a run's run.json with a SHA-256 of itself, unless it is one of an older version, which has none."""
    described = {key: value for key, value in about.items() if key != "sha256"}
    write_json(folder / "run.json", {**described, "sha256": json_digest(described)} if sealed else described)


def identity(about: dict[str, Any]) -> str:
    """SHA-256 that identifies a run: of its run.json without versions and steps, as a run can be lengthened."""
    recipe = {key: value for key, value in about["recipe"].items() if key != "steps"}
    described = {key: value for key, value in about.items() if key not in ("versions", "sha256")}
    return json_digest({**described, "recipe": recipe})


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def load(source: str | Path, *, model: nn.Module | None = None, device: torch.device | str | None = None) -> nn.Module:
    """A trained network from a run's folder, in eval mode.

    A network with a custom backbone cannot be described in the run's `run.json`: pass such a network as `model` to
    load the weights into it.
    """
    folder = Path(source)
    about = read_about(folder)
    if model is None and about.get("model") is None:
        raise invalid("model", f"a network like the one in {folder}, which has a custom backbone", model)
    weights = final(folder, about)
    if weights is None:
        found = newest(folder, about)
        if found is None:
            raise damaged(folder, "a run with a finished network or a checkpoint", "neither")
        weights = under("model.", found[0]) | under("average.", found[0])
    filled = restore(about["model"], weights, folder) if model is None else fill(model, weights, folder)
    recall(filled, about)
    return filled.to(device).eval()
