"""Checkpoints: tensors as safetensors, the rest as JSON, each file whole or not there; nothing is unpickled.

A checkpoint is `step-00001000.safetensors` and, written after it, `step-00001000.json` with the tensors' SHA-256:
the JSON file is what makes it one. The two newest are kept, so that a damaged one costs little.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import Tensor, nn

from mmlda._utils.files import write_json, write_whole
from mmlda._utils.tensors import packed, save_tensors
from mmlda._utils.training_data import recall
from mmlda.models import build
from mmlda.results import weights_digest

__all__ = ["final", "load", "newest", "read_about", "read_weights", "save", "save_weights"]

FORMAT = 1
KEEP = 2


def save(folder: str | Path, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> Path:
    """Write the checkpoint of a step; then remove all but the newest two."""
    folder = Path(folder)
    content = packed(tensors)
    path = write_whole(folder / f"step-{step:08d}.safetensors", content)
    record = {"format": FORMAT, "step": step, "sha256": hashlib.sha256(content).hexdigest(), **record}
    write_json(path.with_suffix(".json"), {**record, "record": _digest(record)})
    kept = [record.stem for record in _records(folder)[:KEEP]]
    for old in sorted(folder.glob("step-*")):  # .json before .safetensors: tensors without a record are no checkpoint
        if old.stem not in kept:
            old.unlink(missing_ok=True)
    return path


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _records(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.json"), reverse=True)  # newest first


def newest(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole and unaltered, as (tensors, record), or None where there is none.

    A damaged one is named in a warning, and the one before it is used; where all are damaged it is a ValueError,
    since starting afresh in silence would lose them.
    """
    damaged = []
    for path in _records(Path(folder)):
        try:
            record = json.loads(path.read_text())
            if not isinstance(record, dict) or record.get("format") != FORMAT:
                raise ValueError(f"format is not {FORMAT}")
            if record.pop("record", None) != _digest(record) or path.stem != f"step-{record['step']:08d}":
                raise ValueError("the record is altered")
            content = path.with_suffix(".safetensors").read_bytes()
            if hashlib.sha256(content).hexdigest() != record.get("sha256"):
                raise ValueError("the tensors are truncated or altered (SHA-256 differs)")
            return load_bytes(content), record
        except (OSError, ValueError) as error:
            damaged.append(f"{path}: {error}")
            warnings.warn(f"checkpoint refused: {path}: {error}; trying the one before it", stacklevel=2)
    if damaged:
        files = "; ".join(damaged)
        raise ValueError(f"no checkpoint can be used: {files}. Remove the folder to start afresh")
    return None


def final(folder: str | Path) -> dict[str, Tensor] | None:
    """The weights of a finished run; None where it is not finished, or, with a warning, where they are damaged."""
    path = Path(folder) / "model.safetensors"
    if not path.is_file():
        return None
    try:
        return read_weights(path)
    except ValueError as error:
        warnings.warn(f"network refused: {error}; trying the newest checkpoint", stacklevel=2)
        return None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights that `save_weights` wrote; a ValueError where they are truncated or altered."""
    try:
        with safe_open(path, "pt") as file:
            digest = (file.metadata() or {}).get("sha256")  # older files have none
        weights = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from None
    if digest not in (None, weights_digest(weights)):
        raise ValueError(f"{path}: the weights are altered (SHA-256 differs)")
    return weights


def save_weights(path: Path, weights: dict[str, Tensor], about: dict[str, str] | None = None) -> Path:
    """A network's weights, with their SHA-256 (and `about`) in the file's header."""
    return save_tensors(path, weights, {"sha256": weights_digest(weights), **(about or {})})


def read_about(folder: Path) -> dict[str, Any]:
    """A run's run.json; a ValueError where it is damaged."""
    path = folder / "run.json"
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): expected what a run writes; choose another folder") from None


def load(source: str | Path, *, model: nn.Module | None = None, device: torch.device | str | None = None) -> nn.Module:
    """A trained network from a run's folder, in eval mode.

    A network with a backbone of one's own can't be described in the run's `run.json`: pass such a network as
    `model`, and it gets the weights.
    """
    folder = Path(source)
    if not (folder / "run.json").is_file():
        raise ValueError(f"source = {str(source)!r}: expected the folder of a run, with its run.json")
    about = read_about(folder)
    if model is None:
        if about.get("model") is None:
            raise ValueError(f"{folder}: its network has a backbone of its own; pass one like it as model=")
        model = build(about["model"])
    weights = final(folder)
    if weights is None:
        found = newest(folder)
        if found is None:
            raise ValueError(f"{folder}: neither a finished network nor a checkpoint is there yet")
        weights = {name[6:]: tensor for name, tensor in found[0].items() if name.startswith("model.")}
        weights |= {name[8:]: tensor for name, tensor in found[0].items() if name.startswith("average.")}
    model.load_state_dict(weights)
    recall(model, about)
    return model.to(device).eval()
