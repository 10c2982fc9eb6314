"""Try the promises about damage at scale, and write the figures: `make soak`, or one part of it.

    python tools/soak.py files --n 10000 --seed 0 --out benchmarks/results/soak/files.json

`files` mutates valid files of every format that is read (see `soak_files`), `kills` kills running work and resumes it
(`soak_kills`). Each sub-command prints a table, writes its figures with their provenance, and exits with 1 where a
promise was broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import soak_files
import soak_kills

from mmlda.results import measured_on


def files(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures, after each format."""
    found: dict[str, Any] = {}
    for name in options.formats.split(",") if options.formats else list(soak_files.FORMATS):
        found[name] = counts = soak_files.soak(name, options.n, options.seed, options.processes)
        shown = ", ".join(f"{key} {value}" for key, value in counts.items() if key not in ("failures", "promise"))
        print(f"{name:14s} {shown}", flush=True)
        for failure in counts["failures"][:20]:
            print(f"    {failure}", flush=True)
        failed = sum(len(counts["failures"]) for counts in found.values())
        yield {"n": options.n, "failed": failed, "formats": found}


def kills(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    for name in soak_kills.SCENARIOS:
        found[name] = counts = soak_kills.disturb(name, -(-options.n // len(soak_kills.SCENARIOS)), options.seed)
        print(f"{name:20s} {', '.join(f'{key} {value}' for key, value in counts.items())}", flush=True)
        done, failed = (sum(counts[key] for counts in found.values()) for key in ("kills", "different"))
        yield {"n": done, "failed": failed, "scenarios": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    part = commands.add_parser("files", help="mutated files of every format")
    part.add_argument("--n", type=int, default=10_000, help="mutants per format")
    part.add_argument("--formats", default="", help=f"some of {','.join(soak_files.FORMATS)}")
    part.set_defaults(run=files)
    part = commands.add_parser("kills", help="SIGKILLs of training, sweeps, attacks and evaluations")
    part.add_argument("--n", type=int, default=1000, help="kills in all")
    part.set_defaults(run=kills)
    for part in commands.choices.values():
        part.add_argument("--seed", type=int, default=0)
        part.add_argument("--out", type=Path, help="JSON file for the figures (default: none)")
        part.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    begin = time.perf_counter()
    about = {"command": f"soak.py {options.command}", "seed": options.seed, **measured_on("cpu")}
    figures: dict[str, Any] = {}
    for figures in options.run(options):
        figures = {**about, "seconds": round(time.perf_counter() - begin, 1), **figures}
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(1 if figures["failed"] else 0)


if __name__ == "__main__":
    main()
