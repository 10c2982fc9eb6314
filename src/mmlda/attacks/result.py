"""What an attack hands back, and how far it moved each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttackResult", "measure"]


@dataclass(frozen=True)
class AttackResult:
    """One attack on N samples; every tensor is on the device of the images.

    `x_adv` is the attack's final point (fixed budget) or its best one (minimum norm). A minimum-norm attack
    that fails on a sample gives the original back and says that the distance is infinite, never 0.

    Shapes: `x_adv` is like the images, everything else [N].
    """

    x_adv: Tensor
    success: Tensor  # bool: the label is no longer y or, where one target was asked for, it is the target
    prediction: Tensor  # int64: the model's label at x_adv, so accuracy under attack is (prediction == y)
    linf: Tensor  # max |x_adv - x|
    l2: Tensor  # ||x_adv - x||_2
    distortion: Tensor  # sqrt(mean((x_adv - x)^2)) with the image range stretched to 0..255
    steps: Tensor  # int64: steps (gradients, or queries of a black box) spent on the sample
    zero_at_start: Tensor | None = None  # bool, of gradient attacks: the gradient was exactly 0 at the start
    target: Tensor | None = None  # int64: the class asked for
    winner: Tensor | None = None  # int64, of a list of attacks: which one broke the sample

    def __len__(self) -> int:
        return len(self.success)

    @property
    def zero_gradient(self) -> float | None:
        """Share of samples whose gradient was exactly zero at the start; None for attacks without gradients.

        Far from 0, the loss is saturated: the attack stood still, and the accuracy under it says nothing
        about robustness. Try another loss.
        """
        return None if self.zero_at_start is None else float(self.zero_at_start.double().mean())

    def take(self, which: Tensor | slice) -> AttackResult:
        """The result of some of the samples."""
        columns: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            column = getattr(self, name)
            columns[name] = None if column is None else column[which]
        return AttackResult(**columns)


def measure(
    x: Tensor,
    x_adv: Tensor,
    *,
    success: Tensor,
    prediction: Tensor,
    steps: Tensor,
    bounds: tuple[float, float] = (0.0, 1.0),
    minimum_norm: bool = False,
    zero_at_start: Tensor | None = None,
    target: Tensor | None = None,
    winner: Tensor | None = None,
) -> AttackResult:
    """The result of moving `x` to `x_adv`: distances in at least float32.

    With `minimum_norm`, failures return to `x` and have infinite distances.

    >>> x = torch.zeros(2, 4)
    >>> x_adv = torch.tensor([[0.0, 0.5, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]])
    >>> broken = torch.tensor([True, False])
    >>> label, steps = torch.tensor([1, 0]), torch.tensor([3, 3])
    >>> r = measure(x, x_adv, success=broken, prediction=label, steps=steps, minimum_norm=True)
    >>> r.linf.tolist(), r.distortion.tolist()
    ([0.5, inf], [63.75, inf])
    """
    lo, hi = bounds
    if minimum_norm:
        keep = success.view(-1, *[1] * (x.ndim - 1))
        x_adv = torch.where(keep, x_adv, x)
    wide = torch.promote_types(x.dtype, torch.float32)
    delta = (x_adv.to(wide) - x.to(wide)).flatten(1)  # [N, D]
    linf = delta.abs().amax(1)
    l2 = torch.linalg.vector_norm(delta, dim=1)
    distortion = l2 * (255.0 / (hi - lo) / delta.shape[1] ** 0.5)
    if minimum_norm:
        linf, l2, distortion = (torch.where(success, d, torch.inf) for d in (linf, l2, distortion))
    return AttackResult(
        x_adv=x_adv,
        success=success,
        prediction=prediction,
        linf=linf,
        l2=l2,
        distortion=distortion,
        steps=steps,
        zero_at_start=zero_at_start,
        target=target,
        winner=winner,
    )


def concatenate(parts: Sequence[AttackResult]) -> AttackResult:
    """The results of consecutive batches as one."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {}
    for name in (f.name for f in fields(AttackResult)):
        column = [getattr(part, name) for part in parts]
        columns[name] = None if any(part is None for part in column) else torch.cat(column)
    return AttackResult(**columns)


def nothing(x: Tensor) -> AttackResult:
    """The result on an empty batch."""
    flags, labels = x.new_zeros(0, dtype=torch.bool), x.new_zeros(0, dtype=torch.int64)
    zero = x.new_zeros(0, dtype=torch.promote_types(x.dtype, torch.float32))
    return AttackResult(
        x_adv=x.clone(), success=flags, prediction=labels, linf=zero, l2=zero, distortion=zero, steps=labels
    )
