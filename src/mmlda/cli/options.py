"""What the commands share: the program itself, common options, and how values are parsed."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmlda._utils.checks import check_choice, invalid

if TYPE_CHECKING:
    from mmlda.attacks import Attack
    from mmlda.data import ImageData

__all__ = [
    "ATTACKS",
    "Chunk",
    "Data",
    "Device",
    "Json",
    "Model",
    "N",
    "Root",
    "app",
    "attack_option",
    "checked",
    "numbers",
    "parse_attack",
    "pick",
    "prepare",
    "settings",
    "typed",
]

app = typer.Typer(
    help="Max-Mahalanobis LDA networks: train them, attack them, and check whether their robustness is real.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ATTACKS = {
    "fgsm": "FGSM",
    "bim": "BIM",
    "ilcm": "ILCM",
    "jsma": "JSMA",
    "cw": "CarliniWagner",
    "pgd": "PGD",
    "apgd": "APGD",
    "square": "Square",
    "fab": "FAB",
    "worst": "WorstCase",
}


def _datasets() -> list[str]:
    return ["digits", "mnist", "fashion-mnist", "cifar10"]


def _networks() -> list[str]:
    from mmlda import zoo

    return zoo.names()


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Root = Annotated[str | None, typer.Option(help="Folder of the datasets (default: $MMLDA_DATA, else ~/.cache/mmlda).")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1 (default: cuda if available).")]
Data = Annotated[
    str, typer.Option(help="digits, mnist, fashion-mnist, cifar10, or a folder.", autocompletion=_datasets)
]
Model = Annotated[
    str,
    typer.Argument(help="A network that ships (see mmlda models) or the folder of a run.", autocompletion=_networks),
]
N = Annotated[int | None, typer.Option(help="Use the first N test images (default: all).")]
Chunk = Annotated[int | None, typer.Option(help="Images per chunk; finished chunks are not repeated.")]
attack_option = typer.Option(
    "--attack",
    metavar="NAME[:EPS][,KEY=VALUE...]",
    help=f"An attack such as pgd:8/255,steps=50; repeat for several. Names: {', '.join(ATTACKS)}.",
    autocompletion=lambda: [*ATTACKS],
)


def pick(device: str | None) -> str:
    """The device given, if it is available; by default CUDA where there is one."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must be available, got {device!r} ({str(error).splitlines()[0]})") from None
    return device


def prepare(model: str, data: str, root: str | None, device: str) -> tuple[Any, ImageData]:
    """The network and the test set, which must fit each other."""
    import mmlda
    from mmlda.evaluation.accuracy import check_fits

    net, test = mmlda.load(model, device=device), mmlda.data.load(data, root)[1]
    check_fits(net, test)
    return net, test


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Comma-separated integers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise invalid(name, "comma-separated integers such as 0,1,2", text) from None


def settings(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """["lr=0.1", "eps=8/255", "flip=true"] as a dictionary: fractions, JSON, or else plain words."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise invalid(option, "KEY=VALUE", pair)
        values[name] = _value(text)
    return values


def _value(text: str) -> Any:
    """
    >>> _value("8/255"), _value("[1, 2]"), _value("margin")
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
            wanted = hint.__name__ if hint in (int, float, str, bool) else str(hint).replace("collections.abc.", "")
            raise invalid(key, wanted, value)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON suits a field of this type."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_is_a(value, part) for part in typing.get_args(hint))
    if hint in (None, type(None)):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    if typing.get_origin(hint) is Sequence:
        return isinstance(value, list) and all(_is_a(one, typing.get_args(hint)[0]) for one in value)
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if not isinstance(value, list):
            return False
        if len(parts) == 2 and parts[1] is ...:
            return all(_is_a(one, parts[0]) for one in value)
        return len(value) == len(parts) and all(_is_a(one, part) for one, part in zip(value, parts))
    return isinstance(hint, type) and isinstance(value, hint)  # functions and attacks cannot be typed in


def parse_attack(text: str) -> Attack:
    """An attack from `NAME[:EPS][,key=value...]`.

    >>> attack = parse_attack("pgd:8/255,steps=50,loss=margin")
    >>> attack.eps * 255, attack.steps, attack.loss
    (8.0, 50, 'margin')
    """
    from mmlda import attacks

    head, *pairs = re.split(r",(?=\w+=)", text)  # a comma inside a JSON list is no separator
    name, colon, eps = head.partition(":")
    check_choice("attack", name, ATTACKS)
    kind = getattr(attacks, ATTACKS[name])
    if colon:
        pairs.append(f"eps={eps}")
    values = settings(pairs, "attack")
    if len(values) < len(pairs):
        raise invalid("attack", "given each setting once", text)
    if "bounds" in values:
        raise invalid("bounds", "left out, as images on the command line are in [0, 1]", values["bounds"])
    values = checked(kind, values, name)
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.init and required and field.name not in values:
            raise invalid("attack", f"given {field.name}, as in {name}:8/255", text)
    return kind(**values)
