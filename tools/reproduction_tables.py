"""The tables of docs/reproduction.md: ours beside the paper's, each number a link to its result."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from from_results import MISSING, at, images, link, markdown, notes, value

from mmlda.paper import numbers
from mmlda.paper.biased import CONTROL, MODELS, paired
from mmlda.paper.hardened import HARDENED
from mmlda.paper.setup import plain_rows
from mmlda.paper.suspects import ATTACKS as SUSPECT_ATTACKS
from mmlda.paper.suspects import VARIANTS
from mmlda.paper.tables import FIELD_EPS, JSMA, difference
from mmlda.report.entries import DATA, Entry, counted, fixed, grouped, number, of_kind, plain, size
from mmlda.report.summary import PARTS
from mmlda.report.tables import STANDS_STILL, mean_number, ours

PLAIN = ("SR", "MM-LDA")
TUNED = ("SR + SAT", "SR + HAT")
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


def table1(entries: list[Entry]) -> str:
    """Test errors."""
    rows = []
    for data in numbers.DATASETS:
        for row in (*plain_rows(data), "SR (Adam)"):
            group, paper = at(entries, "table1", data=data, model=row), numbers.TABLE1.get((data, row))
            mean = ours(group).sort if group else None
            apart = fixed(mean - paper, 2, sign=True) if isinstance(mean, float) and paper is not None else "–"
            rows.append([DATA[data], row, value(group), fixed(paper, 2), apart, images(group)])
    head = ("data", "network", "test error, %", "paper", "difference", "images")
    return markdown(head, rows) + below(entries, "table1")


def table2(entries: list[Entry]) -> str:
    """One table a data set, FGSM, BIM and ILCM; then JSMA, which the paper leaves open in two respects."""

    def cell(data: str, row: str, kind: str, eps: float) -> str:
        group = at(entries, "table2", data=data, model=row, attack=kind, eps=eps)
        return f"{value(group)} / {fixed(numbers.table2(data, row, kind, eps))}"

    text = ""
    for data in numbers.DATASETS:
        n = many(e for e in at(entries, "table2", data=data) if e.at("attack") in GRADIENT)
        rows = [[f"{eps:g}", row, *(cell(data, row, kind, eps) for kind in GRADIENT)]
                for eps in numbers.EPS for row in dict.fromkeys((*numbers.ROWS, *plain_rows(data)))]  # fmt: skip
        text += f"{DATA[data]}, accuracy in %, ours / paper{n}:\n\n"
        text += markdown(("eps", "network", *GRADIENT), rows) + "\n"
    rows = []
    for data in numbers.DATASETS:
        for eps in numbers.EPS:
            for row in plain_rows(data):
                found = [at(entries, "table2", data=data, model=row, attack="JSMA", eps=eps, surface=s, target=t)
                         for s, t in JSMA]  # fmt: skip
                paper = fixed(numbers.table2(data, row, "JSMA", eps))
                rows.append([DATA[data], f"{eps:g}", row, paper, *(value(group) for group in found)])
    head = ("data", "eps", "network", "paper", *(f"{surface}, {target}" for surface, target in JSMA))
    n = many(at(entries, "table2", attack="JSMA"))
    text += f"JSMA, accuracy in %, by what is differentiated and the target{n}:\n\n" + markdown(head, rows)
    return text + "\n" + _counted(entries) + below(entries, "table2")


def _counted(entries: list[Entry]) -> str:
    """The cells that differ by more than a point if images count that are right under attack and were not before."""
    rows = []
    for e in at(entries, "table2"):
        ours, plain = number(e.result.value), number(e.result.numbers.get("plain_accuracy"))
        if ours is not None and plain is not None and 100 * plain - ours > 1:
            clean = number(e.result.numbers.get("clean_accuracy"))
            assert clean is not None
            what = " ".join(word for word in (e.at("attack"), f"{e.eps:g}", e.at("surface"), e.at("target")) if word)
            rows.append([e.data, e.model, what, f"[{fixed(ours, 2)}]({link(e)})", fixed(100 * plain, 2),
                         fixed(number(e.result.paper)), fixed(100 * clean, 2)])  # fmt: skip
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
                group = at(entries, "table3", data=data, model=row, target=target)
                more = [mean_number(group, name, digits, scale).text for name, digits, scale in extra]
                paper = fixed(numbers.TABLE3[data, row], 2)
                rows.append([DATA[data], row, target, value(group), paper, *more, images(group)])
    head = ("data", "network", "target", "mean distortion", "paper", "median", "broken, %", "L∞ ≤ 0.04, %", "images")
    return markdown(head, rows) + below(entries, "table3")


def worst(entries: list[Entry]) -> str:
    """Every network at every perturbation; those trained on PGD at shares of their own."""
    text = ""
    for data in numbers.DATASETS:
        here = at(entries, "worst", data=data)
        sizes = sorted({*WORST_EPS, *(e.eps for e in here if e.eps is not None)})
        rows = []
        robust = [row for row in HARDENED if at(here, "worst", model=row)]
        for row in (*plain_rows(data), *(f"{row} ({kind})" for row in TUNED for kind in GRADIENT), *robust):
            cells = [at(here, "worst", model=row, eps=eps) for eps in sizes]
            rows.append([row, *(value(cell) if cell or row not in HARDENED else "–" for cell in cells)])
        text += f"{DATA[data]}, accuracy in % at each eps{many(here)}:\n\n"
        text += markdown(("network", *map(size, sizes)), rows) + "\n"
    return text.removesuffix("\n") + below(entries, "worst")


def audits(entries: list[Entry]) -> str:
    """Verdicts, with the numbers they rest on."""
    extra = ("standard_accuracy", "worst_accuracy", "zero_gradient", "tiny_gradient", "median_gap")
    rows = []
    for data in numbers.DATASETS:
        named = [e.model for e in of_kind(entries, "audit") if e.at("data") == data]
        for row in dict.fromkeys((*plain_rows(data), *named)):
            group = at(entries, "audit", data=data, model=row)
            for e in group:
                more = [mean_number([e], name, 1).text for name in extra]
                rows.append([DATA[data], row, size(e.eps), f"[{e.result.value}]({link(e)})", *more, images([e]),
                             e.at("seed")])  # fmt: skip
            if not group:
                rows.append([DATA[data], row, "–", MISSING, *["–"] * 7])
    head = ("data", "network", "eps", "verdict", "standard attacks leave, %", "all attacks leave, %",
            "zero gradients, %", "tiny gradients, %", "median gap, nats", "images", "seed")  # fmt: skip
    return markdown(head, rows)


def figures(entries: list[Entry]) -> str:
    """The numbers behind Figures 2 to 5; the paper has 2, 3 and 5 for CIFAR-10 only."""
    made = []
    for data in numbers.DATASETS:
        for kind, what, digits in (("fig2", "silhouette of the classes in the latent space", 3),
                                   ("fig4", "C&W noises that look like their image, %", 2)):  # fmt: skip
            group = at(entries, kind, data=data)
            if kind == "fig4" and any(map(one_sided, group)):
                what = "C&W noises that draw their image again, %; such as take it away: not measured yet"
            if group or kind == "fig4" or data == "cifar10":
                cells = [value([e for e in group if e.model == row], digits) for row in PLAIN]
                if adam := [e for e in group if e.model == "MM-LDA (Adam)"]:
                    cells[1] += f"; Adam: {value(adam, digits)}"
                made.append([f"Fig. {kind[3]}", DATA[data], what, *cells, images(group)])
        group = at(entries, "fig3", data=data)
        if group or data == "cifar10":
            said = [_mean([e for e in group if e.model == row]) for row in BIASED]
            cells = [f"{said[0]}; by MM-LDA's recipe: {said[3]}", f"{said[1]}; true priors: {said[2]}"]
            cells = cells if group else [MISSING, MISSING]
            made.append(["Fig. 3", DATA[data], "accuracy on class-biased sets, %", *cells, images(group)])
        group = sorted(at(entries, "fig5", data=data), key=lambda e: e.result.cell["log10_C"])
        if group or data == "cifar10":
            said = [f"[{plain(e.result.cell['log10_C'])}]({link(e)}): {fixed(number(e.result.value), 2)} ± "
                    f"{fixed(number(e.result.numbers.get('std')), 2)}" for e in group]  # fmt: skip
            cells = ["–", "; ".join(said) or MISSING]
            made.append(["Fig. 5", DATA[data], "validation error, %, by log10(C)", *cells, images(group)])
    text = markdown(("figure", "data", "number", "SR", "MM-LDA", "images"), sorted(made, key=lambda row: row[0]))
    for data in numbers.DATASETS:
        biased = sorted(at(entries, "fig3", data=data), key=lambda e: counted(e.at("set")))
        sets = grouped(biased, lambda e: e.at("set"))
        rows = [[name, *(value([e for e in group if e.model == m]) for m in BIASED)] for name, group in sets.items()]
        if rows:
            text += f"\nFig. 3 set by set, {DATA[data]}, accuracy in %:\n\n" + markdown(("set", *BIASED), rows)
            text += "\n" + "".join(_family(entries, data, family) for family in ("BP1", "BP2"))
            for e in at(entries, "claim", data=data, claim="fig3-recipe"):
                text += f"\nThe two heads with one recipe: {e.result.what} ([{e.result.name}]({link(e)})).\n"
    return text + below(entries, "fig2", "fig3", "fig4", "fig5")


def one_sided(entry: Entry) -> bool:
    """Whether a share of semantic noises is one of before noises of either sign counted."""
    return entry.result.kind == "fig4" and "weakening" not in entry.result.numbers


def _family(entries: list[Entry], data: str, family: str) -> str:
    """MM-LDA beside SR on one kind of biased sets, and how often a set alone would decide."""
    here = [e for e in at(entries, "fig3", data=data) if e.at("set").startswith(family) and e.model in PLAIN]
    pairs = [{e.model: e.result for e in group} for group in grouped(here, lambda e: e.at("set")).values()]
    pairs = [pair for pair in pairs if set(pair) == set(PLAIN)]
    if not pairs:
        return ""
    better, mean, p = paired([pair["MM-LDA"].value - pair["SR"].value for pair in pairs])
    alone = [difference(list(pair.values()), "MM-LDA", "SR") for pair in pairs]
    clear = f"{sum(low > 0 for low, _ in alone)} above and {sum(high < 0 for _, high in alone)} below"
    words = f"- {family}: MM-LDA is above SR on {better} of {len(pairs)} sets, by {fixed(mean, 2, sign=True)} points "
    return words + f"in the mean (p = {p:.2g}); by the interval of a set alone, {clear}.\n"


def _mean(group: list[Entry]) -> str:
    values = [v for v in (number(e.result.value) for e in group) if v is not None]
    return f"{statistics.fmean(values):.2f} in the mean of {len(values)} sets" if values else MISSING


def suspects(entries: list[Entry]) -> str:
    """Every network in every view, with its verdict by the rule of docs/suspects.md."""
    text = ""
    cells = [(kind, eps) for kind in SUSPECT_ATTACKS for eps in numbers.EPS]
    for data in numbers.DATASETS:
        group = at(entries, "suspect", data=data)
        judged = [e for e in at(entries, "claim", data=data) if e.at("claim").split("-")[0] == "suspects"]
        said = "; ".join(f"{e.result.what} ([{e.result.name}]({link(e)}))" for e in judged)
        text += f"{DATA[data]}: {said or MISSING}.\n\n"
        words = {(m, v): word for e in judged for m, v, word in e.result.series.get("verdicts", [])}
        rows = []
        for (model, view), runs in grouped(group, lambda e: (e.model, e.at("view"))).items():
            if view != "worst case":
                six = [value(at(runs, "suspect", attack=kind, eps=eps), 1) for kind, eps in cells]
                rows.append([model, view, *six, words.get((model, view), "–")])
        if rows:
            text += markdown(("network", "view", *(f"{k} {e:g}" for k, e in cells), "explains"), rows) + "\n"
            left = [[model, *(value(at(group, "suspect", model=model, view="worst case", eps=eps), 1)
                              for eps in numbers.EPS)] for model in VARIANTS]  # fmt: skip
            if at(group, "suspect", view="worst case"):
                text += markdown(("network", *(f"worst case {e:g}" for e in numbers.EPS)), left) + "\n"
            text += notes(group) + "\n"
    return text.removesuffix("\n")


def other(entries: list[Entry]) -> str:
    """What belongs to no table or figure of the paper."""
    rows = []
    for e in [e for e in entries if e.result.kind not in OWN]:
        rows.append([e.data, e.model, f"[{e.result.what}]({link(e)})", ours([e], 3).text, e.result.unit, images([e])])
    return markdown(("data", "network", "what", "value", "unit", "images"), rows) if rows else "Nothing.\n"


def measured_on(entries: list[Entry]) -> str:
    """Devices, versions and seconds, part by part."""

    def key(e: Entry) -> tuple[str, ...]:
        part, versions = PARTS.get(e.result.kind, e.result.kind.capitalize()), e.result.versions
        data = e.data if e.result.kind != "theory" else "–"
        return part, data, e.result.device, versions.get("torch", ""), versions.get("python", ""), e.result.commit

    order = list(PARTS.values())
    rows = []
    for (*place, commit), group in grouped(entries, key).items():
        seconds = [s for e in group if (s := number(e.result.seconds)) is not None]
        rows.append([*place, f"`{commit}`", str(len(group)), f"{sum(seconds):,.0f}" if seconds else "–"])
    rows.sort(key=lambda row: (order.index(row[0]) if row[0] in order else len(order), row))
    return markdown(("part", "data", "device", "torch", "Python", "commit", "results", "seconds"), rows)
