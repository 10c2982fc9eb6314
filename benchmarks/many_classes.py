"""Forward plus backward of cross-entropy over many classes: the Max-Mahalanobis head beside `nn.Linear`.

    python benchmarks/many_classes.py --out benchmarks/results/many-classes-cpu.json
    python benchmarks/many_classes.py --device cuda --out benchmarks/results/many-classes-h200.json

Features z [256, p] need a gradient. The head is `MaxMahalanobisHead(L, p).loss(z, y)`; its peer is `nn.Linear(p, L)`
with `F.cross_entropy`, which also computes the gradients of its weight and bias, in float32 and in bfloat16 (the loss
in float32). Seconds are the median of the repetitions after the first ones, memory is the peak beyond what was held
before the head was made: of the resident set on the CPU, where every measurement has a process of its own. What needs
more memory than the machine has free, or longer than --limit seconds, is left out and says so. --out is written after
every line, and what it holds already is not measured again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmlda
from mmlda._utils.files import write_json
from mmlda.models.heads import MaxMahalanobisHead
from mmlda.results.provenance import code_version, device_name
from mmlda.theory.means import settled_code

CLASSES, DIMS, BATCH = (1_000, 10_000, 100_000, 1_000_000), (64, 256, 1024), 256
CONTENDERS = ("head", "linear", "linear, bfloat16")
LEAST = {"cpu": 2.0, "cuda": 0.5}  # seconds of repetitions


def make(contender: str, L: int, p: int, device: str) -> nn.Module:
    if contender == "head":
        # The optimiser's means would take a minute and cost as much as any others: random ones stand for them.
        searched = L > 2 * p and settled_code(L, p) is None
        return MaxMahalanobisHead(L, p, means=torch.randn(L, p) if searched else None).to(device)
    dtype = torch.bfloat16 if contender.endswith("bfloat16") else torch.float32
    return nn.Linear(p, L, device=device, dtype=dtype)


def loss(module: nn.Module, z: Tensor, y: Tensor) -> Tensor:
    if isinstance(module, MaxMahalanobisHead):
        return module.loss(z, y)
    return F.cross_entropy(module(z.to(module.weight.dtype)).float(), y)  # type: ignore[operator, union-attr]


def held(device: str) -> int:
    """Bytes in use, from where `peak` counts: on CUDA those of now, on the CPU the largest resident set so far."""
    if device != "cuda":
        return peak(device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device: str) -> int:
    """Bytes at the peak so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(contender: str, L: int, p: int, device: str) -> dict:
    """Seconds and bytes of one contender, in this process."""
    torch.manual_seed(0)
    z = torch.randn(BATCH, p, device=device, requires_grad=True)
    y = torch.randint(L, (BATCH,), device=device)
    loss(make(contender, 20_000, 64, device), z[:2, :1].expand(-1, 64), y[:2] % 20_000).backward()  # loads libraries
    z.grad = None
    mmlda.cosine_bound(300, 64)  # SciPy too
    before = held(device)
    module = make(contender, L, p, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    first = 3 if device == "cuda" else 1  # repetitions that choose kernels and fill the allocator
    times: list[float] = []
    while len(times) <= first or (sum(times[first:]) < LEAST[device] and len(times) < 50 + first):
        wait()
        begin = time.perf_counter()
        for tensor in (z, *module.parameters()):
            tensor.grad = None
        loss(module, z, y).backward()
        wait()
        times.append(time.perf_counter() - begin)
        if times[0] > 20:  # a warm-up would not matter
            break
    rest = times[first:] or times
    return {"seconds": statistics.median(rest), "repetitions": len(rest), "bytes": peak(device) - before}


def free(device: str) -> float:
    """Bytes that are free."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * float(lines["MemAvailable"].split()[0])


def skipped(contender: str, L: int, p: int, device: str, limit: float) -> str | None:
    """Why not to run a contender; None to run it."""
    if contender == "head":
        return None
    width = 2 if contender.endswith("bfloat16") else 4
    needed = 2 * width * L * p + (width + 12) * BATCH * L  # weight and gradient; logits, their float32 and gradients
    if needed > 0.8 * free(device):
        return f"needs {needed / 1e9:.0f} GB"
    return None if device == "cuda" or 6 * BATCH * L * p / 2e10 < limit else f"longer than {limit:g} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own choice")
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one forward and backward")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no new line after this long")
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "L", "P"), help="measure one and print it as JSON")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.one:
        contender, L, p = args.one
        print(json.dumps(measure(contender, int(L), int(p), args.device)))
        return
    begin = time.perf_counter()
    record: dict = {
        "benchmark": "many classes",
        "mmlda": mmlda.__version__,
        "commit": code_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(args.device),
        "threads": torch.get_num_threads(),
        "batch": BATCH,
        "rows": [],
    }
    if args.out and args.out.is_file():
        record["rows"] = json.loads(args.out.read_text())["rows"]
    done = {(row["num_classes"], row["dim"]) for row in record["rows"]}
    print(f"{'L':>9} {'p':>5}  {'contender':18}{'ms':>10}{'MB':>10}")
    for L, p in itertools.product(args.classes, DIMS):
        if (L, p) in done:
            continue
        if time.perf_counter() - begin > 60 * args.minutes:
            print(f"{args.minutes:g} minutes are over")
            break
        results = {}
        for contender in CONTENDERS:
            why = skipped(contender, L, p, args.device, args.limit)
            found: dict = {"skipped": why} if why else run(contender, L, p, args)
            results[contender] = found
            shown = found.get("skipped") or f"{1e3 * found['seconds']:10.2f}{found['bytes'] / 1e6:10.1f}"
            print(f"{L:9,d} {p:5d}  {contender:18}{shown}", flush=True)
        record["rows"].append({"num_classes": L, "dim": p, "results": results})
        record["rows"].sort(key=lambda row: (row["num_classes"], row["dim"]))
        if args.out:
            write_json(args.out, record)


def run(contender: str, L: int, p: int, args: argparse.Namespace) -> dict:
    """Measure in a process of its own on the CPU, where only the whole process's peak is known."""
    if args.device == "cuda":
        try:
            return measure(contender, L, p, args.device)
        except torch.cuda.OutOfMemoryError as error:
            return {"skipped": str(error).splitlines()[0]}
    command = [sys.executable, __file__, "--device", args.device, "--one", contender, str(L), str(p)]
    if args.threads:
        command += ["--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"skipped": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return json.loads(done.stdout)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
