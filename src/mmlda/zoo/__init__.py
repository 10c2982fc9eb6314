"""Trained networks: those that ship (safetensors files, each with a JSON file that describes it) and saved ones.

torch is imported where it is used: the command line lists the networks without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from mmlda._utils.checks import check_choice, invalid
from mmlda._utils.files import parse_json, read_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mmlda.models import Classifier

    Network = TypeVar("Network", bound=nn.Module)

__all__ = ["about", "load", "names", "save", "trained_on", "user_network"]

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Names of the networks that ship.

    Returns
    -------
    list of str
        In alphabetical order.

    Examples
    --------
    >>> "cifar10-mmlda" in names()
    True
    """
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def about(name: str) -> dict[str, Any]:
    """Describe a network that ships.

    Parameters
    ----------
    name
        Name of the network, one of `names()`.

    Returns
    -------
    dict
        Its config, recipe, data, class names, accuracy and versions.

    Raises
    ------
    ValueError
        If no network of this name ships.

    Examples
    --------
    >>> about("mnist-mmlda")["data"]
    'mnist'
    """
    check_choice("name", name, names())
    return json.loads((FOLDER / f"{name}.json").read_text())


def trained_on(source: str | Path) -> dict[str, Any] | None:
    """The data a network was trained on.

    Parameters
    ----------
    source
        The name of a network that ships, or the folder of a network.

    Returns
    -------
    dict or None
        `name` and, for a run, `images` and `sha256`; None if the data is not known.

    Examples
    --------
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
    """Write a network to `folder/model.safetensors`, from which `load` reads it.

    The file is written whole or not at all. Its header describes the network and names its classes. A backbone of your
    own cannot be described: the weights are saved, and `load` needs a network to put them into, as `model`.

    Parameters
    ----------
    model
        The network.
    folder
        Where to write; it is created if necessary, and a network in it is replaced.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ValueError
        If `folder` is a file or holds a training run, whose network belongs to its checkpoints.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(load("mnist-mmlda"), folder)
    ...     type(load(folder)).__name__
    'Classifier'
    """
    from mmlda._utils.training_data import remembered
    from mmlda.training import checkpoints

    if not callable(getattr(model, "state_dict", None)):
        raise invalid("model", "a network, such as a Classifier", model)
    if not isinstance(folder, str | Path) or Path(folder).is_file():
        raise invalid("folder", "a folder, to which model.safetensors is written", str(folder))
    if (Path(folder) / "run.json").exists():
        raise invalid("folder", "a folder without a training run", str(folder))
    try:
        config = model.config
    except (AttributeError, ValueError):
        config = None  # a custom backbone
    header = {"model": json.dumps(config), "data": json.dumps(remembered(model))}
    return checkpoints.save_weights(Path(folder) / "model.safetensors", model.state_dict(), header)


@overload
def load(source: str | Path, *, device: torch.device | str | None = None) -> Classifier: ...


@overload
def load(source: str | Path, *, model: Network, device: torch.device | str | None = None) -> Network: ...


def load(source: str | Path, *, model: Any = None, device: torch.device | str | None = None) -> Any:
    """Load a trained network, in eval mode.

    Parameters
    ----------
    source
        The name of a network that ships, or a folder written by `mmlda.save`, a training run or `save_pretrained`.
    model
        A network that gets the weights: only for a backbone of your own, which its folder cannot describe.
    device
        Where to put the network; by default the CPU, or where `model` is.

    Returns
    -------
    Classifier
        Or `model`. Its `classes` are the class names of its training set, if the file has them.

    Raises
    ------
    ValueError
        If there is no such network, its files are damaged, the weights do not fit `model`, or `device` is not
        available.

    Examples
    --------
    >>> import torch
    >>> model = load("mnist-mmlda")
    >>> model(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    from mmlda._utils.device import available
    from mmlda._utils.tensors import read_tensors
    from mmlda._utils.training_data import recall
    from mmlda.models.saved import fill, restore
    from mmlda.training import checkpoints

    if not isinstance(source, str | Path):
        raise _no_network(source)
    if device is not None:
        device = available(device)
    folder, path = Path(source), Path(source) / "model.safetensors"
    if str(source) in names():
        path, card = FOLDER / f"{source}.safetensors", about(str(source))
    elif (folder / "run.json").is_file():
        return checkpoints.load(folder, model=model, device=device)
    elif not path.is_file():
        raise _no_network(str(source))
    weights, header = read_tensors(path)
    config, data = (card["model"], card) if str(source) in names() else _described(header, path)
    if model is None and config is None and (folder / "config.json").is_file():  # Hugging Face's layout
        data = read_json(folder / "config.json")
        config = {key: value for key, value in data.items() if key not in ("classes", "bounds")}
    if model is None and config is None:
        raise invalid("model", f"a network to put the weights into, as that in {path} has a custom backbone", None)
    network = restore(config, weights, path) if model is None else fill(model, weights, path)
    recall(network, data)
    return network.to(device).eval()


def _no_network(source: Any) -> ValueError:
    return invalid("source", f"a folder with a network, or one of {', '.join(names())}", source)


def _described(header: dict[str, str], path: str | Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The descriptions in a file's header: of the network, None if there is none, and of its training set."""
    try:
        data = parse_json(header.get("data", "{}"))
        if not isinstance(data, dict):
            raise invalid("data", "a dictionary", data)
        return parse_json(header.get("model", "null")), data
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def user_network(
    name: str, weights: str | Path | None = None, *, device: torch.device | str | None = None
) -> nn.Module:
    """Import a user's function that returns a network, and call it.

    Parameters
    ----------
    name
        `package.module:function`. The module may be in the current folder; the function is called without arguments.
    weights
        Safetensors file to load into the network, such as a run's (default: the function loads the weights).
    device
        Where to put the network.

    Returns
    -------
    nn.Module
        The network, in eval mode.

    Raises
    ------
    ValueError
        If there is no such function, it needs arguments or returns no network, the weights do not fit, or `device` is
        not available.
    """
    import importlib
    import inspect
    import sys

    from torch import nn

    from mmlda._utils.device import available

    if device is not None:
        device = available(device)
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
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        raise ValueError(f"model must be a function without arguments, got {name!r} ({error})") from None
    except ValueError:
        pass  # a builtin without a signature
    network = made()
    if not isinstance(network, nn.Module):
        what = type(network).__name__
        raise ValueError(f"model must be a function that returns a torch.nn.Module, got {name!r}, which returns {what}")
    if weights is not None:
        from mmlda._utils.tensors import read_tensors
        from mmlda._utils.training_data import recall
        from mmlda.models.saved import fill
        from mmlda.training import checkpoints

        folder = Path(weights).parent  # of a run, perhaps
        try:
            tensors, header = read_tensors(weights)
            run = (folder / "run.json").is_file()
            recall(network, checkpoints.read_about(folder) if run else _described(header, weights)[1])
        except (OSError, ValueError) as error:
            why = str(error).removeprefix(f"{weights}: ")
            raise ValueError(f"weights must be a safetensors file, got {str(weights)!r} ({why})") from None
        fill(network, tensors, weights)
    return network.to(device).eval()
