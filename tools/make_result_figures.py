"""Draw the README's two figures from the files in results/: `python tools/make_result_figures.py`.

robustness.svg: accuracy under BIM against the perturbation, ours and the paper's. distortions.svg: how far C&W moves
each image of CIFAR-10, with the mean of ours and of the paper.
"""

from pathlib import Path

import numpy as np
from make_theory_figures import FIGURES, plt, save
from safetensors.torch import load

from mmlda.paper import numbers
from mmlda.results import load_all

RESULTS = Path(__file__).parent.parent / "results"
COLOURS = {"SR": "#3b6fb6", "MM-LDA": "#d1495b"}


def robustness(folder: Path = FIGURES) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    results = load_all(RESULTS)
    for ax, data, title in zip(panels, ("cifar10", "mnist"), ("CIFAR-10", "MNIST")):
        for row, colour in COLOURS.items():
            cells = [r for r in results if r.kind == "table2" and r.cell.get("attack") == "BIM" and r.seed == 0
                     and (r.cell["data"], r.cell["model"]) == (data, row)]  # fmt: skip
            ours = {r.cell["eps"]: r.value for r in cells}
            clean = 100 * float(cells[0].numbers["clean_accuracy"])
            eps = sorted(ours)
            ax.plot([0, *eps], [clean, *(ours[e] for e in eps)], "o-", color=colour, label=f"{row}, here")
            paper = [numbers.table2(data, row, "BIM", e) for e in eps]
            ax.plot([0, *eps], [100 - numbers.TABLE1[data, row], *paper], "x--", color=colour, label=f"{row}, paper")
        ax.set(xlabel="largest change of a pixel (pixels are 0 to 1)", title=title, ylim=(-3, 103))
    panels[0].set_ylabel("accuracy under BIM, %")
    panels[0].legend(loc="center right")
    save(figure, "robustness", folder)


def distortions(folder: Path = FIGURES) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    results = {r.name: r for r in load_all(RESULTS)}
    bins = np.linspace(0, 3, 61)
    for ax, target in zip(panels, ("untargeted", "random")):
        for row, colour in COLOURS.items():
            result = results[f"table3-cifar10-{row.lower()}-{target}-0"]
            columns = load(result.read_outcomes(RESULTS))
            moved = columns["distortion"][columns["success"] & (columns["distortion"] > 0)].numpy()
            ax.hist(moved, bins, color=colour, alpha=0.45, histtype="stepfilled")
            ax.axvline(result.value, color=colour, label=f"{row}, mean here: {result.value:.2f}")
            paper = numbers.TABLE3["cifar10", row]
            ax.axvline(paper, color=colour, linestyle="--", label=f"{row}, mean in the paper: {paper:.2f}")
        ax.set(xlabel="C&W's smallest distortion of an image (0 to 255, RMS)", xlim=(0, 3),
               title="any other class" if target == "untargeted" else "a random class")  # fmt: skip
        ax.legend(loc=(0.3, 0.55), fontsize=8)
    panels[0].set_ylabel("images of CIFAR-10")
    save(figure, "distortions", folder)


if __name__ == "__main__":
    robustness()
    distortions()
