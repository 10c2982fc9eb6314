"""What an attack returns: who was right before and after it, and how far it moved each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttackResult", "measure"]


@dataclass(frozen=True, repr=False)
class AttackResult:
    """One attack on N samples; every tensor is on the device of the images. Printing it shows a summary.

    `x_adv` is the attack's final point (fixed budget) or its best one (minimum norm). A minimum-norm attack
    that fails on a sample returns the original with an infinite distance, never 0.

    Shapes: `x_adv` is like the images, everything else [N].
    """

    x_adv: Tensor
    y: Tensor  # int64: the label
    success: Tensor  # bool: the prediction is not y (if it never was, too) or, where one target was asked for, is that
    prediction: Tensor  # int64: the model's class at x_adv
    linf: Tensor  # max |x_adv - x|
    l2: Tensor  # ||x_adv - x||_2
    distortion: Tensor  # sqrt(mean((x_adv - x)^2)) with the image range stretched to 0..255
    steps: Tensor  # int64: steps (gradients, or queries of a black box) spent on the sample
    clean_prediction: Tensor | None = None  # int64: the model's class at x; None before the call ends
    zero_at_start: Tensor | None = None  # bool, of gradient attacks: the gradient was exactly 0 at the start
    target: Tensor | None = None  # int64: the class asked for
    winner: Tensor | None = None  # int64, of a list of attacks: which one broke the sample

    def __len__(self) -> int:
        return len(self.success)

    @property
    def right_before(self) -> Tensor | None:
        """Which samples the model got right without the attack: bool [N]."""
        return None if self.clean_prediction is None else self.clean_prediction == self.y

    @property
    def right_after(self) -> Tensor:
        """Which samples the model gets right at `x_adv`: bool [N]."""
        return self.prediction == self.y

    @property
    def clean_accuracy(self) -> float | None:
        """Share of samples that were right before the attack."""
        return None if self.right_before is None else _share(self.right_before)

    @property
    def robust_accuracy(self) -> float:
        """Share of samples that are right after the attack."""
        return _share(self.right_after)

    @property
    def zero_gradient(self) -> float | None:
        """Share of samples whose gradient was exactly zero at the start; None for attacks without gradients.

        Far from 0, the loss is saturated: the attack stood still, and the accuracy under it says nothing
        about robustness. Try another loss.
        """
        return None if self.zero_at_start is None else _share(self.zero_at_start)

    def __repr__(self) -> str:
        broken = self.success if self.right_before is None else self.success & self.right_before
        before = "not measured" if self.clean_accuracy is None else f"{self.clean_accuracy:.1%}"
        rows = [
            f"{type(self).__name__}: {len(self)} images",
            f"  right before    {before}",
            f"  right after     {self.robust_accuracy:.1%}",
            f"  success         {_share(self.success):.1%}",
        ]
        if bool(broken.any()):
            sizes = (
                f"{name} {getattr(self, name)[broken].median().item():.4g}" for name in ("linf", "l2", "distortion")
            )
            rows.append(f"  median distance {', '.join(sizes)} (where it succeeded)")
        if self.zero_gradient is not None:
            rows.append(f"  zero gradient   {self.zero_gradient:.1%} at the start")
        return "\n".join(rows)

    def take(self, which: Tensor | slice) -> AttackResult:
        """The result of some of the samples."""
        columns: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            column = getattr(self, name)
            columns[name] = None if column is None else column[which]
        return AttackResult(**columns)


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def measure(
    x: Tensor,
    x_adv: Tensor,
    *,
    y: Tensor,
    success: Tensor,
    prediction: Tensor,
    steps: Tensor,
    bounds: tuple[float, float] = (0.0, 1.0),
    minimum_norm: bool = False,
    clean_prediction: Tensor | None = None,
    zero_at_start: Tensor | None = None,
    target: Tensor | None = None,
    winner: Tensor | None = None,
) -> AttackResult:
    """The result of moving `x` to `x_adv`: distances in at least float32.

    With `minimum_norm`, failures return to `x` and have infinite distances.

    >>> x = torch.zeros(2, 4)
    >>> x_adv = torch.tensor([[0.0, 0.5, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]])
    >>> broken = torch.tensor([True, False])
    >>> y, label, steps = torch.tensor([0, 0]), torch.tensor([1, 0]), torch.tensor([3, 3])
    >>> r = measure(x, x_adv, y=y, success=broken, prediction=label, steps=steps, minimum_norm=True, clean_prediction=y)
    >>> r.linf.tolist(), r.distortion.tolist()
    ([0.5, inf], [63.75, inf])
    >>> r
    AttackResult: 2 images
      right before    100.0%
      right after     50.0%
      success         50.0%
      median distance linf 0.5, l2 0.5, distortion 63.75 (where it succeeded)
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
        y=y,
        success=success,
        prediction=prediction,
        linf=linf,
        l2=l2,
        distortion=distortion,
        steps=steps,
        clean_prediction=clean_prediction,
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
        x_adv=x.clone(), y=labels, success=flags, prediction=labels, linf=zero, l2=zero, distortion=zero, steps=labels
    )
