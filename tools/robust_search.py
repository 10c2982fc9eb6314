"""Search for a recipe of adversarial training on held-out training images of CIFAR-10 or MNIST.

    python tools/robust_search.py tools/robust_trials.json --root DATA --out FOLDER --only a,b --steps 15000
    python tools/robust_search.py tools/robust_trials_mnist.json --data mnist --root DATA --out FOLDER ...

A trial names a head, changes to the network and changes to the recipe. Every trial trains on all training images but
5,000, and is measured on those: clean accuracy, and accuracy under margin APGD with 50 steps, untargeted and against
the three nearest classes. The test set is never read. Each finished trial is one JSON file in the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch

import mmlda
from mmlda._utils.files import write_json
from mmlda.results import code_version, device_name, versions
from mmlda.training.checkpoints import read_weights, save_weights

EPS = {"cifar10": (8 / 255,), "mnist": (0.04, 0.12, 0.2, 0.3)}  # where networks are measured
AUGMENT = {"cifar10": {"pad": 4, "flip": True}, "mnist": {}}
HELD, SPLIT_SEED = 5000, 0
PGD = {"attack": "pgd", "eps": 8 / 255, "steps": 10, "step": 0.25, "random_start": True, "share": 1.0}


def recipe_of(trial: dict, steps: int, data: str = "cifar10") -> mmlda.Recipe:
    """The trial's recipe: adversarial training on PGD-10, with the trial's changes; milestones are shares."""
    changes = dict(trial["recipe"])
    adversary = mmlda.Adversary(**(PGD | changes.pop("adversary", {})))
    if "milestones" in changes:
        changes["milestones"] = tuple(round(share * steps) for share in changes["milestones"])
    steps = changes.pop("steps", steps)
    return mmlda.Recipe(steps=steps, adversary=adversary, **AUGMENT[data], **changes)


def measure(model: torch.nn.Module, held: mmlda.ImageData, eps: float, seed: int = 0) -> dict:
    """Clean and robust accuracy on the held-out images, as counts."""
    x, y = held.pixels().cuda(), held.labels.cuda()
    common = {"eps": eps, "steps": 50, "seed": seed, "batch_size": 2500}
    attacks = [
        mmlda.attacks.APGD(loss="margin", **common),
        mmlda.attacks.APGD(loss="targeted", target="every", targets=3, **common),
    ]
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in x.split(2500)]) == y
    clean = int(right.sum())
    for attack in attacks:
        rows = right.nonzero().flatten()
        broken = attack(model, x[rows], y[rows]).prediction != y[rows]
        right[rows[broken]] = False
    return {"n": len(y), "clean": clean, "robust": int(right.sum())}


def keep_network(path: Path, model: mmlda.Classifier) -> None:
    """Weights in float16, and the network's description, as two files; `path` has no suffix."""
    half = {name: t.half() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    save_weights(Path(f"{path}.safetensors"), half)
    write_json(Path(f"{path}.json"), model.config)


def load_network(path: Path) -> mmlda.Classifier:
    """What `keep_network` wrote."""
    model = mmlda.models.build(json.loads(Path(f"{path}.json").read_text()))
    model.load_state_dict(read_weights(Path(f"{path}.safetensors")))
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trials", type=Path)
    parser.add_argument("--data", default="cifar10", choices=list(EPS))
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--weights", type=Path, help="folder for the networks, in float16")
    parser.add_argument("--teacher", type=Path, help="a network kept by --weights, for trials that distil")
    parser.add_argument("--runs", type=Path, help="folder for checkpoints, so that a stopped search resumes")
    options = parser.parse_args()
    trials = {trial["name"]: trial for trial in json.loads(options.trials.read_text())}
    chosen = [trials[name] for name in options.only.split(",")]
    train, held = mmlda.data.holdout(mmlda.data.load(options.data, options.root)[0], HELD, SPLIT_SEED)
    recipes = [recipe_of(trial, options.steps, options.data) for trial in chosen]
    base = {"backbone": "resnet", "depth": 32, "channels": train.shape[0], "num_classes": 10}
    models = [
        mmlda.models.build(base | {"head": trial["head"]} | trial.get("model", {}), seed=recipe.seed)
        for trial, recipe in zip(chosen, recipes)
    ]
    begin = time.perf_counter()
    teacher = load_network(options.teacher) if options.teacher else None
    folders = [options.runs / trial["name"] for trial in chosen] if options.runs else None
    runs = mmlda.fit_many(models, train, recipes, teacher=teacher, out=folders, device="cuda")
    together = time.perf_counter() - begin
    for trial, run in zip(chosen, runs):
        begin = time.perf_counter()
        *others, eps = EPS[options.data]
        found = measure(run.model, held, eps, run.recipe.seed)
        at = {str(e): measure(run.model, held, e, run.recipe.seed)["robust"] for e in others}
        record = {
            "name": trial["name"],
            "trial": trial,
            "recipe": dataclasses.asdict(run.recipe),
            "model": run.model.config,
            **found,
            "robust_at": at,
            "eps": eps,
            "data": options.data,
            "split_seed": SPLIT_SEED,
            "loss": run.loss,
            "train_accuracy": run.accuracy,
            "seconds_together": together,
            "trained_together": len(runs),
            "seconds_attack": time.perf_counter() - begin,
            "versions": {**versions(), "device": device_name("cuda")},
            "commit": code_version(),
        }
        write_json(options.out / f"{trial['name']}-{options.steps}.json", record)
        print(trial["name"], options.steps, found, at, f"{together:.0f} s together", flush=True)
        if options.weights:
            keep_network(options.weights / trial["name"], run.model)


if __name__ == "__main__":
    main()
