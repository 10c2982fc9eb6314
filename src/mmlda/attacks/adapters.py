"""Other libraries' attacks on any model, and foolbox's attacks as ours.

foolbox and pyautoattack are not needed to import this, only to call it.
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
    """model(x) whose backward pass reaches x and nothing else, whatever parameters the model holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Model) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_(True)
            ctx.z = model(ctx.x)
        return ctx.z.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        # the caller may come back for another gradient; the graph goes with ctx
        return torch.autograd.grad(ctx.z, ctx.x, g, retain_graph=True)[0], None


class _Frozen(nn.Module):
    """`model` at lo + (hi - lo) x, without a gradient in its parameters.

    The other libraries call backward(), which would leave gradients in the caller's parameters and spend a third
    of the time on them. The model is held out of sight of `to()` and `train()`, which would change the caller's.
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
    """`model` as foolbox's attacks want it: a `foolbox.PyTorchModel`.

    Any function of images to logits will do; the parameters behind it get no gradients. Put a module into eval mode
    first: foolbox takes it as it is.
    `device` is where the images are; None for where the module is, or the CPU.

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
    """`model` as AutoAttack wants it: a module on images in [0, 1], whatever the model's own `bounds` are.

    Give AutoAttack images (x - lo) / (hi - lo) and eps / (hi - lo).

    >>> to_autoattack(torch.nn.Linear(4, 3), bounds=(-1.0, 1.0))(torch.rand(2, 4)).shape
    torch.Size([2, 3])
    """
    return _Frozen(model, bounds)


@dataclass(frozen=True, kw_only=True)
class FoolboxAttack(Attack):
    """A foolbox attack that is called, guarded, batched and measured like ours.

    It may stand in the list of a `WorstCase`. foolbox draws from torch's and numpy's generators: they are seeded
    with `seed` and put back, so the result repeats, but a sample's depends on its batch. `steps` in the result is
    the attack's own setting, 0 where it has none: foolbox does not count. An image that comes back with NaN counts as
    the original.

    Parameters
    ----------
    peer
        The foolbox attack.
    eps
        Its perturbation size; None to minimise it.
    """

    norm: ClassVar = "peer"  # foolbox's business
    peer: Any
    eps: float | None = None

    @property
    def minimal(self) -> bool:  # type: ignore[override]
        return self.eps is None

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        import foolbox

        surface.count(x)  # the labels are checked against the first logits
        model = to_foolbox(surface.model, bounds=self.bounds, device=x.device)
        criteria = foolbox.criteria
        criterion = criteria.Misclassification(y) if target is None else criteria.TargetedMisclassification(target)
        with torch.enable_grad(), _seeded(self.seed, x.device):
            try:
                _, x_adv, _ = self.peer(model, x, criterion, epsilons=self.eps)
            except NotImplementedError:
                name = type(self.peer).__name__
                raise invalid("eps", f"a number, since {name} has a fixed size", self.eps) from None
        # Some of foolbox's attacks divide by a gradient of 0 (NewtonFool on a network that is sure of itself): there it
        # has found nothing, and the model is not to be asked about NaN.
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
    """A foolbox attack as one of ours: `from_foolbox(attack, eps)(model, x, y)` is an `AttackResult`.

    >>> import foolbox
    >>> attack = from_foolbox(foolbox.attacks.LinfPGD(steps=5), eps=0.125)
    >>> x, y = torch.full((2, 4), 0.5), torch.tensor([0, 1])
    >>> bool((attack(torch.nn.Linear(4, 3).eval(), x, y).linf <= 0.125).all())
    True
    """
    return FoolboxAttack(peer=peer, eps=eps, **settings)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's and numpy's generators seeded, and as they were afterwards."""
    state = np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed % 2**63)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
