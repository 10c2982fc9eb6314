"""Figures of the theorems and of means. matplotlib is imported on first use."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mmlda._utils.figures import save_figure
from mmlda.theory.means import generate_opt_means
from mmlda.theory.theorems import bayes_error, expected_distance, robustness_bound


def theory_curves(path: str | Path, num_classes: int, C: float) -> Path:
    """Plot distances to the boundary, Theorem 3's bound and the Bayes error against C; a line marks the given C."""
    from matplotlib.figure import Figure

    L, Cs = num_classes, [10 ** (k / 10) for k in range(-10, 41)]
    delta = [(2 * c * L / (L - 1)) ** 0.5 for c in Cs]
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.loglog(Cs, [float(expected_distance(d)) for d in delta], label="E[d] between two classes")
    left.loglog(Cs, [float(robustness_bound(L, c)) for c in Cs], "--", label="Theorem 3: bound on min Delta / 2")
    left.set(xlabel="C", ylabel="distance to the boundary", title=f"{L} classes")
    errors = [float(bayes_error(generate_opt_means(C=c, p=max(L - 1, 1), L=L))) for c in Cs[:31]]
    right.semilogx(Cs[:31], errors)
    right.set(xlabel="C", ylabel="Bayes error", title="how often the best classifier errs")
    for axis in (left, right):
        axis.axvline(C, color="0.6", linewidth=1, linestyle=":", label=f"C = {C:g}")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    return save_figure(path, figure)


def means_picture(path: str | Path, mu: Tensor) -> Path:
    """Plot the cosines between means as a matrix and as a histogram."""
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
    return save_figure(path, figure)
