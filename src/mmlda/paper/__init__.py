"""The paper, one function per table and figure: every number beside the paper's, every sentence with a verdict.

Each takes a `Setup` (data, steps, images, seeds, folder), does what is not done yet, and leaves one file per result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from mmlda._utils.files import write_json
from mmlda.paper.biased import fig3, fig3_control
from mmlda.paper.figures import fig2, fig4, fig5, latent, theory_figure
from mmlda.paper.hardened import hardened
from mmlda.paper.setup import Setup, tuned_cells
from mmlda.paper.suspects import suspects
from mmlda.paper.tables import table1, table2, table3
from mmlda.paper.worst import audits, robust, worst_case
from mmlda.results import Result, device_name

__all__ = [
    "PARTS",
    "Setup",
    "audits",
    "fig2",
    "fig3",
    "fig3_control",
    "fig4",
    "fig5",
    "hardened",
    "latent",
    "reproduce",
    "robust",
    "suspects",
    "table1",
    "table2",
    "table3",
    "theory_figure",
    "times",
    "worst_case",
]


def _all_audits(setup: Setup) -> list[Result]:
    """The audits of Table 2's networks, fine-tuned ones too."""
    return audits(setup, cells=tuned_cells())


# What `mmlda reproduce NAME` runs; beside Table 2 and 3, the same networks under the worst case and the audit.
PARTS: dict[str, tuple[Callable[[Setup], list[Result]], ...]] = {
    "table1": (table1,),
    "table2": (table2, robust, _all_audits),
    "table3": (table3, worst_case, audits),
    "fig2": (fig2, latent),
    "fig3": (fig3, fig3_control),
    "fig4": (fig4,),
    "fig5": (fig5,),
    "theory": (theory_figure,),
    "suspects": (suspects,),
    "pgd": (hardened,),
}
BESIDE = ("suspects", "pgd")  # not part of the paper


def reproduce(name: str, setup: Setup) -> list[Result]:
    """The results of a table or figure, or of "all" of them, made where they are not there yet.

    Two are no part of the paper and not among "all": "suspects", ten more networks that ask why its Table 2 is as it
    is, and "pgd", networks that were trained to be robust.
    """
    if name != "all" and name not in PARTS:
        raise ValueError(f"name must be one of {', '.join(PARTS)}, all, got {name!r}")
    parts = [part for part in PARTS if part not in BESIDE] if name == "all" else [name]
    results = []
    for step in dict.fromkeys(step for part in parts for step in PARTS[part]):
        begin = time.perf_counter()
        try:
            results += step(setup)
        finally:
            _clock(setup, step.__name__.strip("_"), time.perf_counter() - begin)
    return results


def times(setup: Setup) -> dict[str, dict[str, float]]:
    """Seconds that each part has taken in this folder, over all sittings, by device: {device: {part: seconds}}."""
    path = setup.work / "times.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _clock(setup: Setup, part: str, seconds: float) -> None:
    found, device = times(setup), device_name(setup.device)
    of = found.setdefault(device, {})
    of[part] = of.get(part, 0.0) + seconds
    setup.work.mkdir(parents=True, exist_ok=True)
    write_json(setup.work / "times.json", found)
