"""Adapters: a model for the attacks of foolbox and AutoAttack, and a foolbox attack as an `Attack`.

Importing this module needs neither library; calling a function needs the library it adapts to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmlda.attacks.base import Attack
from mmlda.attacks.checks import invalid
from mmlda.attacks.gradient import tall
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.surface import Model, Surface

__all__ = ["FoolboxAttack", "from_foolbox", "to_autoattack", "to_foolbox"]

Bounds = tuple[float, float]


class _InputGradient(torch.autograd.Function):
    """model(x), with a backward pass that computes the gradient of x but not those of the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Model) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_(True)
            ctx.z = model(ctx.x)
        return ctx.z.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        # the caller may ask for another gradient; the graph is freed with ctx
        return torch.autograd.grad(ctx.z, ctx.x, g, retain_graph=True)[0], None


class _Frozen(nn.Module):
    """`model` at lo + (hi - lo) x, without gradients of its parameters.

    The other libraries call backward(), which would leave gradients in the caller's parameters and spend a third
    of the time on them. The model is not registered as a submodule, because `to()` and `train()` would change it.
    """

    def __init__(self, model: Model, bounds: Bounds = (0.0, 1.0)) -> None:
        super().__init__()
        self._held = (model, *bounds)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        model, lo, hi = self._held
        if (lo, hi) != (0.0, 1.0):
            x = lo + (hi - lo) * x
        if torch.is_grad_enabled() and x.requires_grad:
            return _InputGradient.apply(x, model)
        with torch.no_grad():
            return model(x)


def to_foolbox(model: Model, *, bounds: Bounds = (0.0, 1.0), device: torch.device | str | None = None) -> Any:
    """Wrap a model for foolbox's attacks.

    The model's parameters get no gradients.

    Parameters
    ----------
    model
        A module, or any function from images to logits. Put a module into eval mode first; foolbox does not.
    bounds
        Range of the images, (low, high).
    device
        Device of the images (default: that of the module, or the CPU for a function).

    Returns
    -------
    foolbox.PyTorchModel
        The wrapped model.

    Examples
    --------
    >>> import foolbox
    >>> attack = foolbox.attacks.LinfPGD(steps=5)
    >>> x, y = torch.rand(3, 4), torch.tensor([0, 1, 2])
    >>> _, x_adv, success = attack(to_foolbox(torch.nn.Linear(4, 3)), x, y, epsilons=0.1)
    """
    import foolbox

    if device is None:
        some = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        device = torch.device("cpu") if some is None else some.device
    return foolbox.PyTorchModel(_Frozen(model), bounds=bounds, device=device)


def to_autoattack(model: Model, *, bounds: Bounds = (0.0, 1.0)) -> nn.Module:
    """Wrap a model for AutoAttack, which expects images in [0, 1].

    If the model has other `bounds` (low, high), pass (x - low) / (high - low) and eps / (high - low) to AutoAttack.

    Parameters
    ----------
    model
        A module, or any function from images to logits.
    bounds
        Range of the model's own images, (low, high).

    Returns
    -------
    nn.Module
        The model as a module on images in [0, 1].

    Examples
    --------
    >>> to_autoattack(torch.nn.Linear(4, 3), bounds=(-1.0, 1.0))(torch.rand(2, 4)).shape
    torch.Size([2, 3])
    """
    return _Frozen(model, bounds)


@dataclass(frozen=True, kw_only=True)
class FoolboxAttack(Attack):
    """A foolbox attack with the interface of `Attack`: the same checks, batches and `AttackResult`.

    It can be part of a `WorstCase`. foolbox draws from torch's and NumPy's generators, which are seeded with `seed`
    and restored afterwards: results are reproducible, but the result of a sample depends on its batch. `steps` in
    the result is the attack's setting (0 if it has none), since foolbox does not count steps. Where foolbox returns
    NaN, the original image is kept.

    Parameters
    ----------
    peer
        The foolbox attack.
    eps
        Perturbation size (default: None, the attack minimises it).
    """

    norm: ClassVar = "peer"  # known to the foolbox attack only
    peer: Any
    eps: float | None = None

    @property
    def minimal(self) -> bool:  # type: ignore[override]
        return self.eps is None

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        import foolbox

        surface.count(x)  # checks the labels against the first logits
        model = to_foolbox(surface.model, bounds=self.bounds, device=x.device)
        criteria = foolbox.criteria
        criterion = criteria.Misclassification(y) if target is None else criteria.TargetedMisclassification(target)
        with torch.enable_grad(), _seeded(self.seed, x.device):
            try:
                _, x_adv, _ = self.peer(model, x, criterion, epsilons=self.eps)
            except NotImplementedError:
                name = type(self.peer).__name__
                raise invalid("eps", f"a number, since {name} has a fixed size", self.eps) from None
        # Some of foolbox's attacks divide by a gradient of 0 (NewtonFool on a very confident network). They have found
        # nothing there, and NaN must not be passed to the model.
        found = ~x_adv.detach().isnan().flatten(1).any(1)  # [N]
        x_adv = torch.where(tall(found, x), x_adv.detach().clamp(*self.bounds), x)
        prediction = surface.logits(x_adv).argmax(1)
        steps = torch.full_like(y, int(getattr(self.peer, "steps", 0)))
        if self.eps is not None:
            return measure(x, x_adv, y, target, self.bounds, prediction, steps)
        success = prediction != y if target is None else prediction == target
        clean = surface.logits(x).argmax(1)
        return measure(x, x_adv, y, target, self.bounds, prediction, steps, clean=clean, found=success)


def from_foolbox(peer: Any, eps: float | None = None, **settings: Any) -> FoolboxAttack:
    """Adapt a foolbox attack: `from_foolbox(attack, eps)(model, x, y)` returns an `AttackResult`.

    Parameters
    ----------
    peer
        The foolbox attack.
    eps
        Perturbation size (default: None, the attack minimises it).
    settings
        Settings common to all attacks, such as `seed` and `batch_size`; see `Attack`.

    Returns
    -------
    FoolboxAttack
        The adapted attack.

    Examples
    --------
    >>> import foolbox
    >>> attack = from_foolbox(foolbox.attacks.LinfPGD(steps=5), eps=0.125)
    >>> x, y = torch.full((2, 4), 0.5), torch.tensor([0, 1])
    >>> bool((attack(torch.nn.Linear(4, 3).eval(), x, y).linf <= 0.125).all())
    True
    """
    return FoolboxAttack(peer=peer, eps=eps, **settings)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's and NumPy's generators, and restore their states afterwards."""
    state = np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed % 2**63)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
