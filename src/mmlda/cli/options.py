"""What the commands share: the program itself, options, and how values are read."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import nn

    from mmlda.attacks import Attack
    from mmlda.data import ImageData

__all__ = ["ATTACKS", "Data", "Device", "Json", "Model", "Root", "app", "checked", "fits", "make_attack", "pick",
           "settings", "typed"]  # fmt: skip

app = typer.Typer(
    help="Max-Mahalanobis LDA networks: train them, attack them, and see whether the robustness is real.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ATTACKS = {"fgsm": "FGSM", "bim": "BIM", "ilcm": "ILCM", "jsma": "JSMA", "cw": "CarliniWagner", "pgd": "PGD",
           "apgd": "APGD", "square": "Square", "fab": "FAB", "worst": "WorstCase"}  # fmt: skip


def _datasets() -> list[str]:
    return ["digits", "mnist", "fashion-mnist", "cifar10"]


def _networks() -> list[str]:
    from mmlda import zoo

    return zoo.names()


Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Root = Annotated[str | None, typer.Option(help="Where the datasets lie; $MMLDA_DATA or the user's cache by default.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; cuda where there is one by default.")]
Data = Annotated[
    str, typer.Option(help="digits, mnist, fashion-mnist, cifar10, or a folder.", autocompletion=_datasets)
]
Model = Annotated[
    str,
    typer.Argument(help="A network that ships (mmlda models), or the folder of a run.", autocompletion=_networks),
]


def pick(device: str | None) -> str:
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device = {device!r}: expected one that is here ({str(error).splitlines()[0]})") from None
    return device


def settings(pairs: Iterable[str], what: str) -> dict[str, Any]:
    """["lr=0.1", "flip=true"] as a dictionary; values are JSON where they can be read so, words otherwise."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{what} = {pair!r}: expected name=value")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def fits(model: nn.Module, data: ImageData, device: str, *, spare: bool = False) -> None:
    """A ValueError where a network can't take the images, or has other classes; `spare` ones may be fine."""
    import torch

    try:
        with torch.no_grad():
            z = model(data.pixels(slice(1)).to(device))
    except RuntimeError as error:
        what = f"images of {' x '.join(map(str, data.shape))}"
        why = str(error).splitlines()[0]
        raise ValueError(f"data = {data.name!r} has {what}: expected ones this network takes ({why})") from None
    if z.ndim != 2 or (z.shape[1] != data.num_classes and not (spare and z.shape[1] > data.num_classes)):
        raise ValueError(f"data = {data.name!r} has {data.num_classes} classes: expected {z.shape[-1]}, the network's")


def checked(kind: type, values: dict[str, Any], what: str) -> dict[str, Any]:
    """The settings of a dataclass as they came from the command line; a ValueError names one that is unknown or no
    value for it."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(f"{key} = {value!r}: expected a setting of {what}: {', '.join(fields)}")
    typed(fields, values)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def typed(hints: dict[str, Any], values: dict[str, Any]) -> None:
    """A ValueError names a value that is none of its type; what has no type is left to others."""
    for key, value in values.items():
        if key in hints and not _is_a(value, hint := hints[key]):
            wanted = hint.__name__ if hint in (int, float, str, bool) else str(hint).replace("collections.abc.", "")
            raise ValueError(f"{key} = {value!r}: expected {wanted}")


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is one for a field of this type."""
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
    return isinstance(hint, type) and isinstance(value, hint)  # functions and attacks can't be typed in


def make_attack(name: str, values: dict[str, Any]) -> Attack:
    """An attack by its short name, with settings; a ValueError names what is unknown or missing."""
    from mmlda import attacks

    if name not in ATTACKS:
        raise ValueError(f"attack = {name!r}: expected one of {', '.join(ATTACKS)}")
    kind = getattr(attacks, ATTACKS[name])
    if "bounds" in values:
        raise ValueError(f"bounds = {values['bounds']!r}: expected none, as images on the command line are 0 to 1")
    values = checked(kind, values, kind.__name__)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    required = [key for key, field in fields.items() if field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING and key not in values]  # fmt: skip
    if required:
        raise ValueError(f"{kind.__name__} needs {required[0]}: expected a value (--eps 0.1, or bim:0.1 in evaluate)")
    return kind(**values)
