"""Trained networks: those that ship (safetensors files, each with a JSON file that describes it) and saved ones.

torch is imported where it is used: the command line lists the networks without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from mmlda._utils.checks import check_choice, invalid
from mmlda._utils.files import parse_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mmlda.models import Classifier

    Network = TypeVar("Network", bound=nn.Module)

__all__ = ["about", "load", "names", "save", "trained_on", "user_network"]

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of the networks that ship.

    >>> "cifar10-mmlda" in names()
    True
    """
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def about(name: str) -> dict[str, Any]:
    """How a network was made and what was measured: its config, recipe, data, accuracy and versions."""
    check_choice("name", name, names())
    return json.loads((FOLDER / f"{name}.json").read_text())


def trained_on(source: str | Path) -> dict[str, Any] | None:
    """The data a network was trained on: its name and, for a run, images and sha256; None if that is not known.

    >>> trained_on("mnist-sr")
    {'name': 'mnist'}
    """
    if str(source) in names():
        return {"name": about(str(source))["data"]}
    if not (Path(source) / "run.json").is_file():
        return None
    from mmlda.training import checkpoints

    return checkpoints.read_about(Path(source))["data"]


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a network to `folder/model.safetensors`, from which `load` reads it; return the file's path.

    The file is written whole or not at all, and its header describes the network. A network with a backbone of your
    own cannot be described: its weights are saved, and `load` needs a network to put them into, as `model`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(load("mnist-mmlda"), folder)
    ...     type(load(folder)).__name__
    'Classifier'
    """
    from mmlda.training import checkpoints

    if (Path(folder) / "run.json").exists():
        raise invalid("folder", "a folder without a training run", str(folder))
    try:
        config = model.config
    except (AttributeError, ValueError):
        config = None  # a backbone of the user's own
    return checkpoints.save_weights(
        Path(folder) / "model.safetensors", model.state_dict(), {"model": json.dumps(config)}
    )


@overload
def load(source: str | Path, *, device: torch.device | str | None = None) -> Classifier: ...


@overload
def load(source: str | Path, *, model: Network, device: torch.device | str | None = None) -> Network: ...


def load(source: str | Path, *, model: Any = None, device: torch.device | str | None = None) -> Any:
    """A trained network in eval mode: one that ships, by name, or one from a folder of `mmlda.save` or a training run.

    A network with a backbone of your own is not described by its folder: pass such a network as `model`, and it gets
    the weights.

    >>> import torch
    >>> model = load("mnist-mmlda")
    >>> model(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    from mmlda._utils.tensors import read_tensors
    from mmlda.models.saved import fill, restore
    from mmlda.training import checkpoints

    folder, path = Path(source), Path(source) / "model.safetensors"
    if str(source) in names():
        path = FOLDER / f"{source}.safetensors"
    elif (folder / "run.json").is_file():
        return checkpoints.load(folder, model=model, device=device)
    elif not path.is_file():
        raise invalid("source", f"a folder with a network, or one of {', '.join(names())}", str(source))
    weights, header = read_tensors(path)
    if model is not None:
        return fill(model, weights, path).to(device).eval()
    config = about(str(source))["model"] if str(source) in names() else _config(header, path)
    if config is None:
        raise invalid("model", f"a network to put the weights into, as that in {path} has a backbone of its own", None)
    return restore(config, weights, path).to(device).eval()


def _config(header: dict[str, str], path: Path) -> dict[str, Any] | None:
    """The description of the network in a file's header; None if there is none."""
    try:
        return parse_json(header.get("model", "null"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def user_network(
    name: str, weights: str | Path | None = None, *, device: torch.device | str | None = None
) -> nn.Module:
    """A network of the user's own, in eval mode: what the function `package.module:function` returns.

    The module is imported, also from the current folder, and the function is called without arguments.

    Args:
        weights: safetensors file to load into the network; by default the function has done that.
    """
    import importlib
    import sys

    from torch import nn

    module, colon, function = name.partition(":")
    if not (module and colon and function.isidentifier()):
        raise invalid("model", "package.module:function", name)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(f"model must name a module that can be imported, got {name!r} ({error})") from None
    if not callable(made):
        raise invalid("model", f"a function of the module {module}", name)
    network = made()
    if not isinstance(network, nn.Module):
        what = type(network).__name__
        raise ValueError(f"model must be a function that returns a torch.nn.Module, got {name!r}, which returns {what}")
    if weights is not None:
        from mmlda._utils.tensors import read_tensors
        from mmlda.models.saved import fill

        if not Path(weights).is_file():
            raise invalid("weights", "a safetensors file", str(weights))
        fill(network, read_tensors(weights)[0], weights)
    return network.to(device).eval()
