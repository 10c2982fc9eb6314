"""Wrappers around a network that an audit attacks: differentiable, straight-through, averaged, as logits."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmlda.attacks.surface import Model, Surface, check_logits
from mmlda.models.heads import MaxMahalanobisHead

# Warnings of the attacks that the checks report, or that do not matter in an audit.
SILENCED = 'the model seems to return prob|outputs between 0 and 1, up to both ends|the model cannot be captured|"dlr"'


@dataclass(frozen=True)
class View:
    """One way to look at the network: a model, and whether it takes images in float64."""

    model: Model
    float64: bool = False

    def images(self, x: Tensor) -> Tensor:
        return x.double() if self.float64 else x

    def gradient(self, loss: str, x: Tensor, y: Tensor) -> Tensor:
        """The gradient of the loss in the pixels: [N, pixels]."""
        return Surface(self.model, y).gradient(loss, self.images(x), y)[2].flatten(1)


@contextmanager
def seeded(place: torch.device, seed: int) -> Iterator[None]:
    """Seed every random generator inside, and restore their states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), warnings.catch_warnings():
            warnings.filterwarnings("ignore", SILENCED)
            torch.default_generator.manual_seed(seed)
            if place.type == "cuda":
                with torch.cuda.device(place):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def copied(model: Model, place: torch.device, name: str = "model") -> Model:
    """A copy on the device, in eval mode and with frozen parameters, or the function; every answer is checked."""
    if not isinstance(model, nn.Module):
        return Checked(model, name)
    if isinstance(model, torch.jit.ScriptModule):  # it cannot be frozen, and its copy has no float64
        raise ValueError(f"{name} must not be TorchScript, got a {type(model).__name__}; pass lambda x: {name}(x)")
    net = copy.deepcopy(model).to(place).eval().requires_grad_(False)
    net.register_forward_hook(lambda _, inputs, z: check_logits(z, len(inputs[0]), name))
    return net


class Checked:
    """A function that raises a ValueError whenever it does not return logits; otherwise it is the function."""

    def __init__(self, model: Model, name: str) -> None:
        self._model, self._name = model, name

    def __call__(self, x: Tensor) -> Tensor:
        z = self._model(x)
        check_logits(z, len(x), self._name)
        return z

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._model, attribute)


def with_gradient(model: Model) -> Model:
    """The model with a gradient of 0 where autograd has none, so that an attack stands still instead of failing."""

    def call(x: Tensor) -> Tensor:
        z = model(x)
        return z if z.requires_grad or not x.requires_grad else joined(z, x)

    return call


def joined(z: Tensor, x: Tensor) -> Tensor:
    """z, attached to x with a gradient of 0."""
    return z + (0.0 * x).flatten(1).sum(1).view(-1, *[1] * (z.ndim - 1))


class Underived(TorchFunctionMode):
    """Inside, a function without a derivative in torch has the gradient 0 instead of raising an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.grad_fn is not None and out.grad_fn.name().endswith("NotImplemented"):
            return out.data  # not detach(), which StraightThrough replaces by the identity
        return out


def derivable(model: Model, x: Tensor) -> Model:
    """The model, with a gradient of 0 where torch cannot differentiate it at `x`.

    That is where a function has no derivative (`x // c`), or where only the parameters have a gradient.
    """

    def underived(v: Tensor) -> Tensor:
        with Underived():
            return model(v)

    def cut(v: Tensor) -> Tensor:
        with torch.no_grad():
            return model(v)

    for way in (model, underived):
        try:
            with seeded(x.device, 0), torch.enable_grad():
                v = x.detach().clone().requires_grad_(True)
                (g,) = torch.autograd.grad(with_gradient(way)(v).sum(), v, allow_unused=True)
            return way if g is not None else lambda v, way=way: joined(way(v), v)
        except RuntimeError as error:
            if not re.search(r"derivative for .* is not implemented", str(error)):
                raise
    return cut


class StraightThrough(TorchFunctionMode):
    """Inside, functions that round or cut the graph have the gradient of the identity (BPDA).

    A division that rounds has the gradient of the division. `without` names a function to leave unchanged.
    """

    steps = ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "detach")
    casts = ("to", "type", "byte", "char", "short", "int", "long")
    divisions = ("//", "floor_divide", "div", "divide")  # the latter two with a rounding_mode

    def __init__(self, without: str = "") -> None:
        super().__init__()
        self.without = without
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        word, kwargs = getattr(func, "__name__", ""), kwargs or {}
        word = "//" if word == "__floordiv__" else word
        base = word.rstrip("_")  # round_ works in place
        x = args[0] if args else None
        exact = base in self.divisions[2:] and kwargs.get("rounding_mode") is None
        known = base in self.steps + self.casts + self.divisions and not exact
        if not (isinstance(x, Tensor) and x.requires_grad and known) or word == self.without:
            return func(*args, **kwargs)
        if word != base:
            func(x.data, *args[1:], **kwargs)
            self.found.add(word)
            return x
        out = func(*args, **kwargs)
        if word in self.casts and out.is_floating_point():
            return out
        self.found.add(word)
        smooth = x / args[1] if word in self.divisions and len(args) > 1 else x
        return smooth + (out.data.to(smooth.dtype) - smooth).detach()


def straight(model: Model, without: str = "") -> Model:
    """The model with straight-through gradients."""

    def call(x: Tensor) -> Tensor:
        with StraightThrough(without):
            return model(x)

    return with_gradient(call)


def averaged(model: Model, passes: int) -> Model:
    """The mean of several passes of a random model (EOT)."""

    return lambda x: torch.stack([model(x) for _ in range(passes)]).mean(0)


def logarithm(model: Model) -> Model:
    """The logits of a network that returns probabilities: their logarithms."""

    def call(x: Tensor) -> Tensor:
        p = model(x)
        return p.clamp_min(torch.finfo(p.dtype).tiny).log()

    return call


def feature_loss(net: Any, x: Tensor, y: Tensor) -> Callable[..., Tensor] | None:
    """-||z - mu_k||^2 to the nearest mean of another class, as a loss to climb; None without `net.features`."""
    features = getattr(net, "features", None)
    if not callable(features):
        return None
    features = derivable(features, x[:2])
    with torch.no_grad():
        z = features(x).flatten(1)  # [N, p]
    head = getattr(net, "head", None)
    own = isinstance(head, MaxMahalanobisHead) and not head.structured
    means = head.means if own else _centroids(z, y)  # type: ignore[union-attr]

    def loss(model: Model, v: Tensor, label: Tensor) -> Tensor:
        squared = (features(v).flatten(1)[:, None] - means).square().sum(2)  # [N, L]
        value = -squared.scatter(1, label[:, None], torch.inf).amin(1)
        return value if value.requires_grad else joined(value, v)

    return loss


def _centroids(z: Tensor, y: Tensor) -> Tensor:
    """The mean of each class [L, p]; a class without an image has its centroid at infinity."""
    nowhere = torch.full_like(z[0], torch.inf)
    return torch.stack([z[y == k].mean(0) if (y == k).any() else nowhere for k in range(int(y.max()) + 1)])
