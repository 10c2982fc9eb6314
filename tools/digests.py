"""Digests of what must not change when code moves: trained weights, adversarial images, shipped networks' logits.

    python tools/digests.py before.json      # on the old code
    python tools/digests.py after.json before.json      # on the new code: reports every difference

Digests hold on one machine only: CPUs differ in the last bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch

import mmlda
from mmlda import attacks


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 of the tensors' bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def weights(model: torch.nn.Module) -> str:
    return digest(*(tensor for tensor in model.state_dict().values() if tensor.dim()))


def trained() -> dict[str, str]:
    """Short trainings on the digits with every kind of step."""
    train, _ = mmlda.data.load("digits")
    adversary = {"steps": 3, "step": 0.25, "random_start": True, "share": 1.0}
    recipes = {
        "sr": mmlda.Recipe(steps=40, batch_size=64),
        "mmlda": mmlda.Recipe(steps=40, batch_size=64, optimizer="adam", lr=1e-3, pad=1, flip=True, milestones=(30,)),
        "accumulate": mmlda.Recipe(steps=20, batch_size=64, accumulate=2, warmup=5),
        "soft": mmlda.Recipe(steps=20, batch_size=64, loss="soft", lr=0.01),
        "pgd": mmlda.Recipe(
            steps=15, batch_size=64, adversary=mmlda.recipes.Adversary(attack="pgd", eps=0.1, **adversary)
        ),
        "trades": mmlda.Recipe(
            steps=15, batch_size=64, adversary=mmlda.recipes.Adversary(attack="trades", eps=0.1, **adversary)
        ),
        "sat": mmlda.recipes.sat("ilcm", 0.1, steps=15),
        "hat": mmlda.recipes.hat("bim", steps=15, craft="online"),
        "fgsm": mmlda.recipes.sat("fgsm", 0.1, steps=15, craft="online"),
    }
    found = {}
    for name, recipe in recipes.items():
        for head in ("softmax", "mmlda"):
            if (name, head) == ("soft", "softmax"):
                continue
            model = mmlda.models.build({"backbone": "conv_net", "head": head}, seed=0)
            run = mmlda.fit(model, train, recipe, show=False)
            found[f"fit/{name}/{head}"] = weights(model) + f"/{run.loss!r}"
    return found


def attacked() -> dict[str, str]:
    """Every attack on a fixed network and batch."""
    train, test = mmlda.data.load("digits")
    model = mmlda.models.build({"backbone": "conv_net", "head": "mmlda"}, seed=0)
    mmlda.fit(model, train, mmlda.Recipe(steps=60, batch_size=64, optimizer="adam", lr=1e-3), show=False)
    x, y = test.pixels()[:40], test.labels[:40]
    every = {
        "fgsm": attacks.FGSM(eps=0.1),
        "bim": attacks.BIM(eps=0.1),
        "bim-l2": attacks.BIM(eps=0.5, norm="l2", loss="margin"),
        "bim-every": attacks.BIM(eps=0.1, loss="targeted", target="every"),
        "ilcm": attacks.ILCM(eps=0.1),
        "pgd": attacks.PGD(eps=0.1, restarts=2, seed=3),
        "apgd": attacks.APGD(eps=0.1, steps=20),
        "apgd-dlr": attacks.APGD(eps=0.1, steps=20, loss="dlr", restarts=2),
        "fab": attacks.FAB(eps=0.1, steps=10),
        "square": attacks.Square(eps=0.1, queries=100),
        "jsma": attacks.JSMA(eps=0.5),
        "cw": attacks.CarliniWagner(steps=30, search_steps=3),
        "worst": attacks.WorstCase(eps=0.05),
    }
    found = {}
    for name, attack in every.items():
        result = attack(model, x, y)
        found[f"attack/{name}"] = digest(result.x_adv, result.success, result.prediction, result.steps, result.l2)
    return found


def shipped() -> dict[str, str]:
    """Logits of the shipped networks on fixed noise."""
    from mmlda import zoo

    found = {}
    for name in zoo.names():
        shape = zoo.about(name)["probe"]["shape"][1:]
        x = torch.rand(8, *shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            found[f"zoo/{name}"] = digest(mmlda.load(name)(x))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file for the digests")
    parser.add_argument("before", type=Path, nargs="?", help="digests to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    now = {**shipped(), **trained(), **attacked()}
    options.out.write_text(json.dumps(now, indent=1) + "\n")
    if options.before is not None:
        before = json.loads(options.before.read_text())
        changed = [name for name, value in before.items() if now.get(name) != value]
        print(f"{len(before) - len(changed)} of {len(before)} digests are the same", *changed, sep="\n  ")
        sys.exit(bool(changed))
