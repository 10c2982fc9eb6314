"""What the commands share: the program itself, common options, and how values are parsed."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

import mmlda.zoo as zoo
from mmlda._utils.checks import invalid
from mmlda._utils.settings import ATTACKS, parse_value
from mmlda._utils.settings import parse_attack as parse

if TYPE_CHECKING:
    from torch import nn

    from mmlda.attacks import Attack
    from mmlda.data import ImageData

app = typer.Typer(
    help="Max-Mahalanobis LDA networks: train them, attack them, and check whether their robustness is real.",
    epilog="Start with: mmlda demo. Every command has --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Command(TyperCommand):
    """A command whose help lists its options in groups: the `rich_help_panel` of each."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in sorted(self.get_params(ctx), key=lambda param: param.param_type_name != "argument"):
            other = "Arguments" if param.param_type_name == "argument" else next(reversed(groups), "Options")
            if (record := param.get_help_record(ctx)) is not None:
                names = re.sub(r" <\w+>$", "", record[0])  # MODEL, not MODEL <str>
                groups.setdefault(getattr(param, "rich_help_panel", None) or other, []).append((names, record[1]))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def command(example: str, name: str | None = None, of: typer.Typer = app) -> Any:
    """Decorator for a command whose help ends in an example."""
    return of.command(name, cls=Command, epilog=f"\b\nExample: {example}")


DATASETS = ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "cifar100-coarse"]


def writable(ctx: typer.Context, param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Raise a ValueError if nothing can be written at a given path, before the work begins; leaves no trace."""
    given = ctx.get_parameter_source(param.name or "")
    if path is None or ctx.resilient_parsing or given is None or given.name != "COMMANDLINE":
        return path
    folder = next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())
    try:
        tempfile.TemporaryDirectory(dir=folder, prefix=".mmlda-").cleanup()
    except OSError as error:
        what = f"{param.opts[0]} must be a path that can be written"
        raise ValueError(f"{what}, got {str(path)!r} ({error.strerror})") from None
    return path


def option(group: str, *names: str, **settings: Any) -> Any:
    """An option in a group of the help."""
    return typer.Option(*names, rich_help_panel=group, **settings)


def parse_eps(text: str) -> float:
    """A perturbation: 0.03 or 8/255."""
    value = parse_value(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid("eps", "a number such as 0.03 or 8/255", text)
    return value


Json = Annotated[bool, option("Output", "--json", help="Print JSON instead of text.")]
Root = Annotated[
    str | None, option("Data", metavar="DIR", help="Folder of the datasets (default: $MMLDA_DATA or ~/.cache/mmlda).")
]
Device = Annotated[
    str | None, option("Computation", metavar="NAME", help="cpu, cuda or cuda:1 (default: cuda if available).")
]
data_option = functools.partial(option, "Data", metavar="NAME|DIR", autocompletion=lambda: DATASETS)
OwnData = Annotated[
    str | None, data_option(help=f"{', '.join(DATASETS)} or a folder (default: what the network was trained on).")
]
network_argument = typer.Argument(
    metavar="MODEL",
    help="A network that ships (listed by `mmlda models`), or the folder of a trained one.",
    autocompletion=zoo.names,
)
Model = Annotated[str | None, network_argument]
Function = Annotated[
    str | None,
    option(
        "Your own network",
        "--model",
        metavar="MODULE:FUNCTION",
        help="Import package.module and call function, which returns the network.",
    ),
]
Weights = Annotated[Path | None, option("Your own network", metavar="FILE", help="Safetensors file with its weights.")]
N = Annotated[int | None, option("Data", metavar="N", help="Use a stratified sample of N test images (default: all).")]
Chunk = Annotated[
    int | None, option("Computation", metavar="N", help="Images per chunk; a resumed run skips finished chunks.")
]
Priors = Annotated[
    str | None,
    option("Computation", metavar="NAME", help="Predict with other priors: uniform, or empirical (the test set's)."),
]
attack_option = option(
    "Attacks",
    "--attack",
    metavar="NAME[:EPS][,KEY=...]",
    help=f"An attack, such as fgsm:8/255 or pgd:0.1,steps=50; repeat for several. Names: {', '.join(ATTACKS)}.",
    autocompletion=lambda: [*ATTACKS],
)


def show(value: Any, text: Any, as_json: bool) -> None:
    """Print a value (dataclasses included) as JSON, or else the text."""
    print(json.dumps(value, default=_plain) if as_json else text)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else dataclasses.asdict(value)


def browse(page: Path) -> None:
    """Open a page in the browser."""
    import webbrowser

    webbrowser.open(page.resolve().as_uri())


def pick(device: str | None) -> str:
    """The device given, if it is available; by default CUDA if available."""
    import torch

    from mmlda._utils.device import device_of

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    device_of(torch.sum, device)
    return device


class Subject(NamedTuple):
    """What a command measures: a network, its name, the test set, and the name of the dataset it was trained on."""

    net: nn.Module
    name: str
    test: ImageData
    trained_on: str | None

    def heading(self, n: int | None) -> str:
        """The network and the images, and the network's own dataset where it is another."""
        from mmlda.data import stratified

        total, classes = len(self.test), len(stratified(self.test, n).labels.unique())
        images = f"{total:,}" if n is None or n >= total else f"{n:,} of {total:,}"
        note = "" if self.trained_on in (None, self.test.name) else f" (the network was trained on {self.trained_on})"
        return f"{self.name} on {images} test images of {self.test.name}, {classes} classes{note}"


def prepare(
    model: str | None, function: str | None, weights: Path | None, data: str | None, root: str | None, device: str
) -> Subject:
    """The network and the test set, by default that of the dataset it was trained on; they must fit each other."""
    import mmlda
    from mmlda.evaluation.accuracy import own_test_set

    if (model is None) == (function is None):
        raise invalid("MODEL", "given, or else --model package.module:function", model)
    if model is not None and re.fullmatch(r"[\w.]+:\w+", model):
        raise invalid("MODEL", "a name or a folder (for a function of your own, use --model)", model)
    if function is not None:
        net, own = zoo.user_network(function, weights, device=device), None
    elif weights is not None:
        raise invalid("weights", "given with --model only", str(weights))
    else:
        net, own = mmlda.load(str(model), device=device), zoo.trained_on(str(model))
    test = own_test_set(net, data, own, root)
    return Subject(net, str(model or function), test, None if own is None else own["name"])


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Comma-separated integers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise invalid(name, "comma-separated integers such as 0,1,2", text) from None


def parse_attack(text: str) -> Attack:
    """An attack from `NAME[:EPS][,key=value...]`."""
    from mmlda import attacks

    return parse(text, attacks)
