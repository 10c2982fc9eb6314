"""The public names of mmlda beside `import torch`: fresh processes in turn, the median ratio.

python benchmarks/imports.py --out benchmarks/results/imports.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import mmlda

TIMED = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"


def seconds(name: str) -> float:
    done = subprocess.run([sys.executable, "-c", TIMED.format(name)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seconds("mmlda._api"), seconds("torch")  # files into the cache
    pairs = [(seconds("torch"), seconds("mmlda._api")) for _ in range(args.pairs)]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    print(f"import torch {statistics.median(t for t, _ in pairs):.2f} s, import mmlda {ratio:.3f} x that")
    if args.out:
        versions = {"mmlda": mmlda.__version__, "torch": torch.__version__, "python": platform.python_version()}
        result = {"ratio": ratio, "pairs": pairs, "versions": versions, "device": platform.machine()}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
