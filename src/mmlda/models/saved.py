"""Networks from files: the description and the weights are checked before anything is built from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmlda._utils.checks import check_choice, invalid
from mmlda._utils.settings import typed
from mmlda.models.classifier import BACKBONES, Classifier, build
from mmlda.theory.codes import BinaryCode
from mmlda.theory.means import settled_code

CONFIG: dict[str, Any] = {
    "backbone": str,
    "depth": int,
    "channels": int,
    "width": int,
    "preactivation": bool,
    "activation": str,
    "batch_norm": bool,
    "inputs": int,
    "hidden": Sequence[int],
    "head": str,
    "num_classes": int,
    "dim": int,
    "C": float,
    "precision": float,
    "priors": Sequence[float],
    "latent": bool,
    "normalize": bool,
    "mean": float | Sequence[float],
    "std": float | Sequence[float],
}
MOST = {"depth": 2000, "hidden": 1000}  # layers: each costs time and memory, whatever its size
LARGEST = 1 << 20  # of any other whole number


def check_config(config: Any) -> dict[str, Any]:
    """The description of a network from a file; a ValueError if a key is unknown, a type is wrong or a number is out
    of range."""
    typed({"model": dict[str, Any]}, {"model": config})
    for key, value in config.items():
        check_choice("setting of model", key, CONFIG)
        most = MOST.get(key, LARGEST)
        numbers = value if isinstance(value, list) else [value]
        if any(type(number) is int and number > most for number in numbers) or len(numbers) > most:
            raise invalid(key, f"at most {most}", value if not isinstance(value, list) else f"{len(value)} entries")
    typed(CONFIG, config)
    check_choice("backbone", config.get("backbone", "resnet"), BACKBONES)
    return config


def restore(config: Any, weights: dict[str, Tensor], source: str | Path) -> Classifier:
    """The network of a description with these weights, both read from `source`.

    It takes no more memory than the weights do: their shapes are compared with those described before it is built.

    Raises
    ------
    ValueError
        If the description is invalid, or the weights do not fit it.
    """
    check_config(config)
    kind, keys = BACKBONES[config.get("backbone", "resnet")]
    try:
        with torch.device("meta"):
            backbone = kind(**{key: config[key] for key in keys if key in config})
        dim, mmlda = config.get("dim", backbone.num_features), config.get("head", "mmlda") == "mmlda"
        shapes = {f"backbone.{name}": tensor.shape for name, tensor in backbone.state_dict().items()}
        L, coded = config.get("num_classes", 10), mmlda and "head.means" not in weights
        if coded:
            shapes["head.log_priors"] = torch.Size([L])
            if not isinstance(code := settled_code(L, dim), BinaryCode) or "head.signs" not in weights:
                raise ValueError(f"head.means must be [{L}, {dim}], got none")
            shapes["head.signs"] = torch.Size(code.signs().shape)
        else:
            shapes["head.means" if mmlda else "head.weight"] = torch.Size([L, dim])
        if config.get("latent", mmlda):
            shapes["latent.weight"] = torch.Size([dim, backbone.num_features])
        for name, shape in shapes.items():
            if name not in weights or weights[name].shape != shape:
                got = list(weights[name].shape) if name in weights else "none"
                raise ValueError(f"{name} must be {list(shape)}, got {got}")
        model = build(config, means=weights["head.means"].float() if mmlda and not coded else None)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"weights must fit the network, got {str(source)!r}: {str(error).splitlines()[0]}") from None
    return fill(model, weights, source)


def fill(model: Any, weights: dict[str, Tensor], source: str | Path) -> Any:
    """The network itself, with weights read from `source`; a ValueError if they do not fit."""
    assert isinstance(model, nn.Module)
    try:
        own = model.state_dict()
        for name in own.keys() & weights.keys():  # PyTorch would drop imaginary parts
            if weights[name].is_floating_point() != own[name].is_floating_point():
                raise ValueError(f"weights must fit the network, got {str(source)!r}: {name} is {weights[name].dtype}")
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[1:2] or [str(error)]
        raise ValueError(f"weights must fit the network, got {str(source)!r}: {first[0].strip()}") from None
    return model
