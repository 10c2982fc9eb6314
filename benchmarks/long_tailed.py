"""CIFAR-100 and long-tailed CIFAR: softmax and MM-LDA, without and with the priors of the training set.

    python benchmarks/long_tailed.py --data DATA --out FILE --holdout --steps 3000    # chooses the settings
    python benchmarks/long_tailed.py --data DATA --out FILE                           # the test set, once

Networks are Resnet-32, `--together` of them trained at the same time on one GPU. FILE is JSON with a record per
network; what it has is not trained again, and nothing is started after `--minutes`. "priors" means trained with the
shares of the training set and measured with uniform priors. "adjusted" is the softmax network measured so without
having been trained so. "matched" means suit the mean image of each class; variants "-4224" choose them among so many.
The long-tailed set is drawn with the seed of the network; the test set is balanced.

`--holdout` holds 5,000 training images out, balanced, before the profile is applied to the others, so the training
set is a tenth smaller. It trains every variant of each method with seed 0, at an imbalance of 100 alone; the best
there by balanced accuracy is used for all imbalances.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mmlda
from mmlda._utils.files import write_json
from mmlda.data import ImageData, holdout, load, long_tailed
from mmlda.results.provenance import measured_on
from mmlda.training.folder import Run
from mmlda.training.loop import Options
from mmlda.training.many import together

TASKS: dict[str, tuple[str, int, int]] = {  # dataset, imbalance, steps; the most important first
    "cifar10-lt-100": ("cifar10", 100, 10_000),
    "cifar100-lt-100": ("cifar100", 100, 10_000),
    "cifar100": ("cifar100", 1, 15_000),
    "cifar10-lt-10": ("cifar10", 10, 10_000),
    "cifar100-lt-10": ("cifar100", 10, 10_000),
    "cifar10-lt-50": ("cifar10", 50, 10_000),
    "cifar100-lt-50": ("cifar100", 50, 10_000),
}


@dataclass(frozen=True)
class Method:
    """A head, trained with the priors of the training set or not, and what the method fixes about it."""

    head: str
    priors: bool = False
    dim: int | None = None  # else a setting to choose
    matched: bool = False  # whether the means suit the classes' mean images


METHODS = {
    "softmax": Method("softmax"),
    "softmax-priors": Method("softmax", priors=True),
    "mmlda": Method("mmlda"),
    "mmlda-priors": Method("mmlda", priors=True),
    "mmlda-64": Method("mmlda", dim=64),
    "mmlda-64-matched": Method("mmlda", dim=64, matched=True),
    "mmlda-128": Method("mmlda", dim=128),
}
BALANCED = ("softmax", "mmlda-64", "mmlda-64-matched", "mmlda-128")
LONG_TAILED = ("softmax", "softmax-priors", "mmlda", "mmlda-priors")
ADAMW = {"optimizer": "adam", "lr": 1e-3, "decoupled": True, "weight_decay": 0.5}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {  # as many for each head
    "softmax": {
        "sgd-2e-4": {"weight_decay": 2e-4},
        "sgd-5e-4": {"weight_decay": 5e-4},
        "sgd-1e-3": {"weight_decay": 1e-3},
        "sgd-2e-3": {"weight_decay": 2e-3},
        "sgd-1e-3-slow": {"weight_decay": 1e-3, "lr": 0.05},
        "sgd-1e-3-fast": {"weight_decay": 1e-3, "lr": 0.2},
        "sgd-2e-3-slow": {"weight_decay": 2e-3, "lr": 0.05},
        "adamw": ADAMW,
    },
    "mmlda": {
        "adamw": ADAMW,
        "adamw-0.2": {**ADAMW, "weight_decay": 0.2},
        "adamw-C30": {**ADAMW, "C": 30.0},
        "adamw-128": {**ADAMW, "dim": 128},
        "sgd-1e-3-C4": {"weight_decay": 1e-3, "C": 4.0},
        "sgd-1e-3-C10": {"weight_decay": 1e-3, "C": 10.0},
        "sgd-1e-3-C4-128": {"weight_decay": 1e-3, "C": 4.0, "dim": 128},
        "sgd-1e-3-C10-128": {"weight_decay": 1e-3, "C": 10.0, "dim": 128},
    },
}
# Instead of those with a dimension, where the method fixes it; where means are matched, they are chosen among more.
FIXED: dict[str, dict[str, Any]] = {
    "sgd-5e-4-C10": {"weight_decay": 5e-4, "C": 10.0},
    "sgd-5e-4-C30": {"weight_decay": 5e-4, "C": 30.0},
    "sgd-1e-3-C30": {"weight_decay": 1e-3, "C": 30.0},
}
MATCHED = {f"{name}-4224": settings | {"means": 4224} for name, settings in FIXED.items()}
HELD = 5000
MEASURED = {False: "test images", True: "held-out training images"}


@dataclass(frozen=True)
class Unit:
    """One network to train."""

    task: str
    method: str
    variant: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.method}-{self.variant}-seed{self.seed}"


def variants(name: str) -> dict[str, dict[str, Any]]:
    """The settings to choose from."""
    method = METHODS[name]
    if method.dim is None:
        return VARIANTS[method.head]
    rest = {key: settings for key, settings in VARIANTS[method.head].items() if "dim" not in settings}
    return rest | (MATCHED if method.matched else FIXED)


def units(args: argparse.Namespace) -> list[Unit]:
    """What to train, in order."""
    found = []
    for task in args.only:
        imbalance, steps = TASKS[task][1:]
        if args.holdout and imbalance not in (1, 100):
            continue
        for seed in [0] if args.holdout else args.seeds:
            for method in BALANCED if imbalance == 1 else LONG_TAILED:
                if args.methods and method not in args.methods:
                    continue
                names = variants(method) if args.holdout else [best(args.out, task, method)]
                found += [Unit(task, method, name, seed, args.steps or steps) for name in names]
    return found


def best(path: Path, task: str, method: str) -> str:
    """The variant with the highest balanced accuracy on held-out images."""
    dataset, imbalance, _ = TASKS[task]
    selected = dataset if imbalance == 1 else f"{dataset}-lt-100"
    tried = [r for r in read(path) if (r["task"], r["method"], r["measured_on"]) == (selected, method, MEASURED[True])]
    if not tried:
        raise SystemExit(f"--out must have results of --holdout for {selected} and {method}, got none in {path}")
    return str(max(tried, key=lambda record: record["balanced"])["variant"])


@functools.cache
def sets(task: str, seed: int, held: bool, root: str | None) -> tuple[ImageData, ImageData]:
    """Training images of a task, and balanced ones to measure on."""
    dataset, imbalance, _ = TASKS[task]
    train, test = loaded(dataset, root)
    if held:
        train, test = holdout(train, min(HELD, len(train) // 5))
    return (train if imbalance == 1 else long_tailed(train, imbalance, seed)), test


@functools.cache
def loaded(dataset: str, root: str | None) -> tuple[ImageData, ImageData]:
    return load(dataset, root)


def prepare(unit: Unit, train: ImageData) -> Run:
    """The untrained network with its recipe."""
    method = METHODS[unit.method]
    settings = dict(variants(unit.method)[unit.variant])
    config: dict[str, Any] = {"backbone": "resnet", "depth": 32, "channels": train.shape[0], "head": method.head}
    config |= {"num_classes": train.num_classes}
    if method.head == "mmlda":
        config |= {"C": settings.pop("C", 100.0), "dim": method.dim or settings.pop("dim", 64)}
    model = mmlda.models.build(config, seed=unit.seed)
    if method.matched:
        most = settings.pop("means", max(train.num_classes, 2 * config["dim"]))  # with the same largest cosine
        means = mmlda.theory.match_means(mmlda.separated_means(most, config["dim"]), train.class_means())
        model.head = mmlda.MaxMahalanobisHead(train.num_classes, config["dim"], C=config["C"], means=means)
    if method.priors:
        model = model.with_priors(train.priors)
    recipe = mmlda.Recipe(
        steps=unit.steps, schedule="cosine", warmup=unit.steps // 40, pad=4, flip=True, seed=unit.seed, **settings
    )
    return Run(model, recipe)


def measure(model: mmlda.Classifier, data: ImageData, train: ImageData, device: str) -> dict[str, Any]:
    """Accuracy, balanced accuracy, and its means over classes of many, medium and few training images."""
    result = mmlda.accuracy(model, data, device=device)
    counts, groups = train.counts.tolist(), {}
    for group, low, high in (("many", 101, math.inf), ("medium", 20, 100), ("few", 0, 19)):
        right = [share for share, n in zip(result.per_class, counts) if low <= n <= high]
        groups[group] = sum(right) / len(right) if right else None
    return {"n": result.n, "accuracy": result.accuracy, "balanced": result.balanced, **groups}


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.is_file() else []  # type: ignore[no-any-return]


def finished(unit: Unit, args: argparse.Namespace) -> bool:
    """Whether the file has the unit's record; exits if it is that of another length."""
    key = unit.task, unit.method, unit.variant, unit.seed, MEASURED[args.holdout]
    for record in read(args.out):
        if key == tuple(record[name] for name in ("task", "method", "variant", "seed", "measured_on")):
            if record["train_steps"] == unit.steps:
                return True
            what = f"{record['train_steps']} steps for {unit.name}"
            raise SystemExit(f"--out must be a file without networks of another length, got {what} in {args.out}")
    return False


def train(group: Sequence[Unit], args: argparse.Namespace) -> None:
    """Train networks at the same time, measure them and add their records to the file."""
    data = [sets(unit.task, unit.seed, args.holdout, args.data) for unit in group]
    runs = [prepare(unit, one) for unit, (one, _) in zip(group, data)]
    torch.compiler.reset()  # dynamo stops compiling a function after 8 versions of it
    begin = time.perf_counter()
    failures = together(runs, [one for one, _ in data], Options(device=args.device), show=args.show)
    seconds, records = time.perf_counter() - begin, read(args.out)
    for n, (unit, run, (one, test)) in enumerate(zip(group, runs, data)):
        if n in failures:
            print(f"{unit.name}: {type(failures[n]).__name__}: {failures[n]}", flush=True)
            continue
        model, (dataset, imbalance, _) = run.model, TASKS[unit.task]
        assert isinstance(model, mmlda.Classifier)
        record: dict[str, Any] = {"task": unit.task, "dataset": dataset, "imbalance": imbalance, "method": unit.method}
        record |= {"variant": unit.variant, "seed": unit.seed, "train_steps": unit.steps}
        record |= {"train_images": len(one), "train_sha256": one.digest(), "training_loss": run.loss}
        record["measured_on"] = MEASURED[args.holdout]
        priors = METHODS[unit.method].priors
        record |= measure(model.with_priors(None) if priors else model, test, one, args.device)
        if unit.method == "softmax" and imbalance != 1:
            adjusted = model.with_priors(None, old=one.priors)
            record["adjusted"] = measure(adjusted, test, one, args.device)
        record |= {"model": settings_of(model), "recipe": dataclasses.asdict(run.recipe)}
        record |= {"head_parameters": sum(p.numel() for p in model.head.parameters())}
        record |= {"head_bytes": sum(t.nbytes for t in model.head.state_dict().values())}
        record |= {"seconds": seconds, "trained_together": len(group)}
        record["seconds_per_step"] = seconds / sum(other.steps for other in group)
        records.append(record | measured_on(args.device))
        adjusted = f", adjusted {record['adjusted']['balanced']:.2%}" if "adjusted" in record else ""
        print(f"{unit.name}: balanced {record['balanced']:.2%}{adjusted}", flush=True)
    write_json(args.out, records)


def settings_of(model: mmlda.Classifier) -> dict[str, Any]:
    """The network's settings; its priors are those of the training set or uniform, so they are left out."""
    return {key: value for key, value in model.config.items() if key != "priors"}


def names(kind: str, allowed: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if wrong := [name for name in chosen if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{kind} must be among {', '.join(allowed)}, got {wrong[0]}")
        return chosen

    return parse


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the datasets")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all records")
    parser.add_argument("--holdout", action="store_true", help="compare variants on held-out training images")
    parser.add_argument("--only", type=names("--only", list(TASKS)), default=list(TASKS), help="tasks, with commas")
    parser.add_argument("--methods", type=names("--methods", list(METHODS)), help="methods, with commas (default: all)")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="per network (default: 10,000, or 15,000 where balanced)")
    parser.add_argument("--together", type=int, default=8, help="networks at the same time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no group after this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--show", action="store_true", help="show progress")
    args = parser.parse_args(argv)
    begin, wanted = time.monotonic(), units(args)
    missing = [unit for unit in wanted if not finished(unit, args)]
    for start in range(0, len(missing), args.together):
        if time.monotonic() - begin > 60 * args.minutes:
            break
        train(missing[start : start + args.together], args)
    done = sum(finished(unit, args) for unit in wanted)
    print(f"{done} of {len(wanted)} networks are in {args.out}")


if __name__ == "__main__":
    main()
