"""Pictures of attacks, of the theorems and of means. matplotlib is imported where it draws."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmlda import theory
from mmlda._utils.files import write_whole
from mmlda.data import ImageData
from mmlda.theory.means import generate_opt_means

__all__ = ["adversarial_examples", "means_picture", "theory_curves"]


def adversarial_examples(
    path: str | Path, data: ImageData, x_adv: Tensor, clean: Tensor, prediction: Tensor, count: int = 8
) -> Path:
    """Originals, noises (x* - x) / 2 and adversarial images, in three rows, as a PNG file.

    Shown are images that were right and are broken, of different classes where there are; where an attack broke
    none, images that it left.
    """
    from matplotlib.figure import Figure

    labels = data.labels.cpu()
    broken = (clean == labels) & (prediction != labels)
    rows = (broken if broken.any() else clean == labels).nonzero().flatten()
    if not len(rows):
        rows = torch.arange(len(labels))
    seen = torch.zeros(data.num_classes, dtype=torch.int64)
    turn = []  # the how-manieth of its class an image is: first one of each class, then the second, ...
    for k in labels[rows].tolist():
        turn.append(int(seen[k]))
        seen[k] += 1
    rows = rows[torch.tensor(turn).argsort(stable=True)][:count]
    x = data.pixels(rows).cpu()
    moved = x_adv[rows].float().cpu()
    figure = Figure(figsize=(1.25 * len(rows) + 0.9, 4.3), layout="constrained")
    axes = figure.subplots(3, len(rows), squeeze=False)
    scale = float((moved - x).abs().max()) or 1.0
    for column, row in enumerate(rows.tolist()):
        pictures = (x[column], 0.5 + (moved - x)[column] / (2 * scale), moved[column])
        words = (data.classes[int(labels[row])], "", data.classes[int(prediction[row])])
        for axis, picture, word in zip(axes[:, column], pictures, words):
            image = picture.permute(1, 2, 0).clamp(0, 1).numpy()
            axis.imshow(image[..., 0] if image.shape[2] == 1 else image, cmap="gray", vmin=0, vmax=1)
            axis.set_title(word, fontsize=9)
            axis.set_xticks([])
            axis.set_yticks([])
    for axis, word in zip(axes[:, 0], ("image", f"noise,\n±{scale:.3f} shown\nfull scale", "adversarial")):
        axis.set_ylabel(word, fontsize=9)
    return save(path, figure)


def save(path: str | Path, figure: Any) -> Path:
    """A figure as a file, whole or not at all; the format is its ending's."""
    kind = Path(path).suffix[1:].lower()
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"path = {str(path)!r}: expected a .png, .svg or .pdf file")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=120)
    return write_whole(path, buffer.getvalue())


def theory_curves(path: str | Path, num_classes: int, C: float) -> Path:
    """Distances to the boundary, Theorem 3's bound and the Bayes error against C; a line marks the C asked about."""
    from matplotlib.figure import Figure

    L, Cs = num_classes, [10 ** (k / 10) for k in range(-10, 41)]
    delta = [(2 * c * L / (L - 1)) ** 0.5 for c in Cs]
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.loglog(Cs, [float(theory.expected_distance(d)) for d in delta], label="E[d] between two classes")
    left.loglog(Cs, [float(theory.robustness_bound(L, c)) for c in Cs], "--", label="Theorem 3: bound on min Delta / 2")
    left.set(xlabel="C", ylabel="distance to the boundary", title=f"{L} classes")
    errors = [float(theory.bayes_error(generate_opt_means(C=c, p=max(L - 1, 1), L=L))) for c in Cs[:31]]
    right.semilogx(Cs[:31], errors)
    right.set(xlabel="C", ylabel="Bayes error", title="how often the best classifier errs")
    for axis in (left, right):
        axis.axvline(C, color="0.6", linewidth=1, linestyle=":", label=f"C = {C:g}")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    return save(path, figure)


def means_picture(path: str | Path, mu: Tensor) -> Path:
    """The cosines between means, pair by pair, and how they are spread."""
    from matplotlib.figure import Figure

    unit = (mu / mu.norm(dim=1, keepdim=True)).double().cpu()
    cosines = unit @ unit.T  # [L, L]
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = left.imshow(cosines.numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
    figure.colorbar(shown, ax=left, label="cosine")
    left.set(title=f"{len(mu)} means in {mu.shape[1]} dimensions", xlabel="class", ylabel="class")
    apart = cosines[~torch.eye(len(mu), dtype=torch.bool)]
    right.hist(apart.numpy(), bins=40, range=(-1.0, 1.0))
    largest = float(apart.max())
    right.axvline(largest, color="0.3", linewidth=1, linestyle=":", label=f"largest {largest:.4f}")
    right.set(xlabel="cosine between two means", ylabel="pairs (each counted twice)")
    right.legend(frameon=False)
    return save(path, figure)
