"""Write the cards of docs/models.md from the networks that ship and results/: `python tools/make_model_cards.py`.

A result belongs to a network if it has the SHA-256 of its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from from_results import RESULTS, ROOT, load, mean, on_all_images, percent, select, size, table, write

from mmlda import zoo
from mmlda.results import Result, weights_digest

SCRIPT = Path(__file__).name
SHOWN = (2 / 255, 8 / 255, 0.12)  # in the overview
LIMITS = {
    "none": "not robust at eps {}, and standard attacks show it",
    "masked": "not robust at eps {}, although gradient attacks make it look so",
    "mixed": "do not rely on its robustness at eps {}",
    "real": "its robustness is real at eps {}; other perturbations were not audited",
}


def architecture(about: dict[str, Any], parameters: int) -> str:
    made, shape = about["model"], " x ".join(map(str, about["probe"]["shape"][1:]))
    head = f"Max-Mahalanobis head (C = {made['C']:.4g}, dimension {made['dim']})" if "C" in made else "softmax head"
    return f"Resnet-{made['depth']}, {head}, {parameters:,} parameters; {shape} images, {made['num_classes']} classes"


def training(about: dict[str, Any]) -> str:
    made, foe = about["recipe"], about["recipe"]["adversary"]
    optimizer = {"sgd": f"SGD (momentum {made['momentum']:g})", "adam": "Adam"}[made["optimizer"]]
    words = [
        f"{made['steps']:,} steps of {optimizer} at {made['lr']:g}, batches of {made['batch_size']}, cross-entropy"
    ]
    words.append(f"weight decay {made['weight_decay']:g} ({'decoupled' if made['decoupled'] else 'in the gradient'})")
    drops = ", ".join(f"{step:,}" for step in made["milestones"])
    cosine = made.get("schedule") == "cosine"  # networks from before there was a choice have no such field
    words.append("rate along a cosine to 0" if cosine else f"rate times {made['gamma']:g} at {drops}")
    words += [f"weights averaged with decay {made['average']:g}"] if made.get("average") else []
    words.append(f"{made['pad']}-pixel crops and mirroring" if made["pad"] else "no augmentation")
    if foe:
        kind, start = f"{foe['attack'].upper()} at {size(foe['eps'])}", " from a random start" * foe["random_start"]
        words.append(f"adversarial examples only: {kind}, {foe['steps']} steps of {foe['step']:g} eps{start}")
        words += [f"logits paired with weight {foe['pairing']:g}"] if foe.get("pairing") else []
        words += [f"weights perturbed by {foe['awp']:g} of their norm"] if foe.get("awp") else []
    words.append(f"seed {made['seed']}; bf16, {about['versions']['device']}")
    return "; ".join(words)


def worst(results: list[Result]) -> str:
    found = sorted(select(results, "worst"), key=lambda r: r.eps or 0.0)
    return ", ".join(f"{percent(r.number)} at {size(r.eps or 0.0)}" for r in found) or "not measured"


def whole(about: dict[str, Any], attack: str) -> str:
    return ", ".join(f"{percent(left, 2)} at {size(eps)}" for eps, left in on_all_images(about, attack).items())


def least(about: dict[str, Any], results: list[Result], eps: float) -> str:
    """The smallest accuracy at this perturbation: of robust networks on all test images, else on the first 1,000."""
    found = [on_all_images(about, attack).get(eps) for attack in ("autoattack", "worst")]
    return percent(min((left for left in found if left is not None), default=mean(select(results, "worst", eps=eps))))


def cost(about: dict[str, Any]) -> str:
    """GPU time of training; networks that were trained together share the device."""
    minutes, at_once = about["seconds"] / 60, about.get("trained_together", 1)
    others = "another" if at_once == 2 else f"{at_once - 1} others"
    together = f" ({minutes:.0f} minutes together with {others})" if at_once > 1 else ""
    return f"{minutes / at_once:.1f} minutes on one {about['versions']['device']}{together}"


def cards(folder: str | Path = RESULTS) -> dict[str, str]:
    """The overview and the card of every network that ships."""
    results, rows, text = load(folder), [], ""
    for name in zoo.names():
        about, model = zoo.about(name), zoo.load(name)
        digest = weights_digest(model.state_dict())
        here = [r for r in results if r.network_sha256 == digest]
        audits = select(here, "audit")
        audit = ", ".join(f"{r.value} at {size(r.eps or 0.0)}" for r in audits) or "not audited"
        clean = percent(about["accuracy"], 2)
        limits = [LIMITS[str(r.value)].format(size(r.eps or 0.0)) for r in audits] or ["robustness not audited"]
        limits += ["weights rounded to half precision"] if about.get("stored") == "float16" else []
        head = "MM-LDA" if "C" in about["model"] else "softmax"
        left = [least(about, here, eps) for eps in SHOWN]
        rows.append([f"[{name}](#{name})", head, clean, *left, audit])
        text += f"\n## {name}\n\n" + table(
            f'`mmlda.load("{name}")` | ',
            [
                ("architecture", architecture(about, sum(p.numel() for p in model.parameters() if p.requires_grad))),
                ("training", training(about)),
                *([("cost", cost(about))] if about.get("robust") else []),
                ("clean accuracy", f"{clean}% of {about['test_images']:,} test images"),
                *(
                    (f"{words}, all test images, %", numbers)
                    for attack, words in (("autoattack", "AutoAttack"), ("worst", "worst case"))
                    if (numbers := whole(about, attack))
                ),
                *([("worst case, %", worst(here))] if select(here, "worst") or not about.get("robust") else []),
                ("limits", "; ".join(limits)),
                ("weights", f"SHA-256 of the tensors `{digest[:16]}`"),
            ],
        )
    columns = "".join(f" | under attack at {size(eps)}" for eps in SHOWN)
    columns = f"network | head | test accuracy, %{columns} | audit"
    return {"networks": table(columns, rows), "cards": text.lstrip("\n")}


def pages(folder: str | Path = RESULTS) -> dict[Path, dict[str, str]]:
    return {ROOT / "docs" / "models.md": cards(folder)}


if __name__ == "__main__":
    write(SCRIPT, pages())
