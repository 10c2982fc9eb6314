"""Write the tables of benchmarks/README.md and of two how-to pages: `python tools/make_benchmark_tables.py`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from from_results import ROOT, fixed, table, write

SCRIPT = Path(__file__).name
MANY = ROOT / "docs" / "how-to" / "many-classes.md"
IMBALANCED = ROOT / "docs" / "how-to" / "imbalanced-data.md"
PAGE = ROOT / "benchmarks" / "README.md"
METHODS = {  # of benchmarks/long_tailed.py: the method of the record, and the part of it that has the numbers
    "softmax": ("softmax", None),
    "softmax, adjusted at prediction": ("softmax", "adjusted"),
    "softmax, priors in training": ("softmax-priors", None),
    "MM-LDA": ("mmlda", None),
    "MM-LDA, priors in training": ("mmlda-priors", None),
}
BALANCED = {"softmax": "softmax", "MM-LDA with 64 dimensions": "mmlda-64", "with 128": "mmlda-128"}


def read(name: str) -> dict[str, Any]:
    return json.loads((PAGE.parent / "results" / f"{name}.json").read_text())  # type: ignore[no-any-return]


def contenders(what: str, found: dict[str, Any]) -> list[str]:
    """A line of the attacks: seconds of ours and of the peers, with how many times ours that is."""
    if "seconds" in found:
        seconds, times = found["seconds"], found["times_faster_than"]
    else:
        runs = {name: run for name, run in found.items() if isinstance(run, dict) and "times_ours" in run}
        seconds, times = ({name: run[key] for name, run in runs.items()} for key in ("seconds", "times_ours"))
    compiled = f"{seconds['ours, compiled']:.3g} s" if "ours, compiled" in seconds else "–"
    peers = [f"{name} {seconds[name]:.3g} s ({times[name]:.2g} x)" for name in seconds if not name.startswith("ours")]
    return [what, f"{found['images']:,}", f"{seconds['ours']:.3g} s", compiled, "; ".join(peers)]


def attacks(device: str) -> str:
    found = read(f"attacks-{device}")
    rows = []
    for attack in ("bim", "pgd"):
        for what, run in (read("attacks-cpu-bim") if device == "cpu" else found).get(attack, {}).items():
            rows.append(contenders(f"{attack.upper()}, {run['steps']} steps; {what}", run))
    for what, run in found["worst"].items():
        left = " and ".join(f"{share:.1f}%" for share in run["robust_accuracy"].values())
        rows.append(contenders(f"worst case; {what}; ours and AutoAttack leave {left}", run))
    for run in (found[name] for name in ("cw_short", "cw") if name in found):
        rows.append(contenders(f"C&W, {run['search_steps']} x {run['steps']:,}", run))
    rows.append(contenders("JSMA, pairs of pixels", found["jsma"]))
    if device == "cpu":
        for what, over in read("attacks-cpu-bim")["over_bare, all pairs"].items():
            ends = f"{100 * over['low']:.1f} to {100 * over['high']:.1f}"
            rows.append([f"BIM over bare passes; {what}", "–", f"+{100 * over['median']:.1f}% ({ends})", "–", "–"])
    made = found["versions"]
    text = table("attack | images | ours | ours, compiled | peers (times ours)", rows)
    named = ", ".join(f"{name} {made[name]}" for name in ("torch", "torchattacks", "foolbox", "pyautoattack"))
    return f"{text}\n*{found['device']}, {named}.*\n"


def training() -> str:
    rows = []
    for found in (read("training-h200"), read("training-cpu")):
        for name, seconds in found["seconds"].items():
            ratio = f"{found['ratio_to_plain'][name]:.3g} x"
            rows.append([found["device"], name, f"{1000 * seconds:.3g} ms", ratio])
    return table("device | loop | per step and network | plain / this", rows)


def parts_of_the_head() -> str:
    rows = [
        [
            f"head beside `nn.Linear`, L = {r['num_classes']:,}, p = {r['dim']:,}",
            f"{r['ratio_to_linear']:.2f} of its time",
        ]
        for r in read("head")["rows"]
    ]
    rows.append(
        [
            "Algorithm 1 beside the pseudo-code, L = 1,000, p = 2,048",
            f"{read('means')['result']['ratio']:,.0f} x faster",
        ]
    )
    totals = read("convolutions-h200-sweep")["totals"]
    rows.append(
        [
            "3x3 convolutions of a training step beside cuDNN's, H200",
            f"{totals['best_us'] / totals['cudnn_us']:.2f} of its time",
        ]
    )
    rows.append(["`import mmlda` beside `import torch`", f"{read('imports')['ratio']:.2f} of its time"])
    return table("what | median", rows)


def many_classes() -> str:
    rows = []
    found = read("many-classes-cpu")
    for row in found["rows"]:
        cells = [f"{row['num_classes']:,}", f"{row['dim']:,}"]
        for run in row["results"].values():
            if why := run.get("skipped"):
                cells.append(f"– ({why})")
                continue
            ms = 1e3 * run["seconds"]
            cells.append(f"{ms:,.{0 if ms > 99.5 else 1}f} ms, {run['bytes'] / 1e6:,.0f} MB")
        rows.append(cells)
    text = table("L | p | head | `nn.Linear` | `nn.Linear`, bfloat16", rows)
    what = f"{found['device']}, {found['threads']} thread{'s' * (found['threads'] > 1)}, torch {found['torch']}"
    return f"{text}\n*Batch {found['batch']}; {what}; commit {found['commit']}.*\n"


def long_tailed(folder: Path = PAGE.parent / "results" / "long-tailed") -> str:
    """Mean and standard deviation over seeds per method and set; empty without records."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not records:
        return ""
    tasks = [f"{data}-lt-{imbalance}" for data in ("cifar10", "cifar100") for imbalance in (10, 50, 100)]

    def cell(task: str, method: str, part: str | None = None) -> str:
        found = [r[part] if part else r for r in records if (r["task"], r["method"]) == (task, method)]
        values = [100 * one["balanced"] for one in found]
        spread = f" ± {fixed(statistics.stdev(values))}" if len(values) > 1 else ""
        return f"{fixed(statistics.fmean(values))}{spread}" if values else "–"

    rows = [[name, *(cell(task, *where) for task in tasks)] for name, where in METHODS.items()]
    names = {"cifar10": "CIFAR-10-LT", "cifar100": "CIFAR-100-LT"}
    titles = [f"{names[task.split('-')[0]]}, {task.split('-')[-1]}" for task in tasks]
    balanced = ", ".join(f"{name} {cell('cifar100', method)}" for name, method in BALANCED.items())
    published = "softmax 70.4 and 38.3 (Cao et al., 2019), logit adjustment 77.7 and 43.9 (Menon et al., 2021)"
    words = f"\nBalanced CIFAR-100: {balanced}. Published for Resnet-32 at an imbalance of 100: {published}.\n"
    first, seeds = records[0], sorted({record["seed"] for record in records})
    about = [f"Resnet-32, seeds {', '.join(map(str, seeds))}, ± the standard deviation", first["device"]]
    about.append(f"torch {first['versions']['torch']}")
    if any((folder / "held").glob("*.json")):
        about.append("settings chosen on held-out training images at an imbalance of 100")
    text = table(" | ".join(["balanced test accuracy (%)", *titles]), rows)
    return f"{text}{words}\n*{'; '.join(about)}; `benchmarks/long_tailed.py`.*\n"


def pages() -> dict[Path, dict[str, str]]:
    return {
        MANY: {"many classes": many_classes()},
        IMBALANCED: {"long-tailed": long_tailed()},
        PAGE: {"h200": attacks("h200"), "cpu": attacks("cpu"), "training": training(), "other": parts_of_the_head()},
    }


if __name__ == "__main__":
    write(SCRIPT, pages())
