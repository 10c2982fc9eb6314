"""Test error with many classes: Resnet-32 with 64 latent dimensions, softmax beside MM-LDA.

    python benchmarks/many_classes_learning.py select --task strings-3 --root DATA --out runs/select
    python benchmarks/many_classes_learning.py full --task strings-3 --root DATA --chosen runs/select --out runs/full

Tasks are strings of three or four MNIST digits (1,000 and 10,000 classes) and CIFAR-100. `select` trains each variant
of either head with seed 0 on the training images less 5,000, and measures on those (strings: on strings of those).
`full` trains the best variant of each head on all training images with three seeds and measures on the test set, once.
Both write one JSON file per network and skip what they find. Made for one GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import mmlda
from mmlda.data import ImageData, digit_strings, holdout, load
from mmlda.results.provenance import measured_on

TASKS = {"strings-3": 3, "strings-4": 4, "cifar100": 0}
STRINGS = (200_000, 20_000)  # to train and to measure on
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "softmax": {"sgd-0.1": {"lr": 0.1}, "sgd-0.03": {"lr": 0.03}, "adam": {"optimizer": "adam", "lr": 1e-3}},
    "mmlda": {
        "adam-C100": {"optimizer": "adam", "lr": 1e-3, "C": 100.0},
        "adam-C30": {"optimizer": "adam", "lr": 1e-3, "C": 30.0},
        "sgd-C30": {"lr": 0.03, "C": 30.0},
        "sgd-C10": {"lr": 0.1, "C": 10.0},
    },
}


def sets(task: str, root: str | None, held: bool) -> tuple[ImageData, ImageData]:
    """Training images, and those to measure on: held-out ones, or the test set."""
    train, test = load("mnist" if TASKS[task] else "cifar100", root)
    if held:
        train, test = holdout(train, 5000)
    if not TASKS[task]:
        return train, test
    return digit_strings(train, TASKS[task], STRINGS[0]), digit_strings(test, TASKS[task], STRINGS[1])


def train(task: str, head: str, variant: str, seed: int, args: argparse.Namespace, held: bool) -> dict[str, Any]:
    """Train one network and measure it."""
    settings = dict(VARIANTS[head][variant])
    data, measured = sets(task, args.root, held)
    colours = data.shape[0]
    config = {"backbone": "resnet", "depth": 32, "channels": colours, "head": head, "dim": 64}
    config["num_classes"] = data.num_classes
    if head == "mmlda":
        config["C"] = settings.pop("C")
    augmentation = {"pad": 2} if TASKS[task] else {"pad": 4, "flip": True}
    recipe = mmlda.Recipe(
        steps=args.steps, schedule="cosine", warmup=args.steps // 20, seed=seed, **augmentation, **settings
    )
    model = mmlda.models.build(config, seed=seed).to(args.device)
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    run = mmlda.fit(model, data.to(args.device), recipe, device=args.device)
    seconds = time.perf_counter() - begin
    return {
        "task": task,
        "head": head,
        "variant": variant,
        "seed": seed,
        "steps": args.steps,
        "error": mmlda.accuracy(model, measured, device=args.device).error,
        "training_loss": run.loss,
        "head_parameters": sum(p.numel() for p in model.head.parameters()),
        "head_bytes": sum(t.nbytes for t in model.head.state_dict().values()),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "seconds_per_step": seconds / args.steps,
        "measured_on": "held-out images" if held else "test images",
        **measured_on(args.device),
    }


def best(folder: Path, task: str, head: str) -> str:
    """The variant with the smallest error on held-out images."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{task}-{head}-*.json"))]
    if not found:
        raise SystemExit(f"--chosen must have results of select for {task} and {head}, got none in {folder}")
    return min(found, key=lambda result: result["error"])["variant"]  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("select", "full"))
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--root", help="folder of the datasets")
    parser.add_argument("--chosen", type=Path, help="folder of select's results, for full")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.what == "full" and args.chosen is None:
        parser.error("full needs --chosen")
    args.out.mkdir(parents=True, exist_ok=True)
    for head, variants in VARIANTS.items():
        held = args.what == "select"
        jobs = [(name, 0) for name in variants] if held else [(best(args.chosen, args.task, head), s) for s in range(3)]
        for variant, seed in jobs:
            path = args.out / f"{args.task}-{head}-{variant}-seed{seed}.json"
            if not path.is_file():
                path.write_text(json.dumps(train(args.task, head, variant, seed, args, held), indent=1) + "\n")
            result = json.loads(path.read_text())
            print(f"{path.stem}: error {result['error']:.2%}, {1e3 * result['seconds_per_step']:.1f} ms per step")


if __name__ == "__main__":
    main()
