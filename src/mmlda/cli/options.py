"""What the commands share: the program itself, options, and how values are read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mmlda.attacks import Attack

__all__ = ["ATTACKS", "Data", "Device", "Json", "Model", "Root", "app", "make_attack", "pick", "settings"]

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


def make_attack(name: str, values: dict[str, Any]) -> Attack:
    """An attack by its short name, with settings; a ValueError names what is unknown or missing."""
    from mmlda import attacks

    if name not in ATTACKS:
        raise ValueError(f"attack = {name!r}: expected one of {', '.join(ATTACKS)}")
    kind = getattr(attacks, ATTACKS[name])
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for key in values:
        if key not in fields:
            raise ValueError(f"{key} = {values[key]!r}: expected a setting of {kind.__name__}: {', '.join(fields)}")
    required = [key for key, field in fields.items() if field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING and key not in values]  # fmt: skip
    if required:
        raise ValueError(f"{kind.__name__} needs {required[0]}: expected a value (--eps 0.1, or bim:0.1 in evaluate)")
    return kind(**values)
