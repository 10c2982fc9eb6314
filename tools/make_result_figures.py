"""Draw the README's two figures from the files in results/: `python tools/make_result_figures.py`.

robustness.svg: accuracy under BIM against the perturbation, ours and the paper's. distortions.svg: how far C&W moves
each image of CIFAR-10, with the mean of ours and of the paper.
"""

from pathlib import Path

import numpy as np
from make_theory_figures import FIGURES, plt, save
from safetensors.torch import load

from mmlda.paper import numbers
from mmlda.paper.rows import MMLDA, SR
from mmlda.report.entries import percent
from mmlda.results import load_all

RESULTS = Path(__file__).parent.parent / "results"
COLOURS = {SR: "#3b6fb6", MMLDA: "#d1495b"}


def robustness(folder: Path = FIGURES) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    results = load_all(RESULTS)
    for ax, data, title in zip(panels, ("cifar10", "mnist"), ("CIFAR-10", "MNIST")):
        for row, colour in COLOURS.items():
            cells = [r for r in results if (r.kind, r.attack, r.seed, r.dataset) == ("table2", "BIM", 0, data)]
            cells = sorted((r for r in cells if row.has(r)), key=lambda r: r.eps)
            eps, name = [r.eps for r in cells], row.label(data)
            ours = [cells[0].numbers["clean_accuracy"], *(r.value for r in cells)]
            paper = [1 - numbers.TABLE1[data, row], *(numbers.table2(data, row, "BIM", e) for e in eps)]
            for shares, style, whose in ((ours, "o-", "here"), (paper, "x--", "paper")):
                percents = [percent(share) for share in shares]
                ax.plot([0, *eps], percents, style, color=colour, label=f"{name}, {whose}")
        ax.set(xlabel="largest change of a pixel (pixels are 0 to 1)", title=title, ylim=(-3, 103))
    panels[0].set_ylabel("accuracy under BIM, %")
    panels[0].legend(loc="center right")
    save(figure, "robustness", folder)


def distortions(folder: Path = FIGURES) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    results = [r for r in load_all(RESULTS) if (r.kind, r.dataset, r.seed) == ("table3", "cifar10", 0)]
    bins = np.linspace(0, 3, 61)
    for ax, target in zip(panels, ("untargeted", "random")):
        for row, colour in COLOURS.items():
            (result,) = (r for r in results if row.has(r) and r.target == target)
            name = row.label("cifar10")
            columns = load(result.read_outcomes(RESULTS))
            moved = columns["distortion"][columns["success"] & (columns["distortion"] > 0)].numpy()
            ax.hist(moved, bins, color=colour, alpha=0.45, histtype="stepfilled")
            ax.axvline(result.value, color=colour, label=f"{name}, mean here: {result.value:.2f}")
            paper = numbers.TABLE3["cifar10", row]
            ax.axvline(paper, color=colour, linestyle="--", label=f"{name}, mean in the paper: {paper:.2f}")
        title = "any other class" if target == "untargeted" else "a random class"
        ax.set(xlabel="C&W's smallest distortion of an image (0 to 255, RMS)", xlim=(0, 3), title=title)
        ax.legend(loc=(0.3, 0.55), fontsize=8)
    panels[0].set_ylabel("images of CIFAR-10")
    save(figure, "distortions", folder)


if __name__ == "__main__":
    robustness()
    distortions()
