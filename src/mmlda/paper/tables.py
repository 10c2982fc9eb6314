"""Tables 1 to 3, each number beside the paper's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from mmlda import attacks
from mmlda._utils.tensors import packed
from mmlda.evaluation import shares
from mmlda.evaluation.robustness import predictions
from mmlda.paper import claims, numbers, wording
from mmlda.paper.comparisons import mean_interval, of_row, paired_errors, ratio_interval
from mmlda.paper.rows import ADAM, MMLDA, SR, SR_ADAM, Row, plain_rows
from mmlda.paper.setup import (
    MOST,
    Cell,
    Net,
    Setup,
    attacked,
    beside,
    claim,
    claim_of,
    networks,
    slug,
    tuned_cells,
    tuned_for,
)
from mmlda.results import Result, traced

__all__ = ["JSMA", "carlini", "table1", "table1_claims", "table2", "table3", "table3_claims"]

JSMA = (("logits", "least-likely"), ("softmax", "least-likely"), ("logits", "random"), ("softmax", "random"))
Fields = dict[str, Any]  # of a result
PAPERS_SEARCH = (9, 10_000)  # C&W's search steps, and steps in each


# ------------------------------------------------------------------------------------------------------- Table 1


def table1(setup: Setup, rows: Sequence[Row] | None = None) -> list[Result]:
    """Test errors of both heads, and of SR with Adam (the paper's footnote).

    On CIFAR-10 also of MM-LDA with Adam as the paper names it; the row MM-LDA has decoupled weight decay there.
    """
    if rows is None:
        rows = (*plain_rows(setup.data), SR_ADAM)
    results = [_test_error(setup, net) for net in networks(setup, rows)]
    return [*results, *table1_claims(setup, results)]


def _test_error(setup: Setup, net: Net) -> Result:
    test, begin = setup.sets()[1], time.perf_counter()
    guess = predictions(net.model, test, device=setup.device)
    found = shares(guess, test.labels.cpu(), test.num_classes)
    label = net.label(setup.data, "table1")
    result = Result.counted(
        int((guess != test.labels.cpu()).sum()),
        found.n,
        name=f"table1-{setup.data}-{slug(label)}-{net.seed}",
        kind="table1",
        what=f"test error of {label} on {setup.data}",
        note=setup.note(),
        seconds=time.perf_counter() - begin,
        numbers={"balanced_accuracy": found.balanced},
        **net.fields(setup.data),
        **traced(net.model, test, setup.device, net.name),
    )
    result = beside(result, numbers.TABLE1.get((setup.data, net.row)))
    return result.save(setup.out, packed({"clean": guess.to(torch.uint8)}))


def table1_claims(setup: Setup, results: Sequence[Result]) -> list[Result]:
    """What the test errors say about the paper's sentences; MM-LDA by the paper's own recipe is judged apart."""
    wrong = {row: _wrong(setup, of_row(results, row)) for row in (SR, SR_ADAM, MMLDA, ADAM)}
    made, seeds = [], len(setup.seeds)
    if len(wrong[SR]):
        for row in (MMLDA, ADAM):
            if len(wrong[row]):
                gap, interval = paired_errors(wrong[row], wrong[SR])
                what = wording.table1(row.label(setup.data), gap, interval, seeds)
                fields: Fields = {"value": gap, "unit": "share difference", "interval": interval}
                made.append(claim_of(setup, "table1", row, what, claims.error_is_kept(interval), **fields))
        if len(wrong[SR_ADAM]):
            gap, interval = paired_errors(wrong[SR_ADAM], wrong[SR])
            fields = {"value": gap, "unit": "share difference", "interval": interval, **SR_ADAM.fields(setup.data)}
            what = wording.adam(gap, interval, seeds)
            made.append(claim(setup, "adam", what, claims.adam_is_worse(interval), **fields))
    return made


def _wrong(setup: Setup, results: Sequence[Result]) -> np.ndarray:
    """Which test images were wrong, by seed: [seeds, images]; [0, images] without results."""
    labels = setup.sets()[1].labels.cpu()
    tables = [(load(r.read_outcomes(setup.out))["clean"] != labels).double().numpy() for r in results]
    return np.stack(tables) if tables else np.empty((0, len(labels)))


# ------------------------------------------------------------------------------------------------------- Table 2


def table2(
    setup: Setup,
    rows: Sequence[Row] | None = None,
    kinds: Sequence[str] = numbers.ATTACKS,
    eps: Sequence[float] = numbers.EPS,
    *,
    jsma: Sequence[tuple[str, str]] = JSMA,
    cells: Sequence[Cell] | None = None,
) -> list[Result]:
    """Accuracy under the four attacks; every cell of the fine-tuned rows (SAT, HAT) has a network of its own.

    `cells` restricts the fine-tuned rows to some (row, attack, eps). JSMA is run on both surfaces with both targets,
    which the paper leaves open.
    """
    plain = plain_rows(setup.data)
    rows = (*numbers.ROWS, *plain) if rows is None else rows
    wanted = [cell for cell in tuned_cells([k for k in kinds if k != "JSMA"]) if cell[0] in rows and cell[2] in eps]
    wanted = [cell for cell in wanted if cells is None or cell in cells]
    results = []
    for net in networks(setup, [row for row in plain if row in rows or row == SR]):
        if net.row in rows:
            for attack in [attack for kind in kinds for e in eps for attack in _table2_attacks(kind, e, jsma)]:
                results.append(_table2_cell(setup, net, attack))
        if net.row == SR:
            results += _tuned_rows(setup, net, wanted)
    return results


def _table2_attacks(kind: str, eps: float, jsma: Sequence[tuple[str, str]]) -> list[attacks.Attack]:
    if kind == "JSMA":
        return [attacks.JSMA(eps=eps, surface=surface, target=target) for surface, target in jsma]
    return [getattr(attacks, kind)(eps=eps)]


def _tuned_rows(setup: Setup, net: Net, cells: Sequence[Cell]) -> list[Result]:
    part = "" if len(cells) == 18 else f"{len(cells)} of the 18 cells of the fine-tuned rows"
    note = "; ".join(words for words in (setup.tuning_note(), part) if words)
    nets = tuned_for(setup, net, cells)
    return [_table2_cell(setup, nets[cell], getattr(attacks, cell[1])(eps=cell[2]), note) for cell in cells]


def _table2_cell(setup: Setup, net: Net, attack: attacks.Attack, note: str = "") -> Result:
    kind, eps = type(attack).__name__, attack.eps  # type: ignore[attr-defined]
    n = setup.images(MOST if kind == "JSMA" else None)
    label = net.label(setup.data, "table2", kind)
    open_settings: dict[str, str] = {}
    if isinstance(attack, attacks.JSMA):
        open_settings = {"surface": attack.surface, "target": str(attack.target)}
    parts = ["table2", setup.data, slug(label), kind.lower(), f"{eps:g}", *open_settings.values(), str(net.seed)]
    result, outcomes, _ = attacked(
        setup,
        net,
        attack,
        name="-".join(parts),
        kind="table2",
        what=f"accuracy of {label} under {kind} at {eps:g} on {setup.data}",
        target=open_settings.pop("target", ""),
        cell=open_settings,
        n=n,
        note=setup.note(note, n=n),
    )
    return beside(result, numbers.table2(setup.data, net.row, kind, eps)).save(setup.out, outcomes)


# ------------------------------------------------------------------------------------------------------- Table 3


def table3(
    setup: Setup,
    targets: Sequence[str] = ("untargeted", "random"),
    *,
    search_steps: int = PAPERS_SEARCH[0],
    steps: int = PAPERS_SEARCH[1],
    rows: Sequence[Row] | None = None,
) -> list[Result]:
    """Mean smallest C&W distortions over images that were right and were broken, with the success rates."""
    results = []
    for net in networks(setup, plain_rows(setup.data) if rows is None else rows):
        for target in targets:
            result, outcomes, _ = carlini(setup, net, target, search_steps=search_steps, steps=steps)
            results.append(result.save(setup.out, outcomes))
    return [*results, *table3_claims(setup, results)]


def carlini(setup: Setup, net: Net, target: str, *, search_steps: int, steps: int) -> tuple[Result, bytes, Path]:
    """One cell of Table 3: the result, every image's outcome, and the folder with the images."""
    towards = None if target == "untargeted" else target
    attack = attacks.CarliniWagner(search_steps=search_steps, steps=steps, target=towards)
    label, n = net.label(setup.data, "table3", "CarliniWagner"), setup.images(MOST)
    budget = "" if (search_steps, steps) == PAPERS_SEARCH else f"C&W at {search_steps} x {steps}, not 9 x 10000"
    result, outcomes, folder = attacked(
        setup,
        net,
        attack,
        name=f"table3-{setup.data}-{slug(label)}-{target}-{net.seed}",
        n=n,
        target=target,
        kind="table3",
        unit="distortion",
        what=f"mean smallest C&W distortion ({target}) of {label} on {setup.data}",
        note=setup.note(budget, n=n),
    )
    distortion, linf = (_broken(setup, outcomes, key) for key in ("distortion", "linf"))
    mean, interval = mean_interval(distortion) if len(distortion) else (None, None)
    near = float((linf <= 0.04 + 2e-5).mean()) if len(linf) else None
    more = {**result.numbers, "accuracy": result.value, "share_linf_0.04": near}
    result = dataclasses.replace(result, value=mean, interval=interval, numbers=more)
    return beside(result, numbers.TABLE3.get((setup.data, net.row))), outcomes, folder


def _broken(setup: Setup, outcomes: bytes, key: str) -> np.ndarray:
    """A distance of each image that was right and was broken."""
    return load(outcomes)[key].double().numpy()[np.isfinite(_distances(setup, outcomes))]


def _distances(setup: Setup, outcomes: bytes) -> np.ndarray:
    """Each image's distortion; infinite where it was not right or was not broken."""
    columns = load(outcomes)
    labels = setup.sets()[1].labels[: len(columns["clean"])].cpu()
    broken = columns["success"] & (columns["clean"] == labels)
    return torch.where(broken, columns["distortion"].double(), torch.inf).numpy()


def table3_claims(setup: Setup, results: Sequence[Result]) -> list[Result]:
    """What the distortions and success rates say about the paper's sentences."""
    made = []
    for target in dict.fromkeys(result.target for result in results):
        here = [result for result in results if result.target == target]
        for row in (MMLDA, ADAM):
            ours, base = (_all_distances(setup, of_row(here, one)) for one in (row, SR))
            if len(ours) and len(base):
                made += _ratio_claim(setup, row, target, ours, base)
    rates = [float(r.numbers["success_rate"] or 0) for r in results]
    fields: Fields = {"value": min(rates), "unit": "share"}
    return [*made, claim(setup, "success", wording.success(rates), claims.nearly_always_broken(rates), **fields)]


def _all_distances(setup: Setup, results: Sequence[Result]) -> np.ndarray:
    """The distances of all seeds, one after the other."""
    return np.concatenate([[], *(_distances(setup, result.read_outcomes(setup.out)) for result in results)])


def _ratio_claim(setup: Setup, row: Row, target: str, ours: np.ndarray, base: np.ndarray) -> list[Result]:
    both = np.isfinite(ours) & np.isfinite(base)
    if not both.any():
        return []
    ours, base = ours[both], base[both]
    ratio, interval = float(ours.mean() / base.mean()), ratio_interval(ours, base)
    what = wording.distances(row.label(setup.data), target, ratio, interval)
    fields: Fields = {"value": ratio, "unit": "times", "interval": interval, "n": len(ours), "target": target}
    return [claim_of(setup, "table3", row, what, claims.distortion_is_larger(interval), name=target, **fields)]
