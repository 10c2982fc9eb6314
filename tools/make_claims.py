"""Write the tables of docs/claims.md, suspects.md and verdicts.md from results/: `python tools/make_claims.py`.

Each table stands between markers that name it; the text around them is written by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from from_results import (
    DATA,
    RESULTS,
    ROOT,
    fixed,
    load,
    mean,
    on_all_images,
    percent,
    select,
    size,
    source,
    table,
    write,
)

from mmlda import zoo
from mmlda.paper import numbers
from mmlda.paper.biased import CONTROL, MODELS
from mmlda.paper.comparisons import difference, wilcoxon_test
from mmlda.paper.rows import ADAM, HAT, MMLDA, SAT, SR, SR_ADAM, Row, plain_rows
from mmlda.paper.suspects import ATTACKS, WORST, suspect_rows
from mmlda.paper.tables import JSMA
from mmlda.paper.worst import FIELD_EPS
from mmlda.results import Result, label

SCRIPT = Path(__file__).name
VERDICTS = {True: "**holds**", False: "**does not hold**", None: "not decided"}
VIEWS = ("logits", "logits, float64", "clipped probabilities", "predicted labels")
GRADIENT = ("FGSM", "BIM", "ILCM")
Results = list[Result]


def verdict(results: Results, claim: str) -> str:
    """The verdict of most places, or of CIFAR-10 where they are tied; then the others with their places."""
    places: dict[bool | None, set[str]] = {}
    for r in select(results, "claim", claim=claim):
        places.setdefault(r.holds, set()).add("Adam" if ADAM.has(r) else DATA[r.dataset])
    first = max(places, key=lambda holds: (len(places[holds]), "CIFAR-10" in places[holds]))
    others = [f"{', '.join(sorted(names))}: {VERDICTS[holds]}" for holds, names in places.items() if holds != first]
    return VERDICTS[first] + (f" ({'; '.join(others)})".replace("**", "") if others else "")


def overview(results: Results) -> str:
    """One line per claim of the paper: the numbers in tools/claims-overview.md."""

    def value(key: str, **where: object) -> float:
        return select(results, "claim", claim=key, **where)[0].number

    def pair(number: Callable[[str, Row], str], data: str = "cifar10", adam: bool = True) -> str:
        named = f", Adam {number(data, ADAM)}" if adam else ""
        return f"{number(data, MMLDA)}{named} (SR {number(data, SR)})"

    def ours(kind: str, digits: int, show: Callable[..., str] = percent, **where: object) -> Callable[[str, Row], str]:
        return lambda data, row: show(mean(select(results, kind, dataset=data, row=row, **where)), digits)

    def variance(row: Row) -> str:
        return fixed(_number(select(results, "latent", dataset="cifar10", row=row)[0], "variance"), 3)

    def near(row: Row) -> tuple[str, str]:
        """How many of a row's numbers are reproduced, and whether all are."""
        cells = {data: gaps(results, data, row) for data in numbers.DATASETS}
        held = all(within(data, found) == len(found) for data, found in cells.items())
        words = {data: f"{within(data, found)} of {len(found)}" for data, found in cells.items()}
        return f"{words['cifar10']}, MNIST {words['mnist']}", VERDICTS[held]

    (near_mmlda, reproduced_mmlda), (near_sr, reproduced_sr) = near(MMLDA), near(SR)
    (fig3,), (theory,) = select(results, "claim", claim="fig3"), select(results, "theory")
    curves = [c for c in theory.series["curves"] if c["panel"] == "Bayes error"]
    (ten,) = (c for c in curves if c["name"] == "L = 10")
    return (
        (ROOT / "tools" / "claims-overview.md")
        .read_text()
        .format(
            **{key: verdict(results, key) for key in numbers.SENTENCES},
            paper_error=pair(lambda *at: percent(numbers.TABLE1[at], 2), adam=False),
            error=pair(ours("table1", 2)),
            adam_error=fixed(100 * value("adam", dataset="cifar10"), 2, sign=True),
            silhouette=pair(ours("fig2", 3, fixed)),
            best_c=f"{value('fig5'):g}",
            paper_bim=pair(lambda data, row: percent(numbers.table2(data, row, "BIM", 0.04)), adam=False),
            bim=pair(ours("table2", 2, attack="BIM", eps=0.04)),
            near_mmlda=near_mmlda,
            near_sr=near_sr,
            reproduced_mmlda=reproduced_mmlda,
            reproduced_sr=reproduced_sr,
            tuned=sides(results, "cifar10", SAT, HAT).replace("above", "above SR"),
            paper_distortion=pair(lambda *at: fixed(numbers.TABLE3[at], 2), adam=False),
            distortion=pair(ours("table3", 2, fixed, target="random")),
            broken=percent(value("success")),
            noises=f"MNIST {pair(ours('fig4', 2), 'mnist', adam=False)}, CIFAR-10 {pair(ours('fig4', 2), adam=False)}",
            variance=f"{variance(MMLDA)}, Adam {variance(ADAM)}",
            better=f"{fig3.numbers['better']} of {fig3.n} sets, {fixed(100 * fig3.number, 2, sign=True)} points",
            same_label=percent(value("priors"), 2),
            distance=f"{theory.number:.1e}",
            theory=VERDICTS[theory.holds],
            bayes=", ".join(f"{ten['y'][k]:.2g} at C = {ten['x'][k]:g}" for k in (0, -1)),
            bayes_falls=VERDICTS[all(a > b or a == b == 0 for c in curves for a, b in zip(c["y"], c["y"][1:]))],
        )
    )


def gaps(results: Results, data: str, row: Row) -> dict[str, float]:
    """Ours minus the paper's in a row of Table 2, in the reading of JSMA that fits the row best."""
    readings = []
    for surface, target in JSMA:
        found = {}
        for attack, eps in ((attack, eps) for attack in numbers.ATTACKS for eps in numbers.EPS):
            way = {"surface": surface, "target": target} if attack == "JSMA" else {}
            ours = mean(select(results, "table2", dataset=data, row=row, attack=attack, eps=eps, **way))
            paper = numbers.table2(data, row, attack, eps)
            if ours is not None and paper is not None:
                found[f"{attack} {eps:g}"] = round(ours - paper, 12)
        readings.append(found)
    return min(readings, key=lambda found: (-within(data, found), sum(map(abs, found.values()))))


def within(data: str, found: dict[str, float]) -> int:
    """How many cells count as reproduced."""
    return sum(abs(gap) <= numbers.NEAR["table2", data] for gap in found.values())


def sides(results: Results, data: str, *rows: Row) -> str:
    """In how many cells of Table 2 networks are above SR, and in how many below, by the 95% interval."""
    above = below = cells = 0
    for r in (r for row in rows for r in select(results, "table2", dataset=data, row=row)):
        same = {"attack": r.attack, "eps": r.eps, "target": r.target, "surface": r.cell.get("surface")}
        low, high = difference([r], select(results, "table2", dataset=data, row=SR, **same))
        above, below, cells = above + (low > 0), below + (high < 0), cells + 1
    return f"{above} above, {below} below of {cells}" if cells else "–"


def table1(results: Results) -> str:
    rows = []
    for data in numbers.DATASETS:
        for row in (*plain_rows(data), SR_ADAM):
            runs, paper = select(results, "table1", dataset=data, row=row), numbers.TABLE1.get((data, row))
            errors = ", ".join(percent(r.number, 2) for r in sorted(runs, key=lambda r: r.seed or 0))
            held, _ = numbers.reproduced("table1", data, mean(runs), paper)
            near = {True: "yes", False: "no", None: "–"}[held]
            rows.append([DATA[data], row.label(data), percent(mean(runs), 2), errors, percent(paper, 2), near])
    return table("data | network | test error, % | each seed | paper | reproduced", rows) + source(
        select(results, "table1")
    )


def table2(results: Results) -> str:
    text = ""
    for data in numbers.DATASETS:
        rows = []
        for eps in numbers.EPS:
            for row in dict.fromkeys((*numbers.ROWS, *plain_rows(data))):
                cells = []
                for attack in GRADIENT:
                    ours = mean(select(results, "table2", dataset=data, row=row, attack=attack, eps=eps))
                    cells.append(f"{percent(ours, 2)} / {percent(numbers.table2(data, row, attack, eps))}")
                rows.append([f"{eps:g}", row.label(data), *cells])
        text += f"{DATA[data]}, accuracy in %, ours / paper:\n\n{table('eps | network | FGSM | BIM | ILCM', rows)}\n"
    group = [r for r in select(results, "table2") if r.attack in GRADIENT]
    zero, most = max(_number(r, "zero_gradient") for r in group), max(group, key=_made_right)
    text += f"Largest share of images whose gradient is exactly zero at the start: {percent(zero)}%. Counting "
    text += f"images that only the attack makes right adds at most {percent(_made_right(most), 2)} points "
    text += f"({label(most)}, {most.attack} {most.eps:g} on {DATA[most.dataset]}).\n"
    return text + source(group)


def _number(result: Result, name: str) -> float:
    return float(result.numbers[name] or 0.0)


def _made_right(result: Result) -> float:
    return _number(result, "plain_accuracy") - result.number


def jsma(results: Results) -> str:
    rows = []
    for data in numbers.DATASETS:
        for eps in numbers.EPS:
            for row in plain_rows(data):
                found = [
                    select(results, "table2", dataset=data, row=row, attack="JSMA", eps=eps, surface=s, target=t)
                    for s, t in JSMA
                ]
                paper = percent(numbers.table2(data, row, "JSMA", eps))
                rows.append([DATA[data], f"{eps:g}", row.label(data), *(percent(mean(one)) for one in found), paper])
    ways = " | ".join(f"{surface}, {target}" for surface, target in JSMA)
    return table(f"data | eps | network | {ways} | paper", rows) + source(select(results, "table2", attack="JSMA"))


def agreement(results: Results) -> str:
    rows = []
    for row in (*numbers.ROWS, ADAM):
        cells = []
        for data in numbers.DATASETS:
            found = gaps(results, data, row)
            place = max(found, key=lambda name: abs(found[name]), default="")
            largest = f"{fixed(100 * found[place], 1, sign=True)} ({place})" if found else "–"
            near = f"{within(data, found)} of {len(found)}" if found else "–"
            cells += [near, largest, sides(results, data, row) if row != SR else "–"]
        rows.append([row.label("cifar10"), *cells])
    head = (f" | {name}, within 5 points | largest difference | cells beside SR" for name in DATA.values())
    return table("network" + "".join(head), rows)


def table3(results: Results) -> str:
    rows = []
    for data in numbers.DATASETS:
        for row in plain_rows(data):
            for target in ("untargeted", "random"):
                (r,) = select(results, "table3", dataset=data, row=row, target=target)
                ratio = mean(select(results, "claim", claim="table3", dataset=data, row=row, target=target))
                cells = [fixed(r.number, 2), fixed(numbers.TABLE3[data, row], 2), fixed(ratio, 2)]
                held, _ = numbers.reproduced("table3", data, r.number, numbers.TABLE3[data, row])
                more = ["yes" if held else "no", percent(_number(r, "share_linf_0.04"))]
                rows.append([DATA[data], row.label(data), target, *cells, *more])
    head = "data | network | target | mean distortion | paper | ours / SR's | within 20% | L∞ ≤ 0.04, %"
    return table(head, rows) + source(select(results, "table3"))


def networks(group: Results) -> dict[tuple[str, str], Results]:
    """Results by dataset and network; networks fine-tuned on one attack are taken together."""

    def order(r: Result) -> tuple[object, ...]:
        hardened = r.recipe.endswith("-robust")
        return r.dataset != "mnist", "variant" in r.cell, r.fine_tuning, hardened, r.head != "softmax"

    found: dict[tuple[str, str], Results] = {}
    for r in sorted(group, key=order):
        found.setdefault((DATA[r.dataset], label(dataclasses.replace(r, kind="worst"))), []).append(r)
    return found


def worst(results: Results) -> str:
    group = select(results, "worst")
    sizes = (*FIELD_EPS, *numbers.EPS)
    rows = [
        [*key, *(percent(mean(select(runs, "worst", eps=eps))) for eps in sizes)]
        for key, runs in networks(group).items()
    ]
    return table(" | ".join(("data | network", *map(size, sizes))), rows) + source(group)


def robust(results: Results) -> str:
    """The networks trained on adversarial examples, from their cards."""
    rows = []
    for about in map(zoo.about, sorted(zoo.names(), key=lambda name: (name.split("-")[0], "mmlda" in name))):
        for attack, words in (("autoattack", "AutoAttack"), ("worst", "worst case")):
            if left := on_all_images(about, attack):
                head = {"softmax": "SR", "mmlda": "MM-LDA"}[about["model"]["head"]]
                accuracies = ", ".join(f"{percent(share, 2)} at {size(eps)}" for eps, share in left.items())
                rows.append([DATA[about["data"]], head, percent(about["accuracy"], 2), words, accuracies])
    note = "10,000 images; seed 0; NVIDIA H200. Results: [robust](../results/robust)"
    return table("data | head | clean, % | attack | accuracy under it, %", rows) + f"\n*{note}.*\n"


def audits(results: Results) -> str:
    group, rows = select(results, "audit"), []
    for key, runs in networks(group).items():
        cells = []
        for name in ("standard_accuracy", "worst_accuracy", "zero_gradient", "median_gap"):
            ends = sorted(_number(r, name) * (1 if name == "median_gap" else 100) for r in runs)
            cells.append(" to ".join(dict.fromkeys(fixed(end) for end in (ends[0], ends[-1]))))
        verdicts = ", ".join(dict.fromkeys(str(r.value) for r in runs))
        rows.append([*key, size(runs[0].eps or 0.0), verdicts, *cells])
    head = "data | network | eps | verdict | standard attacks leave, % | all attacks leave, % | "
    head += "zero gradients, % | median gap, nats"
    return table(head, rows) + source(group)


def fig2(results: Results) -> str:
    rows = []
    for data in numbers.DATASETS:
        for row in plain_rows(data):
            silhouette, fit = (select(results, kind, dataset=data, row=row) for kind in ("fig2", "latent"))
            stats = [
                f"{fit[0].numbers[name]:.3g}" if fit else "–"
                for name in ("squared_distance", "variance", "mean_offset")
            ]
            rows.append([DATA[data], row.label(data), fixed(mean(silhouette), 3), *stats])
    expected = select(results, "latent")[0].numbers
    values = [f"{expected[f'{name}_expected']:.3g}" for name in ("squared_distance", "variance", "mean_offset")]
    rows.append(["–", "Max-Mahalanobis distribution", "–", *values])
    head = "data | network | silhouette | mean of ‖z − μ_y‖² | variance within a class | distance of class means from μ"
    return table(head, rows) + source(select(results, "fig2") + select(results, "latent"))


def fig3(results: Results) -> str:
    group, columns = select(results, "fig3"), (*MODELS, CONTROL)
    rows = []
    for family in ("BP1", "BP2", ""):
        sets = [r for r in group if family in ("", r.cell["family"])]
        means = [percent(mean([r for r in sets if row.has(r)]), 2) for row in columns]
        tests = []
        for base in (SR, CONTROL):
            values = [{r.cell["set"]: r.number for r in sets if row.has(r)} for row in (MMLDA, base)]
            better, gap, p = wilcoxon_test([values[0][name] - values[1][name] for name in values[0]])
            tests.append(f"{better} of {len(values[0])}, {fixed(100 * gap, 2, sign=True)} (p = {p:.2g})")
        rows.append([family or "both", *means, *tests])
    head = " | ".join(row.label("cifar10") for row in columns)
    return table(f"sets | {head} | MM-LDA above SR | above SR, MM-LDA's recipe", rows) + source(group)


def fig4(results: Results) -> str:
    group = select(results, "fig4")
    rows = []
    for r in sorted(group, key=lambda r: (r.dataset != "mnist", r.head != "softmax")):
        found = f"{r.numbers['semantic']:g} of {r.n}, {r.numbers['weakening']:g} weaken it"
        rows.append([DATA[r.dataset], label(r), percent(r.number, 2), found])
    head = "data | network | look like their image, % | noises"
    text = table(head, rows) + "\n"
    for r in reversed(select(results, "claim", claim="fig4")):
        text += f"- {DATA[r.dataset]}: {r.what}.\n"
    return text + source(group)


def fig5(results: Results) -> str:
    group = sorted(select(results, "fig5"), key=lambda r: r.cell["log10_C"])
    rows = [
        ["validation error, %", *(percent(r.number, 2) for r in group)],
        ["deviation over the folds", *(percent(_number(r, "std"), 2) for r in group)],
    ]
    (judged,) = select(results, "claim", claim="fig5")
    text = table(" | ".join(("log10(C)", *(f"{r.cell['log10_C']:g}" for r in group))), rows)
    return f"{text}\n{judged.what[:1].upper()}{judged.what[1:]}.\n" + source(group)


def views(results: Results) -> str:
    """Every suspect network under BIM at 0.12 in every view, and the views that explain Table 2: MNIST / CIFAR-10."""
    group, found = select(results, "suspect"), {}
    for data in numbers.DATASETS:
        judged: dict[object, list[str]] = {}
        for r in select(results, "claim", dataset=data, claim="suspects"):
            for item in (item for item in r.series["verdicts"] if item["verdict"] != "no"):
                network = item["recipe"], item.get("variant"), bool(item.get("shipped"))
                judged.setdefault(network, []).append(item["view"] + " (in part)" * (item["verdict"] == "in part"))
        shipped = [dataclasses.replace(row, shipped=True) for row in plain_rows(data)]
        for row in (*suspect_rows(data), *shipped):
            here = select(group, "suspect", dataset=data, row=row)
            cells = [percent(mean(select(here, "suspect", attack="BIM", eps=0.12, view=view))) for view in VIEWS]
            left = select(results, "worst", dataset=data, row=dataclasses.replace(row, shipped=False), eps=0.12)
            left = left if row.shipped else select(here, "suspect", eps=0.12, view=WORST)
            said = ", ".join(judged.get((f"{data}-{row.recipe}", row.variant, row.shipped), ["no"]))
            explains = said if row.head == "mmlda" else "control"
            found.setdefault(row.label(data), {})[data] = [*cells, percent(mean(left)), explains]
    rows = []
    for name, cells in found.items():
        pairs = zip(*(cells.get(data, ["–"] * (len(VIEWS) + 2)) for data in numbers.DATASETS), strict=True)
        rows.append([name, *(one if one == other else f"{one} / {other}" for one, other in pairs)])
    return table(" | ".join(("network", *VIEWS, "worst case | explains Table 2")), rows) + source(group)


def looks(results: Results) -> str:
    """The networks with the centre loss beside the paper's row."""
    cells = [(attack, eps) for attack in ATTACKS for eps in numbers.EPS]
    rows = []
    for data in numbers.DATASETS:
        paper = [percent(numbers.table2(data, MMLDA, attack, eps)) for attack, eps in cells]
        rows.append([DATA[data], "the paper's MM-LDA", *paper])
        here = select(results, "suspect", dataset=data, variant="centre loss")
        for view in ("logits", "logits, float64", "clipped probabilities"):
            six = [select(here, "suspect", view=view, attack=attack, eps=eps) for attack, eps in cells]
            rows.append([DATA[data], f"centre loss, {view}", *(percent(mean(one)) for one in six)])
        left = [percent(mean(select(here, "suspect", view=WORST, eps=eps))) for eps in numbers.EPS]
        rows.append([DATA[data], "centre loss, worst case", *left, *["″"] * 3])
    return table(" | ".join(("data | accuracy, %", *(f"{attack} {eps:g}" for attack, eps in cells))), rows)


def rules(results: Results) -> str:
    found = {r.claim: str(r.series["rule"]) for r in select(results, "claim")}
    return table("claim | rule", [[key, found[key]] for key in numbers.SENTENCES if key in found])


def sentences(results: Results) -> str:
    return table(
        "claim | the paper's words",
        [[key, f"“{words}”"] for key, words in numbers.SENTENCES.items() if key not in ("suspects", "fig3-recipe")],
    )


PARTS: dict[str, Sequence[Callable[[Results], str]]] = {
    "claims.md": (overview, table1, table2, jsma, agreement, worst, robust, audits, table3, fig2, fig3, fig4, fig5),
    "suspects.md": (looks, views),
    "verdicts.md": (sentences, rules),
}


def pages(folder: str | Path = RESULTS) -> dict[Path, dict[str, str]]:
    """The generated parts of every page."""
    results = load(folder)
    return {ROOT / "docs" / page: {make.__name__: make(results) for make in makers} for page, makers in PARTS.items()}


if __name__ == "__main__":
    write(SCRIPT, pages())
