"""What identifies saved work: an attack with its settings, the network and the data."""

from __future__ import annotations

import dataclasses
import sys
from functools import reduce
from typing import Any

from mmlda._utils.checks import invalid
from mmlda.attacks import Attack

__all__ = ["check_reproducible", "describe_attack", "identity"]


def identity(about: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What must be the same for saved work to be resumed: data and network of `mmlda.results.traced`, and `more`.

    A network without a hash is identified by its name, so it must have one.
    """
    network = about["network_sha256"] or about["network"]
    if not network:
        raise invalid("name", "given for a model without weights where results are saved", network)
    return {"data": about["data"], "network": network, **more}


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
