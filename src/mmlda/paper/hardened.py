"""Networks trained to be robust, which are not in the paper: further rows of its Tables 2 and 3, and audited."""

from __future__ import annotations

from collections.abc import Sequence

from mmlda.paper import numbers
from mmlda.paper.rows import MMLDA_ROBUST, SR_ROBUST
from mmlda.paper.setup import Setup, networks
from mmlda.paper.tables import JSMA, PAPERS_SEARCH, table2_row, table3_cell
from mmlda.paper.worst import AUDITED, audited, under_worst_case, worst_eps
from mmlda.results import Result
from mmlda.training.recipes import RECIPES

HARDENED = (SR_ROBUST, MMLDA_ROBUST)


def hardened(
    setup: Setup,
    *,
    sizes: Sequence[float] | None = None,
    kinds: Sequence[str] = numbers.ATTACKS,
    eps: Sequence[float] = numbers.EPS,
    jsma: Sequence[tuple[str, str]] = JSMA,
    targets: Sequence[str] = ("untargeted", "random"),
    search: tuple[int, int] = PAPERS_SEARCH,
) -> list[Result]:
    """Both heads, trained on PGD's adversarial examples from the start.

    They are under the worst case up to the perturbation they were trained at (`sizes`, by default the usual ones),
    audited at that, each the surrogate of the other, and under the attacks of Tables 2 and 3.
    """
    adversary = RECIPES[f"{setup.data}-{SR_ROBUST.recipe}"].adversary
    assert adversary is not None
    (_, most), nets = adversary.range, networks(setup, HARDENED)
    if sizes is None:
        sizes = [*(e for e in worst_eps(setup.data) if e < most), most]
    results = under_worst_case(setup, [(net, e) for net in nets for e in sizes])
    for net in nets:
        other = next(one for one in nets if one.row != net.row and one.seed == net.seed)
        results.append(audited(setup, net, other, most, setup.images(AUDITED)))
    for net in nets:
        results += table2_row(setup, net, kinds, eps, jsma)
        results += [table3_cell(setup, net, target, search) for target in targets]
    return results
