"""What every attack shares: input checks, the eval-mode guard, batches, and the settings common to all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmlda.attacks.checks import check_count, check_number, invalid, warn_caller
from mmlda.attacks.noise import Noise
from mmlda.attacks.result import AttackResult, concatenate, nothing
from mmlda.attacks.surface import Model, Surface

__all__ = ["Attack", "activation_bytes", "frozen", "guarded", "survivors"]


@contextmanager
def _eval_mode(training: list[nn.Module]) -> Iterator[None]:
    """Put these modules, which are in train mode, into eval mode, and back afterwards."""
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode and without parameter gradients, restored afterwards: for attacks inside a training step.

    Reads and writes only flags, so it can surround code that is being compiled or captured.

    >>> model = torch.nn.Linear(4, 3)
    >>> with frozen(model):
    ...     print(model.training, model.weight.requires_grad)
    False False
    >>> model.training, model.weight.requires_grad
    (True, True)
    """
    learned = [p for p in model.parameters() if p.requires_grad]
    with _eval_mode([module for module in model.modules() if module.training]):
        try:
            for p in learned:
                p.requires_grad_(False)
            yield
        finally:
            for p in learned:
                p.requires_grad_(True)


@contextmanager
def guarded(model: Model) -> Iterator[None]:
    """`model` in eval mode and autograd usable, restored afterwards; the parameters are left alone.

    A model in train mode is usually a mistake (batch statistics make the samples of a batch depend on each other), so
    this warns.
    """
    owner = getattr(model, "__self__", model)  # of a method, as model.forward
    training = [module for module in owner.modules() if module.training] if isinstance(owner, nn.Module) else []
    if training:
        warn_caller("the model is in train mode: it is attacked in eval mode and given back as it was")
    with _eval_mode(training), torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What every attack shares. A subclass adds its settings and implements `attack` for one batch.

    Args:
        bounds: the image range; `x` may be outside by a rounding error.
        seed: of the attack's random choices, which are keyed by (seed, index of the sample).
        batch_size: most images at a time; None for all at once.
        memory_limit: bytes; the batch size is chosen so that the attack's activations stay below.
    """

    bounds: tuple[float, float] = (0.0, 1.0)
    seed: int = 0
    batch_size: int | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        try:
            lo, hi = self.bounds
            for end in (lo, hi):
                check_number("bounds", end, "a number", lambda v: True)
            check_number("bounds", hi - lo, "a range", lambda v: v > 0)
        except (TypeError, ValueError):
            raise invalid("bounds", "(low, high) with low < high", self.bounds) from None
        object.__setattr__(self, "bounds", (lo, hi))  # of a list too: an attack can be compared and hashed
        for name in ("batch_size", "memory_limit"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("seed", self.seed, -math.inf)

    def __call__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        *,
        target: Tensor | int | None = None,
        index: Tensor | None = None,
    ) -> AttackResult:
        """Attack `model` at the images `x` [N, ...] with labels `y` [N].

        Args:
            model: x -> logits [N, L].
            target: a class, or a class for each sample [N]; overrides the attack's own choice. A sample of that very
                class has reached it from the start, and counts as a success.
            index: int64 [N], the samples' identities for random choices; 0 .. N - 1 by default.
        """
        with guarded(model):
            x, y, target, index = self._prepare(x, y, target, index)
            if len(x) == 0:
                return nothing(x)
            surface = Surface(model, y, target)
            result, size = self.in_batches(surface, x, y, target, index)
            surface.check(result.x_adv, size)
            if result.clean_prediction is None:  # the attack has not looked at the images themselves
                clean = torch.cat([surface.logits(part).argmax(1) for part in x.split(size)])
                result = replace(result, clean_prediction=clean)
            surface.close()
            return result

    def in_batches(
        self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor
    ) -> tuple[AttackResult, int]:
        """Attack at most `batch_size` images at a time (fewer under a memory limit); the result and that number."""
        size = self._batch(surface, x)
        columns = [x, y, index] if target is None else [x, y, index, target]
        parts = []
        for i in range(0, len(x), size):
            batch = [t[i : i + size] for t in columns]
            n = len(batch[0])
            if x.is_cuda and n < size:  # filled up to the others' shape, so that their graphs serve
                batch = [torch.cat([part, t[: size - n]]) for part, t in zip(batch, columns)]
            xs, ys, who, *to = batch
            parts.append(self.attack(surface, xs, ys, to[0] if to else None, who).take(slice(n)))
        return concatenate(parts), size

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        """Attack one batch; called without autograd, with `x` inside the range and the model in eval mode."""
        raise NotImplementedError

    def noise(self, index: Tensor) -> Noise:
        return Noise(self.seed, index)

    def _prepare(
        self, x: Tensor, y: Tensor, target: Tensor | int | None, index: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Check the arguments and bring them into one form; the caller's tensors are not written to."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
            raise invalid("x", "a floating-point tensor [N, ...]", x)
        if len(x) and x[0].numel() == 0:
            raise invalid("x", "images with pixels", x)
        y = check_labels("y", y, x)
        if isinstance(target, int) and not isinstance(target, bool):
            target = torch.full_like(y, target)
        elif target is not None:
            target = check_labels("target", target, x)
        index = torch.arange(len(x), device=x.device) if index is None else check_labels("index", index, x)
        lo, hi = self.bounds
        x = x.detach()
        if len(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            # A rounding error outside is the caller's arithmetic (normalise and back); more is a mistake.
            slack = (hi - lo) * max(1e-5, 4 * torch.finfo(x.dtype).eps)
            low, high = (float(v) for v in torch.stack(torch.aminmax(x)).double())
            if not (low >= lo - slack and high <= hi + slack):  # also false for NaN
                raise ValueError(f"x must be in the range bounds={self.bounds}, got values {low} to {high}")
        return x.clamp(lo, hi), y, target, index

    def _batch(self, surface: Surface, x: Tensor) -> int:
        """The batch size: as told, and such that activations and a dozen copies of the images fit."""
        size = len(x) if self.batch_size is None else min(self.batch_size, len(x))
        if self.memory_limit is not None:
            bytes_each = activation_bytes(surface, x[:1]) + 12 * x[0].numel() * x.element_size()
            size = max(1, min(size, self.memory_limit // bytes_each))
        return size


def check_labels(name: str, labels: object, x: Tensor) -> Tensor:
    """A copy of integer labels [N] on the device of `x` as int64; raise for anything else."""
    expected = f"an integer tensor [{len(x)}]"
    if not isinstance(labels, Tensor) or labels.shape != (len(x),):
        raise invalid(name, expected, labels)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise invalid(name, expected, labels)
    if labels.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, where x is, got a tensor on {labels.device}")
    return labels.detach().to(torch.int64, copy=True)


def activation_bytes(surface: Surface, x: Tensor) -> int:
    """What a forward pass keeps for the backward pass per image, without what every batch shares."""

    def saved(images: Tensor) -> int:
        kept: dict[tuple[int, torch.Size], int] = {}

        def pack(t: Tensor) -> Tensor:
            kept[t.data_ptr(), t.shape] = t.numel() * t.element_size()
            return t

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            surface.logits(images.detach().requires_grad_(True)).sum()
        return sum(kept.values())

    return max(1, saved(torch.cat([x, x])) - saved(x))


def survivors(alive: Tensor) -> Tensor:
    """Who goes on after a compaction point, given who is alive (bool [N]): int64 indices, ascending.

    Exactly the living on the CPU. On CUDA the number is N, N/2, N/4, ..., so that few graphs are captured:
    the places left over go to samples that are done, whose results must not be used again. Waits for the
    device.
    """
    n = int(alive.sum())
    if alive.is_cuda and n:
        size = len(alive)
        while size // 2 >= n:
            size //= 2
        n = size
    return alive.to(torch.int8).argsort(descending=True, stable=True)[:n].sort().values
