"""A network seen in the ways an audit attacks it: differentiable, straight through its steps, averaged, as logits."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmlda.attacks.surface import Model
from mmlda.models.heads import MaxMahalanobisHead

__all__ = ["StraightThrough", "averaged", "copied", "derivable", "feature_loss", "logarithm", "straight",
           "undisturbed", "with_gradient"]  # fmt: skip


@contextmanager
def undisturbed(place: torch.device, seed: int) -> Iterator[None]:
    """Random networks start from the seed, and every generator is given back as it was."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), warnings.catch_warnings():
            for message in ("the model seems to return prob", "outputs between 0 and 1, up to both ends",
                            "the model cannot be captured", '"dlr"'):  # fmt: skip
                warnings.filterwarnings("ignore", message)  # said in the evidence, or of no interest here
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


def copied(model: Model, place: torch.device) -> Model:
    """A copy in eval mode on the device, without gradients of its own; a function as it is."""
    return copy.deepcopy(model).to(place).eval().requires_grad_(False) if isinstance(model, nn.Module) else model


def with_gradient(model: Model) -> Model:
    """The model with a zero gradient where it has none: an attack on it stands still, instead of failing."""

    def call(x: Tensor) -> Tensor:
        z = model(x)
        return z if z.requires_grad or not x.requires_grad else joined(z, x)

    return call


def joined(z: Tensor, x: Tensor) -> Tensor:
    """z, which depends on x with a gradient of 0."""
    return z + (0.0 * x).flatten(1).sum(1).view(-1, *[1] * (z.ndim - 1))


class Underived(TorchFunctionMode):
    """Inside, a function that torch has no derivative for has the gradient 0, instead of an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.grad_fn is not None and out.grad_fn.name().endswith("NotImplemented"):
            return out.data  # not detach, for which StraightThrough would put the identity
        return out


def derivable(model: Model, x: Tensor) -> Model:
    """The model; where torch cannot differentiate it at `x`, with a gradient of 0 in place of what is missing.

    It cannot where a function has no derivative (`x // c`), or where parameters have a gradient and the image has not.
    """

    def underived(v: Tensor) -> Tensor:
        with Underived():
            return model(v)

    def cut(v: Tensor) -> Tensor:
        with torch.no_grad():
            return model(v)

    for way in (model, underived):

        def unused(v: Tensor, way: Model = way) -> Tensor:
            return joined(way(v), v)

        try:
            with undisturbed(x.device, 0), torch.enable_grad():
                v = x.detach().clone().requires_grad_(True)
                (g,) = torch.autograd.grad(with_gradient(way)(v).sum(), v, allow_unused=True)
            return unused if g is None else way
        except RuntimeError as error:
            if not re.search(r"derivative for .* is not implemented", str(error)):
                raise
    return cut


class StraightThrough(TorchFunctionMode):
    """Inside, functions whose gradient is 0 almost everywhere or that cut the graph have the identity's (BPDA).

    A division that rounds has the division's. `without` is a function to leave as it is.
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
    def call(x: Tensor) -> Tensor:
        with StraightThrough(without):
            return model(x)

    return with_gradient(call)


def averaged(model: Model, passes: int) -> Model:
    def call(x: Tensor) -> Tensor:
        return torch.stack([model(x) for _ in range(passes)]).mean(0)

    return call


def logarithm(model: Model) -> Model:
    """Logits of a network that returns probabilities."""

    def call(x: Tensor) -> Tensor:
        p = model(x)
        return p.clamp_min(torch.finfo(p.dtype).tiny).log()

    return call


def feature_loss(net: Any, x: Tensor, y: Tensor) -> Callable[..., Tensor] | None:
    """-||z - mu_k||^2 to the nearest mean of another class, as a loss to climb; None where there are no features."""
    features = getattr(net, "features", None)
    if not callable(features):
        return None
    features = derivable(features, x[:2])
    with torch.no_grad():
        z = features(x).flatten(1)  # [N, p]
    head = getattr(net, "head", None)
    if isinstance(head, MaxMahalanobisHead):
        means = head.means
    else:  # classes without an image have their centroid at infinity
        means = torch.stack([z[y == k].mean(0) if (y == k).any() else torch.full_like(z[0], torch.inf)
                             for k in range(int(y.max()) + 1)])  # fmt: skip

    def loss(model: Model, v: Tensor, label: Tensor) -> Tensor:
        squared = (features(v).flatten(1)[:, None] - means).square().sum(2)  # [N, L]
        value = -squared.scatter(1, label[:, None], torch.inf).amin(1)
        return value if value.requires_grad else joined(value, v)

    return loss
