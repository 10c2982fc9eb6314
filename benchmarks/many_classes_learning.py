"""Test error with many classes: Resnet-32 with 64 latent dimensions, softmax beside MM-LDA, also with matched means.

    python benchmarks/many_classes_learning.py --task strings-3 --root DATA --steps 2000 --holdout --out FILE
    python benchmarks/many_classes_learning.py --task strings-3 --root DATA --steps 6000 --out FILE

Tasks are strings of three or four MNIST digits, 1,000 and 10,000 classes; benchmarks/long_tailed.py measures CIFAR-100.
With --holdout, every variant of either head is trained with seed 0 on strings of all training digits but 5,000, and
measured on strings of those. Without it, the best variant of each head by these results is trained on strings of all
training digits with three seeds, and measured on the test set, once. FILE is JSON with a record per network; what it
has is not trained again. Made for one GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import mmlda
from mmlda._utils.files import write_json
from mmlda.data import ImageData, digit_strings, holdout, load
from mmlda.results.provenance import measured_on
from mmlda.training.folder import Run
from mmlda.training.loop import Options
from mmlda.training.many import together

TASKS = {"strings-3": 3, "strings-4": 4}  # digits per string
MEANS = {"strings-3": 4224, "strings-4": 10_000}  # to choose from, all with the same largest cosine
ROUNDS = {"strings-3": 20, "strings-4": 3}  # to match means; one takes 12 s with 10,000 classes
STRINGS = (200_000, 20_000)  # to train and to measure on
HELD = 5_000
MEASURED = {False: "test images", True: "held-out images"}
Job = tuple[str, str, int]  # head, variant, seed
SGD = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 5e-4}
ADAM = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.5, "decoupled": True}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {  # as many for each head
    "softmax": {
        "sgd": SGD,
        "sgd-slow": SGD | {"lr": 0.03},
        "adam": ADAM,
        "adam-free": ADAM | {"weight_decay": 0.05},
    },
    "mmlda": {
        "sgd-C10": SGD | {"C": 10.0},
        "sgd-slow-C100": SGD | {"lr": 0.03, "C": 100.0},
        "adam-C10": ADAM | {"C": 10.0},
        "adam-C100": ADAM | {"C": 100.0},
    },
    "mmlda-matched": {  # means in an order that suits the classes' mean images
        "sgd-C10": SGD | {"C": 10.0},
        "sgd-C30": SGD | {"C": 30.0},
        "sgd-fast-C10": SGD | {"lr": 0.3, "C": 10.0},
        "sgd-fast-C30": SGD | {"lr": 0.3, "C": 30.0},
    },
}
DIM = 64


def sets(args: argparse.Namespace) -> tuple[ImageData, ImageData]:
    """Training images, and those to measure on: held-out ones, or the test set."""
    length, (train, test) = TASKS[args.task], load("mnist", args.root)
    if args.holdout:
        train, test = holdout(train, HELD)
    return digit_strings(train, length, STRINGS[0]), digit_strings(test, length, STRINGS[1])


def make_run(head: str, variant: str, seed: int, data: ImageData, args: argparse.Namespace) -> Run:
    """A network with new weights, and how to train it."""
    settings = dict(VARIANTS[head][variant])
    config: dict[str, Any] = {"backbone": "resnet", "depth": args.depth, "channels": data.shape[0]}
    config |= {"head": "softmax" if head == "softmax" else "mmlda", "dim": DIM, "num_classes": data.num_classes}
    if head != "softmax":
        config["C"] = settings.pop("C")
    model = mmlda.models.build(config, seed=seed)
    if head == "mmlda-matched":
        model.head = mmlda.MaxMahalanobisHead(data.num_classes, DIM, C=config["C"], means=matched(args.task, data))
    recipe = mmlda.Recipe(steps=args.steps, schedule="cosine", warmup=args.steps // 20, seed=seed, pad=2, **settings)
    return Run(model.to(args.device), recipe)


@functools.lru_cache(1)
def matched(task: str, data: ImageData) -> torch.Tensor:
    """Means that suit the mean image of each class."""
    means = mmlda.separated_means(MEANS[task], DIM)
    return mmlda.theory.match_means(means, data.class_means().cpu(), rounds=ROUNDS[task])


def train(jobs: list[Job], data: ImageData, test: ImageData, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train networks at the same time, and return the record of each."""
    cuda = args.device == "cuda"
    runs = [make_run(*job, data, args) for job in jobs]
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    failures = together(runs, [data] * len(runs), Options(device=args.device), show=True)
    seconds = time.perf_counter() - begin
    records = []
    for n, (run, (head, variant, seed)) in enumerate(zip(runs, jobs)):
        model: Any = run.model
        speeds = [entry["steps_per_second"] for entry in run.history[1:]]  # without the compilation
        record = {
            "task": args.task,
            "head": head,
            "variant": variant,
            "settings": VARIANTS[head][variant],
            "seed": seed,
            "num_classes": data.num_classes,
            "train_images": len(data),
            "train_steps": run.recipe.steps,
            "batch_size": run.recipe.batch_size,
            "measured_on": MEASURED[args.holdout],
            "n": len(test),
            "error": 1.0 if n in failures else mmlda.accuracy(model, test, device=args.device).error,
            "failure": str(failures[n]) if n in failures else None,
            "training_loss": run.loss if math.isfinite(run.loss) else None,
            "training_error": 1 - run.accuracy if math.isfinite(run.accuracy) else None,
            "head_parameters": sum(p.numel() for p in model.head.parameters()),
            "head_bytes": sum(t.nbytes for t in model.head.state_dict().values()),
            "streamed": model.head.structured,
            "at_once": len(runs),
            # of one network, where `at_once` share the device
            "seconds_per_step": 1 / statistics.median(speeds) / len(runs) if speeds else None,
            "seconds_together": seconds,  # with compilation
            "peak_bytes_together": torch.cuda.max_memory_allocated() if cuda else None,
            **measured_on(args.device),
        }
        records.append(record)
        name = f"{args.task} {head} {variant} seed {seed}"
        print(f"{name}: error {record['error']:.2%} {record['failure'] or ''}", flush=True)
    return records


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.is_file() else []  # type: ignore[no-any-return]


def records_of(args: argparse.Namespace, head: str, *, holdout: bool) -> list[dict[str, Any]]:
    """What the file has of this task and head, on held-out or on test images."""
    here = (args.task, head, MEASURED[holdout])
    return [r for r in read(args.out) if (r["task"], r["head"], r["measured_on"]) == here]


def best(args: argparse.Namespace, head: str) -> str:
    """The variant with the smallest error on held-out images, of the longest trials."""
    tried = records_of(args, head, holdout=True)
    if not tried:
        raise SystemExit(f"--out must have results of --holdout for {args.task} and {head}, got none in {args.out}")
    return min(tried, key=lambda record: (-record["train_steps"], record["error"]))["variant"]  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--root", help="folder of the datasets")
    parser.add_argument("--holdout", action="store_true", help="choose the settings on held-out training images")
    parser.add_argument("--heads", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="without --holdout")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--n", type=int, help="measure on at most this many images")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing new after this long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    begin = time.perf_counter()
    groups: list[list[Job]] = []  # of one head each, so that the seconds per step are those of this head
    for head in args.heads:
        if args.holdout:
            jobs = [(head, name, 0) for name in VARIANTS[head]]
        else:
            jobs = [(head, best(args, head), seed) for seed in args.seeds]
        found = records_of(args, head, holdout=args.holdout)
        done = {(r["variant"], r["seed"]) for r in found if r["train_steps"] == args.steps}
        groups.append([job for job in jobs if job[1:] not in done])
    if not any(groups):
        return
    data, test = sets(args)
    data, test = data.to(args.device), mmlda.data.stratified(test, args.n)
    for jobs in filter(None, groups):
        if time.perf_counter() - begin > 60 * args.minutes:
            print(f"{args.minutes:g} minutes are over: left out {len(jobs)} networks with {jobs[0][0]}")
            continue
        records = train(jobs, data, test, args)
        write_json(args.out, read(args.out) + records)


if __name__ == "__main__":
    main()
