"""What a result was made with: network, data, attack, versions."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from functools import reduce
from typing import Any

import torch
from torch import nn

from mmlda._utils.checks import invalid
from mmlda._utils.device import Model
from mmlda._utils.tensors import packed
from mmlda.attacks import Attack
from mmlda.data import ImageData
from mmlda.results import code_version, versions

__all__ = ["check_reproducible", "describe_attack", "identity", "provenance"]


def provenance(model: Model, data: ImageData, device: torch.device, name: str = "") -> dict[str, Any]:
    """Where a result comes from, as fields of `Result`: data, network, device, versions, commit.

    The network's hash is None for a plain function and for a module without weights.
    """
    weights = model.state_dict() if isinstance(model, nn.Module) else {}
    found = versions(device)
    return {
        "data": {"name": data.name, "images": len(data), "sha256": data.digest()},
        "network": {"name": name, "sha256": hashlib.sha256(packed(weights)).hexdigest() if weights else None},
        "device": found["device"],
        "versions": found,
        "commit": code_version(),
    }


def identity(about: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for saved work to be resumed, from its `provenance`: data, network and attack.

    A network without a hash is identified by its name, so it must have one.
    """
    network = about["network"]["sha256"] or about["network"]["name"]
    if not network:
        raise invalid("name", "given for a model without weights where results are saved", network)
    return {key: about[key] for key in ("data", "attack") if key in about} | {"network": network}


def describe_attack(attack: Attack) -> dict[str, Any]:
    """An attack as JSON: its name and every setting; functions by `module.qualname`.

    >>> from mmlda.attacks import BIM
    >>> describe_attack(BIM(eps=0.04))["settings"]["eps"]
    0.04
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Attack):
            return describe_attack(value)
        if isinstance(value, tuple | list):
            return [plain(one) for one in value]
        if value is None or isinstance(value, int | float | str | bool):
            return value
        qualname = getattr(value, "__qualname__", None)
        return repr(value) if qualname is None else f"{value.__module__}.{qualname}"

    settings = {field.name: plain(getattr(attack, field.name)) for field in dataclasses.fields(attack)}
    return {"name": type(attack).__name__, "settings": settings}


def check_reproducible(attack: Attack) -> None:
    """Raise unless `describe_attack` tells the attack from every other one, in another process too."""
    for field in dataclasses.fields(attack):
        value = getattr(attack, field.name)
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, Attack):
                check_reproducible(one)
            elif not _has_name(one):
                what = "a named loss or a module-level function where results are saved"
                raise ValueError(f"{field.name} must be {what}, got {getattr(one, '__qualname__', repr(one))}")


def _has_name(value: Any) -> bool:
    """Whether a value is plain, has a repr without an address, or is found in its module under its name."""
    qualname = getattr(value, "__qualname__", None)
    if qualname is None:
        return " at 0x" not in repr(value)
    module = sys.modules.get(value.__module__)
    return reduce(lambda scope, part: getattr(scope, part, None), qualname.split("."), module) is value
