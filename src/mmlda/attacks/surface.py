"""The caller's model as an attack sees it: checked logits and their gradients in the input.

A `Surface` never touches the parameters' `.grad`, the caller's tensors or any generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmlda.attacks.checks import NoGradient, described, warn_caller
from mmlda.attacks.losses import Loss, score
from mmlda.attacks.progress import Bar
from mmlda.attacks.replay import Step, replay

__all__ = [
    "PASSES",
    "Model",
    "Surface",
    "check_logits",
    "finite",
    "first_answer",
    "input_gradient",
    "is_random",
    "may_be_infinite",
]

Model = Callable[[Tensor], Tensor]

# How near to 0 and to 1 the first answers must come to look like a sigmoid's. Small logits or cosines may all be
# between 0 and 1 too, but hardly end just there.
_END = 0.01

PASSES = 16  # of a random model, whose mean probabilities decide what it predicts
_PROBE = 16  # images that are asked about twice to see whether a model is random


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
        self.random = False  # whether two passes over the same images differ, known then too
        self.bar: Bar | None = None  # told of every step
        self.black_box = False  # whether attacks were left out because the model has no gradient
        self.notes: list[str] = []  # what the attack has to say about its result
        self._labels = {"y": y, "target": target}
        self._total: Tensor | None = None  # the sum of all answers, on the device: NaN once one of them was
        self._graphs: dict[object, Step] = {}
        # One stream to capture on, one memory to work in: the graphs run one after the other.
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._capturable = True

    def note(self, text: str) -> None:
        """Have the result, and one warning, say so."""
        if text not in self.notes:
            self.notes.append(text)

    def logits(self, x: Tensor) -> Tensor:
        """Z(x) in at least float32: [N, L]."""
        z = self._answer(x)
        self._note(z)
        return z

    def replayed_logits(self, x: Tensor) -> Tensor:
        """`logits` without autograd and, on CUDA, as a graph: a buffer that the next call overwrites."""
        return self.step("logits", lambda v: (self.logits(v),), x)[0]

    def classify(self, x: Tensor) -> Tensor:
        """The predicted class, int64 [N]; of a random model the one with the highest mean probability of 16 passes."""
        z = self.replayed_logits(x)
        if not self.random:
            return z.argmax(1)
        total = z.softmax(1)
        for _ in range(PASSES - 1):
            total += self.replayed_logits(x).softmax(1)
        return total.argmax(1)

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

    def sign(self, loss: Loss, x: Tensor, y: Tensor, target: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """The logits as in `gradient`, and the sign of the gradient [like x], 0 where that is NaN.

        All that a step in the largest norm needs, for an intermediate point: `check` does not see its logits. Neither
        these nor the gradient are searched for NaN, which on the CPU is a good part of what a step costs beside its
        passes. A loop turns autograd on once for all its steps, which takes less time than once per step.
        """
        _, z, g = self._differentiate(loss, x, y, target)
        return None if z is None else z.detach(), g.sign()  # of infinity 1, of NaN 0

    def _answer(self, x: Tensor) -> Tensor:
        if self.classes is None:
            z = first_answer(self.model, x)
            self._inspect(z, len(x))
            self.random = is_random(self.model, x)
        else:
            z = self.model(x)
            check_logits(z, len(x))
        return z if z.dtype in (torch.float32, torch.float64) else z.float()

    def watched(self, x: Tensor) -> Tensor:
        """Z(x) as part of autograd's graph, or `NoGradient`."""
        try:
            z = self._answer(x)
        except RuntimeError as error:
            if "Can't call numpy()" not in str(error):
                raise
            raise NoGradient("model must be differentiable in x, got one that computes with NumPy") from error
        if not z.requires_grad:
            raise NoGradient("model must be differentiable in x, got logits without a gradient")
        return z

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
                raise ValueError(f"loss must return one value per sample, [{len(y)}], got {described(value)}")
        else:
            z = self.watched(x)  # [N, L]
            value = score(loss, z, y, target)  # [N]
        if not value.requires_grad:
            raise NoGradient("model must be differentiable in x, got logits without a gradient")
        g = slope(value, x)
        # A model's own backward pass may have made the gradient part of a graph.
        return value, z, g.detach() if g.requires_grad else g

    def step(self, key: object, step: Step, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`step(*inputs)`; on CUDA as a graph, captured once a call for each `key` and shape.

        `step` must be the same function of its inputs whenever `key` is the same. The outputs may be
        overwritten by the next call with the same key.
        """
        if self.bar is not None:
            self.bar.tick()
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
        """Learn the classes from the model's first answer; refuse labels and values that do not go with it."""
        self.classes, self.precision = z.shape[1], z.dtype
        L = z.shape[1]
        if z.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        for name, label in self._labels.items():
            if label is not None:
                low, high = torch.stack(torch.aminmax(label)).tolist()
                if low < 0 or high >= L:
                    raise ValueError(f"{name} must be classes 0 to {L - 1} of the model, got labels {low} to {high}")
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
        warn_caller(
            f"{found[0]}: attack the model's logits, since {found[1]} flattens the gradient and the result says more "
            "about float32 than about robustness"
        )


def input_gradient(model: Model, loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient in `x` of the summed `loss` of the model's logits (in float32 at least): like x.

    For loops of your own, such as `ascend` in a training step: it looks at no value, so it never waits for the device
    and can be captured. Use it inside `frozen(model)`, which keeps parameters out of the backward pass.

    >>> model = torch.nn.Linear(2, 2, bias=False)
    >>> torch.equal(input_gradient(model, lambda z: z[:, 0], torch.zeros(1, 2))[0], model.weight[0])
    True
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        z = model(x)
        value = loss(z if z.dtype == torch.float64 else z.float())  # [N]
        return torch.autograd.grad(value.sum(), x)[0]


def slope(value: Tensor, x: Tensor, *, retain_graph: bool = False) -> Tensor:
    """The gradient of the sum of `value` in x, or `NoGradient` where it depends on the model's parameters alone."""
    ones = torch.ones_like(value)
    (g,) = torch.autograd.grad(value, x, ones, retain_graph=retain_graph, allow_unused=True)
    if g is None:
        raise NoGradient("model must be differentiable in x, got logits without a gradient in x")
    return g


class NotLogits(ValueError):
    """What a model has returned cannot be logits."""


def first_answer(model: Model, x: Tensor, name: str = "model") -> Tensor:
    """The logits of a model that has not been asked before: a ValueError where it takes or returns something else."""
    try:
        z = model(x)
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError | NotLogits) or "Can't call numpy()" in str(error):
            raise
        why = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{name} must take inputs {list(x.shape)}, got {type(error).__name__}: {why}") from error
    check_logits(z, len(x), name)
    return z


def check_logits(z: object, n: int, name: str = "model") -> None:
    """Raise `NotLogits` unless `z` can be the logits of `n` samples."""
    dense = isinstance(z, Tensor) and z.layout == torch.strided and z.is_floating_point()
    if not dense or z.ndim != 2 or len(z) != n or z.shape[1] < 2:  # type: ignore[attr-defined, arg-type]
        expected = f"[{n}, classes], a floating-point tensor with 2 classes or more"
        raise NotLogits(f"{name} must return logits {expected}, got {described(z)}")


@torch.no_grad()
def is_random(model: Model, x: Tensor) -> bool:
    """Whether two passes over a few of the samples differ by more than rounding."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    few = x.detach()[:_PROBE]  # fewer would make a compiler specialise on small batches
    one, two = first_answer(model, few).clone(), first_answer(model, few)  # a graph may answer in the same buffer twice
    scale = torch.where(one.isfinite(), one.abs(), 0).amax().item()
    close = scale * max(1e-4, 16 * torch.finfo(one.dtype).eps)
    return not torch.allclose(one, two, rtol=0.0, atol=close, equal_nan=True)
