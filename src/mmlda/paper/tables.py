"""Tables 1 to 3, each number beside the paper's."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from mmlda import attacks
from mmlda._utils.tensors import packed
from mmlda.evaluation import shares
from mmlda.evaluation.robustness import predictions
from mmlda.paper import claims, numbers
from mmlda.paper.comparisons import mean_interval, of_row, paired_errors, ratio_interval
from mmlda.paper.rows import ADAM, MMLDA, SR, SR_ADAM, Fields, Row, plain_rows
from mmlda.paper.setup import MOST, Cell, Net, Setup, attacked, beside, claim, named, networks, tuned_cells, tuned_for
from mmlda.results import Result, traced

JSMA = (("logits", "least-likely"), ("softmax", "least-likely"), ("logits", "random"), ("softmax", "random"))
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
    result = Result.counted(
        int((guess != test.labels.cpu()).sum()),
        found.n,
        **table1_fields(setup, net),
        seconds=time.perf_counter() - begin,
        numbers={"balanced_accuracy": found.balanced},
        **net.fields(setup.data),
        **traced(net.model, test, setup.device, net.name),
    )
    result = beside(result, numbers.TABLE1.get((setup.data, net.row)))
    return result.save(setup.out, packed({"clean": guess.to(torch.uint8)}))


def table1_fields(setup: Setup, net: Net) -> Fields:
    """The fields of a result of Table 1."""
    words, name = named(setup, net, "table1")
    what = f"test error of {words} on {setup.data}"
    return {"name": name, "kind": "table1", "what": what, "note": setup.note()}


def table1_claims(setup: Setup, results: Sequence[Result]) -> list[Result]:
    """Verdicts on the paper's sentences from the test errors; MM-LDA by the paper's own recipe is judged separately."""
    wrong = {row: _wrong(setup, of_row(results, row)) for row in (SR, SR_ADAM, MMLDA, ADAM)}
    made, over = [], f", over {len(setup.seeds)} seeds" if len(setup.seeds) > 1 else ""
    for row in (MMLDA, ADAM, SR_ADAM):
        if len(wrong[SR]) and len(wrong[row]):
            gap, (low, high) = paired_errors(wrong[row], wrong[SR])
            points = f"{100 * gap:+.2f} points from"
            rest = f"{over} (95% interval {100 * low:+.2f} to {100 * high:+.2f})"
            key, what = "table1", f"{row.label(setup.data)}'s error is {points} SR's{rest}"
            holds = claims.error_is_kept((low, high))
            if row == SR_ADAM:
                key, what = "adam", f"with Adam, SR's error is {points} that with SGD{rest}"
                holds = claims.above((low, high))
            fields: Fields = {"value": gap, "unit": "share difference", "interval": (low, high), "row": row}
            made.append(claim(setup, key, what, holds, **fields))
    return made


def _wrong(setup: Setup, results: Sequence[Result]) -> np.ndarray:
    """Which test images were wrong, by seed: [seeds, images]; [0, images] without results."""
    labels = setup.sets()[1].labels.cpu()
    tables = [(load(r.read_outcomes(setup.out))["clean"] != labels).double().numpy() for r in results]
    return np.stack(tables) if tables else np.empty((0, len(labels)))


# ------------------------------------------------------------------------------------------------------- Table 2


def table2(
    setup: Setup,
    kinds: Sequence[str] = numbers.ATTACKS,
    eps: Sequence[float] = numbers.EPS,
    *,
    jsma: Sequence[tuple[str, str]] = JSMA,
    cells: Sequence[Cell] | None = None,
) -> list[Result]:
    """Accuracy under the four attacks; every cell of the fine-tuned rows (SAT, HAT) has its own network.

    `cells` restricts the fine-tuned rows to some (row, attack, eps). JSMA is run on both surfaces with both targets,
    which the paper leaves open.
    """
    tuned = [cell for cell in tuned_cells() if cell[1] in kinds and cell[2] in eps and (cells is None or cell in cells)]
    results = []
    for net in networks(setup, plain_rows(setup.data)):
        results += table2_row(setup, net, kinds, eps, jsma)
        if net.row == SR:
            results += _tuned_rows(setup, net, tuned)
    return results


def table2_row(
    setup: Setup,
    net: Net,
    kinds: Sequence[str] = numbers.ATTACKS,
    eps: Sequence[float] = numbers.EPS,
    jsma: Sequence[tuple[str, str]] = JSMA,
) -> list[Result]:
    """One network under the attacks."""
    chosen: list[attacks.Attack] = []
    for kind, e in itertools.product(kinds, eps):
        if kind == "JSMA":
            chosen += [attacks.JSMA(eps=e, surface=surface, target=target) for surface, target in jsma]
        else:
            chosen.append(getattr(attacks, kind)(eps=e))
    return [_table2_cell(setup, net, attack) for attack in chosen]


def _tuned_rows(setup: Setup, net: Net, cells: Sequence[Cell]) -> list[Result]:
    part = "" if len(cells) == 18 else f"{len(cells)} of the 18 cells of the fine-tuned rows"
    note = "; ".join(words for words in (setup.tuning_note(), part) if words)
    nets = tuned_for(setup, net, cells)
    return [_table2_cell(setup, nets[cell], getattr(attacks, cell[1])(eps=cell[2]), note) for cell in cells]


def _table2_cell(setup: Setup, net: Net, attack: attacks.Attack, note: str = "") -> Result:
    kind, eps = type(attack).__name__, attack.eps  # type: ignore[attr-defined]
    n = setup.images(MOST if kind == "JSMA" else None)
    result, outcomes, _ = attacked(setup, net, attack, n=n, **table2_fields(setup, net, attack, n, note))
    return beside(result, numbers.table2(setup.data, net.row, kind, eps)).save(setup.out, outcomes)


def table2_fields(setup: Setup, net: Net, attack: attacks.Attack, n: int, note: str = "") -> Fields:
    """The fields of a result of Table 2."""
    kind, eps = type(attack).__name__, attack.eps  # type: ignore[attr-defined]
    surface, target = (attack.surface, str(attack.target)) if isinstance(attack, attacks.JSMA) else ("", "")
    parts = filter(None, [kind.lower(), f"{eps:g}", surface, target])
    words, name = named(setup, net, "table2", *parts, attack=kind)
    what = f"accuracy of {words} under {kind} at {eps:g} on {setup.data}"
    place = {"target": target, "cell": {"surface": surface} if surface else {}}
    return {"name": name, "kind": "table2", "what": what, "note": setup.note(note, n=n), **place}


# ------------------------------------------------------------------------------------------------------- Table 3


def table3(
    setup: Setup, targets: Sequence[str] = ("untargeted", "random"), *, search: tuple[int, int] = PAPERS_SEARCH
) -> list[Result]:
    """Mean smallest C&W distortions over images that were right and were broken, with the success rates."""
    nets = networks(setup, plain_rows(setup.data))
    results = [table3_cell(setup, net, target, search) for net in nets for target in targets]
    return [*results, *table3_claims(setup, results)]


def table3_cell(setup: Setup, net: Net, target: str, search: tuple[int, int] = PAPERS_SEARCH) -> Result:
    """The distortions of one network."""
    result, outcomes, _ = carlini(setup, net, target, search)
    return result.save(setup.out, outcomes)


def carlini(setup: Setup, net: Net, target: str, search: tuple[int, int]) -> tuple[Result, bytes, Path]:
    """One cell of Table 3: the result, every image's outcome, and the folder with the images."""
    attack, n = cw_attack(target, search), setup.images(MOST)
    result, outcomes, folder = attacked(setup, net, attack, n=n, **table3_fields(setup, net, target, search, n))
    labels = setup.sets()[1].labels[:n].cpu()
    mean, interval, near = smallest_distances(load(outcomes), labels)
    more = {**result.numbers, "accuracy": result.value, "share_linf_0.04": near}
    result = dataclasses.replace(result, value=mean, interval=interval, numbers=more)
    return beside(result, numbers.TABLE3.get((setup.data, net.row))), outcomes, folder


def cw_attack(target: str, search: tuple[int, int]) -> attacks.CarliniWagner:
    """The attack of Table 3."""
    towards, (rounds, steps) = None if target == "untargeted" else target, search
    return attacks.CarliniWagner(search_steps=rounds, steps=steps, target=towards)


def table3_fields(setup: Setup, net: Net, target: str, search: tuple[int, int], n: int) -> Fields:
    """The fields of a result of Table 3."""
    words, name = named(setup, net, "table3", target, attack="CarliniWagner")
    what = f"mean smallest C&W distortion ({target}) of {words} on {setup.data}"
    note = setup.note("" if search == PAPERS_SEARCH else f"C&W at {search[0]} x {search[1]}, not 9 x 10000", n=n)
    return {"name": name, "kind": "table3", "what": what, "unit": "distortion", "target": target, "note": note}


def smallest_distances(
    columns: dict[str, Tensor], labels: Tensor
) -> tuple[float | None, tuple[float, float] | None, float | None]:
    """Mean distortion of images that were right and were broken, its interval, and the share within L-inf 0.04."""
    broken = columns["success"] & (columns["clean"] == labels)
    if not broken.any():
        return None, None, None
    distortion, linf = (columns[key][broken].double().numpy() for key in ("distortion", "linf"))
    return *mean_interval(distortion), float((linf <= 0.04 + 2e-5).mean())


def _distances(setup: Setup, outcomes: bytes) -> np.ndarray:
    """Each image's distortion; infinite where it was not right or was not broken."""
    columns = load(outcomes)
    labels = setup.sets()[1].labels[: len(columns["clean"])].cpu()
    broken = columns["success"] & (columns["clean"] == labels)
    return torch.where(broken, columns["distortion"].double(), torch.inf).numpy()


def table3_claims(setup: Setup, results: Sequence[Result]) -> list[Result]:
    """Verdicts on the paper's sentences from the distortions and success rates."""
    made = []
    for target in dict.fromkeys(result.target for result in results):
        here = [result for result in results if result.target == target]
        for row in (MMLDA, ADAM):
            ours, base = (_all_distances(setup, of_row(here, one)) for one in (row, SR))
            if len(ours) and len(base):
                made += _ratio_claim(setup, row, target, ours, base)
    rates = [float(r.numbers["success_rate"] or 0) for r in results]
    what = f"C&W breaks {100 * min(rates):.1f}% to {100 * max(rates):.1f}% of the images"
    holds = min(rates) >= claims.NEARLY_ALL
    return [*made, claim(setup, "success", what, holds, value=min(rates), unit="share")]


def _all_distances(setup: Setup, results: Sequence[Result]) -> np.ndarray:
    """The distances of all seeds, one after the other."""
    return np.concatenate([[], *(_distances(setup, result.read_outcomes(setup.out)) for result in results)])


def _ratio_claim(setup: Setup, row: Row, target: str, ours: np.ndarray, base: np.ndarray) -> list[Result]:
    both = np.isfinite(ours) & np.isfinite(base)
    if not both.any():
        return []
    ours, base = ours[both], base[both]
    ratio, (low, high) = float(ours.mean() / base.mean()), ratio_interval(ours, base)
    what = f"C&W ({target}) moves {row.label(setup.data)}'s images {ratio:.2f} times as far as SR's"
    what += f" (95% interval {low:.2f} to {high:.2f})"
    fields: Fields = {"value": ratio, "unit": "times", "interval": (low, high), "n": len(ours), "target": target}
    return [claim(setup, "table3", what, claims.above((low, high), claims.MUCH), row=row, name=target, **fields)]
