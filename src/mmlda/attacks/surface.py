"""The caller's model as an attack sees it: guarded, checked, differentiable in its input.

`Attack` is what every attack inherits: it checks the arguments, puts the model into eval mode and back, cuts
the batch, and hands a `Surface` to the attack itself. A `Surface` gives logits and gradients, and never
touches the parameters' `.grad`, the caller's tensors or any generator.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmlda.attacks.losses import Loss, choose_target, score
from mmlda.attacks.memory import keep_memory
from mmlda.attacks.noise import Noise
from mmlda.attacks.replay import Step, replay
from mmlda.attacks.result import AttackResult, concatenate, nothing

__all__ = ["Attack", "Model", "Surface", "check_count", "check_number", "finite", "guarded", "may_be_infinite",
           "survivors", "tell"]  # fmt: skip

Model = Callable[[Tensor], Tensor]

# How near to 0 and to 1 the first answers must come to look like a sigmoid's. Small logits or cosines may all be
# between 0 and 1 too, but hardly end just there.
_END = 0.01


def may_be_infinite(g: Tensor) -> bool:
    """Whether `g` has to be searched for NaN and infinities. On CUDA always: to look costs more than to replace."""
    return g.is_cuda or not math.isfinite(g.sum().item())


def finite(g: Tensor) -> Tensor:
    """The gradient `g` without NaN, which becomes 0, and infinities, which become large numbers of their sign.

    A square root at a pixel of 0 has an infinite gradient, and 0 times that is NaN: neither may reach the images.
    """
    if not may_be_infinite(g):
        return g
    far = torch.finfo(g.dtype).max ** 0.4  # its square is a number still
    return torch.nan_to_num(g, nan=0.0, posinf=far, neginf=-far)


class Surface:
    """Logits and gradients of `model`, for one call of an attack.

    `y` and `target` are the labels of the whole call: they are checked once, against the first logits.
    """

    def __init__(self, model: Model, y: Tensor, target: Tensor | None = None) -> None:
        self.model = model
        self.classes: int | None = None  # L, known after the first logits
        self.precision: torch.dtype | None = None  # that the model answers in, known then too
        self._labels = {"y": y, "target": target}
        self._ones: Tensor | None = None  # what the backward pass begins with, kept from step to step
        self._total: Tensor | None = None  # the sum of all answers, on the device: NaN once one of them was
        self._graphs: dict[object, Step] = {}
        # One stream to capture on, one memory to work in: the graphs run one after the other.
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._capturable = True

    def logits(self, x: Tensor) -> Tensor:
        """Z(x) in at least float32: [N, L]."""
        z = self._answer(x)
        self._note(z)
        return z

    def replayed_logits(self, x: Tensor) -> Tensor:
        """`logits` without autograd and, on CUDA, as a graph: a buffer that the next call overwrites."""
        return self.step("logits", lambda v: (self.logits(v),), x)[0]

    def count(self, x: Tensor) -> int:
        """L, the number of classes; asks the model about one image if it has not answered yet."""
        if self.classes is None:
            self.logits(x[:1])
        assert self.classes is not None
        return self.classes

    def gradient(
        self, loss: Loss, x: Tensor, y: Tensor, target: Tensor | None = None, *, clean: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The loss [N], the logits [N, L], the gradient of the loss in x [like x]; all detached.

        The logits are None for a loss that is a function, since it runs the model itself. With `clean` the gradient
        has no NaN and no infinities (`finite`).
        """
        value, z, g = self._differentiate(loss, x, y, target)
        value, z = value.detach(), None if z is None else z.detach()
        if z is not None:
            self._note(z)
        return value, z, finite(g) if clean else g

    def sign(self, loss: Loss, x: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
        """The sign of the gradient [like x], 0 where that is NaN: what a step in the largest norm needs.

        For a point on the way, of which nothing is said in the end: `check` is not told of its logits. Neither these
        nor the gradient are searched for NaN, which on the CPU is a good part of what a step costs beside its passes.
        A loop turns autograd on once for all its steps, which takes less time than to turn it on in each.
        """
        return self._differentiate(loss, x, y, target)[2].sign()  # of infinity 1, of NaN 0

    def _answer(self, x: Tensor) -> Tensor:
        z = self.model(x)
        if self.classes is None:
            self._inspect(z, len(x))
        return z if z.dtype in (torch.float32, torch.float64) else z.float()

    def _note(self, z: Tensor) -> None:
        """Have `check` know of these logits."""
        if self._total is None:
            self._total = z.new_zeros(())
        self._total += z.detach().sum()  # part of a captured step, so nothing is looked at here

    def _differentiate(
        self, loss: Loss, x: Tensor, y: Tensor, target: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """`gradient` as it comes, with NaN and infinities; loss and logits are part of a graph still."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._differentiate(loss, x, y, target)
        x = x.detach().requires_grad_(True)
        if callable(loss):
            z, _ = None, self.count(x)
            value = loss(self.model, x, y if target is None else target)  # [N]
            if not isinstance(value, Tensor) or value.shape != y.shape:
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise ValueError(f"loss returned {what}: expected one value a sample, [{len(y)}]")
        else:
            z = self._answer(x)  # [N, L]
            value = score(loss, z, y, target)  # [N]
        if not value.requires_grad:
            raise ValueError("model: its output does not depend on x in a way torch can differentiate")
        ones = self._ones
        if ones is None or ones.shape != value.shape or ones.dtype != value.dtype or callable(loss):
            ones = torch.ones_like(value)
            if not value.is_cuda and not callable(loss):  # what a graph or somebody else's code may hold is not kept
                self._ones = ones
        (g,) = torch.autograd.grad(value, x, ones)  # of the sum, which nobody wants to know
        # A model's own backward pass may have made the gradient part of a graph.
        return value, z, g.detach() if g.requires_grad else g

    def step(self, key: object, step: Step, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`step(*inputs)`; on CUDA as a graph, captured once a call for each `key` and shape.

        `step` must be the same function of its inputs whenever `key` is the same. The outputs may be
        overwritten by the next call with the same key.
        """
        if not inputs[0].is_cuda:
            return step(*inputs)
        try:
            hash(key)
        except TypeError:  # of a loss of the caller's: then by identity, for the graph keeps the loss alive
            key = tuple(id(part) for part in key)  # type: ignore[attr-defined]
        key = (key, *((t.shape, t.dtype) for t in inputs))
        if key not in self._graphs:
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(inputs[0].device), torch.cuda.graph_pool_handle()
                free, total = torch.cuda.mem_get_info(inputs[0].device)
                if free < total // 4:  # the memory of earlier calls' graphs is kept, and no other graph can use it
                    torch.cuda.empty_cache()
            self._graphs[key] = replay(step, inputs, self._stream, self._pool) if self._capturable else step
            # Once is enough to find out, and to say, that the model cannot be captured.
            self._capturable = self._graphs[key] is not step
        return self._graphs[key](*inputs)

    def check(self, x_adv: Tensor, size: int) -> None:
        """Refuse NaN at the attack's final points, `size` at a time: it is no label, and argmax makes one of it.

        One look at a value a call; the model is asked again only where some answer was NaN. A point on the way may
        have been: the attack has left it.
        """
        if self._total is None or (x_adv.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if bool(self._total.isnan()):
            lost = sum(int(self.logits(v).isnan().any(1).sum()) for v in x_adv.split(size))
            if lost:
                raise ValueError(f"model returned NaN logits for {lost} of {len(x_adv)} images after the attack")

    def close(self) -> None:
        """Wait for the device: a graph must not be freed while it runs."""
        if self._graphs:
            torch.cuda.synchronize()
            self._graphs.clear()

    @torch.no_grad()
    def _inspect(self, z: Tensor, n: int) -> None:
        """Check the model's first answer, where a wrong one can still be explained."""
        if not isinstance(z, Tensor) or z.ndim != 2 or len(z) != n or z.shape[1] < 2:
            what = f"shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise ValueError(f"model returned {what} for {n} images: expected logits [{n}, classes], 2 classes or more")
        self.classes, self.precision = z.shape[1], z.dtype
        L = z.shape[1]
        if z.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        for name, label in self._labels.items():
            if label is not None:
                low, high = torch.stack(torch.aminmax(label)).tolist()
                if low < 0 or high >= L:
                    raise ValueError(f"{name} has labels {low} to {high}: the model has classes 0 to {L - 1}")
        close, z = max(1e-3, torch.finfo(z.dtype).eps), z.float()  # in bfloat16 rows of probabilities hardly sum to 1
        least, most = torch.stack(torch.aminmax(z)).tolist()  # NaN if one of them is
        if math.isnan(least):
            lost = int(z.isnan().any(1).sum())
            raise ValueError(f"model returned NaN logits for {lost} of the first {n} images it was asked about")
        if least >= 0 and bool(((z.sum(1) - 1).abs() < close).all()):
            found = "the model seems to return probabilities", "softmax"
        elif 0 <= least < _END and 1 - _END < most <= 1:
            found = "outputs between 0 and 1, up to both ends, look like probabilities (sigmoid)", "the sigmoid"
        else:
            return
        tell(
            f"{found[0]}: attack the model's logits, since {found[1]} flattens the gradient and the result says more "
            "about float32 than about robustness"
        )


def tell(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn where the caller of the attack is: Python tells the same thing of the same line once."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("mmlda", "torch", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def guarded(model: Model) -> Iterator[None]:
    """The model in eval mode, autograd usable, and everything back as it was afterwards.

    A model left in train mode is a mistake more often than not (batch statistics make the samples of a batch
    depend on each other), so it is said; every submodule gets its own mode back.
    """
    owner = getattr(model, "__self__", model)  # of a method, as model.forward
    training = [m for m in owner.modules() if m.training] if isinstance(owner, nn.Module) else []
    if training:
        tell("the model is in train mode: it is attacked in eval mode and given back as it was")
    try:
        for m in training:
            m.training = False
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for m in training:
            m.training = True


def check_count(name: str, value: Any, least: float = 1) -> None:
    """Refuse what is no whole number, or too small a one."""
    try:
        enough = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        enough = False
    if not enough:
        wanted = "a whole number" if least == -math.inf else f"at least {least}, a whole number"
        raise ValueError(f"{name}={value!r}: expected {wanted}")


def check_number(name: str, value: Any, wanted: str, fits: Callable[[float], bool]) -> None:
    """Refuse what is no number, too large for float32, or not what is wanted."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not abs(value) <= torch.finfo(torch.float32).max or not fits(value):
        raise ValueError(f"{name}={value!r}: expected {wanted}")


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What every attack shares. A subclass adds its settings and says in `attack` what it does with a batch.

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
            raise ValueError(f"bounds={self.bounds!r}: expected (low, high) with low < high") from None
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
            if not x.is_cuda:
                keep_memory()
            surface = Surface(model, y, target)
            result, size = self.in_batches(surface, x, y, target, index)
            surface.check(result.x_adv, size)
            surface.close()
            return result

    def in_batches(
        self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor
    ) -> tuple[AttackResult, int]:
        """Attack a batch of at most so many images at a time, and say how many."""
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

    def attack(
        self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor
    ) -> AttackResult:
        """Attack one batch; called without autograd, with `x` inside the range and the model in eval mode."""
        raise NotImplementedError

    def noise(self, index: Tensor) -> Noise:
        return Noise(self.seed, index)

    def target_for(
        self, kind: str | None, surface: Surface, x: Tensor, y: Tensor, index: Tensor
    ) -> Tensor | None:
        """The target a setting asks for, from the clean logits; None for none."""
        return None if kind is None else choose_target(kind, surface.logits(x), y, self.noise(index))

    def _prepare(
        self, x: Tensor, y: Tensor, target: Tensor | int | None, index: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Check the arguments and bring them into one form; the caller's tensors are not written to."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
            what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x is {what}: expected a floating-point tensor [N, ...]")
        if not isinstance(y, Tensor):
            raise ValueError(f"y is a {type(y).__name__}: expected a tensor of integers [{len(x)}]")
        if isinstance(target, int) and not isinstance(target, bool):
            target = torch.full_like(y, target, dtype=torch.int64)
        if index is None:
            index = torch.arange(len(x), device=x.device)
        labels = {"y": y, "target": target, "index": index}
        for name, label in labels.items():
            if label is None:
                continue
            if not isinstance(label, Tensor):
                raise ValueError(f"{name} is {label!r}: expected a tensor of integers [{len(x)}]")
            if label.shape != (len(x),) or label.is_floating_point() or label.dtype == torch.bool:
                what = f"{label.dtype} {tuple(label.shape)}"
                raise ValueError(f"{name} is {what}: expected integers [{len(x)}]")
            if label.device != x.device:
                raise ValueError(f"{name} is on {label.device}: expected {x.device}, where x is")
            label = label.detach().to(torch.int64)
            labels[name] = label.clone() if label.is_inference() else label  # so that autograd may keep it
        lo, hi = self.bounds
        x = x.detach()
        if len(x) and x[0].numel() == 0:
            raise ValueError(f"x is {tuple(x.shape)}: expected images with pixels")
        if len(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            # A rounding error outside is the caller's arithmetic (normalise and back); more is a mistake.
            slack = (hi - lo) * max(1e-5, 4 * torch.finfo(x.dtype).eps)
            low, high = (float(v) for v in torch.stack(torch.aminmax(x)).double())
            if not (low >= lo - slack and high <= hi + slack):  # also false for NaN
                raise ValueError(f"x has values {low} to {high}: expected the range bounds={self.bounds}")
        x = x.clamp(lo, hi)
        given = labels["y"], labels["target"], labels["index"]
        return x, *given  # type: ignore[return-value]

    def _batch(self, surface: Surface, x: Tensor) -> int:
        """The batch size: as told, and such that activations and a dozen copies of the images fit."""
        size = len(x) if self.batch_size is None else min(self.batch_size, len(x))
        if self.memory_limit is not None:
            bytes_each = activation_bytes(surface, x[:1]) + 12 * x[0].numel() * x.element_size()
            size = max(1, min(size, self.memory_limit // bytes_each))
        return size


def activation_bytes(surface: Surface, x: Tensor) -> int:
    """What a forward pass keeps for the backward pass for one image, without what every batch shares."""

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
