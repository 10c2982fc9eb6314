"""What an attack returns: predictions before and after it, and how far it moved each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, repr=False)
class AttackResult:
    """One attack on N samples; every tensor is on the device of the images. Printing it shows a summary.

    Parameters
    ----------
    x_adv
        The final points (fixed budget) or the nearest ones (minimum norm), like the images. Where a minimum-norm
        attack fails, the original, at an infinite distance.
    y
        Labels, int64 [N].
    success
        Where the prediction is not y or, for a targeted attack, is the target, bool [N].
    prediction
        The model's classes at `x_adv`, int64 [N].
    linf
        L-infinity distances of `x_adv` from the original, on the scale of the images [N].
    l2
        L2 distances, likewise [N].
    distortion
        Root mean square change of a pixel, with the image range scaled to 0..255 [N].
    steps
        Gradient steps, or queries of a black-box attack, int64 [N].
    clean_prediction
        The model's classes at the originals, int64 [N].
    zero_at_start
        Where the gradient was exactly 0 at the start, bool [N]; None for attacks without gradients.
    target
        Target classes, int64 [N]; None for an untargeted attack.
    winner
        For a list of attacks, which one broke each sample, int64 [N].
    blind
        Where every gradient that the attack started from was exactly 0, bool [N].
    classes
        Number of classes of the model.
    passes
        Passes whose mean probabilities decided each prediction; more than 1 for a random model.
    black_box
        Whether the model has no gradient, so that only the attacks of a list that need none were run.
    notes
        Why the accuracy under attack may not measure robustness.
    """

    x_adv: Tensor
    y: Tensor
    success: Tensor
    prediction: Tensor
    linf: Tensor
    l2: Tensor
    distortion: Tensor
    steps: Tensor
    clean_prediction: Tensor | None = None  # None before the call ends
    zero_at_start: Tensor | None = None
    target: Tensor | None = None
    winner: Tensor | None = None
    blind: Tensor | None = None
    classes: int | None = None  # None before the call ends
    passes: int = 1
    black_box: bool = False
    notes: tuple[str, ...] = ()

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

        If it is far from 0, the loss is saturated: the attack stood still, and the accuracy under it does not
        measure robustness. Try another loss.
        """
        return None if self.zero_at_start is None else _share(self.zero_at_start)

    @property
    def blind_share(self) -> float:
        """Share of samples that were not broken and for which the attack had no gradient; 0 for black-box attacks."""
        return 0.0 if self.blind is None or not len(self) else _share(self.blind & ~self.success)

    def __repr__(self) -> str:
        broken = self.success if self.right_before is None else self.success & self.right_before
        before = "not measured" if self.clean_accuracy is None else f"{self.clean_accuracy:.1%}"
        classes = "" if self.classes is None else f", {self.classes} classes"
        rows = [
            f"{type(self).__name__}: {len(self)} images{classes}",
            f"  right before    {before}",
            f"  right after     {self.robust_accuracy:.1%}",
            f"  success         {_share(self.success):.1%}",
        ]
        if bool(broken.any()):
            linf, l2, distortion = (d[broken].median().item() for d in (self.linf, self.l2, self.distortion))
            sizes = f"linf {in_255ths(linf)}, l2 {l2:.4g}, distortion {distortion:.4g}"
            rows.append(f"  median distance {sizes} (where it succeeded)")
        if self.zero_gradient is not None:
            rows.append(f"  zero gradient   {self.zero_gradient:.1%} at the start")
        return "\n".join([*rows, *(f"  note: {note}" for note in self.notes)])

    def take(self, which: Tensor | slice) -> AttackResult:
        """Select the results of some samples.

        Parameters
        ----------
        which
            Indices, a boolean mask, or a slice.

        Returns
        -------
        AttackResult
            The results of these samples.
        """
        columns = (getattr(self, f.name) for f in fields(self))
        return AttackResult(*(column[which] if isinstance(column, Tensor) else column for column in columns))  # type: ignore[arg-type]


def in_255ths(value: float) -> str:
    """A distance as text: 8/255 for a multiple of 1/255 without a short decimal form.

    >>> in_255ths(8 / 255), in_255ths(51 / 255), in_255ths(0.12345678)
    ('8/255', '0.2', '0.1235')
    """
    k, short = 255 * value, float(f"{value:.3g}")
    plain = abs(short - value) <= 1e-6 * value or abs(k - round(k)) > 1e-3
    return f"{value:.4g}" if plain else f"{round(k)}/255"


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def measure(
    x: Tensor,
    x_adv: Tensor,
    y: Tensor,
    target: Tensor | None,
    bounds: tuple[Any, Any],
    prediction: Tensor,
    steps: Tensor,
    *,
    clean: Tensor | None = None,
    zero: Tensor | None = None,
    found: Tensor | None = None,
    winner: Tensor | None = None,
    blind: Tensor | None = None,
) -> AttackResult:
    """Make the result of moving `x` to `x_adv`; distances are computed in at least float32.

    Parameters
    ----------
    x, x_adv
        Samples before and after the attack [N, ...].
    y
        Labels, int64 [N].
    target
        Target classes, int64 [N], or None.
    bounds
        Range of the samples, (low, high).
    prediction
        The model's classes at `x_adv`, int64 [N].
    steps
        Steps or queries spent on each sample, int64 [N].
    clean
        The model's classes at `x`, int64 [N].
    zero
        Where the gradient was exactly 0 at the start, bool [N].
    found
        For minimum-norm attacks, where a point was found, bool [N]. Elsewhere the sample is reset to `x` and its
        `clean` prediction, and its distances are infinite.
    winner
        For a list of attacks, which one broke each sample, int64 [N].
    blind
        Where every gradient the attack started from was exactly 0, bool [N] (default: `zero`).

    Returns
    -------
    AttackResult
        The result.

    Examples
    --------
    >>> x = torch.zeros(2, 4)
    >>> x_adv = torch.tensor([[0.0, 0.5, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]])
    >>> y, label, found = torch.tensor([0, 0]), torch.tensor([1, 1]), torch.tensor([True, False])
    >>> r = measure(x, x_adv, y, None, (0.0, 1.0), label, y + 3, clean=y, found=found)
    >>> r.linf.tolist(), r.distortion.tolist()
    ([0.5, inf], [63.75, inf])
    >>> r
    AttackResult: 2 images
      right before    100.0%
      right after     50.0%
      success         50.0%
      median distance linf 0.5, l2 0.5, distortion 63.75 (where it succeeded)
    """
    success = prediction != y if target is None else prediction == target
    if found is not None:
        assert clean is not None
        success = found
        x_adv = torch.where(found.view(-1, *[1] * (x.ndim - 1)), x_adv, x)
        prediction = torch.where(found, prediction, clean)
    wide = torch.promote_types(x.dtype, torch.float32)
    delta = (x_adv.to(wide) - x.to(wide)).flatten(1)  # [N, D]
    linf, l2 = delta.abs().amax(1), torch.linalg.vector_norm(delta, dim=1)
    width: Any = bounds[1] - bounds[0]
    size = l2
    if isinstance(width, Tensor):  # one for each feature, 0 for one that may not change
        width, size = 1.0, torch.linalg.vector_norm(delta / width.clamp_min(torch.finfo(wide).tiny), dim=1)
    distortion = size * (255.0 / width / delta.shape[1] ** 0.5)
    if found is not None:
        linf, l2, distortion = (torch.where(found, d, torch.inf) for d in (linf, l2, distortion))
    blind = zero if blind is None else blind
    return AttackResult(x_adv, y, success, prediction, linf, l2, distortion, steps, clean, zero, target, winner, blind)


def concatenate(parts: Sequence[AttackResult]) -> AttackResult:
    """Join the results of consecutive batches."""
    if len(parts) == 1:
        return parts[0]
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(AttackResult)}
    joined = {k: torch.cat(column) for k, column in columns.items() if all(isinstance(v, Tensor) for v in column)}
    return AttackResult(**joined)  # type: ignore[arg-type]
