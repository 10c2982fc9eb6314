"""Test error of the paper's networks at the paper's step counts, beside its Table 1, seed 0.

    python benchmarks/paper_accuracy.py select --root DATA --out runs/select     # settings, on held-out images
    python benchmarks/paper_accuracy.py full --root DATA --out runs/full --chosen runs/select   # the test set, once

`select` trains variants on the training images less 5,000 and measures on those: the test set plays no part in
choosing. `full` trains each network on all training images, with the recipes that ship or, given `--chosen`, the
MM-LDA network on CIFAR-10 with the variant that was best there. Both go on where they were stopped, and write one
JSON a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from mmlda.training.recipes import RECIPES, network
from mmlda.training.sweeps import Job, sweep

PAPER = {"mnist-sr": 0.38, "mnist-mmlda": 0.35, "cifar10-sr": 7.13, "cifar10-mmlda": 8.04}  # Table 1, test error (%)


def variants(steps: int, root: str) -> list[Job]:
    """What the paper leaves open about the MM-LDA network on CIFAR-10, one thing changed at a time."""
    base = RECIPES["cifar10-mmlda-adam"].scaled(steps)
    model = network("mmlda", "cifar10")
    changes = {
        "coupled-2e-4": (base, model),
        "decoupled-0.05": (dataclasses.replace(base, decoupled=True, weight_decay=0.05), model),
        "decoupled-0.2": (dataclasses.replace(base, decoupled=True, weight_decay=0.2), model),
        "decoupled-0.5": (dataclasses.replace(base, decoupled=True, weight_decay=0.5), model),
        "coupled-2e-5": (dataclasses.replace(base, weight_decay=2e-5), model),
        "preactivation": (base, {**model, "preactivation": True}),
    }
    return [
        Job(name=name, model=config, recipe=recipe, data="cifar10", part=("holdout", 5000, 0), root=root)
        for name, (recipe, config) in changes.items()
    ]


def best(folder: str) -> Job:
    """The variant with the highest accuracy on the held-out images, at the paper's number of steps."""
    records = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    name = max(records, key=lambda record: record["accuracy"])["name"]
    return next(job for job in variants(RECIPES["cifar10-mmlda-adam"].steps, "") if job.name == name)


def full(root: str, names: list[str], chosen: str | None) -> list[Job]:
    heads = {"sr": "softmax", "mmlda": "mmlda"}
    jobs = []
    for name in names:
        data, head = name.split("-")
        model, recipe = network(heads[head], data), RECIPES[name]
        if chosen is not None and name == "cifar10-mmlda":
            model, recipe = best(chosen).model, best(chosen).recipe
        jobs.append(Job(name=f"{name}-seed=0", model=model, recipe=recipe, data=data, root=root))
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["select", "full"])
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20_000, help="of each variant (select)")
    parser.add_argument("--chosen", default=None, help="the folder of a finished `select` (full)")
    parser.add_argument("--names", nargs="*", default=list(PAPER), help="networks (full) or variants (select)")
    args = parser.parse_args()
    if args.what == "select":
        jobs = [job for job in variants(args.steps, args.root) if job.name in args.names or args.names == list(PAPER)]
    else:
        jobs = full(args.root, args.names, args.chosen)
    for record in sweep(jobs, args.out, device=args.device, at_once=len(jobs)):
        error, name = 100 * (1 - record["accuracy"]), record["name"]
        paper = PAPER.get(name.removesuffix("-seed=0"))
        beside = "" if paper is None else f"   paper {paper:.2f}%   difference {error - paper:+.2f}"
        print(f"{name:24s} error {error:.2f}% on {record['test_images']} images{beside}   {record['seconds']:.0f} s")


if __name__ == "__main__":
    main()
