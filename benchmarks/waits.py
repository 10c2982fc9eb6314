"""What a user waits for on one GPU: first steps, adversarial training, the worst case.

    python benchmarks/waits.py --out benchmarks/results/waits-h200.json
    python benchmarks/waits.py --only worst-1000,worst-10000 --images cifar10.safetensors --out ...

Every part runs in a process of its own with empty compiler caches, so what is compiled is counted wherever it says
"cold". Training data is noise of CIFAR-10's shape; the worst case takes a robust network that ships (--model) and test
images `x`, `y` from a safetensors file. A part that is in the file already is measured again and replaced.

first-step          training a new Resnet-32 until the first captured step is done (the fifth), cold; with the network
                    made and the data copied to the GPU
first-adversarial   the same with PGD-10
adversarial         a step with PGD-10, batch 128, beside crafting on the network as it is, compiled; alone and four at
                    once; they take turns, and the numbers are medians over rounds
worst-1000          `WorstCase` on 1,000 images at 8/255, compiled and cold, beside pyautoattack without and with the
                    same compiled copy
worst-10000         the same on 10,000 images, without a peer
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import mmlda
from mmlda.data import ImageData
from mmlda.models import build
from mmlda.results import code_version, device_name, versions
from mmlda.training import step
from mmlda.training.loop import Options, Run, training_steps
from mmlda.training.recipes import RECIPES, network

EPS, ROUNDS = 8 / 255, 5


def noise() -> ImageData:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return ImageData(pixels, torch.randint(0, 10, (50_000,), generator=generator), tuple("0123456789"), "noise")


def training(recipe: mmlda.Recipe, count: int, data: ImageData) -> Callable[[int], float]:
    """New networks in training: a function that goes on by some steps, and returns seconds per step and network."""
    models = [build(network("softmax", "cifar10"), seed=n) for n in range(count)]
    streams = [torch.cuda.Stream() for _ in models]
    options = Options(device="cuda", log_every=10**6)
    turns = [training_steps(Run(m, recipe), data, options, report=lambda done, **numbers: None) for m in models]
    torch.cuda.synchronize()

    def go(rounds: int) -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            for steps, stream in zip(turns, streams):
                with torch.cuda.stream(stream):
                    next(steps)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / rounds / count

    return go


def pgd10() -> mmlda.Recipe:
    adversary = mmlda.Adversary(attack="pgd", eps=EPS, steps=10, step=0.25, random_start=True, share=1.0)
    return dataclasses.replace(RECIPES["cifar10-sr-robust"], adversary=adversary)


def first(recipe: mmlda.Recipe, what: str) -> list[dict]:
    begin = time.perf_counter()
    training(recipe, 1, noise().to("cuda"))(5)
    return [{"what": f"first step of `fit`{what}, Resnet-32, cold", "seconds": {"ours": time.perf_counter() - begin}}]


def adversarial() -> list[dict]:
    contenders = {"ours": step.foldable, "crafting on the network as it is, compiled": lambda *given: False}
    data, runs = noise().to("cuda"), {}
    for name, foldable in contenders.items():
        step.foldable = foldable  # type: ignore[assignment]
        for count in (1, 4):
            runs[name, count] = training(pgd10(), count, data)
            runs[name, count](20)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, go in runs.items():
            times[key].append(go(50))
    what = "adversarial training step, PGD-10, Resnet-32, batch 128"
    return [
        {
            "what": what + (f", {count} networks" if count > 1 else ""),
            "seconds": {name: statistics.median(times[name, count]) for name in contenders},
            "rounds": {name: times[name, count] for name in contenders},
        }
        for count in (1, 4)
    ]


def worst(options: argparse.Namespace, n: int, *, peer: bool) -> list[dict]:
    images = load_file(options.images)
    x, y = images["x"][:n].cuda(), images["y"][:n].cuda()
    model = mmlda.load(options.model).cuda().eval()
    torch.cuda.synchronize()

    def theirs(network: torch.nn.Module) -> torch.Tensor:
        import pyautoattack

        attack = pyautoattack.AutoAttack(network, norm="Linf", eps=EPS, seed=0, device="cuda")
        x_adv = attack.run_standard_evaluation(x, y, batch_size=n)
        return (x_adv[0] if isinstance(x_adv, tuple) else x_adv).cuda()

    contenders = {"ours": lambda: mmlda.attacks.WorstCase(eps=EPS)(mmlda.attacks.compiled(model), x, y).x_adv}
    if peer:
        contenders["pyautoattack"] = lambda: theirs(model)
        contenders["pyautoattack, compiled"] = lambda: theirs(mmlda.attacks.compiled(model))
    seconds, robust = {}, {}
    for name, attack in contenders.items():
        begin = time.perf_counter()
        x_adv = attack()
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - begin
        robust[name] = float((model.predict(x_adv) == y).double().mean())
    what = f"worst case on {len(y):,} images, {options.model} at 8/255, compiled and cold"
    return [{"what": what, "seconds": seconds, "robust": robust}]


PARTS: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "first-step": lambda options: first(RECIPES["cifar10-sr"], ""),
    "first-adversarial": lambda options: first(pgd10(), " with PGD-10"),
    "adversarial": lambda options: adversarial(),
    "worst-1000": lambda options: worst(options, 1000, peer=True),
    "worst-10000": lambda options: worst(options, 10_000, peer=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="first-step,first-adversarial,adversarial", help="parts, with commas")
    parser.add_argument("--model", default="cifar10-mmlda-robust")
    parser.add_argument("--images", help="a safetensors file with test images x [N, 3, 32, 32] and labels y [N]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in a process of its own: print the rows
    options = parser.parse_args()
    if options.part:
        print("ROWS", json.dumps(PARTS[options.part](options)))
        return
    found = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    for part in options.only.split(","):
        with tempfile.TemporaryDirectory() as caches:
            cold = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
            done = subprocess.run(command, env=os.environ | cold, stdout=subprocess.PIPE, text=True, check=True)
        rows = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ROWS"))[5:])
        about = {"versions": versions(), "commit": code_version()}
        new = {row["what"] for row in rows}
        found["device"] = device_name("cuda")
        found["rows"] = [row for row in found["rows"] if row["what"] not in new] + [row | about for row in rows]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        for row in rows:
            print(row["what"], row["seconds"], row.get("robust", ""), flush=True)


if __name__ == "__main__":
    main()
