"""`import mmlda` with all its public names beside `import torch`: fresh processes in turn, the median ratio.

python benchmarks/imports.py --out benchmarks/results/imports.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from mmlda.results.provenance import measured_on

TIMED = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"
OURS = "import mmlda; mmlda.fit"  # the first name imports the others too
TORCH = "import torch"


def seconds(statement: str) -> float:
    # With bytecode, as an installed package has it.
    cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", TIMED.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=cached).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seconds(OURS), seconds(TORCH)  # files into the cache
    pairs = [(seconds(TORCH), seconds(OURS)) for _ in range(args.pairs)]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    print(f"import torch {statistics.median(t for t, _ in pairs):.2f} s, import mmlda {ratio:.3f} x that")
    if args.out:
        result = {"ratio": ratio, "pairs": pairs, **measured_on("cpu")}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
