"""The figure of an audit: accuracy by attack, accuracy against eps, and the gaps between the top two logits."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from mmlda._utils.text import eps_text
from mmlda.audit.checks import Evidence
from mmlda.audit.profile import UNDERFLOW
from mmlda.audit.text import attack_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(e: Evidence, title: str) -> Figure:
    """Three panels under a title."""
    from matplotlib.figure import Figure

    eps = e.settings.eps
    within = [trial for trial in e.trials if trial.eps in (0.0, eps)]
    figure = Figure(figsize=(11.5, 0.24 * len(within) + 1.6), layout="constrained")
    figure.suptitle("\n".join(textwrap.wrap(title, 140)), fontsize=10)
    bars, curve, gaps = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))

    values = np.array([trial.share for trial in within])
    low, high = np.array([trial.interval for trial in within]).T
    names = [f"{attack_name(trial)} ({trial.surface})" for trial in within]
    errors = 100 * np.stack([values - low, high - values]).clip(0)
    bars.barh(names, 100 * values, xerr=errors, color="tab:blue", ecolor="0.4", height=0.7)
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=7.5)
    bars.set(xlim=(0, 102), xlabel=f"accuracy (%) at eps = {eps_text(eps)}, 95% interval")

    points = e.curve()
    curve.plot(points["eps"], 100 * np.array(points["accuracy"]), marker="o", color="tab:red")
    curve.set_xscale("symlog", linthresh=eps / 4)
    curve.set_xticks([0.0, eps, 1.0], ["0", f"{eps_text(eps)}", "1"], minor=False)
    curve.minorticks_off()
    curve.set(ylim=(-3, 103), xlabel="eps", ylabel="accuracy (%)", title="BIM against eps")

    edges = e.profile.gaps["edges"]
    gaps.stairs(e.profile.gaps["counts"], edges, fill=True, color="tab:green")
    if edges[-1] > UNDERFLOW:
        gaps.axvline(UNDERFLOW, color="0.3", linestyle=":")
    gaps.set(xlabel="nats", ylabel="images", title="gap of the top two logits")
    return figure
