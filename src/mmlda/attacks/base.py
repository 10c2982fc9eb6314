"""What every attack shares: input checks, the eval-mode guard, batches, and the settings common to all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmlda.attacks.checks import AttackWarning, check_choice, check_count, check_number, invalid, warn_caller
from mmlda.attacks.docstrings import document
from mmlda.attacks.losses import check_loss
from mmlda.attacks.noise import Noise
from mmlda.attacks.progress import Bar
from mmlda.attacks.result import AttackResult, concatenate, measure
from mmlda.attacks.surface import PASSES, Model, Surface


@contextmanager
def _off(flag: str, things: Sequence[nn.Module | Tensor]) -> Iterator[None]:
    """Set a flag of all `things` to False, and back to True afterwards."""
    try:
        for thing in things:
            setattr(thing, flag, False)
        yield
    finally:
        for thing in things:
            setattr(thing, flag, True)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode without parameter gradients, and restore it: for attacks inside a training step.

    Reads and writes only flags, so it can surround code that is being compiled or captured.

    Parameters
    ----------
    model
        The network being trained.

    Returns
    -------
    context manager
        To use in a `with` statement.

    Examples
    --------
    >>> model = torch.nn.Linear(4, 3)
    >>> with frozen(model):
    ...     print(model.training, model.weight.requires_grad)
    False False
    >>> model.training, model.weight.requires_grad
    (True, True)
    """
    learned = [p for p in model.parameters() if p.requires_grad]
    training = [module for module in model.modules() if module.training]
    with _off("training", training), _off("requires_grad", learned):
        yield


@contextmanager
def guarded(model: Model) -> Iterator[None]:
    """Put a model into eval mode with autograd usable, and restore it; parameters do not change.

    A model in train mode is usually a mistake (batch statistics make the samples of a batch depend on each other), so
    this warns.
    """
    owner = getattr(model, "__self__", model)  # of a method, as model.forward
    training = [module for module in owner.modules() if module.training] if isinstance(owner, nn.Module) else []
    if training:
        warn_caller("the model is in train mode: it is attacked in eval mode and put back into train mode")
    with _off("training", training), torch.inference_mode(False), torch.no_grad():
        yield


BLIND = 0.05  # an attack warns from this share of images without a gradient

# How the settings of attacks are checked, by name; None is allowed where it is the default.
RULES: dict[str, Callable[[str, Any], None]] = {
    "loss": check_loss,
    "norm": partial(check_choice, allowed=("linf", "l2")),
    "target": partial(check_choice, allowed=(None, "least-likely", "random", "every")),
    "seed": partial(check_count, least=-math.inf),
    **dict.fromkeys(("steps", "search_steps", "restarts", "targets", "queries"), check_count),
    **dict.fromkeys(("batch_size", "memory_limit"), check_count),
    **dict.fromkeys(("eps", "kappa"), partial(check_number, expected="a finite number >= 0", fits=lambda v: v >= 0)),
    **dict.fromkeys(
        ("step_size", "rate", "initial_c"), partial(check_number, expected="a finite number > 0", fits=lambda v: v > 0)
    ),
    **dict.fromkeys(("p", "max_share"), partial(check_number, expected="in (0, 1]", fits=lambda v: 0 < v <= 1)),
}


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Base class of the attacks. A subclass adds its settings and implements `attack` for one batch.

    Settings are checked by `rules`, which a subclass may extend.

    Parameters
    ----------
    bounds
        Range of the images, (low, high); `x` may exceed it by a rounding error. For tables [N, D] also two tensors
        [D], the range of each feature; a feature with low = high does not change.
    seed
        Random seed; each random choice is keyed by (seed, index of the sample).
    batch_size
        Largest number of images per batch (default: all at once).
    memory_limit
        Memory for the attack's activations, in bytes; limits the batch size (default: no limit).
    """

    rules: ClassVar[dict[str, Callable[[str, Any], None]]] = RULES
    minimal: ClassVar[bool] = False  # whether it minimises the distance, and returns the image itself where it fails
    bounds: tuple[Any, Any] = (0.0, 1.0)
    seed: int = 0
    batch_size: int | None = None
    memory_limit: int | None = None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        document(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", check_bounds(self.bounds))
        for setting in fields(self):
            value, rule = getattr(self, setting.name), self.rules.get(setting.name)
            if rule is not None and not (value is None and setting.default is None):
                rule(setting.name, value)
        eps, width = getattr(self, "eps", None), self.width()
        if eps is not None and getattr(self, "norm", "linf") == "linf" and abs(eps) > width * (1 + 1e-6):
            hint = f"; did you mean {eps:g}/255?" if width == 1 and abs(eps) <= 255 else ""
            raise ValueError(f"eps must be at most {width}, the width of the pixel range, got {eps!r}{hint}")

    def width(self, of: Callable[..., float] = max) -> float:
        """high - low, of the widest feature where they differ."""
        lo, hi = (end.tolist() if isinstance(end, Tensor) else end for end in self.bounds)
        return of(high - low for low, high in zip(lo, hi)) if isinstance(lo, tuple | list) else hi - lo

    def most_steps(self) -> int:
        """Approximate largest number of steps for one batch."""
        steps = math.prod(getattr(self, name, 1) for name in ("steps", "restarts", "queries", "search_steps"))
        every = getattr(self, "target", "every" if hasattr(self, "targets") else None) == "every"
        return steps * (getattr(self, "targets", 9) if every else 1)

    def __call__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        *,
        target: Tensor | int | None = None,
        index: Tensor | None = None,
        show: bool | None = None,
    ) -> AttackResult:
        """Attack a model.

        Warns with an `AttackWarning` if the result may not measure robustness: the attack had no gradient, or the
        model is random (predictions are then those of the mean probabilities of 16 passes). `notes` of the result
        repeat the warnings.

        Parameters
        ----------
        model : callable
            Maps x to logits [N, L]: a module, which is attacked in eval mode, or any function.
        x : Tensor
            Images or other samples [N, ...] within `bounds`.
        y : Tensor
            Labels, integers [N].
        target : Tensor or int, optional
            One class for all samples, or one per sample [N]; overrides the attack's own choice. A sample that the
            model already assigns to its target counts as a success.
        index : Tensor, optional
            Identities of the samples for random choices, int64 [N] (default: 0 .. N - 1).
        show : bool, optional
            Whether to show progress on standard error after 2 seconds (default: only on a terminal).

        Returns
        -------
        AttackResult
            The adversarial samples, the model's predictions on them, and the distances.

        Raises
        ------
        ValueError
            If an argument is invalid, the model does not return finite logits, or a gradient attack gets a model
            without a gradient.
        """
        if not callable(model) or isinstance(model, type):
            raise invalid("model", "a module or a function from samples to logits", model)
        with guarded(model):
            x, y, target, index = self._prepare(x, y, target, index)
            if len(x) == 0:
                return measure(x, x, y, None, self.bounds, y, y)
            surface = Surface(model, y, target)
            surface.bar = Bar(type(self).__name__, self.most_steps(), show)
            try:
                result, size = self.in_batches(surface, x, y, target, index)
            finally:
                surface.bar.close()
            surface.check(result.x_adv, size)
            if result.clean_prediction is None:  # the attack has not classified the images themselves
                clean = torch.cat([surface.logits(part).argmax(1) for part in x.split(size)])
                result = replace(result, clean_prediction=clean)
            if surface.random:
                surface.note(
                    "the model is random, since two passes over the same images differ: an image counts as broken only "
                    f"where the mean probabilities of {PASSES} passes are wrong; attack that mean for a stronger attack"
                )
                result = replace(result, clean_prediction=torch.cat([surface.classify(part) for part in x.split(size)]))
            if (blind := result.blind_share) >= BLIND:
                surface.note(
                    f"the gradient was exactly zero for {blind:.1%} of the images, so the attack is blind there and "
                    'their accuracy is not robustness: try loss="margin", Square or WorstCase'
                )
            surface.close()
            for note in surface.notes:
                warn_caller(note, AttackWarning)
            passes = PASSES if surface.random else 1
            result = replace(result, classes=surface.classes, passes=passes, notes=tuple(surface.notes))
            return replace(result, black_box=surface.black_box)

    def in_batches(
        self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor
    ) -> tuple[AttackResult, int]:
        """Attack in batches of at most `batch_size` images, fewer under a memory limit; the result and the size."""
        size, attack, bar = self._batch(surface, x), self.placed(x), surface.bar or Bar("", 1, False)
        begin, weight, share = bar.done, bar.weight, bar.weight * size / len(x)
        columns = [x, y, index] if target is None else [x, y, index, target]
        parts = []
        for i in range(0, len(x), size):
            batch = [t[i : i + size] for t in columns]
            n = len(batch[0])
            if x.is_cuda and n < size:  # padded to the shape of the others, to reuse their graphs
                batch = [torch.cat([part, t[: size - n]]) for part, t in zip(batch, columns)]
            xs, ys, who, *to = batch
            bar.weight, bar.done = share, begin + self.most_steps() * weight * i / len(x)
            part = attack.attack(surface, xs, ys, to[0] if to else None, who)
            if surface.random:
                part = attack._judged_again(part, surface, xs)
            parts.append(part.take(slice(n)))
        bar.weight, bar.done = weight, begin + self.most_steps() * weight
        return concatenate(parts), size

    def placed(self, x: Tensor) -> Attack:
        """This attack with per-feature bounds as tensors like `x`; itself if the bounds are two numbers."""
        if not isinstance(self.bounds[0], tuple):
            return self
        if x.shape[1:] != (len(self.bounds[0]),):
            raise ValueError(f"bounds must be numbers or of shape {list(x.shape[1:])}, got [{len(self.bounds[0])}]")
        attack = copy.copy(self)
        object.__setattr__(attack, "bounds", tuple(x.new_tensor(end) for end in self.bounds))
        return attack

    def _judged_again(self, result: AttackResult, surface: Surface, x: Tensor) -> AttackResult:
        """The result with the classes that a random model predicts on average, since one lucky draw is no success."""
        r, label = result, surface.classify(result.x_adv)
        broken = label != r.y if r.target is None else label == r.target
        winner = r.winner  # a sample broken only on average is credited to the first attack, whose points are kept
        if winner is not None:
            winner = torch.where(broken, torch.where(winner == -1, 0, winner), -1)
        found, clean = (broken & r.success, surface.classify(x)) if self.minimal else (None, r.clean_prediction)
        again = measure(x, r.x_adv, r.y, r.target, self.bounds, label, r.steps, clean=clean, found=found)
        return replace(again, winner=winner, blind=r.blind, zero_at_start=r.zero_at_start)

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        """Attack one batch; called without autograd, with `x` inside the range and the model in eval mode.

        Parameters
        ----------
        surface
            The model, with checked logits and gradients.
        x
            Samples [N, ...].
        y
            Labels, int64 [N].
        target
            Target classes, int64 [N], or None.
        index
            Identities of the samples for random choices, int64 [N].

        Returns
        -------
        AttackResult
            The result of the batch, from `measure`.

        """
        raise NotImplementedError

    def noise(self, index: Tensor) -> Noise:
        return Noise(self.seed, index)

    def _prepare(
        self, x: Tensor, y: Tensor, target: Tensor | int | None, index: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Check the arguments and bring them into one form; the caller's tensors are not modified."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided or x.ndim < 2:
            raise invalid("x", "a floating-point tensor [N, ...]", x)
        if len(x) and x[0].numel() == 0:
            raise invalid("x", "images with pixels", x)
        y = check_labels("y", y, x)
        if isinstance(target, int) and not isinstance(target, bool):
            target = torch.full_like(y, target)
        elif target is not None:
            target = check_labels("target", target, x)
        index = torch.arange(len(x), device=x.device) if index is None else check_labels("index", index, x)
        lo, hi = self.placed(x).bounds
        x = x.detach()
        if len(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            # A rounding error outside is the caller's arithmetic (normalise and back); more is a mistake.
            slack = (hi - lo) * max(1e-5, 4 * torch.finfo(x.dtype).eps)
            if isinstance(lo, Tensor):
                if not bool(((x >= lo - slack) & (x <= hi + slack)).all()):
                    outside = (~((x >= lo - slack) & (x <= hi + slack))).any(0).nonzero().flatten().tolist()
                    raise ValueError(f"x must be within bounds, got values outside in features {outside}")
                return x.clamp(lo, hi), y, target, index
            low, high = (float(v) for v in torch.stack(torch.aminmax(x)).double())
            if not (low >= lo - slack and high <= hi + slack):  # also false for NaN
                raise ValueError(f"x must be in the range bounds={self.bounds}, got values {low} to {high}")
        return x.clamp(lo, hi), y, target, index

    def _batch(self, surface: Surface, x: Tensor) -> int:
        """The batch size: at most `batch_size`, and such that activations and a dozen copies of the images fit."""
        size = len(x)
        if self.batch_size is not None:
            surface.room = min(surface.room, self.batch_size)
            size = min(size, self.batch_size)
        if self.memory_limit is not None:
            bytes_each = activation_bytes(surface, x[:1]) + 12 * x[0].numel() * x.element_size()
            surface.room = min(surface.room, self.memory_limit // bytes_each)
            size = max(1, min(size, self.memory_limit // bytes_each))
        return size


document(Attack)


def check_bounds(bounds: Any) -> tuple[Any, Any]:
    """(low, high): two numbers, or for each feature as two tuples, so that an attack can be compared and hashed."""
    try:
        ends = [end.tolist() if hasattr(end, "tolist") else end for end in bounds]
        lo, hi = (tuple(end) if isinstance(end, list | tuple) else end for end in ends)
        several = isinstance(lo, tuple)
        lows, highs = (lo, hi) if several else ((lo,), (hi,))
        for end in (*lows, *highs):
            check_number("bounds", end, "a number", lambda v: True)
        widths = [high - low for low, high in zip(lows, highs, strict=True)]
        check_number("bounds", max(widths), "a range", lambda v: v > 0)
        check_number("bounds", min(widths), "a range", lambda v: v >= 0)
    except (TypeError, ValueError):
        expected = "(low, high) with low < high"
        raise invalid("bounds", expected, bounds) from None
    return lo, hi


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
    """Which samples continue after a compaction point, given which are alive (bool [N]): int64 indices, ascending.

    On the CPU exactly the samples that are alive. On CUDA their number is N, N/2, N/4, ..., so that few graphs are
    captured: the remaining places are filled with finished samples, whose results must not be used again. Waits for
    the device.
    """
    n = int(alive.sum())
    if alive.is_cuda and n:
        size = len(alive)
        while size // 2 >= n:
            size //= 2
        n = size
    return alive.to(torch.int8).argsort(descending=True, stable=True)[:n].sort().values


def record(end: Sequence[Tensor], who: Tensor, state: Sequence[Tensor]) -> None:
    """Write the columns of `state`, which belong to the samples `who`, into those of all samples."""
    for total, part in zip(end, state):
        total.index_copy_(0, who, part)


def compact_before(k: int, done: Tensor, marks: Sequence[int] = ()) -> bool:
    """Whether to drop finished samples before step `k`.

    Dropping waits for the device: on CUDA only at powers of two and at `marks`, so that few graphs are captured.
    """
    if done.is_cuda:
        return k in marks or k & (k - 1) == 0
    return bool(done.sum() * 20 >= len(done))
