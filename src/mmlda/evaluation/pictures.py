"""Pictures of adversarial images and of accuracies. matplotlib is imported where it draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmlda._utils.figures import save_figure
from mmlda.data import ImageData

__all__ = ["accuracy_bars", "adversarial_examples"]


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
    return save_figure(path, figure)


def accuracy_bars(rows: list[tuple[str, float, tuple[float, float]]]) -> Any:
    """Horizontal bars of (name, accuracy, interval), shown in percent: a matplotlib `Figure`."""
    from matplotlib.figure import Figure

    names, values = [name for name, _, _ in rows], [100 * value for _, value, _ in rows]
    below = [value - 100 * low for value, (_, _, (low, _)) in zip(values, rows)]
    above = [100 * high - value for value, (_, _, (_, high)) in zip(values, rows)]
    figure = Figure(figsize=(6.4, 1.0 + 0.4 * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.barh(names, values, xerr=[below, above], color="#4c78a8", ecolor="0.3", capsize=3)
    axis.set(xlim=(0, 100), xlabel="accuracy (%), 95% interval")
    axis.invert_yaxis()  # the clean images first
    return figure
