"""FGSM, BIM, ILCM and PGD: one loop with different values.

    x_{m+1} = P(x_m + a d(grad_x loss(x_m))),   d(g) = sign(g)  or  g / ||g||_2,

where P projects onto the ball of radius eps around the image, and onto the image range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmlda.attacks.base import Attack, survivors
from mmlda.attacks.losses import Loss, choose_target, margin, other_classes
from mmlda.attacks.noise import Noise
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.surface import Surface

Size = float | Tensor  # one for all samples, or [N]
Bounds = tuple[Any, Any]  # numbers, or tensors with one for each feature


def tall(v: Tensor, x: Tensor) -> Tensor:
    """One value per sample [N], shaped to broadcast with the images: [N, 1, ...]."""
    return v.view(-1, *[1] * (x.ndim - 1))


def per_sample(size: Size, x: Tensor) -> Size:
    """One size per sample, shaped to broadcast with the images: [N, 1, ...]; a number is returned unchanged."""
    return tall(size.to(x.dtype), x) if isinstance(size, Tensor) else size


def norm_of(v: Tensor) -> Tensor:
    """||v||_2 of each sample, shaped to broadcast with the images: [N, 1, ...]."""
    return tall(torch.linalg.vector_norm(v.flatten(1), dim=1), v)


def direction(g: Tensor, norm: str) -> Tensor:
    """The unit step that climbs fastest along `g`; 0 where the gradient is exactly 0.

    For L2, `g` is scaled by its largest entry first: a gradient of 1e-25 has a direction too, and its square
    is 0 in float32.
    """
    if norm == "linf":
        return g.sign()
    largest = tall(g.flatten(1).abs().amax(1), g)
    g = g / torch.where(largest > 0, largest, 1.0)
    return g / norm_of(g).clamp_min(1.0)  # the largest entry is 1, so the norm is at least 1 unless g = 0


def limits(x: Tensor, eps: Size, norm: str, bounds: Bounds) -> tuple[Tensor, ...]:
    """What `project` needs to know about the images, computed once per attack."""
    if norm == "l2":
        return (x,)
    eps = per_sample(eps, x)
    return (x - eps).clamp_min(bounds[0]), (x + eps).clamp_max(bounds[1])


def project(v: Tensor, limit: tuple[Tensor, ...], eps: Size, norm: str, bounds: Bounds) -> Tensor:
    """Project `v` onto the ball around x and onto the range.

    For L2 in this order: clipping to the range stays in the ball, because x is in the range.
    """
    if norm == "linf":
        return torch.clamp(v, *limit)
    (x,) = limit
    delta = v - x
    size = norm_of(delta)
    shrink = torch.where(size > per_sample(eps, x), per_sample(eps, x) / size, 1.0)
    return (x + delta * shrink).clamp(*bounds)


def in_ball(x: Tensor, x_adv: Tensor, eps: float, norm: str, bounds: Bounds) -> Tensor:
    """Whether each `x_adv` is a point of the ball around its `x`, rounded to the dtype of the images: bool [N].

    Each pixel may be off by half the distance between two numbers of that dtype around it, by which x + eps is
    rounded; in bfloat16 that can be as much as a small eps. Anything beyond it is due to the perturbation. The
    projection rounds too: for L-infinity eps itself, for L2 a difference, its norm, a quotient and a product.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    own, fine = torch.finfo(x.dtype).eps, torch.finfo(wide).eps
    v = x_adv.to(wide).flatten(1)  # [N, D]
    _, exponent = torch.frexp(v)  # |v| is from 2^(exponent - 1) to 2^exponent
    rounding = torch.ldexp(torch.where(v == 0, 0.0, own / 4), exponent)
    r = ((v - x.to(wide).flatten(1)).abs() - rounding).clamp_min(0)
    size = r.amax(1) if norm == "linf" else torch.linalg.vector_norm(r, dim=1)
    relative = own / 2 if norm == "linf" else 2 * own
    largest = torch.cat(bounds).abs().amax() if isinstance(bounds[0], Tensor) else max(map(abs, bounds))
    return size <= eps * (1 + max(1e-5, relative)) + 4 * fine * largest


def advance(
    x_adv: Tensor, d: Tensor, limit: tuple[Tensor, ...], eps: Size, step_size: Size, norm: str, bounds: Bounds
) -> Tensor:
    """One step of the loop in the direction `d`."""
    if isinstance(step_size, Tensor):
        v = x_adv + tall(step_size.to(d.dtype), d) * d
    else:
        v = torch.add(x_adv, d, alpha=step_size)
    if norm == "linf":
        return v.clamp_(*limit)  # in place: on the CPU a small network's step takes hardly longer than this
    return project(v, limit, eps, norm, bounds)


def ascend(
    gradient: Callable[[Tensor], Tensor],
    x: Tensor,
    start: Tensor,
    *,
    eps: Size,
    step_size: Size,
    steps: int,
    norm: str = "linf",
    bounds: Bounds = (0.0, 1.0),
) -> Tensor:
    """Gradient ascent in the ball of radius `eps` around `x`.

    The loop reads no values back, so it can be part of a captured or compiled training step.

    Parameters
    ----------
    gradient
        Function from points like x to the gradient to follow, like x; see `input_gradient`.
    x
        Images [N, ...].
    start
        Points to start from, like x.
    eps
        Radius of the ball: a number, or one per sample [N].
    step_size
        Length of a step: a number, or one per sample [N].
    steps
        Number of steps.
    norm
        "linf" or "l2".
    bounds
        Range of the images, (low, high).

    Returns
    -------
    Tensor
        The final points, like x.

    Examples
    --------
    >>> x = torch.tensor([[0.5, 0.05]])
    >>> ascend(lambda v: torch.tensor([[1.0, -1.0]]), x, x, eps=0.25, step_size=0.125, steps=3)
    tensor([[0.7500, 0.0000]])
    """
    limit = limits(x, eps, norm, bounds)
    x_adv = start
    for _ in range(steps):
        x_adv = advance(x_adv, direction(gradient(x_adv), norm), limit, eps, step_size, norm, bounds)
    return x_adv


def random_start(x: Tensor, eps: Size, norm: str, bounds: Bounds, noise: Noise, draw: int | Tensor) -> Tensor:
    """Uniform random points in the ball around x, clipped to the range: like x."""
    shape = tuple(x.shape[1:])
    if norm == "linf":
        delta = 2 * noise.uniform(shape, draw, x.dtype) - 1
    else:
        delta = noise.normal(shape, draw, x.dtype)
        radius = per_sample(noise.uniform((), draw - (1 << 32), x.dtype) ** (1 / x[0].numel()), x)
        delta = delta / norm_of(delta) * radius
    return project(x + per_sample(eps, x) * delta, limits(x, eps, norm, bounds), eps, norm, bounds)


class Batch(NamedTuple):
    """The samples of one run."""

    x: Tensor
    y: Tensor
    ids: Tensor  # the samples' indices, for random choices
    draw: Tensor  # the number of the run, int64 [N], for random choices
    to: Tensor | None  # the class to climb towards
    goal: Tensor | None  # the class that counts as a success; None for any but y

    def take(self, who: Tensor) -> Batch:
        return Batch(*(None if t is None else t[who] for t in self))  # type: ignore[arg-type]

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """One batch of all, one after the other."""
        return Batch(*(None if None in column else torch.cat(column) for column in zip(*batches)))  # type: ignore[arg-type]


@dataclass
class Run:
    """Where one run of an attack ends, per sample."""

    x_adv: Tensor
    prediction: Tensor
    success: Tensor
    steps: Tensor
    zero: Tensor  # whether the first gradient was exactly 0
    gap: Tensor  # how near the attack has come: of two failures the higher one is kept
    clean: Tensor | None = None  # the class at the image itself, where the run started there

    def split(self, n: int) -> list[Run]:
        """The runs of `n` samples each that were joined."""
        columns = (value.split(n) for value in vars(self).values() if value is not None)  # `clean` comes last
        return [Run(*parts) for parts in zip(*columns)]

    def improve(self, who: Tensor, again: Run) -> None:
        """Take over what is better for the samples `who`; a broken sample does not change."""
        open_ = ~self.success[who]
        self.steps.index_add_(0, who, again.steps * open_)
        better = open_ & (again.success | (again.gap > self.gap[who]))
        for name in ("x_adv", "prediction", "success", "gap"):
            getattr(self, name).index_copy_(0, who[better], getattr(again, name)[better])


@dataclass(frozen=True, kw_only=True)
class Ascent(Attack):
    """Runs that climb a loss inside a ball: `restarts` per target, each on the samples that earlier runs left.

    On the CPU small batches cost more per sample than large ones, so the samples that are left do 2, 4, ... runs at a
    time while there is room. The result is that of one run after the other: the first that breaks a sample counts.
    """

    eps: float
    norm: str = "linf"
    loss: Loss = "ce"
    target: str | None = None
    steps: int = 10
    restarts: int = 1

    def attack(self, surface: Surface, x: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> AttackResult:
        turns, clean = [target], None
        if target is None and self.target is not None:
            z = surface.logits(x)
            clean = z.argmax(1)
            if self.target == "every":  # any other class will do, so success is judged as without a target
                turns = self.others(z, y)
            else:
                turns = [target := choose_target(self.target, z, y, self.noise(index))]
        loss = self.usable_loss(surface, x, aimed=turns[0] is not None)
        batches = [
            Batch(x, y, index, torch.full_like(y, draw), to, target)
            for draw, (to, _) in enumerate(product(turns, range(self.restarts)))
        ]
        best, done = self.run(surface, loss, batches[0]), 1
        while done < len(batches) and len(who := survivors(~best.success)):
            count = min(2 * done, surface.runs_at_once(who))  # few at first: an early success wastes the others
            several = [batch.take(who) for batch in batches[done : done + count]]
            for again in self.run(surface, loss, Batch.join(several)).split(len(who)):
                best.improve(who, again)
            done += count
        clean = best.clean if clean is None else clean
        return measure(x, best.x_adv, y, target, self.bounds, best.prediction, best.steps, clean=clean, zero=best.zero)

    def others(self, z: Tensor, y: Tensor) -> list[Tensor | None]:
        """The targets of `target="every"`, one after the other."""
        return list(other_classes(z, y).unbind(1))

    def usable_loss(self, surface: Surface, x: Tensor, aimed: bool) -> Loss:
        return self.loss

    def run(self, surface: Surface, loss: Loss, batch: Batch) -> Run:
        """Climb once."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GradientAttack(Ascent):
    """The loop's settings; `FGSM`, `BIM`, `ILCM` and `PGD` are values of them.

    Parameters
    ----------
    eps
        Radius of the ball, on the scale of the images: 8 / 255 for images in [0, 1].
    norm
        "linf" or "l2".
    loss
        "ce", "margin", "dlr", "targeted", or a function (model, x, y) -> [N] to be maximised.
    target
        None (away from y), "least-likely" (by the clean logits), "random", or "every" (each class in turn, until one
        changes the label of the sample).
    steps
        Gradient steps per run.
    step_size
        Length of a step; None for eps / steps (2.5 eps / steps for PGD, eps for FGSM).
    random_start
        Whether to start at a random point of the ball.
    restarts
        Number of runs; a sample is finished after the first run that breaks it.
    """

    step_size: float | None = None
    random_start: bool = False

    def stride(self) -> float:
        """The step size in use: eps / steps, so that the steps just reach the edge of the ball."""
        return self.eps / self.steps if self.step_size is None else self.step_size

    def run(self, surface: Surface, loss: Loss, batch: Batch) -> Run:
        x, y, ids, draw, to, goal = batch
        start = x
        if self.random_start:
            start = random_start(x, self.eps, self.norm, self.bounds, self.noise(ids), draw)
        aimed, wide = to is not None, torch.promote_types(x.dtype, torch.float32)
        half = x.dtype != wide

        # On the CPU a small network's step takes hardly longer than torch's calls around it, so avoid needless ones.
        def step(x_adv: Tensor, y: Tensor, to: Tensor, *limit: Tensor) -> tuple[Tensor, ...]:
            where = loss, x_adv.to(x.dtype) if half else x_adv, y, to if aimed else None
            if self.norm == "linf":
                z, d = surface.sign(*where)
            else:
                _, z, g = surface.gradient(*where)
                d = direction(g, self.norm)
            up = d.to(wide) if half else d
            moved = advance(x_adv, up, limit, self.eps, self.stride(), self.norm, self.bounds)
            return (moved, d) if z is None else (moved, d, z)

        # Intermediate points are float32 at least: a step may be smaller than the rounding of half-precision images.
        fixed = (y, y if to is None else to, *limits(x.to(wide), self.eps, self.norm, self.bounds))
        with torch.enable_grad():
            x_adv, d, *logits = surface.step((self, aimed), step, start.to(wide), *fixed)
            zero = (d == 0).flatten(1).all(1)  # [N]
            clean = logits[0].argmax(1) if logits and not self.random_start else None
            for _ in range(self.steps - 1):
                x_adv = surface.step((self, aimed), step, x_adv, *fixed)[0]
        x_adv = x_adv.to(x.dtype, copy=True)  # the step's buffer is the next run's
        z = surface.replayed_logits(x_adv)
        prediction = z.argmax(1)
        success = prediction != y if goal is None else prediction == goal
        gap = margin(z, y) if goal is None else -margin(z, goal)
        return Run(x_adv, prediction, success, torch.full_like(y, self.steps), zero, gap, clean)


@dataclass(frozen=True, kw_only=True)
class FGSM(GradientAttack):
    """Fast gradient sign method (Goodfellow et al. 2015): one step of size eps.

    Examples
    --------
    >>> model = torch.nn.Linear(4, 3).eval()
    >>> x, y = torch.full((2, 4), 0.5), torch.tensor([0, 1])
    >>> FGSM(eps=0.125)(model, x, y).linf
    tensor([0.1250, 0.1250])
    """

    steps: int = field(default=1, init=False)


@dataclass(frozen=True, kw_only=True)
class BIM(GradientAttack):
    """Basic iterative method (Kurakin et al. 2017): 10 steps of eps / 10 by default."""


@dataclass(frozen=True, kw_only=True)
class ILCM(GradientAttack):
    """Iterative least-likely class method (Kurakin et al. 2017): BIM towards argmin_k Z_k(x)."""

    target: str | None = "least-likely"


@dataclass(frozen=True, kw_only=True)
class PGD(GradientAttack):
    """Projected gradient descent (Madry et al. 2018): random start, 40 steps of 2.5 eps / steps."""

    steps: int = 40
    random_start: bool = True

    def stride(self) -> float:
        return 2.5 * self.eps / self.steps if self.step_size is None else self.step_size
