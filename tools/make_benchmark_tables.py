"""Write the tables of benchmarks/README.md and docs/how-to/many-classes.md: `python tools/make_benchmark_tables.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from from_results import ROOT, table, write

SCRIPT = Path(__file__).name
MANY = ROOT / "docs" / "how-to" / "many-classes.md"
PAGE = ROOT / "benchmarks" / "README.md"


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


def pages() -> dict[Path, dict[str, str]]:
    return {
        MANY: {"many classes": many_classes()},
        PAGE: {"h200": attacks("h200"), "cpu": attacks("cpu"), "training": training(), "other": parts_of_the_head()},
    }


if __name__ == "__main__":
    write(SCRIPT, pages())
