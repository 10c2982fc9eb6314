"""Settings and attacks from text such as `pgd:8/255,steps=50`. torch is not imported here."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from mmlda._utils.checks import check_choice, invalid

CLASSES = ("FGSM", "BIM", "ILCM", "JSMA", "CarliniWagner", "PGD", "APGD", "Square", "FAB", "WorstCase")
SHORT = {"CarliniWagner": "cw", "WorstCase": "worst"}
ATTACKS = {SHORT.get(name, name.lower()): name for name in CLASSES}


def settings(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """["lr=0.1", "eps=8/255", "flip=true"] as a dictionary: fractions, JSON, or else plain words."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise invalid(option, "KEY=VALUE", pair)
        values[name] = parse_value(text)
    return values


def parse_value(text: str) -> Any:
    """
    >>> parse_value("8/255"), parse_value("[1, 2]"), parse_value("margin")
    (0.03137254901960784, [1, 2], 'margin')
    """
    if fraction := re.fullmatch(r"([\d.]+)/([\d.]+)", text):
        try:
            return float(fraction[1]) / float(fraction[2])
        except (ValueError, ZeroDivisionError):
            return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def checked(kind: type, values: dict[str, Any], what: str) -> dict[str, Any]:
    """Settings of a dataclass from the command line; a ValueError for an unknown one and for a wrong type."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
    for key in values:
        check_choice(f"setting of {what}", key, fields)
    typed(fields, values)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def typed(hints: dict[str, Any], values: dict[str, Any]) -> None:
    """Raise a ValueError for a value that is not of its type; values without a hint are not checked."""
    for key, value in values.items():
        if key in hints and not _is_a(value, hint := hints[key]):
            wanted = (
                hint.__name__
                if hint in (int, float, str, bool)
                else re.sub(r"collections\.abc\.|typing\.", "", str(hint))
            )
            raise invalid(key, wanted, value)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON suits a field of this type. Functions and attacks cannot be typed in."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_is_a(value, part) for part in parts)
    if hint is Any:
        return True
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(entry, parts[1]) for entry in value.values())
    if origin in (tuple, Sequence):
        if not isinstance(value, list | tuple):
            return False
        if origin is Sequence or parts[-1] is ...:
            parts = parts[:1] * len(value)
        return len(value) == len(parts) and all(map(_is_a, value, parts))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def parse_attack(text: str, attacks: Any) -> Any:
    """An attack from `NAME[:EPS][,key=value...]`.

    Parameters
    ----------
    text : str
        Such as "pgd:8/255" or "pgd:0.1,steps=50,loss=margin"; the names are those of `ATTACKS`.
    attacks : module
        `mmlda.attacks`, which holds the classes.

    Returns
    -------
    Attack

    Raises
    ------
    ValueError
        An unknown name or setting, or a value of the wrong type.

    Examples
    --------
    >>> from mmlda import attacks
    >>> attack = parse_attack("pgd:8/255,steps=50,loss=margin", attacks)
    >>> attack.eps * 255, attack.steps, attack.loss
    (8.0, 50, 'margin')
    """
    head, *pairs = re.split(r",(?=\w+=)", text)  # a comma inside a JSON list does not separate
    name, colon, eps = head.partition(":")
    check_choice("attack", name, ATTACKS)
    kind = getattr(attacks, ATTACKS[name])
    if colon:
        pairs.append(f"eps={eps}")
    values = settings(pairs, "attack")
    if len(values) < len(pairs):
        raise invalid("attack", "given each setting once", text)
    if "bounds" in values:
        raise invalid("bounds", "left out, as images are in [0, 1]", values["bounds"])
    values = checked(kind, values, name)
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.default is parameter.empty and parameter.name not in values:
            raise invalid("attack", f"given {parameter.name}, as in {name}:8/255", text)
    return kind(**values)
