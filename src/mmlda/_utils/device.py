"""Where a model is, and how to use it without changing it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

Model = Callable[[Tensor], Tensor]  # images in [0, 1] -> logits: a module, or any function


def device_of(model: Model, device: torch.device | str | None = None) -> torch.device:
    """`device` if given, else that of the model's first parameter or buffer, else the CPU.

    "cuda" becomes the current CUDA device with its number, so that devices can be compared.

    >>> device_of(nn.Linear(2, 2, device="meta")), device_of(torch.sum), device_of(nn.ReLU(), "cpu")
    (device(type='meta'), device(type='cpu'), device(type='cpu'))
    """
    check_model(model)
    if device is not None:
        return available(device)
    tensor = next(_tensors(model), None)
    return torch.device("cpu") if tensor is None else tensor.device


def available(device: torch.device | str) -> torch.device:
    """`device`, with its number for "cuda"; a ValueError if it is not available."""
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device must be available, got {device!r} ({str(error).splitlines()[0]})") from None
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place


def check_model(model: object, name: str = "model") -> None:
    """Raise a ValueError unless a model can be called; `name` is the argument's."""
    if callable(model) and not isinstance(model, type):
        return
    hint = f"; mmlda.load({str(model)!r}) loads a network" if isinstance(model, str | Path) else ""
    raise ValueError(f"{name} must be a module or a function from images to logits, got {model!r}{hint}")


def on_device(model: Model, device: torch.device | str | None) -> Model:
    """The model itself if it is on `device` already (or `device` is None), else a copy there.

    A plain function is returned unchanged: only its author knows where it computes.
    """
    if device is None or not isinstance(model, nn.Module):
        return model
    place = device_of(model, device)
    return model if all(t.device == place for t in _tensors(model)) else copy.deepcopy(model).to(place)


@contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Put a module, or that of a method such as `model.forward`, into eval mode, and each submodule back afterwards."""
    owner = getattr(model, "__self__", model)
    training = [module for module in owner.modules() if module.training] if isinstance(owner, nn.Module) else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _tensors(model: Model) -> Iterator[Tensor]:
    owner = getattr(model, "__self__", model)  # of a method, as model.forward
    return itertools.chain(owner.parameters(), owner.buffers()) if isinstance(owner, nn.Module) else iter(())
