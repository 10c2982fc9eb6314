"""The figure of an audit: accuracy by attack, accuracy against eps, and the gaps between the top two logits."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmlda._utils.files import write_whole
from mmlda.audit.checks import Evidence
from mmlda.audit.profile import UNDERFLOW, Gaps
from mmlda.audit.text import attack_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "save"]


def draw(evidence: Evidence, title: str) -> Figure:
    """Three panels under a title."""
    from matplotlib.figure import Figure

    within = [trial for trial in evidence.trials if trial.eps in (0.0, evidence.settings.eps)]
    figure = Figure(figsize=(11.5, 0.24 * len(within) + 1.6), layout="constrained")
    bars, curve, gaps = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    _accuracies(bars, evidence)
    _curve(curve, evidence)
    _gaps(gaps, evidence.profile.gaps)
    figure.suptitle("\n".join(textwrap.wrap(title, 140)), fontsize=10)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure, as SVG if the name ends so and as PNG otherwise."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if Path(path).suffix == ".svg" else "png", dpi=120)
    return write_whole(path, buffer.getvalue())


def _accuracies(ax: Axes, e: Evidence) -> None:
    within = [trial for trial in e.trials if trial.eps in (0.0, e.settings.eps)]
    values = np.array([trial.share for trial in within])
    low, high = np.array([trial.interval for trial in within]).T
    names = [f"{attack_name(trial)} ({trial.surface})" for trial in within]
    errors = 100 * np.stack([values - low, high - values]).clip(0)
    ax.barh(names, 100 * values, xerr=errors, color="tab:blue", ecolor="0.4", height=0.7)
    ax.invert_yaxis()
    ax.tick_params(axis="y", labelsize=7.5)
    ax.set(xlim=(0, 102), xlabel=f"accuracy (%) at eps = {e.settings.eps:g}, 95% interval")


def _curve(ax: Axes, e: Evidence) -> None:
    points = [trial for trial in e.trials if trial.kind in ("clean", "curve", "unbounded")]
    eps = e.settings.eps
    ax.plot([trial.eps for trial in points], [100 * trial.share for trial in points], marker="o", color="tab:red")
    ax.set_xscale("symlog", linthresh=eps / 4)
    ticks = [0.0, eps, 1.0]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    ax.minorticks_off()
    ax.set(ylim=(-3, 103), xlabel="eps", ylabel="accuracy (%)", title="BIM against eps")


def _gaps(ax: Axes, gaps: Gaps) -> None:
    ax.stairs(gaps.counts, gaps.edges, fill=True, color="tab:green")
    if gaps.edges[-1] > UNDERFLOW:
        ax.axvline(UNDERFLOW, color="0.3", linestyle=":")
    ax.set(xlabel="nats", ylabel="images", title="gap of the top two logits")
