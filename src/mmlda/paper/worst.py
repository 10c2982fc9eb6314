"""Beside Table 2: the same networks under the worst case and audited."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from mmlda import attacks
from mmlda.audit import audit, default_eps
from mmlda.paper import claims, numbers
from mmlda.paper.comparisons import difference, of_row
from mmlda.paper.rows import ADAM, MMLDA, SR, Fields, Row, plain_rows
from mmlda.paper.setup import MOST, Cell, Net, Setup, attacked, claim, kept, named, networks, tuned_cells, tuned_for
from mmlda.results import Result, label, traced

FIELD_EPS = (2 / 255, 4 / 255, 8 / 255)  # the usual perturbations in the literature, beside the paper's three
AUDITED = 200  # images


def worst_case(setup: Setup, eps: Sequence[float] | None = None, cells: Sequence[Cell] = ()) -> list[Result]:
    """The same networks under the worst case: those not fine-tuned, and the fine-tuned ones of some cells."""
    eps = worst_eps(setup.data) if eps is None else eps
    plain = networks(setup, plain_rows(setup.data))
    jobs = [(net, e) for net in plain for e in eps]
    for net in plain:
        if net.row == SR and cells:
            nets = tuned_for(setup, net, cells)
            jobs += [(nets[cell], cell[2]) for cell in cells]
    return under_worst_case(setup, jobs)


def worst_eps(dataset: str) -> tuple[float, ...]:
    """The perturbations of the worst case: the paper's three, and on its datasets the usual ones."""
    return (*FIELD_EPS, *numbers.EPS) if dataset in numbers.DATASETS else numbers.EPS


def under_worst_case(setup: Setup, jobs: Sequence[tuple[Net, float]]) -> list[Result]:
    """Some networks under the worst case, each at a perturbation; existing results are kept."""
    results, n = [], setup.images(MOST)
    for net, eps in jobs:
        about = worst_fields(setup, net, eps, n)
        if (there := kept(setup, about["name"], net, n)) is None:
            found, outcomes, _ = attacked(setup, net, attacks.WorstCase(eps=eps), n=n, **about)
            there = found.save(setup.out, outcomes)
        results.append(there)
    return results


def worst_fields(setup: Setup, net: Net, eps: float, n: int) -> Fields:
    """The fields of a result about the worst case."""
    words, name = named(setup, net, "worst", f"{eps:.4g}", attack="WorstCase")
    what = f"accuracy of {words} under the worst case at {eps:.4g} on {setup.data}"
    note = setup.note(setup.tuning_note() if net.row.fine_tuning else "", n=n)
    return {"name": name, "kind": "worst", "what": what, "note": note}


def robust(setup: Setup, cells: Sequence[Cell] | None = None) -> list[Result]:
    """The worst case beside Table 2, and whether by it MM-LDA is more robust than SR, fine-tuned or not."""
    results = worst_case(setup, cells=tuned_cells(eps=worst_eps(setup.data)) if cells is None else cells)
    return [*results, *robust_claims(setup, results)]


def robust_claims(setup: Setup, results: Sequence[Result]) -> list[Result]:
    """Verdicts on the paper's sentence from the worst case, one per recipe of MM-LDA."""
    return [_robust_claim(setup, results, row) for row in (MMLDA, ADAM) if of_row(results, row)]


def _robust_claim(setup: Setup, results: Sequence[Result], row: Row) -> Result:
    comparisons, against_sr, accuracies = [], [], []
    for eps in numbers.EPS:
        here = [result for result in results if result.eps == eps]
        ours, base = of_row(here, row), of_row(here, SR)
        means = [statistics.mean(result.number for result in group) for group in (ours, base)]
        against_sr.append((means[1], difference(ours, base)))
        accuracies.append((eps, means[0], means[1]))
        others: dict[str, list[Result]] = {}  # SR, and the fine-tuned networks by what they were tuned on
        for result in here:
            if result.head == "softmax":
                others.setdefault(label(result), []).append(result)
        comparisons += [difference(ours, others[name]) for name in sorted(others)]
    above = sum(low > 0 for low, _ in comparisons)
    us = row.label(setup.data)
    words = [f"at {eps:g} {us} keeps {100 * ours:.1f}%, SR {100 * base:.1f}%" for eps, ours, base in accuracies]
    words.append(f"{us} is above the others in {above} of {len(comparisons)} comparisons")
    what = f"under the worst case {'; '.join(words)}"
    fields: Fields = {"value": float(above), "unit": "comparisons", "n": setup.images(MOST)}
    fields["numbers"] = {"comparisons": len(comparisons)}
    return claim(setup, "table2", what, claims.more_robust(comparisons, against_sr), row=row, **fields)


def audits(setup: Setup, cells: Sequence[Cell] = ()) -> list[Result]:
    """Whether each network's robustness is real: SR and MM-LDA, each the other's surrogate, and fine-tuned ones."""
    eps, n = default_eps(setup.sets()[1]), setup.images(AUDITED)
    plain = networks(setup, plain_rows(setup.data))
    nets = [*plain]
    for net in plain:
        if net.row == SR and cells:
            nets += {made.name: made for made in tuned_for(setup, net, cells).values()}.values()
    results = []
    for net in nets:
        other = next(one for one in plain if (one.row == SR) != (net.row == SR) and one.seed == net.seed)
        results.append(audited(setup, net, other, eps, n))
    return results


def audited(setup: Setup, net: Net, surrogate: Net, eps: float, n: int) -> Result:
    """Whether a network's robustness is real; an existing result is kept."""
    part = setup.sets()[1].subset(slice(n))  # the first images, as in the committed results
    name = named(setup, net, "audit", f"{eps:.4g}")[1]
    if (there := kept(setup, name, net, n)) is not None:
        return there
    judged = audit(net.model, part, eps=eps, n=None, surrogate=surrogate.model, device=setup.device, show=setup.show)
    found = judged.to_result()
    note = setup.note(setup.tuning_note() if net.row.fine_tuning else "", found.note, n=n)
    about = traced(net.model, part, setup.device, net.name)
    return dataclasses.replace(found, name=name, note=note, **net.fields(setup.data), **about).save(setup.out)
