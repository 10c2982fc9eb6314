"""Networks trained on PGD's adversarial examples from the start, with either head: what real robustness looks like.

Not part of the paper. They are judged as its networks are: by the worst case and by the audit.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmlda.paper.rows import MMLDA_PGD, SR_PGD
from mmlda.paper.setup import Setup, networks
from mmlda.paper.worst import audited, under_worst_case
from mmlda.results import Result
from mmlda.training.recipes import RECIPES

__all__ = ["HARDENED", "hardened"]

HARDENED = (SR_PGD, MMLDA_PGD)


def hardened(setup: Setup, shares: Sequence[float] = (0.25, 0.5, 1.0), n: int = 200) -> list[Result]:
    """Both networks under the worst case at shares of the perturbation they were trained at, and audited at that.

    Each is the surrogate of the other.
    """
    adversary = RECIPES[f"{setup.data}-{SR_PGD.recipe}"].adversary
    assert adversary is not None
    (_, eps), nets = adversary.range, networks(setup, HARDENED)
    if not nets:
        raise ValueError(f"data must be cifar10, for which networks trained on PGD ship, got {setup.data!r}")
    results = under_worst_case(setup, [(net, eps * share) for net in nets for share in shares])
    for net in nets:
        other = next(one for one in nets if one.row != net.row and one.seed == net.seed)
        results.append(audited(setup, net, other, eps, setup.images(n)))
    return results
