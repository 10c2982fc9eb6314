"""Write the tables of benchmarks/README.md and of three how-to pages: `python tools/make_benchmark_tables.py`."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from from_results import ROOT, fixed, table, write

SCRIPT = Path(__file__).name
MANY = ROOT / "docs" / "how-to" / "many-classes.md"
IMBALANCED = ROOT / "docs" / "how-to" / "imbalanced-data.md"
SKLEARN = ROOT / "docs" / "how-to" / "scikit-learn.md"
PAGE = ROOT / "benchmarks" / "README.md"
METHODS = {  # of benchmarks/long_tailed.py: the method of the record, and the part of it that has the numbers
    "softmax": ("softmax", None),
    "softmax, adjusted at prediction": ("softmax", "adjusted"),
    "softmax, priors in training": ("softmax-priors", None),
    "MM-LDA": ("mmlda", None),
    "MM-LDA, priors in training": ("mmlda-priors", None),
}
# Of benchmarks/training.py: ours as a row names it, and the loops beside it.
TRAINED = {
    "ours": "",
    "ours, from a DataLoader": ", from a DataLoader of random images, read in batches",
    "ours, from a DataLoader, 4 workers": ", from a DataLoader with 4 workers",
    "ours, 8 networks": ", 8 networks",
    "ours, bfloat16": ", bfloat16",
}
PLAIN = ("plain", "plain, 4 workers")
HEADS = {"softmax": "softmax", "mmlda": "MM-LDA", "mmlda-matched": "MM-LDA, matched means"}
BALANCED = {
    "softmax": "softmax",
    "MM-LDA with 64 dimensions": "mmlda-64",
    "the same with matched means": "mmlda-64-matched",
    "with 128": "mmlda-128",
}


def read(name: str) -> Any:
    """A file of results; {} if it has not been measured yet."""
    path = PAGE.parent / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def beside(what: str, device: str, seconds: dict[str, float], ours: str = "ours") -> list[str]:
    """A row: seconds of ours, also compiled where measured, and those of the others with times ours."""
    mine = {ours: "", f"{ours}, compiled": "compiled "}
    own = ", ".join(f"{words}{duration(seconds[name])}" for name, words in mine.items() if name in seconds)
    peers = {name: value for name, value in seconds.items() if name not in mine}
    times = [seconds[name] for name in mine if name in seconds]
    others = [
        f"{name} {duration(peer)} ({' or '.join(f'{peer / own:.2g}' for own in times)} x)"
        for name, peer in peers.items()
    ]
    return [what, device, own, "; ".join(others)]


def duration(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def training() -> Iterator[list[str]]:
    for found in (read("training-h200"), read("training-cpu")):
        seconds = found["seconds"]
        plain = {name: seconds[name] for name in PLAIN if name in seconds}
        for name, words in TRAINED.items():
            if name in seconds:
                what = f"training step, Resnet-32, batch {found['batch_size']}{words}"
                memory = {"from memory": seconds["ours"]} if "DataLoader" in name else {}
                yield beside(what, found["device"], {name: seconds[name], **memory, **plain}, name)


def waits(device: str) -> Iterator[list[str]]:
    """What a user waits for: rows of a file {"device": ..., "rows": [{"what": ..., "seconds": {"ours": ...}}]}."""
    found = read(f"waits-{device}")
    for row in found.get("rows", ()):
        left = [f"{name} {100 * share:.1f}%" for name, share in row.get("robust", {}).items()]
        words = f"; accuracy left by {', '.join(left)}" if left else ""
        yield beside(row["what"] + words, found["device"], row["seconds"])


def attacks(device: str) -> Iterator[list[str]]:
    files = {"h200": ("attacks-h200",), "cpu": ("attacks-cpu-bim", "attacks-cpu-robust", "attacks-cpu")}[device]
    for found in filter(None, map(read, files)):
        where = found["device"] + (f", {found['threads']} threads" if device == "cpu" else "")
        for what, run in found.get("bim", {}).items():
            text = f"BIM, {run['steps']} steps on {run['images']:,} images; {what}"
            yield beside(text, where, run["seconds"])
        for what, run in found.get("worst", {}).items():
            left = " and ".join(f"{run['robust_accuracy'][who]:.1f}%" for who in ("ours", "pyautoattack"))
            text = f"worst case on {run['images']:,} images; {what}; ours and AutoAttack leave {left}"
            yield beside(text, where, run["seconds"])
        for run in (found[name] for name in ("cw_short", "cw") if name in found):
            yield beside(f"C&W, {run['search_steps']} x {run['steps']:,} on {run['images']} images", where, timed(run))
        if "jsma" in found:
            yield beside(f"JSMA, pairs of pixels on {found['jsma']['images']} images", where, timed(found["jsma"]))


def timed(found: dict[str, Any]) -> dict[str, float]:
    return {name: run["seconds"] for name, run in found.items() if isinstance(run, dict) and "times_ours" in run}


def scikit_learn() -> str:
    """Accuracy and seconds of each estimator, a row per dataset."""
    found = read("scikit-learn")
    names = list(dict.fromkeys(row["estimator"] for row in found["result"]))
    cells: dict[str, list[str]] = {}
    for row in found["result"]:
        accuracy = f"{fixed(100 * row['accuracy'])} ± {fixed(100 * row['sd'])}"
        cells.setdefault(row["dataset"], []).append(f"{accuracy}, {duration(row['cpu_seconds'])}")
    text = table(" | ".join(["data", *names]), [[data.replace("_", " "), *row] for data, row in cells.items()])
    about = (
        f"Accuracy (%) over {found['repeats']} x {found['splits']} folds, ± the standard deviation; CPU time of a fit"
    )
    versions = f"scikit-learn {found['scikit-learn']}, torch {found['torch']}"
    return f"{text}\n*{about}; default settings, inputs standardised; {versions}; `benchmarks/scikit_learn.py`.*\n"


def ratios() -> Iterator[list[str]]:
    """What is known as a share of another's time."""
    for r in read("head")["rows"]:
        what = f"head, L = {r['num_classes']:,}, p = {r['dim']:,}"
        yield [what, "CPU", "–", f"`nn.Linear` ({1 / r['ratio_to_linear']:.2f} x)"]
    ratio = read("means")["result"]["ratio"]
    yield ["Algorithm 1, L = 1,000, p = 2,048", "CPU", "–", f"the pseudo-code ({ratio:,.0f} x)"]
    yield ["`import mmlda`", "CPU", "–", f"`import torch` ({1 / read('imports')['ratio']:.2f} x)"]


def speed() -> str:
    rows = [*training(), *waits("h200"), *attacks("h200"), *waits("cpu"), *attacks("cpu"), *ratios()]
    return table("what | device | ours | beside (times ours)", rows)


def many_classes(name: str) -> str:
    rows = []
    found = read(name)
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
    threads = f", {found['threads']} thread{'s' * (found['threads'] > 1)}" if "cpu" in found["torch"] else ""
    what = f"{found['device']}{threads}, torch {found['torch']}; commit {found['commit']}"
    return f"{text}\n*Batch {found['batch']}; random means where the optimiser would run; {what}.*\n"


def learning() -> str:
    """Test error with many classes, per task and head: the longest runs."""
    strings = tested("many-classes-learning-h200")
    balanced = {"softmax": "softmax", "mmlda-64": "mmlda", "mmlda-64-matched": "mmlda-matched"}  # methods and heads
    cifar = [r for r in tested("long-tailed-h200") if r["task"] == "cifar100" and r["method"] in balanced]
    records = strings + [r | {"head": balanced[r["method"]], "error": 1 - r["accuracy"]} for r in cifar]
    tasks = {"strings-3": ("strings of 3 digits", 1_000), "strings-4": ("strings of 4 digits", 10_000)}
    tasks["cifar100"] = ("CIFAR-100", 100)
    rows = []
    for (task, (what, classes)), (head, words) in itertools.product(tasks.items(), HEADS.items()):
        found = [r for r in records if (r["task"], r["head"]) == (task, head)]
        runs = [r for r in found if r["train_steps"] == max(r["train_steps"] for r in found)]
        if not runs:
            continue
        errors, one = [100 * r["error"] for r in runs], runs[0]
        size = f"{one['head_parameters']:,}, {one['head_bytes'] / 1000:,.0f} kB"
        per_step = f"{1000 * statistics.fmean(r['seconds_per_step'] for r in runs):.2f} ms"
        error = f"{statistics.fmean(errors):.2f} ± {statistics.stdev(errors):.2f}"
        rows.append([what, f"{classes:,}", words, error, size, f"{one['train_steps']:,}", per_step])
    first = strings[0]
    about = f"Resnet-32, 64 dimensions, seeds {', '.join(str(s) for s in sorted({r['seed'] for r in records}))}"
    counts = sorted({r.get("at_once") or r["trained_together"] for r in records})
    together = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    where = f"{first['device']}, {together} networks at once; times are per network"
    where += f", torch {first['versions']['torch']}"
    text = table("images | classes | head | test error (%) | head's parameters, memory | steps | a step", rows)
    return f"{text}\n*{about}, ± the standard deviation; {where}; {commits_of(records)}.*\n"


def commits_of(records: list[dict[str, Any]]) -> str:
    return "commit " + " and ".join(dict.fromkeys(record["commit"] for record in records))


def tested(name: str) -> list[dict[str, Any]]:
    """The records of a file that were measured on test images, with the settings that were chosen last for each method;
    none without the file."""
    records = [record for record in read(name) if record["measured_on"] == "test images"]
    method = [(record["task"], record.get("method") or record["head"]) for record in records]
    settings = [(record["variant"], record["train_steps"]) for record in records]
    last = dict(zip(method, settings))
    return [record for record, key, own in zip(records, method, settings) if last[key] == own]


def long_tailed() -> str:
    """Mean and standard deviation over seeds per method and set; empty without records."""
    records = tested("long-tailed-h200")
    if not records:
        return ""
    names = {"cifar10": "CIFAR-10-LT", "cifar100": "CIFAR-100-LT"}
    tasks = {f"{data}-lt-{k}": f"{words}, {k}" for data, words in names.items() for k in (10, 50, 100)}

    def cell(task: str, method: str, part: str | None = None) -> str:
        found = [r[part] if part else r for r in records if (r["task"], r["method"]) == (task, method)]
        values = [100 * one["balanced"] for one in found]
        spread = f" ± {fixed(statistics.stdev(values))}" if len(values) > 1 else ""
        return f"{fixed(statistics.fmean(values))}{spread}" if values else "–"

    rows = [[name, *(cell(task, *where) for task in tasks)] for name, where in METHODS.items()]
    measured = {name: cell("cifar100", method) for name, method in BALANCED.items()}
    balanced = ", ".join(f"{name} {value}" for name, value in measured.items() if value != "–")
    published = "softmax 70.4 and 38.3 (Cao et al., 2019), logit adjustment 77.7 and 43.9 (Menon et al., 2021)"
    sets = "CIFAR-10-LT and CIFAR-100-LT at an imbalance of 100"
    words = f"\nBalanced CIFAR-100: {balanced}. Published for Resnet-32, {sets}: {published}.\n"
    first, seeds = records[0], sorted({record["seed"] for record in records})
    about = [f"Resnet-32, seeds {', '.join(map(str, seeds))}, ± the standard deviation", first["device"]]
    lengths = {balanced: r["train_steps"] for r in records for balanced in [r["task"] == "cifar100"]}
    about.append("; ".join(f"{steps:,} steps{', balanced' * balanced}" for balanced, steps in sorted(lengths.items())))
    about += [f"torch {first['versions']['torch']}", commits_of(records)]
    trials = max(r["train_steps"] for r in read("long-tailed-h200") if r["measured_on"] != "test images")
    about.append(f"settings chosen in trials of {trials:,} steps on held-out training images, imbalance 100 or 1")
    text = table(" | ".join(["balanced test accuracy (%)", *tasks.values()]), rows)
    return f"{text}{words}\n*{'; '.join(about)}; `benchmarks/long_tailed.py`.*\n"


def pages() -> dict[Path, dict[str, str]]:
    return {
        MANY: {
            "many classes, GPU": many_classes("many-classes-h200"),
            "many classes, CPU": many_classes("many-classes-cpu"),
            "learning": learning(),
        },
        IMBALANCED: {"long-tailed": long_tailed()},
        SKLEARN: {"scikit-learn": scikit_learn()},
        PAGE: {"speed": speed()},
    }


if __name__ == "__main__":
    write(SCRIPT, pages())
