"""Tables 1 to 3, each number beside the paper's, and beside them the worst case and the audit."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load

from mmlda import attacks
from mmlda._utils.tensors import packed
from mmlda.audit import audit, default_eps
from mmlda.evaluation import shares
from mmlda.evaluation.robustness import predictions
from mmlda.evaluation.robustness import provenance as traced
from mmlda.paper import numbers
from mmlda.paper.setup import (
    MOST,
    Net,
    Setup,
    attacked,
    beside,
    claim,
    networks,
    number,
    plain_rows,
    slug,
    tuned,
    variant,
)
from mmlda.results import Result, difference_interval, wilson

__all__ = ["audits", "kept", "robust", "robust_claims", "table1", "table1_claims", "table2", "table3",
           "table3_claims", "tuned_cells", "worst_case"]  # fmt: skip

EPS = numbers.EPS
FIELD_EPS = (2 / 255, 4 / 255, 8 / 255)  # what others report, beside the paper's three
MUCH = 1.2  # times as far: what "much larger" is taken for
JSMA = (("logits", "least-likely"), ("softmax", "least-likely"), ("logits", "random"), ("softmax", "random"))


def table1(setup: Setup, rows: Sequence[str] | None = None) -> list[Result]:
    """Test errors of both heads, and of SR with Adam (the paper's footnote).

    On CIFAR-10 also of MM-LDA with Adam as the paper names it; the row MM-LDA has decoupled weight decay there.
    """
    if rows is None:
        rows = (*plain_rows(setup.data), "SR (Adam)")
    test = setup.sets()[1]
    results = []
    for net in networks(setup, rows):
        begin = time.perf_counter()
        guess = predictions(net.model, test, device=setup.device)
        found = shares(guess, test.labels.cpu(), test.num_classes)
        wrong = int((guess != test.labels.cpu()).sum())
        low, high = wilson(wrong, found.n)
        result = Result(
            name=f"table1-{setup.data}-{slug(net.row)}-{net.seed}",
            kind="table1",
            what=f"test error of {net.row} on {setup.data}",
            cell={"data": setup.data, "model": net.row, "seed": net.seed},
            value=100 * wrong / found.n,
            unit="%",
            interval=(100 * low, 100 * high),
            note=setup.note(),
            n=found.n,
            seed=net.seed,
            seconds=time.perf_counter() - begin,
            numbers={"balanced_accuracy": found.balanced},
            **net.about(),
            **traced(net.model, test, torch.device(setup.device), net.name),
        )
        result = beside(result, numbers.TABLE1.get((setup.data, net.row)))
        results.append(result.save(setup.out, packed({"clean": guess.to(torch.uint8)})))
    return [*results, *table1_claims(setup, results)]


def table1_claims(setup: Setup, results: Sequence[Result]) -> list[Result]:
    """What the test errors say of the paper's sentences; of MM-LDA by the paper's own recipe, "(Adam)", apart."""
    found, over = [], f", over {len(setup.seeds)} seeds" if len(setup.seeds) > 1 else ""
    rows = {r.cell["model"] for r in results}
    for row in ("MM-LDA", "MM-LDA (Adam)"):
        if {"SR", row} <= rows:
            gap, low, high = paired_errors(setup, results, row, "SR")
            found.append(claim(
                setup, f"table1{variant(row)}", f"{row}'s error is {gap:+.2f} points from SR's{over} (95% interval "
                f"{low:+.2f} to {high:+.2f})", True if high <= 1 else False if low > 1 else None,
                value=gap, unit="points", interval=(low, high),
                rule="holds if the 95% interval of the difference lies below 1 point, does not if it lies above: the "
                "paper's own gap on CIFAR-10 is 0.91",
            ))  # fmt: skip
    if {"SR", "SR (Adam)"} <= rows:
        gap, low, high = paired_errors(setup, results, "SR (Adam)", "SR")
        found.append(claim(
            setup, "adam", f"with Adam, SR's error is {gap:+.2f} points from that with SGD{over} (95% interval "
            f"{low:+.2f} to {high:+.2f})", True if low > 0 else False if high < 0 else None,
            value=gap, unit="points", interval=(low, high),
            rule="holds if the 95% interval of the difference lies above 0, does not if it lies below",
        ))  # fmt: skip
    return found


def paired_errors(
    setup: Setup, results: Sequence[Result], first: str, second: str
) -> tuple[float, float, float]:
    """The first network's error minus the second's, in points, and a 95% interval.

    Two things are left to chance: which images were drawn, where the networks are compared image by image; and the
    seeds, where there are several (Welch). The interval has room for both.
    """
    from scipy.stats import t

    labels, each, runs = setup.sets()[1].labels.cpu(), [], []
    for row in (first, second):
        wrong = [load(r.read_outcomes(setup.out))["clean"] != labels for r in results if r.cell["model"] == row]
        table = 100 * torch.stack(wrong).double().numpy()  # [seeds, images]
        each.append(table.mean(0))
        runs.append(table.mean(1))
    gaps = each[0] - each[1]
    half = 1.96 * float(gaps.std(ddof=1)) / len(gaps) ** 0.5
    parts = [(float(run.var(ddof=1)) / len(run), len(run) - 1) for run in runs if len(run) > 1]
    if spread := sum(part for part, _ in parts):
        freedom = spread**2 / sum(part**2 / n for part, n in parts)
        half = float(np.hypot(half, t.ppf(0.975, freedom) * spread**0.5))
    gap = float(gaps.mean())
    return gap, gap - half, gap + half


def difference(results: Sequence[Result], first: str, second: str) -> tuple[float, float]:
    """A 95% interval, in points, for the first network's share minus the second's, over all their runs' images."""
    counts = []
    for model in (first, second):
        group = [(number(r), r.n) for r in results if r.kind != "claim" and r.cell.get("model") == model and r.n]
        counts += [round(sum(share * n / 100 for share, n in group)), sum(n for _, n in group)]
    low, high = difference_interval(*counts)
    return 100 * low, 100 * high


def table2(
    setup: Setup,
    rows: Sequence[str] | None = None,
    kinds: Sequence[str] = numbers.ATTACKS,
    eps: Sequence[float] = EPS,
    *,
    jsma: Sequence[tuple[str, str]] = JSMA,
    cells: Sequence[tuple[str, str, float]] | None = None,
) -> list[Result]:
    """Accuracy under the four attacks; SAT and HAT rows are a network of their own each.

    `cells` restricts the fine-tuned rows to some (row, attack, eps). JSMA comes on both surfaces with both targets,
    which the paper leaves open.
    """
    plain = plain_rows(setup.data)
    rows = (*numbers.ROWS, *plain) if rows is None else rows
    results = []
    for net in networks(setup, [row for row in plain if row in rows or row == "SR"]):
        if net.row in rows:
            for kind in kinds:
                for e in eps:
                    results += _table2_cells(setup, net, kind, e, jsma)
        if net.row == "SR":
            results += _tuned_rows(setup, net, rows, [k for k in kinds if k != "JSMA"], eps, cells)
    return results


def _tuned_rows(
    setup: Setup,
    net: Net,
    rows: Sequence[str],
    kinds: Sequence[str],
    eps: Sequence[float],
    cells: Sequence[tuple[str, str, float]] | None,
) -> list[Result]:
    wanted = [cell for cell in tuned_cells(kinds) if cell[0] in rows and cell[2] in eps]
    wanted = [cell for cell in wanted if cells is None or cell in cells]
    found, nets = [], _tuned(setup, net, wanted)
    for cell in wanted:
        part = "" if len(wanted) == 18 else f"{len(wanted)} of the 18 cells of the fine-tuned rows"
        note = "; ".join(words for words in (setup.tuning_note(), part) if words)
        found += _table2_cells(setup, nets[cell], cell[1], cell[2], (), note)
    return found


def _table2_cells(
    setup: Setup, net: Net, kind: str, eps: float, jsma: Sequence[tuple[str, str]], note: str = ""
) -> list[Result]:
    found = []
    n = setup.images(MOST if kind == "JSMA" else None)
    for surface, target in jsma if kind == "JSMA" else [("", "")]:
        cell = {"attack": kind, "eps": eps} | ({"surface": surface, "target": target} if kind == "JSMA" else {})
        attack = (attacks.JSMA(eps=eps, surface=surface, target=target) if kind == "JSMA"
                  else getattr(attacks, kind)(eps=eps))  # fmt: skip
        variant = slug(f"{surface} {target}")
        parts = ["table2", setup.data, slug(net.row), kind.lower(), f"{eps:g}", variant, str(net.seed)]
        result, outcomes, _ = attacked(
            setup, net, attack, name="-".join(part for part in parts if part), cell=cell, kind="table2",
            what=f"accuracy of {net.row} under {kind} at {eps:g} on {setup.data}",
            n=n, note=setup.note(note, n=n),
        )  # fmt: skip
        found.append(beside(result, numbers.table2(setup.data, net.row, kind, eps)).save(setup.out, outcomes))
    return found


def worst_case(
    setup: Setup,
    eps: Sequence[float] | None = None,
    cells: Sequence[tuple[str, str, float]] = (),
) -> list[Result]:
    """The same networks under the worst case: those not fine-tuned, and the fine-tuned ones of some cells."""
    eps = worst_eps(setup.data) if eps is None else eps
    plain = networks(setup, plain_rows(setup.data))
    jobs = [(net, net.row, e) for net in plain for e in eps]
    for net in plain:
        if net.row == "SR" and cells:
            nets = _tuned(setup, net, cells)
            jobs += [(nets[cell], f"{cell[0]} ({cell[1]})", cell[2]) for cell in cells]
    return under_worst_case(setup, jobs)


def worst_eps(data: str) -> tuple[float, ...]:
    """The perturbations of the worst case: the paper's three, and on its data sets what others report."""
    return (*FIELD_EPS, *EPS) if data in numbers.DATASETS else EPS


def under_worst_case(setup: Setup, jobs: Sequence[tuple[Net, str, float]]) -> list[Result]:
    """Some networks, each as a row of a table, under the worst case at a perturbation; what is there is taken over."""
    results, n = [], setup.images(MOST)
    for net, row, e in jobs:
        name = f"worst-{setup.data}-{slug(row)}-{e:.4g}-{net.seed}"
        about = traced(net.model, setup.sets()[1].subset(slice(n)), torch.device(setup.device))
        there = kept(setup.out / f"{name}.json", about["network"]["sha256"], n)
        if there is None:
            found, outcomes, _ = attacked(
                setup, dataclasses.replace(net, row=row), attacks.WorstCase(eps=e), kind="worst", n=n, name=name,
                cell={"attack": "WorstCase", "eps": e},
                what=f"accuracy of {row} under the worst case at {e:.4g} on {setup.data}",
                note=setup.note(setup.tuning_note() if _is_tuned(net) else "", n=n),
            )  # fmt: skip
            there = found.save(setup.out, outcomes)
        results.append(there)
    return results


def robust(setup: Setup, cells: Sequence[tuple[str, str, float]] | None = None) -> list[Result]:
    """The worst case beside Table 2, and whether by it MM-LDA is more robust than SR, fine-tuned or not."""
    results = worst_case(setup, cells=tuned_cells(eps=worst_eps(setup.data)) if cells is None else cells)
    return [*results, *robust_claims(setup, results)]


def robust_claims(setup: Setup, results: Sequence[Result]) -> list[Result]:
    """What the worst case says of the paper's sentence, for each recipe of MM-LDA."""
    heads = [row for row in ("MM-LDA", "MM-LDA (Adam)") if any(r.cell["model"] == row for r in results)]
    found = []
    for head in heads:
        above, excluded, words = [], [], ""
        for e in EPS:
            here = [r for r in results if r.cell["eps"] == e]
            ours, base = (statistics.mean(number(r) for r in here if r.cell["model"] == row) for row in (head, "SR"))
            words += f"{'; ' if words else ''}at {e:g} {head} keeps {ours:.1f}%, SR {base:.1f}%"
            for row in sorted({r.cell["model"] for r in here} - {"MM-LDA", "MM-LDA (Adam)"}):
                low, high = difference(here, head, row)
                above.append(low > 0)
                if row == "SR" and base < 80:  # where there is room to be better
                    excluded.append(high < 10)
        found.append(claim(
            setup, f"table2{variant(head)}", f"under the worst case {words}; {head} is above the others in "
            f"{sum(above)} of {len(above)} comparisons", True if all(above) else False if any(excluded) else None,
            value=float(sum(above)), unit=f"of {len(above)} comparisons", n=setup.images(MOST),
            rule="holds if the 95% interval of the difference lies above 0 against SR and each fine-tuned SR network "
            "at each of Table 2's three perturbations; does not hold if at one where SR keeps less than 80% it "
            "excludes an advantage of 10 points over SR",
        ))  # fmt: skip
    return found


def tuned_cells(
    kinds: Sequence[str] = ("FGSM", "BIM", "ILCM"), eps: Sequence[float] = EPS
) -> list[tuple[str, str, float]]:
    """The cells of Table 2's fine-tuned rows, or of the same rows at other perturbations."""
    return [(row, kind, e) for row in ("SR + SAT", "SR + HAT") for kind in kinds for e in eps]


def audits(setup: Setup, n: int = 200, cells: Sequence[tuple[str, str, float]] = ()) -> list[Result]:
    """Whether each network's robustness is real: SR and MM-LDA, each the other's surrogate, and fine-tuned ones."""
    test, n = setup.sets()[1], setup.images(n)
    eps = default_eps(test)
    plain = networks(setup, plain_rows(setup.data))
    nets = [*plain]
    for net in plain:
        if net.row == "SR" and cells:
            made = _tuned(setup, net, cells)
            named = {made[cell].name: dataclasses.replace(made[cell], row=_name(cell)) for cell in cells}
            nets += list(named.values())
    results = []
    for net in nets:
        other = next(one for one in plain if (one.row == "SR") != (net.row == "SR") and one.seed == net.seed)
        results.append(audited(setup, net, other, eps, n))
    return results


def audited(setup: Setup, net: Net, surrogate: Net, eps: float, n: int) -> Result:
    """Whether a network's robustness is real; a result that is there already is taken over."""
    test, name = setup.sets()[1], f"audit-{setup.data}-{slug(net.row)}-{eps:.4g}-{net.seed}"
    about = traced(net.model, test.subset(slice(n)), torch.device(setup.device), net.name)
    there = kept(setup.out / f"{name}.json", about["network"]["sha256"], n)
    if there is not None:
        return there
    judged = audit(net.model, test, eps=eps, n=n, surrogate=surrogate.model, device=setup.device, show=setup.show)
    found = judged.to_result()
    cell = {"data": setup.data, "model": net.row, "eps": eps, "seed": net.seed}
    note = setup.note(setup.tuning_note() if _is_tuned(net) else "", found.note)
    fields = {"seed": net.seed, "note": note, **net.about(), **about}
    return dataclasses.replace(found, name=name, cell=cell, **fields).save(setup.out)


def _is_tuned(net: Net) -> bool:
    return net.row.startswith("SR +")


def _name(cell: tuple[str, str, float]) -> str:
    """A fine-tuned network in words: SAT's are made for one perturbation, HAT's for all."""
    row, kind, eps = cell
    return f"{row} ({kind})" if row == "SR + HAT" else f"{row} ({kind} {eps:g})"


def _tuned(setup: Setup, net: Net, cells: Sequence[tuple[str, str, float]]) -> dict[tuple[str, str, float], Net]:
    """The networks of some cells. A HAT network serves every perturbation: its range, 0.02 to 0.20, has Table 2's."""
    made = list(dict.fromkeys((row, kind, None if row == "SR + HAT" else e) for row, kind, e in cells))
    nets = dict(zip(made, tuned(setup, net, made)))
    return {(row, kind, e): nets[row, kind, None if row == "SR + HAT" else e] for row, kind, e in cells}


def kept(path: Path, network: str, n: int) -> Result | None:
    """A result that is there already, if it is of the same network and of as many images or more."""
    if not path.is_file():
        return None
    there = Result.load(path)
    same = there.network is not None and there.network["sha256"] == network
    return there if same and there.n is not None and there.n >= n else None


def table3(
    setup: Setup,
    targets: Sequence[str] = ("untargeted", "random"),
    *,
    search_steps: int = 9,
    steps: int = 10_000,
    rows: Sequence[str] | None = None,
) -> list[Result]:
    """Mean smallest C&W distortions over images that were right and were broken, with the success rates."""
    results = []
    for net in networks(setup, plain_rows(setup.data) if rows is None else rows):
        for target in targets:
            result, outcomes, _ = carlini(setup, net, target, search_steps=search_steps, steps=steps)
            results.append(result.save(setup.out, outcomes))
    return [*results, *table3_claims(setup, results)]


def table3_claims(setup: Setup, results: Sequence[Result]) -> list[Result]:
    """What the distortions and success rates say of the paper's sentences."""
    found = []
    for target in dict.fromkeys(r.cell["target"] for r in results):
        of: dict[str, list[np.ndarray]] = {}
        for r in results:
            if r.cell["target"] == target:
                of.setdefault(r.cell["model"], []).append(_distances(setup, r.read_outcomes(setup.out)))
        for row in ("MM-LDA", "MM-LDA (Adam)") if "SR" in of else ():
            if row not in of:
                continue
            ours, base = (np.concatenate(of[one]) for one in (row, "SR"))
            both = np.isfinite(ours) & np.isfinite(base)
            if both.any():
                ours, base = ours[both], base[both]
                low, high = ratio_interval(ours, base)
                ratio = float(ours.mean() / base.mean())
                found.append(claim(
                    setup, f"table3-{target}{variant(row)}", f"C&W ({target}) moves {row}'s images {ratio:.2f} times "
                    f"as far as SR's (95% interval {low:.2f} to {high:.2f})",
                    True if low > MUCH else False if high < MUCH else None, value=ratio, unit="times",
                    interval=(low, high), n=len(ours),
                    rule="holds if the interval of the ratio of the means (bootstrap over the images that both get "
                    "right and C&W breaks for both) lies above 1.2, does not if it lies below: much larger is a fifth "
                    "or more",
                ))  # fmt: skip
    rates = [float(r.numbers["success_rate"] or 0) for r in results]
    return [*found, claim(
        setup, "success", f"C&W breaks {100 * min(rates):.1f}% to {100 * max(rates):.1f}% of the images",
        min(rates) >= 0.99, value=100 * min(rates), unit="%",
        rule="holds if at least 99% for every network and target",
    )]  # fmt: skip


def carlini(
    setup: Setup, net: Net, target: str, *, search_steps: int = 9, steps: int = 10_000
) -> tuple[Result, bytes, Path]:
    """One cell of Table 3."""
    towards = None if target == "untargeted" else target
    attack = attacks.CarliniWagner(search_steps=search_steps, steps=steps, target=towards)
    result, outcomes, folder = attacked(
        setup, net, attack, name=f"table3-{setup.data}-{slug(net.row)}-{target}-{net.seed}", n=setup.images(MOST),
        cell={"attack": "C&W", "target": target}, kind="table3", unit="distortion",
        what=f"mean smallest C&W distortion ({target}) of {net.row} on {setup.data}",
    )  # fmt: skip
    distortion, linf = (_broken(setup, outcomes, key) for key in ("distortion", "linf"))
    mean = float(distortion.mean()) if len(distortion) else None
    half = 1.96 * float(distortion.std(ddof=1)) / len(distortion) ** 0.5 if len(distortion) > 1 else 0.0
    extra = {"accuracy": result.value, "share_linf_0.04": float((linf <= 0.04 + 2e-5).mean()) if len(linf) else None}
    budget = (search_steps, steps) != (9, 10_000)
    note = "; ".join(w for w in (result.note, f"C&W at {search_steps} x {steps}, not 9 x 10000" if budget else "") if w)
    result = dataclasses.replace(
        result, value=mean, interval=None if mean is None else (mean - half, mean + half), note=note,
        numbers={**result.numbers, **extra},
    )  # fmt: skip
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


def ratio_interval(a: np.ndarray, b: np.ndarray, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """A 95% bootstrap interval for mean(a) / mean(b), pair by pair."""
    rows = np.random.default_rng(seed).integers(len(a), size=(draws, len(a)))
    low, high = np.quantile(a[rows].mean(1) / b[rows].mean(1), [0.025, 0.975])
    return float(low), float(high)
