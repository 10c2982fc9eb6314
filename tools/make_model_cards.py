"""Write the cards of docs/models.md from the networks that ship and the files in results/.

`python tools/make_model_cards.py`; a result belongs to a network if it has the SHA-256 of its weights.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from from_results import MISSING, RESULTS, at, images, link, load, markdown, put, value

from mmlda import zoo
from mmlda._utils.files import write_whole
from mmlda.paper import numbers
from mmlda.report.entries import DATA, Entry, grouped, size
from mmlda.report.tables import mean_number, variant
from mmlda.results import HEADS, weights_digest

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SCRIPT = Path(__file__).name
VERDICTS = {
    "none": "Not robust at eps {eps}, and standard attacks show it there: the audit's verdict is *none*.",
    "masked": "Not robust at eps {eps}, although gradient attacks make it look so: the audit's verdict is *masked*.",
    "mixed": "Do not rely on its robustness at eps {eps}: the audit's verdict is *mixed*.",
    "real": "Audited at eps {eps} only, where its robustness is *real*.",
}
UNAUDITED = "Its robustness has not been audited: take it for not robust."


def recipe(about: dict[str, Any]) -> str:
    """How a network was trained, in words."""
    made, words = about["recipe"], []
    rate = f"{made['optimizer'].upper() if made['optimizer'] == 'sgd' else 'Adam'} at {made['lr']:g}"
    rate += f" (momentum {made['momentum']:g})" if made["optimizer"] == "sgd" else ""
    words.append(f"{made['steps']:,} steps of {rate} on batches of {made['batch_size']}")
    decay = "decoupled" if made["decoupled"] else "in the gradient"
    words.append(f"weight decay {made['weight_decay']:g} ({decay})" if made["weight_decay"] else "no weight decay")
    if made["milestones"]:
        words.append(f"the rate times {made['gamma']:g} at {', '.join(f'{step:,}' for step in made['milestones'])}")
    crop, flip = f"crops of {made['pad']} padded pixels", "mirroring"
    seen = [word for word, there in ((crop, made["pad"]), (flip, made["flip"])) if there]
    words.append(" and ".join(seen) or "no augmentation")
    words.append({"ce": "cross-entropy"}.get(made["loss"], f"the loss {made['loss']!r}"))
    if foe := made["adversary"]:
        kind = f"{foe['attack'].upper()} at eps {size(foe['eps'])}"
        words.append(f"{100 * foe['share']:g}% adversarial examples, {kind}: "
                     f"{foe['steps']} steps of {foe['step']:g} eps"
                     f"{' from a random start' if foe['random_start'] else ''}, crafted {foe['craft']}")  # fmt: skip
    return "; ".join(words)


def network(about: dict[str, Any], parameters: int) -> str:
    """What it is, in words."""
    made = about["model"]
    blocks = "pre-activation" if made["preactivation"] else "post-activation"
    head = "softmax head"
    if made["head"] == "mmlda":
        head = f"Max-Mahalanobis head (C = {made['C']:.4g}, precision {made['precision']:g}, dimension {made['dim']})"
    return f"Resnet-{made['depth']}, {blocks} blocks, {head}, {made['num_classes']} classes, {parameters:,} parameters"


def attacked(entries: list[Entry]) -> str:
    """A table of what attacks leave: the paper's, and the worst case."""
    found = [e for e in entries if e.result.kind in ("table2", "worst")]
    jsma = [_attack(e) for e in found if e.result.attack == "JSMA"]
    names = list(dict.fromkeys(["FGSM", "BIM", "ILCM", *(jsma or ["JSMA"]), "worst case"]))
    sizes = sorted({e.eps for e in found if e.eps is not None})
    rows = []
    for eps in sizes:
        cells = [[e for e in found if e.eps == eps and _attack(e) == name] for name in names]
        asked = [eps in numbers.EPS or name == "worst case" for name in names]  # the paper has three perturbations
        rows.append([size(eps), *(value(cell) if cell or wanted else "–" for cell, wanted in zip(cells, asked))])
    return markdown(("eps", *names), rows) if rows else f"Under attack: {MISSING}.\n"


def _attack(entry: Entry) -> str:
    return "worst case" if entry.result.kind == "worst" else variant(entry)


def distances(entries: list[Entry]) -> str:
    """C&W's distortions."""
    made = [f"{value(group)} ({target}; {mean_number(group, 'success_rate', 1, 100.0).text}% broken)"
            for target, group in grouped(at(entries, "table3"), lambda e: e.target).items()]  # fmt: skip
    return "; ".join(made) or MISSING


def card(name: str, entries: list[Entry]) -> str:
    """One network's card."""
    about, model = zoo.about(name), zoo.load(name)
    digest = weights_digest(model.state_dict())
    here = [e for e in entries if e.result.network_sha256 == digest]
    clean, audits = at(here, "table1"), at(here, "audit")
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config, made = about["model"], about["versions"]
    again = f"; measured again: {_accuracy(clean)}" if clean else ""
    audited = "; ".join(f"[{e.result.value}]({link(e)}) at eps {size(e.eps)} ({images([e])} images)" for e in audits)
    shape = about["probe"]["shape"][1:]
    half = about.get("stored") == "float16"
    when = "as it ships, on a CPU" if half else "when it was made"
    rows = [
        ("what it is", network(about, parameters)),
        ("input", f"{' x '.join(map(str, shape))} images in [0, 1]; the network itself subtracts "
         f"{config['mean'][0]:g} and divides by {config['std'][0]:g}"),
        ("recipe", recipe(about)),
        ("seed", str(about["recipe"]["seed"])),
        ("data", f"{DATA[about['data']]}, {about['train_images']:,} training images"),
        ("trained on", f"{made['device']}, torch {made['torch']}, {about['seconds']:.0f} seconds, others side by side"),
        ("test accuracy", f"{100 * about['accuracy']:.2f}% of {about['test_images']:,} images {when}{again}"),
        ("audit", audited or MISSING),
        ("C&W distortion", distances(here)),
        ("weights", f"`{name}.safetensors`, SHA-256 of the tensors `{digest[:16]}`"),
    ]  # fmt: skip
    limits = [VERDICTS.get(str(e.result.value), UNAUDITED).format(eps=size(e.eps)) for e in audits] or [UNAUDITED]
    limits += ["Trained in bf16 on one GPU; another seed or device gives another network.",
               f"Only for images like {DATA[about['data']]}'s: it gives every image one of its classes."]  # fmt: skip
    if config["head"] == "mmlda" and about["recipe"]["loss"] == "ce":
        limits.append("Nothing in its training pulls its features to the means that the theorems speak of "
                      "([head.md](head.md#latent-fit)).")  # fmt: skip
    if half:
        limits.append("Stored in half precision, which rounds its weights" + (
            ", and the entries of its means by up to 0.004 of 10." if config["head"] == "mmlda" else "."))  # fmt: skip
    paper = HEADS[config["head"]]
    use = f"the paper's Resnet-32 ({paper}) for {DATA[about['data']]}: to check this project's numbers, to try attacks "
    use += "and audits on, and as a start for fine-tuning."
    if about["recipe"]["adversary"]:
        use = f"a Resnet-32 ({paper}) trained to be robust, which the paper has none of: to see what a network looks "
        use += "like whose robustness is real, and to try attacks and audits on."
    use += " Not for decisions that anybody depends on."
    text = f"## `{name}`\n\n" + markdown(("", ""), rows)
    text += f"\nAccuracy in % under attack{_many(here)}:\n\n{attacked(here)}\n"
    return text + f"**Intended use:** {use}\n\n**Limits:** {' '.join(dict.fromkeys(limits))}\n"


def _accuracy(clean: list[Entry]) -> str:
    """The accuracy from the test error of Table 1, with the interval."""
    (e, *_) = clean
    error, ends = statistics.fmean(e.result.number for e in clean), e.result.interval
    interval = f" ({100 * (1 - ends[1]):.2f} to {100 * (1 - ends[0]):.2f})" if ends else ""
    return f"[{100 * (1 - error):.2f}%]({link(e)}){interval} on {e.result.device}"


def _many(entries: list[Entry]) -> str:
    n = images(e for e in entries if e.result.kind in ("table2", "worst"))
    return "" if n == "–" else f", {n} images, 95% intervals in brackets"


def parts(folder: str | Path = RESULTS) -> dict[str, str]:
    """The cards of all networks that ship, with the results in a folder."""
    entries = load(folder)
    return {"cards": "\n".join(card(name, entries) for name in zoo.names())}


if __name__ == "__main__":
    write_whole(PAGE, put(PAGE.read_text(), SCRIPT, parts()).encode())
