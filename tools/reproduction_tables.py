"""The tables of docs/reproduction.md: ours beside the paper's, each number a link to its result."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from from_results import MISSING, at, images, link, markdown, notes, value

from mmlda.paper import numbers
from mmlda.paper.biased import CONTROL, MODELS
from mmlda.paper.comparisons import difference, wilcoxon_test
from mmlda.paper.hardened import HARDENED
from mmlda.paper.rows import ADAM, HAT, MMLDA, SAT, SR, SR_ADAM, Row, plain_rows
from mmlda.paper.suspects import ATTACKS as SUSPECT_ATTACKS
from mmlda.paper.suspects import WORST, suspect_rows
from mmlda.paper.tables import JSMA
from mmlda.paper.worst import FIELD_EPS
from mmlda.report.entries import DATA, Entry, fixed, grouped, number, of_kind, percent, plain, size
from mmlda.report.summary import TITLES
from mmlda.report.tables import STANDS_STILL, mean_number, ours

PLAIN = (SR, MMLDA)
TUNED = (SAT, HAT)
GRADIENT = ("FGSM", "BIM", "ILCM")
TARGETS = ("untargeted", "random")
WORST_EPS = (*FIELD_EPS, *numbers.EPS)
BIASED = (*MODELS, CONTROL)
OWN = {"claim", "suspect", "audit", "theory", "worst", "table1", "table2", "table3", "fig2", "fig3", "fig4", "fig5"}


def many(group: Iterable[Entry]) -> str:
    """How many images, in brackets; "" where nothing was measured."""
    n = images(group)
    return "" if n == "–" else f" ({n} images)"


def below(entries: list[Entry], *kinds: str) -> str:
    """What has to be known before quoting a number of a table."""
    here = [e for e in entries if e.result.kind in kinds]
    text = notes(here)
    if any((number(e.result.numbers.get("zero_gradient")) or 0) >= STANDS_STILL for e in here):
        text += f"- † the gradient was exactly zero for {STANDS_STILL:.0%} of the images or more: there the attack "
        text += "stood still\n"
    return f"\n{text}" if text else ""


def in_percent(share: float | None) -> float | None:
    return None if share is None else percent(share)


def of(group: Iterable[Entry], row: Row) -> list[Entry]:
    """The entries about one network."""
    return [e for e in group if row.has(e.result)]


def table1(entries: list[Entry]) -> str:
    """Test errors."""
    rows = []
    for data in numbers.DATASETS:
        for row in (*plain_rows(data), SR_ADAM):
            group, paper = at(entries, "table1", dataset=data, row=row), in_percent(numbers.TABLE1.get((data, row)))
            mean = ours(group).sort if group else None
            apart = fixed(mean - paper, 2, sign=True) if isinstance(mean, float) and paper is not None else "–"
            rows.append([DATA[data], row.label(data), value(group), fixed(paper, 2), apart, images(group)])
    head = ("data", "network", "test error, %", "paper", "difference", "images")
    return markdown(head, rows) + below(entries, "table1")


def table2(entries: list[Entry]) -> str:
    """One table a data set, FGSM, BIM and ILCM; then JSMA, which the paper leaves open in two respects."""

    def cell(data: str, row: Row, kind: str, eps: float) -> str:
        group = at(entries, "table2", dataset=data, row=row, attack=kind, eps=eps)
        return f"{value(group)} / {fixed(in_percent(numbers.table2(data, row, kind, eps)))}"

    text = ""
    for data in numbers.DATASETS:
        n = many(e for e in at(entries, "table2", dataset=data) if e.result.attack in GRADIENT)
        rows = [[f"{eps:g}", row.label(data), *(cell(data, row, kind, eps) for kind in GRADIENT)]
                for eps in numbers.EPS for row in dict.fromkeys((*numbers.ROWS, *plain_rows(data)))]  # fmt: skip
        text += f"{DATA[data]}, accuracy in %, ours / paper{n}:\n\n"
        text += markdown(("eps", "network", *GRADIENT), rows) + "\n"
    rows = []
    for data in numbers.DATASETS:
        for eps in numbers.EPS:
            for row in plain_rows(data):
                found = [at(entries, "table2", dataset=data, row=row, attack="JSMA", eps=eps, surface=s, target=t)
                         for s, t in JSMA]  # fmt: skip
                paper = fixed(in_percent(numbers.table2(data, row, "JSMA", eps)))
                rows.append([DATA[data], f"{eps:g}", row.label(data), paper, *(value(group) for group in found)])
    head = ("data", "eps", "network", "paper", *(f"{surface}, {target}" for surface, target in JSMA))
    n = many(at(entries, "table2", attack="JSMA"))
    text += f"JSMA, accuracy in %, by what is differentiated and the target{n}:\n\n" + markdown(head, rows)
    return text + "\n" + _counted(entries) + below(entries, "table2")


def _counted(entries: list[Entry]) -> str:
    """The cells that differ by more than a point if images count that are right under attack and were not before."""
    rows = []
    for e in at(entries, "table2"):
        after, clean = (number(e.result.numbers.get(key)) for key in ("plain_accuracy", "clean_accuracy"))
        if e.value is not None and after is not None and percent(after) - e.value > 1:
            assert clean is not None
            what = " ".join(word for word in (e.attack, f"{e.eps:g}", e.at("surface"), e.target) if word)
            shown = [f"[{fixed(e.value, 2)}]({link(e)})", fixed(percent(after), 2), fixed(e.paper)]
            rows.append([e.data, e.model, what, *shown, fixed(percent(clean), 2)])
    if not rows:
        return ""
    head = ("data", "network", "attack", "right before and after", "right after", "paper", "clean")
    text = "Cells where all that is right under attack is a point more than what was right before too:\n\n"
    return text + markdown(head, rows) + "\n"


def table3(entries: list[Entry]) -> str:
    """C&W's distortions."""
    extra = (("median_distortion", 2, 1.0), ("success_rate", 1, 100.0), ("share_linf_0.04", 1, 100.0))
    rows = []
    for data in numbers.DATASETS:
        for row in plain_rows(data):
            for target in TARGETS:
                group = at(entries, "table3", dataset=data, row=row, target=target)
                more = [mean_number(group, name, digits, scale).text for name, digits, scale in extra]
                paper = fixed(numbers.TABLE3[data, row], 2)
                rows.append([DATA[data], row.label(data), target, value(group), paper, *more, images(group)])
    head = ("data", "network", "target", "mean distortion", "paper", "median", "broken, %", "L∞ ≤ 0.04, %", "images")
    return markdown(head, rows) + below(entries, "table3")


def worst(entries: list[Entry]) -> str:
    """Every network at every perturbation; those trained on PGD at shares of their own."""
    text = ""
    for data in numbers.DATASETS:
        here = at(entries, "worst", dataset=data)
        sizes = sorted({*WORST_EPS, *(e.eps for e in here if e.eps is not None)})
        named = {row.label(data): of(here, row) for row in plain_rows(data)}
        for row in TUNED:
            for kind in GRADIENT:
                named[f"{row.label(data)} ({kind})"] = at(here, "worst", row=row, tuned_on=(kind, None))
        named |= {row.label(data): of(here, row) for row in HARDENED if of(here, row)}
        everywhere = [*plain_rows(data), *TUNED]  # those trained on PGD are at shares of their own perturbation
        rows = []
        for words, group in named.items():
            asked = not group or any(row.has(group[0].result) for row in everywhere)
            cells = [at(group, "worst", eps=eps) for eps in sizes]
            rows.append([words, *(value(cell) if cell or asked else "–" for cell in cells)])
        text += f"{DATA[data]}, accuracy in % at each eps{many(here)}:\n\n"
        text += markdown(("network", *map(size, sizes)), rows) + "\n"
    return text.removesuffix("\n") + below(entries, "worst")


def audits(entries: list[Entry]) -> str:
    """Verdicts, with the numbers they rest on."""
    extra = {
        "standard_accuracy": 100.0,
        "worst_accuracy": 100.0,
        "zero_gradient": 100.0,
        "tiny_gradient": 100.0,
        "median_gap": 1.0,
    }
    rows = []
    for data in numbers.DATASETS:
        here = [e for e in of_kind(entries, "audit") if e.result.dataset == data]
        named = {row.label(data): [] for row in plain_rows(data)} | grouped(here, lambda e: e.model)
        for words, group in named.items():
            for e in group:
                more = [mean_number([e], name, 1, scale).text for name, scale in extra.items()]
                verdict = f"[{e.result.value}]({link(e)})"
                rows.append([DATA[data], words, size(e.eps), verdict, *more, images([e]), str(e.result.seed)])
            if not group:
                rows.append([DATA[data], words, "–", MISSING, *["–"] * 7])
    head = ("data", "network", "eps", "verdict", "standard attacks leave, %", "all attacks leave, %",
            "zero gradients, %", "tiny gradients, %", "median gap, nats", "images", "seed")  # fmt: skip
    return markdown(head, rows)


def figures(entries: list[Entry]) -> str:
    """The numbers behind Figures 2 to 5; the paper has 2, 3 and 5 for CIFAR-10 only."""
    made = []
    for data in numbers.DATASETS:
        for kind, title, what, digits in (
            ("fig2", "Fig. 2", "silhouette of the classes in the latent space", 3),
            ("fig4", "Fig. 4", "C&W noises that look like their image, %", 2),
        ):
            group = at(entries, kind, dataset=data)
            if kind == "fig4" and any(map(one_sided, group)):
                what = "C&W noises that draw their image again, %; such as take it away: not measured yet"
            if group or kind == "fig4" or data == "cifar10":
                cells = [value(of(group, row), digits) for row in PLAIN]
                if adam := of(group, ADAM):
                    cells[1] += f"; Adam: {value(adam, digits)}"
                made.append([title, DATA[data], what, *cells, images(group)])
        group = at(entries, "fig3", dataset=data)
        if group or data == "cifar10":
            said = [_mean(of(group, row)) for row in BIASED]
            cells = [f"{said[0]}; by MM-LDA's recipe: {said[3]}", f"{said[1]}; true priors: {said[2]}"]
            cells = cells if group else [MISSING, MISSING]
            made.append(["Fig. 3", DATA[data], "accuracy on class-biased sets, %", *cells, images(group)])
        group = sorted(at(entries, "fig5", dataset=data), key=lambda e: e.result.cell["log10_C"])
        if group or data == "cifar10":
            said = [f"[{plain(e.result.cell['log10_C'])}]({link(e)}): {fixed(e.value, 2)} ± "
                    f"{fixed(in_percent(number(e.result.numbers.get('std'))), 2)}" for e in group]  # fmt: skip
            cells = ["–", "; ".join(said) or MISSING]
            made.append(["Fig. 5", DATA[data], "validation error, %, by log10(C)", *cells, images(group)])
    text = markdown(("figure", "data", "number", "SR", "MM-LDA", "images"), sorted(made, key=lambda row: row[0]))
    for data in numbers.DATASETS:
        biased = sorted(at(entries, "fig3", dataset=data), key=_set_order)
        sets = grouped(biased, lambda e: e.at("set"))
        rows = [[name, *(value(of(group, row)) for row in BIASED)] for name, group in sets.items()]
        if rows:
            text += f"\nFig. 3 set by set, {DATA[data]}, accuracy in %:\n\n" + markdown(
                ("set", *(row.label(data) for row in BIASED)), rows
            )
            text += "\n" + "".join(_family(entries, data, family) for family in ("BP1", "BP2"))
            for e in at(entries, "claim", dataset=data, claim="fig3-recipe"):
                text += f"\nThe two heads with one recipe: {e.result.what} ([{e.result.name}]({link(e)})).\n"
    return text + below(entries, "fig2", "fig3", "fig4", "fig5")


def one_sided(entry: Entry) -> bool:
    """Whether a share of semantic noises is one of before noises of either sign counted."""
    return entry.result.kind == "fig4" and "weakening" not in entry.result.numbers


def _set_order(entry: Entry) -> tuple[str, int]:
    return entry.at("family"), int(entry.result.cell["index"])


def _family(entries: list[Entry], data: str, family: str) -> str:
    """MM-LDA beside SR on one kind of biased sets, and how often a set alone would decide."""
    sets = grouped(at(entries, "fig3", dataset=data, family=family), lambda e: e.at("set"))
    pairs = [([e.result for e in of(group, MMLDA)], [e.result for e in of(group, SR)]) for group in sets.values()]
    pairs = [pair for pair in pairs if all(pair)]
    if not pairs:
        return ""
    better, mean, p = wilcoxon_test([ours[0].number - base[0].number for ours, base in pairs])
    alone = [difference(*pair) for pair in pairs]
    clear = f"{sum(low > 0 for low, _ in alone)} above and {sum(high < 0 for _, high in alone)} below"
    words = f"- {family}: MM-LDA is above SR on {better} of {len(pairs)} sets, by {fixed(percent(mean), 2, sign=True)} "
    return words + f"points in the mean (p = {p:.2g}); by the interval of a set alone, {clear}.\n"


def _mean(group: list[Entry]) -> str:
    values = [e.value for e in group if e.value is not None]
    return f"{statistics.fmean(values):.2f} in the mean of {len(values)} sets" if values else MISSING


def suspects(entries: list[Entry]) -> str:
    """Every network in every view, with its verdict by the rule of docs/suspects.md."""
    text = ""
    cells = [(kind, eps) for kind in SUSPECT_ATTACKS for eps in numbers.EPS]
    for data in numbers.DATASETS:
        group = at(entries, "suspect", dataset=data)
        judged = at(entries, "claim", dataset=data, claim="suspects")
        said = "; ".join(f"{e.result.what} ([{e.result.name}]({link(e)}))" for e in judged)
        text += f"{DATA[data]}: {said or MISSING}.\n\n"
        words = {_suspect(item, item): item["verdict"] for e in judged for item in e.result.series.get("verdicts", [])}
        rows = []
        for (model, view), runs in grouped(group, lambda e: (e.model, e.at("view"))).items():
            if view != WORST:
                six = [value(at(runs, "suspect", attack=kind, eps=eps), 1) for kind, eps in cells]
                first = runs[0].result
                rows.append([model, view, *six, words.get(_suspect({"recipe": first.recipe}, first.cell), "–")])
        if rows:
            text += markdown(("network", "view", *(f"{k} {e:g}" for k, e in cells), "explains"), rows) + "\n"
            left = [[row.label(data), *(value(at(group, "suspect", row=row, view=WORST, eps=eps), 1)
                                        for eps in numbers.EPS)] for row in suspect_rows(data)]  # fmt: skip
            if at(group, "suspect", view=WORST):
                text += markdown(("network", *(f"worst case {e:g}" for e in numbers.EPS)), left) + "\n"
            text += notes(group) + "\n"
    return text.removesuffix("\n")


def _suspect(network: dict[str, Any], cell: dict[str, Any]) -> tuple[Any, ...]:
    """A network and a view of one dataset."""
    return network["recipe"], cell.get("variant"), bool(cell.get("shipped")), cell["view"]


def other(entries: list[Entry]) -> str:
    """What belongs to no table or figure of the paper."""
    rows = []
    for e in [e for e in entries if e.result.kind not in OWN]:
        rows.append([e.data, e.model, f"[{e.result.what}]({link(e)})", ours([e], 3).text, e.unit, images([e])])
    return markdown(("data", "network", "what", "value", "unit", "images"), rows) if rows else "Nothing.\n"


def measured_on(entries: list[Entry]) -> str:
    """Devices, versions and seconds, part by part."""

    def key(e: Entry) -> tuple[str, ...]:
        part, versions = TITLES.get(e.result.kind, e.result.kind.capitalize()), e.result.versions
        data = e.data if e.result.kind != "theory" else "–"
        return part, data, e.result.device, versions.get("torch", ""), versions.get("python", ""), e.result.commit

    order = list(TITLES.values())
    rows = []
    for (*place, commit), group in grouped(entries, key).items():
        seconds = [s for e in group if (s := number(e.result.seconds)) is not None]
        rows.append([*place, f"`{commit}`", str(len(group)), f"{sum(seconds):,.0f}" if seconds else "–"])
    rows.sort(key=lambda row: (order.index(row[0]) if row[0] in order else len(order), row))
    return markdown(("part", "data", "device", "torch", "Python", "commit", "results", "seconds"), rows)
