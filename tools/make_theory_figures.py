"""Draw the plots of docs/theory.md and docs/how-to/many-classes.md: `python tools/make_theory_figures.py`.

They are SVG files under docs/figures/. Every curve comes from the functions of `mmlda.theory`. Takes a few minutes,
most of it for the optimised means.
"""

import math
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

import mmlda
from mmlda import theory
from mmlda.theory.bounds import welch_bound
from mmlda.theory.codes import binary_code
from mmlda.theory.optimiser import largest_cosine, optimise

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
plt.rcParams.update({"svg.hashsalt": "mmlda", "font.size": 9, "figure.constrained_layout.use": True})
plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})


def save(figure: plt.Figure, name: str, folder: Path = FIGURES) -> None:
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})  # no date: the same plot is the same file
    plt.close(figure)


def efficiency() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    delta = np.linspace(0, 6, 200)
    table = {0: 1, 0.5: 1, 1: 0.995, 1.5: 0.968, 2: 0.899, 2.5: 0.786, 3: 0.641, 3.5: 0.486, 4: 0.343}
    left.plot(delta, theory.relative_efficiency(0.0, delta, 1), label="equal priors, every p")
    left.plot(table.keys(), table.values(), "k.", label="Efron (1975)")
    left.set(xlabel="Δ", ylabel="Eff", title="Efficiency against distance")
    left.legend()
    pi_1 = np.linspace(0.02, 0.98, 241)
    for p in (1, 2, 8, 64, math.inf):
        curve = theory.relative_efficiency(np.log(pi_1 / (1 - pi_1)), 3.0, p)
        right.plot(pi_1, curve, label=f"p = {'∞' if p == math.inf else p}")
    right.set(xlabel="π₁", ylabel="Eff", title="Δ = 3: biased priors need not lower it")
    right.legend(ncols=2)
    save(figure, "efficiency")


def distance() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    delta = np.linspace(0.05, 6, 400)
    for zeta in (0.0, 1.0, 3.0, -1.0):
        left.plot(delta, theory.expected_distance(delta, zeta), label=f"ζ = {zeta:g}")
    left.plot(delta, delta / 2, "k:", label="Δ/2")
    left.set(xlabel="Δ", ylabel="E[d]", title="Distance to the boundary", ylim=(0, 6))
    left.legend()
    printed = _printed_derivative(delta, 1.0)
    right.plot(delta, theory.expected_distance_derivative(delta, 1.0), label="ζ = 1")
    right.plot(delta, printed, "--", label="as printed")
    right.axvline(math.sqrt(2), color="k", lw=0.8, ls=":", label="|ζ| = Δ²/2")
    right.set(xlabel="Δ", ylabel="dE[d]/dΔ", title="Its derivative", ylim=(-2, 2))
    right.legend()
    save(figure, "distance")


def _printed_derivative(delta: np.ndarray, zeta: float) -> np.ndarray:
    """The appendix's third line, with its flipped sign inside Phi: never negative."""
    slope = 0.5 - zeta / delta**2
    inside = np.array([math.erf(a / math.sqrt(2)) for a in delta * slope])
    return inside * slope


def radicand() -> None:
    """1 - ||mu_L||^2 in the pseudo-code before its last square root, by number of classes."""
    figure, axis = plt.subplots(figsize=(8, 2.6))
    sizes = np.arange(2, 121)
    for dtype, marker in ((np.float32, "."), (np.float64, "x")):
        left = np.array([_last_radicand(L, dtype) for L in sizes]) / np.finfo(dtype).eps
        axis.plot(sizes, left, marker, ms=4, label=f"{dtype.__name__}, NaN for {np.mean(left < 0):.0%} of these L")
    axis.axhline(0, color="k", lw=0.8)
    axis.set(xlabel="L", ylabel="(1 − ‖μ_L‖²) / eps", title="Under the root of entry (L, L) in Algorithm 1")
    axis.legend()
    save(figure, "radicand")


def _last_radicand(L: int, dtype: type) -> float:
    mu = np.zeros((L, L), dtype)
    mu[0, 0] = 1
    for i in range(1, L):
        for j in range(i):
            mu[i, j] = -(1 + mu[i] @ mu[j] * dtype(L - 1)) / (mu[j, j] * dtype(L - 1))
        radicand = dtype(1) - mu[i] @ mu[i]
        if i < L - 1:
            mu[i, i] = np.sqrt(radicand)
    return float(radicand)


def scale() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    C = np.geomspace(0.1, 100, 200)
    for precision in (1.0, 2.0):
        left.loglog(C, theory.soft_target_gap(10, C, precision), label=f"precision {precision:g}")
    left.axhline(1e-8, color="k", lw=0.8, ls=":")
    left.axvline(10, color="k", lw=0.8, ls=":")
    left.set(xlabel="C", ylabel="gap", ylim=(1e-16, 1.5), title="One-hot against soft target, L = 10")
    left.legend()
    for L in (2, 10, 100):
        error = [theory.bayes_error(mmlda.generate_opt_means(c, L, L)).item() for c in C]
        right.loglog(C, error, label=f"L = {L}")
    right.set(xlabel="C", ylabel="Bayes error", ylim=(1e-13, 1.5), title="Bayes error of the distribution")
    right.legend()
    save(figure, "scale")


def cosines() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    for axis, p, sizes in ((left, 3, range(2, 25)), (right, 16, [*range(2, 33, 2), 36, 40, 48, 64, 80])):
        reached = [mmlda.max_cosine(mmlda.separated_means(L, p)) for L in sizes]
        axis.plot(sizes, reached, "o", ms=3, label="separated_means")
        axis.plot(sizes, [mmlda.cosine_bound(L, p) for L in sizes], "k-", lw=0.9, label="Rankin, Levenshtein")
        axis.plot(sizes, [welch_bound(L, p) for L in sizes], ":", label="Welch (lines)")
        axis.set(xlabel="L", ylabel="largest cosine", ylim=(-0.6, 0.8), title=f"p = {p}")
    left.legend()
    save(figure, "cosines")


def many_classes() -> None:
    """Largest cosine and approximate robustness in 64 dimensions, from a few classes to a hundred thousand."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6))
    p = 64
    sizes = np.unique(np.geomspace(2, 100_000, 120).astype(int))
    curves = {"simplex": [], "cross-polytope": [], "Kerdock": [], "Delsarte–Goethals": []}
    for L in sizes:
        if L <= 2 * p:
            name, cosine = ("simplex", -1 / (L - 1)) if L <= p + 1 else ("cross-polytope", 0.0)
        else:
            code = binary_code(int(L), p)
            name, cosine = code.name.replace("-", "–"), code.max_cosine
        curves[name].append((L, cosine))
    curves["optimiser"] = [(L, largest_cosine(optimise(L, p, 0, -1.0))) for L in (150, 200, 300, 500, 800)]
    rng = np.random.default_rng(0)
    curves["random directions"] = [
        (L, mmlda.max_cosine(rng.standard_normal((L, p)))) for L in (3, 10, 30, 100, 300, 1000, 3000)
    ]
    for name, points in curves.items():
        L, cosine = np.array(points).T
        style = "o" if name == "optimiser" else "--" if name == "random directions" else "-"
        left.semilogx(L, cosine, style, ms=3, label=name)
        right.semilogx(L, 10 * np.sqrt((1 - cosine) / 2), style, ms=3)
    bound = np.array([mmlda.cosine_bound(int(L), p) for L in sizes])
    left.semilogx(sizes, bound, "k-", lw=0.9, label="Rankin, Levenshtein")
    left.semilogx(sizes, [welch_bound(int(L), p) for L in sizes], "k:", label="Welch (lines)")
    orthoplex = sizes[sizes > p * (p + 1)]
    left.semilogx(orthoplex, np.full(len(orthoplex), p**-0.5), "k--", lw=0.9, label="orthoplex (lines)")
    left.set(xlabel="L", ylabel="largest cosine", ylim=(-0.3, 0.75), title="p = 64")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7)
    right.semilogx(sizes, 10 * np.sqrt((1 - bound) / 2), "k-", lw=0.9)
    right.set(xlabel="L", ylabel="min Δ / 2", title="Approximate robustness, C = 100", ylim=(3.5, 9))
    save(figure, "many-classes")


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    for figure in (efficiency, distance, radicand, scale, cosines, many_classes):
        figure()
        print(f"{FIGURES.name}/{figure.__name__.replace('_', '-')}.svg")


if __name__ == "__main__":
    main()
