"""What training attacks, on the device and without waiting: images, by the attacks' own loop, and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mmlda.attacks import ascend, frozen, input_gradient, kl_divergence, least_likely, score
from mmlda.attacks.gradient import random_start
from mmlda.attacks.noise import Noise
from mmlda.models.folded import folded
from mmlda.training.batches import Batches
from mmlda.training.recipes import Adversary, Recipe


def craft(
    model: nn.Module, x: Tensor, y: Tensor, eps: Tensor, start: Tensor, adversary: Adversary, *, fold: bool = False
) -> Tensor:
    """Adversarial images of `x` within `eps` [n], from `start`; eval mode, and no gradient for parameters.

    `fold` folds batch norm into the convolutions first, which the network must allow.
    """
    step = adversary.step if adversary.step is not None else 1 / adversary.steps
    with frozen(model):
        logits = folded(model) if fold else model  # type: ignore[arg-type]
        loss = _crafting_loss(logits, x, y, adversary)
        gradient = functools.partial(input_gradient, logits, loss)
        return ascend(gradient, x, start, eps=eps, step_size=eps * step, steps=adversary.steps)


def _crafting_loss(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, adversary: Adversary
) -> Callable[[Tensor], Tensor]:
    """What the adversarial images maximise: a function of the logits [n, L] -> [n]."""
    if adversary.attack not in ("ilcm", "trades"):
        return lambda z: score("ce", z, y)
    with torch.no_grad():
        clean = model(x).float()  # [n, L]
    if adversary.attack == "trades":
        return lambda z: kl_divergence(z, clean)
    target = least_likely(clean, y)
    return lambda z: score("ce", z, y, target)


def begin_attack(
    x: Tensor, uniform: Tensor, rows: Tensor, draw: Tensor, recipe: Recipe, adversary: Adversary
) -> tuple[Tensor, Tensor]:
    """Each image's perturbation [n], and where its attack starts."""
    low, high = adversary.range
    eps = low + (high - low) * uniform
    if not adversary.random_start:
        return eps, x
    return eps, random_start(x, eps, "linf", (0.0, 1.0), Noise(recipe.seed, rows), draw)


def craft_once(model: nn.Module, batches: Batches) -> None:
    """Attack every training image on the current network; later batches mix these images in."""
    recipe, adversary = batches.recipe, batches.recipe.adversary
    assert adversary is not None
    chunk = 1024 if batches.device.type == "cuda" else 512  # large enough to keep the device busy
    n = len(batches.labels)
    generator = torch.Generator(batches.device).manual_seed(recipe.seed)
    uniform = torch.rand(n, generator=generator, device=batches.device)
    still = torch.full((n,), recipe.pad, device=batches.device)  # no crop, no mirror
    crafted = torch.empty((n, *batches.shape), device=batches.device)
    for rows in torch.arange(n, device=batches.device).split(chunk):
        x = batches.pixels(None, rows, still[rows], still[rows], torch.zeros_like(rows))
        eps, start = begin_attack(x, uniform[rows], rows, rows.new_zeros(()), recipe, adversary)
        crafted[rows] = craft(model, x, batches.labels[rows], eps, start, adversary)
    batches.adversarial = crafted


@contextmanager
def moved_weights(weights: Sequence[Tensor], gradients: tuple[Tensor, ...], size: float) -> Iterator[None]:
    """Move each weight up its gradient by `size` times its norm, for the time of the block (AWP, Wu et al., 2020)."""
    values = [weight.detach() for weight in weights]
    kept = [value.clone() for value in values]
    scales = torch._foreach_norm(kept)
    torch._foreach_mul_(scales, size)
    torch._foreach_div_(scales, torch._foreach_add(torch._foreach_norm(gradients), 1e-12))
    torch._foreach_add_(values, torch._foreach_mul(gradients, scales))
    try:
        yield
    finally:
        torch._foreach_copy_(values, kept)
