"""The whole way in a minute: both heads on the embedded digits, trained, attacked, and judged by the worst case."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmlda import attacks
from mmlda.checkpoints import versions
from mmlda.data import ImageData, load
from mmlda.distribution import latent_fit
from mmlda.evaluation import accuracy
from mmlda.files import write_json, write_whole
from mmlda.head import MaxMahalanobisHead
from mmlda.models import Classifier, build
from mmlda.recipes import RECIPES, network
from mmlda.training import fit

__all__ = ["demo"]

HEADS = {"softmax": "digits-sr", "mmlda": "digits-mmlda"}
TITLES = {"softmax": "softmax (SR)", "mmlda": "MM-LDA"}
EPS = (0.04, 0.12, 0.20)  # the paper's
ATTACKED = 120  # test images; the worst case is a search, and this is to take a minute


def demo(out: str | Path = "demo", *, show: bool = True) -> dict[str, Any]:
    """Train, attack, and write `out/demo.json` and `out/demo.png`; the numbers as a dictionary."""
    folder = Path(out)
    train, test = load("digits")
    result: dict[str, Any] = {
        "data": "digits",
        "n": len(test),
        "attacked": ATTACKED,
        "seed": 0,
        "steps": RECIPES["digits-sr"].steps,
        "versions": versions(torch.device("cpu")),
        "heads": {},
    }
    models: dict[str, Classifier] = {}
    for head, name in HEADS.items():
        model = models[head] = build(network(head, "digits"), seed=0)
        if show:
            print(f"training {TITLES[head]} ...", flush=True)
        fit(model, train, RECIPES[name], show=False)
        if show:
            print(f"attacking {TITLES[head]} ...", flush=True)
        result["heads"][head] = _measure(model, test)
    fixed = models["mmlda"].head
    assert isinstance(fixed, MaxMahalanobisHead)
    z = models["mmlda"].features(test.pixels()).detach()
    result["latent_fit"] = str(latent_fit(z, test.labels, fixed.means))
    write_json(folder / "demo.json", result)
    write_whole(folder / "demo.png", _picture(models, train, test))
    return result


def _measure(model: nn.Module, test: ImageData) -> dict[str, Any]:
    x, y = test.pixels(slice(ATTACKED)), test.labels[:ATTACKED]
    table: dict[str, Any] = {"clean": accuracy(model, test).accuracy}
    for eps in EPS:
        row: dict[str, float | None] = {}
        for kind in (attacks.FGSM, attacks.BIM, attacks.WorstCase):
            attacked = kind(eps=eps)(model, x, y)
            row[kind.__name__] = (attacked.prediction == y).double().mean().item()
            if kind is attacks.BIM:
                row["zero_gradient"] = attacked.zero_gradient
        table[f"{eps:g}"] = row
    return table


def lines(result: dict[str, Any]) -> list[str]:
    """The table, and what to make of it."""
    text = [f"{'accuracy (%)':14s} {'clean':>7s}" + "".join(f"{kind:>7s}{eps:>5s}" for eps in map("{:g}".format, EPS)
            for kind in ("FGSM", "BIM", "worst"))]  # fmt: skip
    for head, title in TITLES.items():
        table = result["heads"][head]
        cells = [table[f"{eps:g}"][kind] for eps in EPS for kind in ("FGSM", "BIM", "WorstCase")]
        text.append(f"{title:14s} {100 * table['clean']:7.1f}" + "".join(f"{100 * cell:12.1f}" for cell in cells))
    blind = {head: max(result["heads"][head][f"{eps:g}"]["zero_gradient"] for eps in EPS) for head in TITLES}
    text.append("")
    worst = {head: result["heads"][head]["0.2"]["WorstCase"] for head in TITLES}
    text.append(f"At 0.2 the worst case leaves {100 * worst['softmax']:.1f}% (softmax) and {100 * worst['mmlda']:.1f}% "
                "(MM-LDA): what single attacks leave above that is what they missed.")  # fmt: skip
    if max(blind.values()) > 0:
        shares = f"softmax {100 * blind['softmax']:.1f}%, MM-LDA {100 * blind['mmlda']:.1f}%"
        text.append("Share of images whose cross-entropy gradient is exactly zero in float32, so that FGSM and BIM "
                    f"stand still: {shares}.")  # fmt: skip
    text.append(result["latent_fit"])
    return text


def _picture(models: dict[str, Classifier], train: ImageData, test: ImageData) -> bytes:
    """Latent features of both heads in their two main directions, and adversarial images beside their originals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    for axis, (head, model) in zip(axes, models.items()):
        z = model.features(test.pixels()).detach()
        flat = (z - z.mean(0)) @ torch.linalg.svd(z - z.mean(0), full_matrices=False)[2][:2].T  # [N, 2]
        axis.scatter(*flat.T.numpy(), c=test.labels.numpy(), cmap="tab10", s=6)
        for k in range(test.num_classes):
            centre = flat[test.labels == k].median(0).values
            axis.text(*centre.tolist(), str(k), ha="center", va="center", weight="bold")
        axis.set(title=f"latent features, {TITLES[head]}", xticks=[], yticks=[])
    x, y = test.pixels(slice(5)), test.labels[:5]
    rows = [x, *(attacks.BIM(eps=0.2)(model, x, y).x_adv for model in models.values())]
    tiles = [nn.functional.pad(row[:, 0], (1, 1, 1, 1), value=1.0) for row in rows]  # [5, 10, 10], white edges
    picture = torch.cat([torch.cat(list(row), dim=1) for row in tiles])
    axes[2].imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1)
    axes[2].set(title="digits; BIM at 0.2 on SR and on MM-LDA", xticks=[], yticks=[])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
