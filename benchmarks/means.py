"""Algorithm 1 in closed form beside the paper's pseudo-code.

    python benchmarks/means.py --out benchmarks/results/means.json

The pseudo-code is run as it is written: for every i and every j < i, one entry from the inner product of two vectors of
length p (NumPy's), then the square root on the diagonal, then the scaling. Each pair times both once, ours after theirs
and before it in turn; the ratio is the median over the pairs. The largest error of the Gram matrix, and whether entry
(L, L) is a number, are reported for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import mmlda
from mmlda.results.provenance import measured_on


def pseudo_code(C: float, p: int, L: int) -> np.ndarray:
    mu = np.zeros((L, p))
    mu[0, 0] = 1.0
    for i in range(1, L):
        for j in range(i):
            mu[i, j] = -(1 + np.dot(mu[i], mu[j]) * (L - 1)) / (mu[j, j] * (L - 1))
        with np.errstate(invalid="ignore"):  # at i = L the number under the root is a rounding error of either sign
            mu[i, i] = np.sqrt(1 - np.dot(mu[i], mu[i]))
    for k in range(L):
        mu[k] = np.sqrt(C) * mu[k]
    return mu


def closed_form(C: float, p: int, L: int) -> np.ndarray:
    return mmlda.generate_opt_means(C, p, L).numpy()


def seconds(function: Callable[[float, int, int], np.ndarray], C: float, p: int, L: int) -> float:
    begin = time.perf_counter()
    function(C, p, L)
    return time.perf_counter() - begin


def quality(mu: np.ndarray, C: float) -> dict:
    L = len(mu)
    target = np.full((L, L), C / (1 - L))
    np.fill_diagonal(target, C)
    return {
        "gram_error_over_C": str((np.abs(mu @ mu.T - target) / C).max()),  # text: JSON has no NaN
        "last_entry": str(mu[L - 1, L - 1]),
    }


def compare(C: float, p: int, L: int, pairs: int) -> dict:
    contenders = {"closed_form": closed_form, "pseudo_code": pseudo_code}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    closed_form(C, p, L)  # warm up
    for pair in range(pairs):
        for name in list(contenders)[:: 1 if pair % 2 else -1]:
            times[name].append(seconds(contenders[name], C, p, L))
    ratios = [theirs / ours for ours, theirs in zip(times["closed_form"], times["pseudo_code"])]
    return {
        "num_classes": L,
        "dim": p,
        "C": C,
        "pairs": pairs,
        "seconds": {name: statistics.median(t) for name, t in times.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "quality": {name: quality(function(C, p, L), C) for name, function in contenders.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    row = compare(100.0, options.dim, options.num_classes, options.pairs)
    print(f"Algorithm 1, L = {row['num_classes']}, p = {row['dim']}, median of {row['pairs']} pairs")
    for name, value in row["seconds"].items():
        made = row["quality"][name]
        error = float(made["gram_error_over_C"])
        print(f"  {name:12} {value:10.5f} s   Gram error {error:.1e} C   entry (L, L) {made['last_entry']}")
    print(f"  ratio        {row['ratio']:10.0f}     (pairs: {', '.join(f'{r:.0f}' for r in row['ratios'])})")
    if options.out:
        record = {
            "benchmark": "means",
            **measured_on("cpu"),
            "result": row,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
