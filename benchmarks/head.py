"""Forward plus backward of the Max-Mahalanobis head beside `nn.Linear` of the same shape.

    python benchmarks/head.py --out benchmarks/results/head.json

Both take features z [128, p] that need a gradient and a fixed gradient of the logits [128, L]. `nn.Linear` is what the
head replaces, so it also computes the gradients of its weight and bias; `frozen` is the same layer without them, the
least that any linear head must do. Each pair times every contender once, in an order that turns from pair to pair, over
so many repetitions that one timing takes about 20 ms. The ratio is the median over the pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from mmlda.models.heads import MaxMahalanobisHead
from mmlda.results.provenance import measured_on

SHAPES = [(10, 64), (10, 2048), (1000, 64), (1000, 2048)]  # (L, p)
BATCH = 128
LEAST = 0.02  # seconds a timing lasts


def contender(module: nn.Module, z: Tensor, gradient: Tensor) -> Callable[[int], float]:
    """Seconds for one forward and backward, over a number of repetitions."""
    learned = list(module.parameters())

    def run(repetitions: int) -> float:
        wait(z)
        begin = time.perf_counter()
        for _ in range(repetitions):
            z.grad = None
            for parameter in learned:
                parameter.grad = None
            module(z).backward(gradient)
        wait(z)
        return (time.perf_counter() - begin) / repetitions

    return run


def wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def compare(L: int, p: int, pairs: int, device: str) -> dict:
    z = torch.randn(BATCH, p, device=device, requires_grad=True)
    gradient = torch.randn(BATCH, L, device=device)
    contenders = {
        "head": MaxMahalanobisHead(num_classes=L, dim=p).to(device),
        "linear": nn.Linear(p, L, device=device),
        "frozen": nn.Linear(p, L, device=device).requires_grad_(False),
    }
    runs = {name: contender(module, z, gradient) for name, module in contenders.items()}
    for run in runs.values():
        run(20)  # warm up
    repetitions = max(3, round(LEAST / runs["linear"](5)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for pair in range(pairs):
        order = list(runs)
        order = order[pair % 3 :] + order[: pair % 3]
        for name in order:
            times[name].append(runs[name](repetitions))
    ratios = {
        other: statistics.median(ours / theirs for ours, theirs in zip(times["head"], times[other]))
        for other in ("linear", "frozen")
    }
    return {
        "num_classes": L,
        "dim": p,
        "batch": BATCH,
        "repetitions": repetitions,
        "pairs": pairs,
        "microseconds": {name: round(statistics.median(values) * 1e6, 2) for name, values in times.items()},
        "ratio_to_linear": round(ratios["linear"], 4),
        "ratio_to_frozen": round(ratios["frozen"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    print("    L     p      head    linear    frozen  us   head/linear  head/frozen")
    rows = []
    for L, p in SHAPES:
        row = compare(L, p, args.pairs, args.device)
        rows.append(row)
        us = row["microseconds"]
        print(
            f"{L:5d} {p:5d}{us['head']:10.1f}{us['linear']:10.1f}{us['frozen']:10.1f}"
            f"{row['ratio_to_linear']:17.3f}{row['ratio_to_frozen']:13.3f}"
        )
    if args.out:
        record = {
            "benchmark": "head",
            **measured_on(args.device),
            "seed": args.seed,
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
