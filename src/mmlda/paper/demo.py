"""The whole paper in a minute: its tables and figures in miniature on scikit-learn's digits, and a report."""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from mmlda import paper
from mmlda.paper import Setup
from mmlda.paper.rows import HAT, MMLDA, SAT, SR
from mmlda.results import Result, label

IMAGES = 50  # to attack; the worst case is a search
SEARCH = (5, 200)  # C&W; the paper has 9 x 10,000
TUNED = [(SAT, "BIM", 0.12), (HAT, "BIM", 0.12)]  # one cell each
SETS = ("BP1-1", "BP1-2", "BP2-1", "BP2-2")
SHORT = 150  # steps of the many networks of Figures 3 and 5

Part = tuple[str, Callable[[], list[Result]]]  # its title, and the function that computes it


def demo(out: str | Path = "demo", *, show: bool = True) -> tuple[Path, list[Result]]:
    """Train both heads, attack and audit them, and write `out/report.html`; the page and the results behind it.

    Existing results in `out` are kept. Half of the parts run in a second process; a part waits for the networks that
    the other process is training.
    """
    from mmlda.report import build

    folder = Path(out)
    setup = Setup(data="digits", out=folder / "results", n=IMAGES, show=False)
    short = dataclasses.replace(setup, steps=SHORT)
    jsma = (("logits", "least-likely"),)
    here: list[Part] = [
        ("Table 1: training softmax (SR) and MM-LDA", partial(paper.table1, setup, (SR, MMLDA))),
        ("Table 2: four attacks, adversarial training", partial(paper.table2, setup, jsma=jsma, cells=TUNED)),
        ("beside it: the worst case", partial(paper.robust, setup, TUNED)),
    ]
    beside: list[Part] = [
        ("theory: distances, robustness and its bound", partial(paper.theory_figure, setup)),
        ("Figure 3: class-biased data, 12 networks", partial(paper.fig3, short, SETS)),
        ("Figure 5: the choice of C, 6 networks", partial(paper.fig5, short, (1.0, 2.0, 3.0), 2)),
        ("Figure 2: latent features", partial(paper.fig2, setup)),
        ("Table 3: Carlini and Wagner's attack", partial(paper.table3, setup, ("untargeted",), search=SEARCH)),
        ("Figure 4: what the noises look like", partial(paper.fig4, setup, search=SEARCH)),
        ("the audit", partial(paper.audits, setup, cells=TUNED)),
    ]
    threads, begin = torch.get_num_threads(), time.monotonic()
    each = max(1, threads // 2)  # threads per process
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (each,)) as second:
        others = second.submit(_run, beside, begin, show)
        torch.set_num_threads(each)
        try:
            results = _run(here, begin, show)
        finally:
            torch.set_num_threads(threads)
        results += others.result()
    page = build(folder / "results", folder / "report.html", title="MM-LDA on digits: the demo")
    if show:
        print(f"done in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return page, results


def _run(parts: list[Part], begin: float, show: bool) -> list[Result]:
    """Run some parts, one after the other."""
    results: list[Result] = []
    for title, part in parts:
        if show:
            print(f"{time.monotonic() - begin:4.0f} s  {title}", file=sys.stderr, flush=True)
        results += part()
    return results


def lines(results: list[Result]) -> list[str]:
    """The key numbers: clean accuracy and accuracy under attack for both heads, and the audits' verdicts."""
    columns = [("clean", "")] + [(kind, f"{eps:g}") for eps in (0.04, 0.12, 0.2) for kind in ("BIM", "worst")]
    text = [f"{'accuracy (%)':12s}" + "".join(f"{kind:>8s} {eps:<4s}" for kind, eps in columns)]
    for row in (SR, MMLDA):
        line = f"{row.label('digits'):12s}"
        for kind, eps in columns:
            found = next((result for result in results if row.has(result) and _is(result, kind, eps)), None)
            share = None if found is None else 1 - found.number if kind == "clean" else found.number
            line += f"{'-':>8s} {'':4s}" if share is None else f"{100 * share:8.1f} {'':4s}"
        text.append(line.rstrip())
    audits = [result for result in results if result.kind == "audit"]
    text += ["", *(f"audit of {label(result)}: {result.what}" for result in audits)]
    held = {True: "holds", False: "does not hold", None: "not decided"}
    claims = [f"{result.claim} {held[result.holds]}" for result in results if result.kind == "claim"]
    return [*text, f"the paper's claims, at this scale: {', '.join(claims)}"]


def _is(result: Result, kind: str, eps: str) -> bool:
    if kind == "clean":
        return result.kind == "table1"
    same = result.eps is not None and f"{result.eps:g}" == eps
    return same and (result.kind == "worst" if kind == "worst" else result.attack == kind)
