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

Model = Callable[[Tensor], Tensor]

# How close to 0 and to 1 the first outputs must come to look like a sigmoid's. Small logits or cosines may also lie
# between 0 and 1, but hardly reach both ends.
_END = 0.01
_SMALL = 100 * torch.finfo(torch.float32).tiny  # products of smaller numbers vanish

ROOM = 64  # samples per pass from which, on two cores, a Resnet-32 takes hardly less time per sample
PASSES = 16  # over a random model, whose mean probabilities decide what it predicts
_PROBE = 16  # images classified twice to find out whether a model is random
_FINITE = "model must return finite logits"


def may_be_infinite(g: Tensor) -> bool:
    """Whether `g` must be searched for NaN and infinities. Always on CUDA, where checking costs more than replacing."""
    return g.is_cuda or not math.isfinite(g.sum().item())


def finite(g: Tensor) -> Tensor:
    """The gradient `g` without NaN, which becomes 0, and infinities, which become large numbers of their sign.

    A square root at a pixel of 0 has an infinite gradient, and 0 times that is NaN: neither may reach the images.
    """
    if not may_be_infinite(g):
        return g
    far = torch.finfo(g.dtype).max ** 0.4  # its square is still finite
    return torch.nan_to_num(g, nan=0.0, posinf=far, neginf=-far)


class Surface:
    """Logits and gradients of a model, for one call of an attack.

    Parameters
    ----------
    model
        A module, or any function from images to logits.
    y, target
        Labels and targets of the whole call, which are checked once, against the first logits.
    """

    def __init__(self, model: Model, y: Tensor, target: Tensor | None = None) -> None:
        self.model = model
        self.classes: int | None = None  # L, known after the first logits
        self.precision: torch.dtype | None = None  # dtype of the logits, known then too
        self.random = False  # whether two passes over the same images differ, known then too
        self.bar: Bar | None = None  # counts the steps
        self.room = ROOM  # samples per pass up to which runs are joined
        self.black_box = False  # whether attacks were skipped because the model has no gradient
        self.notes: list[str] = []  # caveats about the result
        self._labels = {"y": y, "target": target}
        self._total: Tensor | None = None  # the sum of all logits, on the device: NaN if one of them was
        self._graphs: dict[object, Step] = {}
        # One stream to capture on, one memory to work in: the graphs run one after the other.
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._capturable = True

    def note(self, text: str) -> None:
        """Add a note to the result, which is also issued as a warning.

        Parameters
        ----------
        text
            The note; a repeated one is ignored.
        """
        if text not in self.notes:
            self.notes.append(text)

    def logits(self, x: Tensor) -> Tensor:
        """Compute logits.

        Parameters
        ----------
        x
            Samples [N, ...].

        Returns
        -------
        Tensor
            Logits [N, L], float32 at least.
        """
        z = self._answer(x)
        self._note(z)
        return z

    def replayed_logits(self, x: Tensor) -> Tensor:
        """`logits` without autograd and, on CUDA, as a graph: a buffer that the next call overwrites."""
        return self.step("logits", lambda v: (self.logits(v),), x)[0]

    def classify(self, x: Tensor) -> Tensor:
        """Predict classes; those of a random model have the highest mean probability over 16 passes.

        Parameters
        ----------
        x
            Samples [N, ...].

        Returns
        -------
        Tensor
            Classes, int64 [N].
        """
        z = self.replayed_logits(x)
        if not self.random:
            return z.argmax(1)
        total = z.softmax(1)
        for _ in range(PASSES - 1):
            total += self.replayed_logits(x).softmax(1)
        return total.argmax(1)

    def runs_at_once(self, who: Tensor) -> int:
        """How many runs on the samples `who` to join in one pass: 1 on CUDA, where each shape is another graph."""
        return 1 if who.is_cuda else max(1, self.room // len(who))

    def count(self, x: Tensor) -> int:
        """Number of classes L; runs the model on one sample if it has not run yet."""
        if self.classes is None:
            self.logits(x[:1])
        assert self.classes is not None
        return self.classes

    def gradient(
        self, loss: Loss, x: Tensor, y: Tensor, target: Tensor | None = None, *, clean: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute a loss and its gradient with respect to x.

        Parameters
        ----------
        loss
            Name of a loss, or a function (model, x, y) -> [N].
        x
            Samples [N, ...].
        y
            Labels, int64 [N].
        target
            Target classes, int64 [N], or None.
        clean
            Whether to replace NaN by 0 and infinities by large numbers in the gradient.

        Returns
        -------
        tuple of Tensor
            The loss [N], the logits [N, L] and the gradient like x, all detached. The logits are None for a loss
            that is a function, since it runs the model itself.
        """
        value, z, g = self._differentiate(loss, x, y, target)
        value, z = value.detach(), None if z is None else z.detach()
        if z is not None:
            self._note(z)
        return value, z, finite(g) if clean else g

    def sign(self, loss: Loss, x: Tensor, y: Tensor, target: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Logits as in `gradient`, and the sign of the loss's gradient like x, 0 for NaN.

        This is all that an L-infinity step needs at an intermediate point. Neither the logits nor the gradient are
        searched for NaN, and `check` does not see these logits: on the CPU that would be a large part of the cost of
        a step besides its passes. Enable autograd once around the loop, which is faster than once per step.
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
        """Logits [N, L] as part of autograd's graph; raises `NoGradient` if they do not depend on x differentiably."""
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
        """Add logits to what `check` checks."""
        if self._total is None:
            self._total = z.new_zeros(())
        self._total += z.detach().sum()  # part of a captured step, so no value is read here

    def _differentiate(
        self, loss: Loss, x: Tensor, y: Tensor, target: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """`gradient` with NaN and infinities; loss and logits are still part of autograd's graph."""
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
        """`step(*inputs)`; on CUDA as a graph, captured once per `key` and shape in a call of the attack.

        The same `key` must always mean the same function of the inputs. The next call with the same key may overwrite
        the outputs.
        """
        if self.bar is not None:
            self.bar.tick()
        if not inputs[0].is_cuda:
            return step(*inputs)
        try:
            hash(key)
        except TypeError:  # the caller's loss is not hashable: use its identity, since the graph keeps it alive
            key = tuple(id(part) for part in key)  # type: ignore[attr-defined]
        key = (key, *((t.shape, t.dtype) for t in inputs))
        if key not in self._graphs:
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(inputs[0].device), torch.cuda.graph_pool_handle()
                free, total = torch.cuda.mem_get_info(inputs[0].device)
                if free < total // 4:  # the allocator keeps the memory of earlier graphs, which new ones cannot use
                    torch.cuda.empty_cache()
            self._graphs[key] = replay(step, inputs, self._stream, self._pool) if self._capturable else step
            # Try, and warn, only once if the model cannot be captured.
            self._capturable = self._graphs[key] is not step
        return self._graphs[key](*inputs)

    def check(self, x_adv: Tensor, size: int) -> None:
        """Reject NaN logits at the attack's final points, which argmax would turn into a class.

        Reads one value per call; the model runs again only if some logits were NaN. NaN at an intermediate point
        does no harm. `size` is the number of points per forward pass.
        """
        if self._total is None or (x_adv.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if bool(self._total.isnan()):
            lost = sum(int(self.logits(v).isnan().any(1).sum()) for v in x_adv.split(size))
            if lost:
                raise ValueError(f"{_FINITE}, got NaN for {lost} of {len(x_adv)} images after the attack")

    def close(self) -> None:
        """Wait for the device: a graph must not be freed while it runs."""
        if self._graphs:
            torch.cuda.synchronize()
            self._graphs.clear()

    @torch.no_grad()
    def _inspect(self, z: Tensor, n: int) -> None:
        """Learn the number of classes from the model's first logits; reject labels and values that do not fit."""
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
            raise ValueError(f"{_FINITE}, got NaN for {lost} of the first {n} images it classified")
        if 0 < most - least < _SMALL:
            self.note(
                f"logits differ by at most {most - least:.1g}, too little for gradients in float32: scale them up"
            )
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
    """Gradient with respect to `x` of the summed `loss` of the model's logits.

    For your own loops, such as `ascend` in a training step: it reads no values back, so it never waits for the device
    and can be captured. Use it inside `frozen(model)`, which keeps parameters out of the backward pass.

    Parameters
    ----------
    model
        A module, or any function from images to logits.
    loss
        Function from logits [N, L], float32 at least, to losses [N].
    x
        Images [N, ...].

    Returns
    -------
    Tensor
        The gradient, like x.

    Examples
    --------
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
    """The gradient of the sum of `value` in x; raises `NoGradient` if only the model's parameters have one."""
    ones = torch.ones_like(value)
    (g,) = torch.autograd.grad(value, x, ones, retain_graph=retain_graph, allow_unused=True)
    if g is None:
        raise NoGradient("model must be differentiable in x, got logits without a gradient in x")
    return g


class NotLogits(ValueError):
    """Raised if the output of a model cannot be logits."""


def first_answer(model: Model, x: Tensor, name: str = "model") -> Tensor:
    """The logits of a model that has not run before; a ValueError if it takes or returns something else."""
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
    one, two = first_answer(model, few).clone(), first_answer(model, few)  # a graph may return the same buffer twice
    scale = torch.where(one.isfinite(), one.abs(), 0).amax().item()
    close = scale * max(1e-4, 16 * torch.finfo(one.dtype).eps)
    return not torch.allclose(one, two, rtol=0.0, atol=close, equal_nan=True)
