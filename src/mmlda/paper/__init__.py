"""The paper, one function per table and figure: every number beside the paper's, every sentence with a verdict.

Each takes a `Setup` (data, steps, images, seeds, folder), computes what is missing, and writes one file per result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mmlda._utils.checks import check_choice
from mmlda.paper.biased import fig3, fig3_control
from mmlda.paper.figures import fig2, fig4, fig5, latent, theory_figure
from mmlda.paper.hardened import hardened
from mmlda.paper.setup import Setup, tuned_cells
from mmlda.paper.suspects import suspects
from mmlda.paper.tables import table1, table2, table3
from mmlda.paper.worst import audits, robust, worst_case
from mmlda.results import Result

__all__ = ["PARTS", "Setup", "reproduce"]


# What `mmlda reproduce NAME` runs; beside Table 2 and 3, the same networks under the worst case and the audit.
PARTS: dict[str, tuple[Callable[[Setup], list[Result]], ...]] = {
    "table1": (table1,),
    "table2": (table2, robust, partial(audits, cells=tuned_cells())),
    "table3": (table3, worst_case, audits),
    "fig2": (fig2, latent),
    "fig3": (fig3, fig3_control),
    "fig4": (fig4,),
    "fig5": (fig5,),
    "theory": (theory_figure,),
    "suspects": (suspects,),
    "robust": (hardened,),
}
BESIDE = ("suspects", "robust")  # not part of the paper


def reproduce(name: str, setup: Setup) -> list[Result]:
    """Reproduce a table or figure; existing results are kept.

    Two parts are not in the paper and not included in "all": "suspects", ten networks that test what would explain its
    Table 2, and "robust", networks trained on adversarial examples.

    Parameters
    ----------
    name
        A key of `PARTS`, or "all".
    setup
        The data, the scale, the device and the folder for the results.

    Returns
    -------
    list of Result
        Each number beside the paper's, and each claim with its verdict.

    Raises
    ------
    ValueError
        If there is no such part.
    """
    check_choice("name", name, [*PARTS, "all"])
    parts = [part for part in PARTS if part not in BESIDE] if name == "all" else [name]
    steps = dict.fromkeys(step for part in parts for step in PARTS[part])
    return [result for step in steps for result in step(setup)]
