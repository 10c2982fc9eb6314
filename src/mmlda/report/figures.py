"""The figures of the page: matplotlib's SVG, made to live inside HTML.

Each panel is a separate drawing, so that a phone can stack them. Colours are placeholders that become the page's
CSS variables, so that a drawing follows the theme; text stays text; nothing depends on the time or the process.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 350.0, 246.0  # in CSS pixels at scale 1
INK, MUTED, RULE, PAPER = "#010101", "#010102", "#010103", "#010104"
SERIES = [f"#0200{k:02x}" for k in range(6)]
CLASSES = [f"#0300{k:02x}" for k in range(10)]
THEME = {INK: "currentColor", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--paper)"}
THEME |= {colour: f"var(--s{k})" for k, colour in enumerate(SERIES)}
THEME |= {colour: f"var(--k{k})" for k, colour in enumerate(CLASSES)}
MODEL_COLOURS = {"SR": SERIES[0], "MM-LDA": SERIES[1], "MM-LDA, true priors": SERIES[2], "SR + SAT": SERIES[2]}
MODEL_COLOURS |= {"SR + HAT": SERIES[3], "MM-LDA (Adam)": SERIES[4]}
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "mmlda", "text.parse_math": False}
STYLE |= {"axes.unicode_minus": True, "font.family": "DejaVu Sans", "legend.frameon": False, "axes.grid": True}
STYLE |= {"axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= dict.fromkeys(["font.size", "axes.labelsize"], 10.5)
STYLE |= dict.fromkeys(["xtick.labelsize", "ytick.labelsize", "legend.fontsize"], 10.0)
STYLE |= dict.fromkeys(["text.color", "axes.labelcolor"], INK)
STYLE |= dict.fromkeys(["axes.edgecolor", "xtick.color", "ytick.color"], MUTED) | {"grid.color": RULE}
STYLE |= {"axes.linewidth": 0.8, "grid.linewidth": 0.8, "lines.linewidth": 1.8, "lines.markersize": 4.5}
STYLE |= {f"{axis}tick.{kind}.size": 0.0 for axis in "xy" for kind in ("major", "minor")}


def latent(series: Mapping[str, Any], prefix: str) -> str:
    """Fig. 2: the latent features in two dimensions, one colour per class, with its number at its median."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    x, y, label = (np.asarray(series[name], dtype=float) for name in ("x", "y", "label"))
    if not x.shape == y.shape == label.shape or x.ndim != 1 or not len(x):
        raise ValueError(f"x, y and label must have one length, got {x.shape}, {y.shape} and {label.shape}")

    def draw(ax: Axes) -> None:
        for k in np.unique(label):
            rows = np.flatnonzero(label == k)
            points = np.repeat(np.column_stack([x[rows], y[rows]]), 2, axis=0)
            codes = np.tile(np.array([Path.MOVETO, Path.LINETO], dtype=np.uint8), len(rows))
            # Lines of no length with round ends: a tenth of the bytes that a thousand markers take.
            path = Path(points, codes)
            path.should_simplify = False
            look: dict[str, Any] = {"edgecolor": CLASSES[int(k) % 10], "linewidth": 4.0, "alpha": 0.85}
            ax.add_patch(PathPatch(path, fill=False, capstyle="round", **look))
        for cx, cy, k in series.get("centres") or []:
            disc = {"boxstyle": "circle,pad=0.2", "facecolor": PAPER, "edgecolor": RULE, "alpha": 0.92}
            at = (float(cx), float(cy))
            ax.text(*at, clip(plain(k)), ha="center", va="center", fontsize=11, fontweight="bold", bbox=disc)
        ax.set(xticks=[], yticks=[], xlim=_span(x), ylim=_span(y))
        ax.spines[:].set_visible(False)

    return _panel(draw, prefix, HEIGHT + 50)


def biased(values: Mapping[str, Mapping[str, float]], family: Mapping[str, str], prefix: str) -> str:
    """Fig. 3: accuracy on the class-biased sets, one mark per model: {model: {set: percent}}, {set: family}."""
    sets = list(dict.fromkeys(name for series in values.values() for name in series))
    at = {name: k for k, name in enumerate(sets)}

    def draw(ax: Axes) -> None:
        for k, name in enumerate(sets):
            there = [series[name] for series in values.values() if name in series]
            ax.plot([k, k], [min(there), max(there)], color=RULE, linewidth=2.2, zorder=1)
        for k, (model, series) in enumerate(values.items()):
            look: dict[str, Any] = {"marker": "osD^v"[k % 5], "fillstyle": "none" if k == 2 else "full"}
            look |= {"linestyle": "none", "markersize": 5.5, "color": colour(model, k + 3)}
            ax.plot([at[name] for name in series], list(series.values()), label=clip(model, 34), **look)
        if len(sets) > 8:  # twenty names do not fit a phone: the family, under its middle
            places: dict[str, list[int]] = {}
            for name in sets:
                places.setdefault(family[name], []).append(at[name])
            words = [f"{clip(name)}, {len(each)} sets" for name, each in places.items()]
            ax.set_xticks([float(np.mean(each)) for each in places.values()], words)
            for each in list(places.values())[1:]:
                ax.axvline(min(each) - 0.5, color=RULE, linewidth=1.2)
        else:
            ax.set_xticks(range(len(sets)), [clip(name, 12) for name in sets])
        ax.grid(False, axis="x")
        ax.set_ylabel("accuracy, %")
        _legend(ax)

    return _panel(draw, prefix)


def cross_validation(
    log10_c: Sequence[float], error: Sequence[float], std: Sequence[float], best: float | None, prefix: str
) -> str:
    """Fig. 5: error against log10(C), with the standard deviation over the folds and the best C."""

    def draw(ax: Axes) -> None:
        low, high = np.subtract(error, std), np.add(error, std)
        ax.fill_between(log10_c, np.maximum(low, 0), high, color=SERIES[1], alpha=0.16, linewidth=0)
        ax.plot(log10_c, error, color=SERIES[1], marker="o")
        if best is not None:
            ax.axvline(best, color=MUTED, linewidth=1.0, linestyle=(0, (3, 3)))
            place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            ax.annotate(f"best: {plain(best)}", (best, 1.0), xytext=(4, -10), color=MUTED, fontsize=10, **place)
        ax.set(xlabel="log₁₀ C", ylabel="error, %")
        ax.set_ylim(bottom=max(0.0, float(low.min()) - 0.1 * float(np.ptp(error) or 1.0)))

    return _panel(draw, prefix)


def curves(lines: Sequence[Mapping[str, Any]], prefix: str) -> str:
    """The theory: named curves in one panel; an axis is logarithmic where it spans more than two decades."""

    def draw(ax: Axes) -> None:
        styles: Any = ("-", (0, (5, 2)), (0, (2, 2)), (0, (6, 2, 1.5, 2)))
        for k, line in enumerate(lines):
            name = clip(line.get("name", ""), 34)
            ax.plot(line["x"], line["y"], color=SERIES[k % 6], label=name, linestyle=styles[k % 4])
        for key, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
            values = [v for line in lines for v in line[key]]
            if min(values) > 0 and max(values) / min(values) > 100:
                getattr(ax, f"set_{key}scale")("log")
                axis.set_major_formatter(lambda v, _: plain(v))
        ax.set(xlabel=clip(lines[0].get("xlabel", "")), ylabel=clip(lines[0].get("ylabel", ""), 28))
        if any(line.get("name") for line in lines):
            _legend(ax)

    return _panel(draw, prefix)


def accuracies(rows: Sequence[Mapping[str, Any]], model: str, prefix: str) -> str:
    """Of an audit: the accuracy under each loss and surface, as bars with the name above; intervals as whiskers."""
    sizes = {row.get("eps") for row in rows}

    def draw(ax: Axes) -> None:
        for k, row in enumerate(rows):
            value = 100 * float(row["accuracy"])
            surface = row.get("surface") if row.get("surface") != "logits" else ""  # what attacks differentiate anyway
            name = ", ".join(str(word) for word in (row.get("name"), surface) if word)
            name += f", ε = {plain(row.get('eps'))}" if len(sizes) > 1 and row.get("eps") is not None else ""
            ax.barh(k, 100.0, height=0.34, color=RULE, alpha=0.55)
            ax.barh(k, value, height=0.34, color=colour(model))
            if row.get("low") is not None and row.get("high") is not None:
                ax.plot([100 * row["low"], 100 * row["high"]], [k, k], color=INK, linewidth=1.1)
            ax.text(0, k - 0.3, clip(name, 44), fontsize=10.5, va="bottom")
            ax.text(100, k - 0.3, f"{value:.1f}%", fontsize=10.5, va="bottom", ha="right")
        ax.set(xlim=(0, 100), ylim=(len(rows) - 0.6, -0.85), yticks=[], xticks=[])
        ax.grid(False)
        ax.spines[:].set_visible(False)

    return _panel(draw, prefix, 30.0 * len(rows) + 14)


def robustness(lines: Sequence[tuple[str, Mapping[float, float], Mapping[float, float]]], prefix: str) -> str:
    """Accuracy against the perturbation, one colour per network: ours as a line, the paper's dashed."""

    def draw(ax: Axes) -> None:
        for k, (model, ours, paper) in enumerate(lines):
            look: dict[str, Any] = {"color": colour(model, k + 2), "clip_on": False}
            joined = "-" if len(ours) > 2 else "none"  # two points say nothing about what lies between them
            ax.plot(*zip(*sorted(ours.items())), label=clip(model, 24), marker="osD^v"[k % 5], linestyle=joined, **look)
            if paper:
                ring: dict[str, Any] = {"marker": "osD^v"[k % 5], "markerfacecolor": PAPER}
                ax.plot(*zip(*sorted(paper.items())), linestyle=(0, (4, 2.5)), **ring, **look)
        if any(paper for _, _, paper in lines):
            ax.plot([], [], color=MUTED, label="ours")
            ax.plot([], [], color=MUTED, linestyle=(0, (4, 2.5)), label="paper")
        ax.set(xlabel="perturbation ε", ylabel="accuracy, %", ylim=(0, 100), xlim=(0, None))
        ticks = sorted({eps for _, ours, _ in lines for eps in ours})
        if len(ticks) < 6:
            ax.set_xticks(ticks, [plain(eps) for eps in ticks])
        ax.tick_params(pad=6)  # room for markers at 0
        if len(ax.lines) > 1:
            _legend(ax)

    return _panel(draw, prefix)


def compared(rows: Sequence[tuple[str, Sequence[float], float]], model: str, prefix: str) -> str:
    """Table 2 as a picture: our accuracies and the paper's, attack by attack: (words, ours, paper)."""

    def draw(ax: Axes) -> None:
        for k, (_, ours, paper) in enumerate(rows):
            ax.plot([min(*ours, paper), max(*ours, paper)], [k, k], color=RULE, linewidth=2.2, zorder=1)
        dots: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 6.0, "clip_on": False}
        ring: dict[str, Any] = {"markerfacecolor": PAPER, "markeredgecolor": INK, "markeredgewidth": 1.2}
        ours_at = [(value, k) for k, row in enumerate(rows) for value in row[1]]
        ax.plot([row[2] for row in rows], range(len(rows)), label="paper", **dots, **ring)
        ax.plot(*zip(*ours_at), label="ours", color=colour(model), **dots)
        ax.set_yticks(range(len(rows)), [clip(row[0], 34) for row in rows])
        ax.set(xlim=(0, 100), ylim=(len(rows) - 0.4, -0.6), xlabel="accuracy, %")
        ax.tick_params(axis="y", pad=8)  # room for a dot at 0
        ax.grid(False, axis="y")
        ax.spines["left"].set_visible(False)
        _legend(ax)

    return _panel(draw, prefix, 17.0 * len(rows) + 60, width=290.0)


def colour(model: str, otherwise: int = 1) -> str:
    """A network's colour, the same in every drawing."""
    return MODEL_COLOURS.get(model, SERIES[otherwise % 6])


def plain(value: Any) -> str:
    """A number in few digits, on an axis or as a class; words are returned unchanged.

    >>> plain(0.0001), plain(3.0), plain(1e6), plain("cat")
    ('0.0001', '3', '1e6', 'cat')
    """
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:.4g}".replace("e+0", "e").replace("e-0", "e-").replace("-", "−")


def clip(text: Any, most: int = 40) -> str:
    """Words on one line that fit a drawing."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _span(values: np.ndarray) -> tuple[float, float]:
    """Limits with a little room."""
    room = 0.05 * (float(np.ptp(values)) or 1.0)
    return float(values.min()) - room, float(values.max()) + room


def _legend(ax: Axes) -> None:
    """Place the legend above the axes, where it covers nothing."""
    lengths = [len(label) for label in ax.get_legend_handles_labels()[1]]
    columns = 3 if sum(lengths) < 44 else 2 if max(lengths) < 22 else 1
    space = {"borderaxespad": 0.2, "handlelength": 1.6, "columnspacing": 1.2}
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, **space)


def _panel(draw: Any, prefix: str, height: float = HEIGHT, width: float = WIDTH) -> str:
    """One pair of axes, drawn and made ready for a page."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")  # only measured here: the reader's fonts draw it
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        draw(figure.add_subplot())
        return _inline(figure, prefix)


def _inline(figure: Figure, prefix: str) -> str:
    """The figure as an `<svg>` for use inside HTML: unique ids, the page's colours and fonts, short numbers."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    view = re.search(r'viewBox="([^"]*)"', text)
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.S)  # it would style the whole page
    body = re.sub(r"<!--.*?-->", "", body, flags=re.S)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', body))
    body = re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], prefix, used), body)  # tags alone: texts stay as they are
    body = re.sub(r">\s+<", "><", body).strip()
    return f'<svg class="plot" viewBox="{view[1] if view else ""}" aria-hidden="true" focusable="false">{body}</svg>'


def _tag(tag: str, prefix: str, used: set[str]) -> str:
    """One tag: ids that cannot clash with another drawing's, colours and fonts of the page, no needless bytes."""
    tag = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", tag)
    tag = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", tag.replace("xlink:href", "href"))
    tag = re.sub(r"((?:fill|stroke): )(#\w{6})", lambda m: m[1] + THEME.get(m[2], m[2]), tag)
    tag = re.sub(r"font: ((?:[a-z]+ |\d+ )*)([\d.]+px)[^;\"]*", _font, tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r"\d+\.\d{2,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), tag)
    tag = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", tag)
    return re.sub(r"\s*\n\s*", "", tag)


def _font(found: re.Match[str]) -> str:
    """The size and the weight; the family is the page's."""
    return f"font-size: {found[2]}" + ("; font-weight: bold" if "bold" in found[1] or "700" in found[1] else "")
