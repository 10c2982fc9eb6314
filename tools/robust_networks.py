"""Train the robust networks, several seeds of both heads, and measure them on the test set.

    python tools/robust_networks.py train --data cifar10 --root DATA --runs RUNS --out NETWORKS
    python tools/robust_networks.py attack --data cifar10 --root DATA --networks NETWORKS --out results/robust
    python tools/robust_networks.py compare --data cifar10
    python tools/robust_networks.py ship --data cifar10 --root DATA --networks NETWORKS

`train` trains the recipes DATA-sr-robust and DATA-mmlda-robust together; stopped by Ctrl-C (or `timeout -s INT`) it
saves, and the same call resumes. The networks are kept in float16, as they ship, and it is these files that `attack`
measures: on all test images, clean, under AutoAttack's standard version (pyautoattack) and under `WorstCase`. Both
attack the network as `mmlda.attacks.compiled` copies it for speed; an image counts as robust if neither the copy nor
the network itself is wrong about what they return. Each network and attack is one JSON file with the outcome of every
image; what exists is not measured again, and nothing is started after `--minutes`. `compare` prints the accuracies and
the paired difference of the heads with its interval. `ship` puts seed 0 of each head, chosen before any was measured,
into the package, and an entry in RobustBench's format into results/robustbench. Without --networks, `attack` and `ship`
take the networks that ship already: to add an attack to their cards.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import fnmatch
import importlib.metadata
import itertools
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from robust_search import EPS, keep_network, load_network

import mmlda
from mmlda import zoo
from mmlda._utils.files import write_json
from mmlda.results import code_version, device_name, versions

RESULTS = Path(__file__).parent.parent / "results"
HEADS = {"sr": "softmax", "mmlda": "mmlda"}


def pack(outcome: torch.Tensor) -> str:
    """One bit per image, as text."""
    return base64.b64encode(np.packbits(outcome.cpu().numpy())).decode()


def unpack(text: str, n: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8))[:n].astype(bool)


def about(device: str) -> dict:
    found = {**versions(), "device": device_name(device)}
    return {"versions": found, "commit": code_version()}


def train(options: argparse.Namespace) -> None:
    """Train every head and seed that is not there yet, all at the same time."""
    data = mmlda.data.load(options.data, options.root)[0]
    names = [f"{options.data}-{head}-robust-{seed}" for seed in options.seeds for head in options.heads]
    names = [name for name in names if not (options.out / f"{name}.safetensors").exists()]
    recipes, models = [], []
    for name in names:
        recipe_name, seed = name.rsplit("-", 1)
        recipe = dataclasses.replace(mmlda.RECIPES[recipe_name], seed=int(seed))
        recipes.append(recipe.scaled(options.steps) if options.steps else recipe)
        config = {"backbone": "resnet", "depth": 32, "channels": data.shape[0], "num_classes": data.num_classes}
        models.append(mmlda.models.build(config | {"head": HEADS[name.split("-")[1]]}, seed=int(seed)))
    folders = [options.runs / name for name in names]
    for name, run in zip(names, mmlda.fit_many(models, data, recipes, out=folders, device=options.device)):
        record = {"name": name, "recipe": dataclasses.asdict(run.recipe), "model": run.model.config}
        record |= {"train_steps": run.step, "loss": run.loss, "train_accuracy": run.accuracy, "seconds": run.seconds}
        record |= {"trained_together": len(names), "train_images": len(data), **about(options.device)}
        write_json(options.out / f"{name}.trained.json", record)
        keep_network(options.out / name, run.model)
        print(name, f"{run.seconds:.0f} s", flush=True)


def autoattack(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, eps: float, batch: int) -> torch.Tensor:
    """Images after AutoAttack's standard version."""
    import pyautoattack

    peer = pyautoattack.AutoAttack(model, norm="Linf", eps=eps, seed=0, device=str(x.device))
    x_adv = peer.run_standard_evaluation(x, y, batch_size=batch)
    return (x_adv[0] if isinstance(x_adv, tuple) else x_adv).to(x.device)


def predict(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(part).argmax(1) for part in x.split(2500)])


def networks(options: argparse.Namespace) -> Iterator[tuple[str, mmlda.Classifier]]:
    """The networks of a folder, or those that ship, with their names; seed 0 ships."""
    pattern = f"{options.data}-*-robust"
    if options.networks is None:
        yield from ((f"{name}-0", mmlda.load(name)) for name in fnmatch.filter(zoo.names(), pattern))
    else:
        for path in sorted(options.networks.glob(f"{pattern}-*.safetensors")):
            yield path.stem, load_network(path.with_suffix(""))


def attack(options: argparse.Namespace) -> None:
    """Measure every network under every attack that has no record yet."""
    test = mmlda.data.load(options.data, options.root)[1]
    x, y = test.pixels(slice(options.n)).to(options.device), test.labels[: options.n].to(options.device)
    begin, batch = time.perf_counter(), options.batch
    for name, network in networks(options):
        model = network.to(options.device).eval()
        for kind, eps in itertools.product(options.attacks, options.eps or EPS[options.data]):
            path = options.out / f"{name}-{kind}-{eps:.4f}.json"
            if path.exists() or time.perf_counter() - begin > 60 * options.minutes:
                continue
            start = time.perf_counter()
            twin = mmlda.attacks.compiled(model)
            if kind == "autoattack":
                x_adv = autoattack(twin, x, y, eps, batch)
            else:
                x_adv = mmlda.attacks.WorstCase(eps=eps, seed=0, batch_size=batch)(twin, x, y).x_adv
            seconds = time.perf_counter() - start
            if not bool(((x_adv - x).abs() <= eps + 1e-6).all() & (x_adv >= 0).all() & (x_adv <= 1).all()):
                raise SystemExit(f"{kind} left the ball of radius {eps}")
            clean = predict(model, x) == y
            robust = clean & (predict(model, x_adv) == y) & (predict(twin, x_adv) == y)
            record = {"name": name, "data": options.data, "attack": kind, "eps": eps, "n": len(y)}
            record |= {"clean": int(clean.sum()), "robust": int(robust.sum()), "seconds": seconds}
            record |= {"clean_images": pack(clean), "robust_images": pack(robust), **about(options.device)}
            if kind == "autoattack":
                record["versions"]["pyautoattack"] = importlib.metadata.version("pyautoattack")
            write_json(path, record)
            counts = f"clean {record['clean']}, robust {record['robust']}"
            print(f"{name} {kind} {eps:.4f}: {counts}, {seconds:.0f} s", flush=True)


def compare(options: argparse.Namespace) -> None:
    """Print mean accuracies, and MM-LDA minus softmax with its 95% interval over seeds and images (bootstrap)."""
    records = [json.loads(path.read_text()) for path in sorted(options.records.glob(f"{options.data}-*.json"))]
    rng = np.random.default_rng(0)
    for kind, eps in sorted({(r["attack"], r["eps"]) for r in records if "attack" in r}):
        held: dict[str, dict[int, np.ndarray]] = {head: {} for head in HEADS}
        for r in records:
            if (r.get("attack"), r.get("eps")) == (kind, eps):
                _, head, _, seed = r["name"].split("-")
                held[head][int(seed)] = unpack(r["robust_images"], r["n"])
                shares = f"clean {r['clean'] / r['n']:.2%}, robust {r['robust'] / r['n']:.2%}"
                print(f"{r['name']:24s} {kind:10s} eps {eps:.4f}: {shares}")
        seeds = sorted(set(held["sr"]) & set(held["mmlda"]))
        if not seeds:
            continue
        pairs = np.stack([held["mmlda"][s].astype(float) - held["sr"][s] for s in seeds])  # [seeds, n]
        drawn = []
        for _ in range(2000):
            rows = pairs[rng.integers(len(seeds), size=len(seeds))]
            drawn.append(rows[:, rng.integers(pairs.shape[1], size=pairs.shape[1])].mean())
        low, high = np.quantile(drawn, (0.025, 0.975))
        means = {head: statistics.mean(float(held[head][s].mean()) for s in seeds) for head in HEADS}
        print(f"{kind} eps {eps:.4f}: mmlda {means['mmlda']:.2%}, sr {means['sr']:.2%}, ", end="")
        print(f"difference {100 * pairs.mean():+.2f} points [{100 * low:+.2f}, {100 * high:+.2f}], seeds {seeds}")


def ship(options: argparse.Namespace) -> None:
    """Put seed 0 of each head into the package with its description; write what RobustBench asks about it."""
    for head, kind in HEADS.items():
        name = f"{options.data}-{head}-robust"
        if options.networks is not None:
            shutil.copyfile(options.networks / f"{name}-0.safetensors", zoo.FOLDER / f"{name}.safetensors")
            write_json(zoo.FOLDER / f"{name}.json", described(name, options))
        card = zoo.about(name)
        found = [json.loads(path.read_text()) for path in sorted(options.records.glob(f"{name}-0-*.json"))]
        card["robust"] = [{key: r[key] for key in ("attack", "eps", "n", "robust", "versions")} for r in found]
        write_json(zoo.FOLDER / f"{name}.json", card)
        for r in found:
            if r["attack"] != "autoattack":
                continue
            entry = {"link": "https://arxiv.org/abs/1802.09308", "name": f"mmlda: {name}", "venue": "N/A"}
            entry |= {"authors": "the authors of mmlda", "additional_data": False, "number_forward_passes": 1}
            entry |= {"dataset": options.data, "threat_model": "Linf", "eps": f"{r['eps']:.6g}"}
            entry |= {"architecture": f"Resnet-32, {kind} head", "clean_acc": f"{100 * r['clean'] / r['n']:.2f}"}
            entry |= {"reported": None, "autoattack_acc": f"{100 * r['robust'] / r['n']:.2f}", "unreliable": False}
            write_json(RESULTS / "robustbench" / options.data / "Linf" / f"{name}-{r['eps']:.4f}.json", entry)


def described(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A network as the package describes it, from the record of its training and its accuracy on the test set."""
    train, test = mmlda.data.load(options.data, options.root)
    trained = json.loads((options.networks / f"{name}-0.trained.json").read_text())
    model = load_network(options.networks / f"{name}-0").eval()
    clean, shape = mmlda.accuracy(model, test), [4, *test.shape]
    with torch.no_grad():
        logits = model(torch.rand(shape, generator=torch.Generator().manual_seed(0)))
    card = {"format": 1, "name": name, "model": model.config, "recipe": trained["recipe"], "data": options.data}
    card |= {"classes": list(test.classes), "part": None, "train_images": len(train), "test_images": len(test)}
    card |= {"train_sha256": train.digest(), "test_sha256": test.digest(), "loss": trained["loss"]}
    card |= {"accuracy": clean.accuracy, "balanced_accuracy": clean.balanced, "per_class": list(clean.per_class)}
    card |= {"seconds": trained["seconds"], "trained_together": trained["trained_together"]}
    card |= {"versions": trained["versions"], "commit": trained["commit"], "stored": "float16"}
    return card | {"probe": {"seed": 0, "shape": shape, "logits": logits.tolist()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (train, attack, compare, ship):
        sub = commands.add_parser(command.__name__)
        sub.set_defaults(command=command)
        sub.add_argument("--data", default="cifar10", choices=list(EPS))
        if command is not compare:
            sub.add_argument("--root", required=True)
        if command in (train, attack):
            sub.add_argument("--out", type=Path, required=True)
            sub.add_argument("--device", default="cuda")
        if command is train:
            sub.add_argument("--runs", type=Path, required=True)
            sub.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
            sub.add_argument("--heads", type=lambda text: text.split(","), default=list(HEADS))
            sub.add_argument("--steps", type=int, help="another length than the recipe's")
        if command in (attack, ship):
            sub.add_argument("--networks", type=Path, help="folder of networks (default: those that ship)")
        if command is attack:
            sub.add_argument("--eps", type=lambda text: [float(eps) for eps in text.split(",")], help="instead of all")
            sub.add_argument("--attacks", type=lambda text: text.split(","), default=["worst", "autoattack"])
            sub.add_argument("--n", type=int, default=10_000)
            sub.add_argument("--batch", type=int, default=2500)
            sub.add_argument("--minutes", type=float, default=60.0)
        if command in (compare, ship):
            sub.add_argument("--records", type=Path, default=RESULTS / "robust")
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
