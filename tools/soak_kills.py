"""SIGKILL training, sweeps, attacks and evaluations again and again; each must end as if nothing had happened.

Each scenario runs in a forked process. Half of the time it is killed at a random file operation, half of the time after
a random delay; then it is started again on the same folder, until it finishes. What it leaves is compared, bit for bit,
with what an undisturbed process leaves. Needs Linux.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported once, here, and not in each fork

import mmlda
from mmlda.evaluation.robustness import adversarial_images, attack_images
from mmlda.models import build
from mmlda.results import weights_digest
from mmlda.training import checkpoints

SMALL = {"backbone": "conv_net", "width": 4, "head": "mmlda", "dim": 12}
RECIPE = mmlda.Recipe(steps=40, optimizer="adam", lr=1e-3, batch_size=32, pad=1, flip=True, average=0.9)
OPERATIONS = ("open", "os.rename", "os.remove", "os.chmod", "os.mkdir")


def _data() -> tuple[mmlda.ImageData, mmlda.ImageData]:
    train, test = mmlda.data.load("digits")
    return train.subset(slice(400)), test.subset(slice(120))


def training(out: Path) -> str:
    return _trained(out, RECIPE)


def adversarial(out: Path) -> str:
    adversary = mmlda.Adversary(attack="pgd", eps=0.1, steps=2, share=1.0, pairing=0.5)
    return _trained(out, dataclasses.replace(RECIPE, steps=20, adversary=adversary))


def _trained(out: Path, recipe: mmlda.Recipe) -> str:
    train, test = _data()
    model = build(SMALL, seed=0)
    options: dict[str, Any] = {"validation": test, "keep_best": True, "validate_every": 10, "show": False}
    mmlda.fit(model, train, recipe, out=out, checkpoint_every=3, **options)
    left = checkpoints.final(out)
    assert left is not None
    return weights_digest(left)


def sweep(out: Path) -> str:
    recipe = dataclasses.replace(RECIPE, steps=10)
    train = _data()[0]
    models = {C: {**SMALL, "C": C} for C in (1.0, 10.0, 100.0)}
    jobs = [
        mmlda.Job(name=f"C={C:g}", model=model, recipe=recipe, data=train, part=("fold", 0, 4, 0))
        for C, model in models.items()
    ]
    records = mmlda.sweep(jobs, out, show=False)
    return _digest([{key: record[key] for key in ("name", "accuracy", "loss") if key in record} for record in records])


def attack(out: Path) -> str:
    pgd, model = mmlda.attacks.PGD(eps=0.1, steps=5), build(SMALL, seed=0).eval()
    result = attack_images(model, _data()[1], pgd, picture=False, **_chunks(out))
    return _digest([result.value, weights_digest({"x": adversarial_images(out)})])


def evaluation(out: Path) -> str:
    found = mmlda.evaluate(
        build(SMALL, seed=0).eval(), _data()[1], ["bim:0.1", "square:0.1,queries=20"], **_chunks(out)
    )
    return _digest([result.value for result in found.results])


def _chunks(out: Path) -> dict[str, Any]:
    return {"out": out, "chunk": 20, "show": False}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


SCENARIOS: dict[str, Callable[[Path], str]] = {
    "training": training,
    "adversarial training": adversarial,
    "sweep": sweep,
    "attack": attack,
    "evaluation": evaluation,
}


def start(scenario: Callable[[Path], str], folder: Path, answer: Path, operations: int) -> int:
    """Fork a process that runs the scenario and writes its digest; it kills itself at a file operation, 0 for none."""
    child = os.fork()
    if child:
        return child
    left = operations

    def count(event: str, arguments: Any) -> None:
        nonlocal left
        if event in OPERATIONS and str(arguments[0]).startswith(str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        answer.write_text(scenario(folder))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def wait(child: int, delay: float | None) -> bool:
    """Whether the process was killed, by us after `delay` seconds or by itself; False where it finished."""
    end = None if delay is None else time.monotonic() + delay
    while True:
        done, status = os.waitpid(child, 0 if end is None else os.WNOHANG)
        if done:
            break
        if end is not None and time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            end = None
        time.sleep(0.002)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if status:
        raise RuntimeError(f"the scenario failed with status {status}")
    return False


def disturb(name: str, kills: int, seed: int) -> dict[str, Any]:
    """Kill a scenario `kills` times, over as many runs as that takes; count the runs that ended differently."""
    torch.set_num_threads(1)
    scenario, draw = SCENARIOS[name], random.Random(f"{seed} {name}")
    with tempfile.TemporaryDirectory() as where:
        answer = Path(where) / "answer"
        begin = time.monotonic()
        assert not wait(start(scenario, Path(where) / "whole", answer, 0), None)
        seconds, expected = time.monotonic() - begin, answer.read_text()
        done = runs = different = 0
        while done < kills:
            folder, attempts = Path(where) / f"run-{runs}", 0
            while True:
                attempts += 1
                at_file = draw.random() < 0.5
                operations = draw.randint(1, 60) if at_file and attempts < 40 else 0  # an end, whatever the draws
                delay = draw.uniform(0, seconds) if not at_file and attempts < 40 else None
                if not wait(start(scenario, folder, answer, operations), delay):
                    break
                done += 1
            runs += 1
            different += answer.read_text() != expected
    return {"kills": done, "runs": runs, "different": different, "seconds_undisturbed": round(seconds, 3)}
