"""The networks that ship with the package: safetensors files, each with a JSON file that describes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from mmlda._utils.checks import check_choice, invalid
from mmlda.models import build
from mmlda.training import checkpoints

__all__ = ["about", "load", "names"]

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of the networks.

    >>> "cifar10-mmlda" in names()
    True
    """
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def about(name: str) -> dict[str, Any]:
    """How a network was made and what was measured: its config, recipe, data, accuracy and versions."""
    check_choice("name", name, names())
    return json.loads((FOLDER / f"{name}.json").read_text())


def load(source: str | Path, *, model: nn.Module | None = None, device: torch.device | str | None = None) -> nn.Module:
    """A trained network in eval mode: the name of one that ships, or the folder of a run.

    `run.json` cannot describe a network with a backbone of your own: pass such a network as `model`, and it gets the
    weights.

    >>> model = load("mnist-mmlda")
    >>> model(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    if str(source) in names():
        network: nn.Module = build(about(str(source))["model"])
        network.load_state_dict(load_file(FOLDER / f"{source}.safetensors"))
        return network.to(device).eval()
    if not (Path(source) / "run.json").is_file():
        raise invalid("source", f"the folder of a run, or one of {', '.join(names())}", str(source))
    return checkpoints.load(source, model=model, device=device)
