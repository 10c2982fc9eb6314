"""Networks trained on PGD's adversarial examples from the start, with either head: what robustness is, beside Table 2.

No part of the paper. They are judged as its networks are: by the worst case and by the audit.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmlda.paper.setup import Setup, networks, recipe_name
from mmlda.paper.tables import audited, under_worst_case
from mmlda.results import Result
from mmlda.training.recipes import RECIPES

__all__ = ["HARDENED", "hardened"]

HARDENED = ("SR (PGD)", "MM-LDA (PGD)")


def hardened(setup: Setup, shares: Sequence[float] = (0.25, 0.5, 1.0), n: int = 200) -> list[Result]:
    """Both networks under the worst case at shares of the perturbation they were trained at, and audited at that.

    Each is the surrogate of the other.
    """
    adversary = RECIPES[recipe_name(setup.data, HARDENED[0])].adversary
    assert adversary is not None
    (_, eps), nets = adversary.range, networks(setup, HARDENED)
    if not nets:
        raise ValueError(f"data = {setup.data!r}: expected cifar10, for which networks trained on PGD ship")
    results = under_worst_case(setup, [(net, net.row, eps * share) for net in nets for share in shares])
    for net in nets:
        other = next(one for one in nets if one.row != net.row and one.seed == net.seed)
        results.append(audited(setup, net, other, eps, setup.images(n)))
    return results
