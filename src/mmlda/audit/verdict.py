"""audit(): is the robustness real? Attacks that are blind in different ways, compared image by image.

    network, images -> gradients -> attacks by loss, surface and budget -> who is left -> verdict with its evidence

The rule and the reasons for its limits are in docs/audit.md.
"""

from __future__ import annotations

import io
import re
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmlda._utils.files import write_whole
from mmlda.attacks.surface import Model
from mmlda.audit.trials import Attacked, Case, run_all
from mmlda.audit.views import copied, derivable, undisturbed, with_gradient
from mmlda.data import ImageData
from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead
from mmlda.results import Result, head_of, label, traced, wilson
from mmlda.results.upgrade import audit_in_shares

__all__ = ["audit", "lines", "picture"]

GREY, COLOUR = 0.12, 0.04  # the paper's perturbations at which BIM leaves its SR 3.4% and 5.5%
LIMIT = 0.05  # of a share that would be 0 if every search found what there is
UNBOUNDED_LIMIT = 0.01  # the same, where the whole range leaves nothing to search for
AGREEMENT = 0.5  # cosine of two averaged gradients: below it, an attack on a random network follows noise
UNDERFLOW = 104.0  # nats below the top at which float32's softmax is exactly 0


def default_eps(data: ImageData) -> float:
    """The perturbation to audit at unless told."""
    return GREY if data.shape[0] == 1 else COLOUR


def audit(
    model: Model,
    data: ImageData,
    *,
    eps: float | None = None,
    surrogate: Model | None = None,
    n: int = 200,
    steps: int = 20,
    queries: int = 300,
    passes: int = 16,
    thorough: bool = False,
    batch_size: int = 128,
    name: str = "",
    seed: int = 0,
    device: torch.device | str | None = None,
    show: bool = True,
) -> Result:
    """Whether accuracy under attack at the L-infinity radius `eps` is robustness: a Result of kind "audit".

    Its value is "real", "none", "masked" or "mixed"; `series` has the evidence, the accuracy under each attack, the
    curve over eps and the histogram of gaps. Each entry of `series["accuracies"]` has every image's outcome in "held",
    a "1" where it is still right after the attack and a "0" where not. `series["kinds"]` lists the kinds of mask that
    were recognised, whether they hide anything or not: "saturated", "probabilities", "sigmoids", "rounding",
    "no gradient", "random"; a plain network has none. Images are in [0, 1]. The model, its mode and all generators are
    left as they were: a copy is attacked.

    Args:
        model: x -> logits, or probabilities. `model.features`, where there is one, is attacked too.
        eps: unless told, 0.12 for images of one channel and 0.04 for others: the paper's perturbations at which its
            softmax network has nearly nothing left on grey MNIST and on CIFAR-10. The verdict's sentence names it.
        surrogate: another network, whose adversarial images are tried on this one.
        n: how many images, the first of `data`; fewer where there are fewer.
        steps: gradients of an iterative attack.
        queries: of Square.
        passes: over a network that is random, to average its gradients and to judge an image.
        thorough: 5 times the steps, 10 times the queries: minutes instead of seconds.
        name: what to call the network.
    """
    if eps is None:
        eps = default_eps(data)
    if not 0 < eps < 1:
        raise ValueError(f"eps = {eps}: expected a radius between 0 and 1, the range of the images")
    counts = {"n": n, "steps": steps, "queries": queries, "passes": passes, "batch_size": batch_size}
    for word, value in counts.items():
        if value < 1:
            raise ValueError(f"{word} = {value}: expected at least 1")
    if not len(data):
        raise ValueError("data has no images: expected at least 1")
    n = min(n, len(data))
    if len(data.labels[:n].unique()) < 2:
        raise ValueError(f"data: the first {n} images are of one class, expected at least 2 classes among them")
    if not callable(model) or not (surrogate is None or callable(surrogate)):
        raise ValueError("model, surrogate: expected networks, functions from images to logits")
    begin = time.perf_counter()
    if thorough:
        steps, queries = 5 * steps, 10 * queries
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    place = torch.device(device) if device is not None else data.device if parameter is None else parameter.device
    settings = {"eps": eps, "steps": steps, "queries": queries, "passes": passes, "batch_size": batch_size,
                "surrogate": surrogate is not None}  # fmt: skip
    with undisturbed(place, seed):
        net = copied(model, place)
        case = Case(net, data.pixels(slice(n)).to(place), data.labels[:n].to(place), eps, batch_size, passes)
        other = None if surrogate is None else with_gradient(derivable(copied(surrogate, place), case.x[:2]))
        run_all(case, steps, queries, seed, other, show)
    name = name or _called(model)
    verdict, what, evidence = _judge(case)
    kinds = _kinds(case, evidence)
    what += _named(kinds, verdict, case.numbers["hidden"] or 0.0)
    rows = [_row(row, n) for row in case.rows]
    file = "-".join(re.sub(r"[^\w.+]+", "_", part) for part in ("audit", data.name or "data", name, f"{eps:g}"))
    return Result(
        name=file,
        kind="audit",
        what=what,
        value=verdict,
        note=" ".join(_images(data, n) + case.notes),
        n=n,
        seed=seed,
        dataset=data.name,
        head=head_of(model),
        eps=eps,
        attack_settings=settings,
        attack_steps=steps,
        seconds=time.perf_counter() - begin,
        numbers={
            key: value / 100 if value is not None and key != "median_gap" else value
            for key, value in case.numbers.items()
        },
        series=audit_in_shares(
            {
                "evidence": evidence,
                "kinds": list(kinds),
                "accuracies": rows,
                "curve": _curve(case),
                "gaps": _histogram(case.gaps),
            }
        ),
        **traced(net, data.subset(slice(n)), place, name),
    )


def _images(data: ImageData, n: int) -> list[str]:
    """How many of the images were attacked, where it was not all of them, or where they are few."""
    part = [f"The first {n} of {len(data)} images{f' of {data.name}' if data.name else ''}."] if n < len(data) else []
    return part + ([f"Only {n} images."] if n < 50 else [])


def _called(model: Model) -> str:
    head = getattr(model, "head", None)
    if isinstance(head, MaxMahalanobisHead):
        return "MM-LDA"
    return "SR" if isinstance(head, SoftmaxHead) else getattr(model, "__name__", type(model).__name__)


def _above(count: int | Tensor, n: int, limit: float) -> bool:
    """Whether a share is above a limit, noise allowed for.

    >>> _above(10, 100, LIMIT), _above(9, 100, LIMIT)
    (True, False)
    """
    return wilson(int(count), n)[0] > limit


def _judge(case: Case) -> tuple[str, str, list[dict[str, Any]]]:
    """The rule of docs/audit.md: the verdict, its sentence and the evidence."""
    n = len(case.y)
    chance = float(torch.bincount(case.y).max()) / n
    standard, white = case.left("standard"), case.left("standard", "white", "curve")
    left = case.left("standard", "white", "curve", "black", "transfer")
    proven = left & case.proven
    hidden = standard & ~proven
    evidence: list[dict[str, Any]] = []

    def say(test: str, words: str, value: float | None = None, limit: float | None = None,
            passed: bool | None = None) -> None:  # fmt: skip
        evidence.append({"test": test, "words": words, "value": value, "limit": limit, "passed": passed})

    def few(test: str, words: str, share: Tensor | int, of: int = n, limit: float = LIMIT,
            passed: bool | None = True) -> None:  # fmt: skip
        """Evidence of a share that should be 0; `words` has a place for it. `passed` is what to say where it is few."""
        count = int(share.sum()) if isinstance(share, Tensor) else share
        value = 100 * count / max(of, 1)
        many = bool(of) and _above(count, of, limit)
        say(test, words.format(f"{value:.1f}%"), value, 100 * limit, False if many else passed)

    def percent(mask: Tensor) -> float:
        return 100 * float(mask.double().mean())

    number, by = case.numbers, {(row.name, row.surface): row.left for row in case.rows if row.eps == case.eps}
    number |= {"clean_accuracy": percent(case.right), "standard_accuracy": percent(standard),
               "worst_accuracy": percent(left), "proven_accuracy": percent(proven), "hidden": percent(hidden),
               "chance": 100 * chance}  # fmt: skip
    few("hidden", "{} of the images count as robust for standard gradient attacks on the cross-entropy, and are broken "
        "by another attack or out of reach of any gradient.", hidden)  # fmt: skip
    survives = _above(proven.sum(), n, chance)
    say("survivors", f"{percent(proven):.1f}% survive all attacks of the audit, where these demonstrably work; a "
        f"constant answer has {100 * chance:.1f}%.", percent(proven), 100 * chance, survives or None)  # none, no fault

    exact = number["zero_gradient_float64"]
    beside = "" if exact is None else f"; in float64 for {exact:.1f}%"
    few("zero gradients", "The float32 gradient of the cross-entropy is exactly 0 for {} of the right images" + beside
        + ".", case.zeros, int(case.right.sum()))  # fmt: skip
    say("tiny gradients", f"For {number['tiny_gradient'] or 0:.1f}% softmax has cost the gradient more than the 24 "
        "bits of a float32.", number["tiny_gradient"])  # fmt: skip
    own = "probabilities" if case.probabilities else "logits"
    if case.wide is not None:
        low, high = by["APGD, cross-entropy", own], by["APGD, cross-entropy, float64", own]
        words = (f"The sign is wrong in float32 at {number['wrong_sign'] or 0:.1f}% of the pixels; the same attack "
                 "breaks {} more images in float64.")  # fmt: skip
        if case.random:  # then two runs differ anyway
            say("float64", words.format(f"{percent(low & ~high):.1f}%"), percent(low & ~high))
        else:
            few("float64", words, low & ~high)
    names = ("margin", "DLR", "targeted", "feature distance")
    losses = [left for (name, _), left in by.items() if name in {f"APGD, {word}" for word in names}]
    few("losses", "Other losses break {} of the images that every standard attack leaves.",
        standard & ~torch.stack(losses).all(0))  # fmt: skip
    soft, hard = (by["APGD, cross-entropy", surface] for surface in ("probabilities", "logits"))
    if case.probabilities:  # a kind that is recognised is never "passed", whether it hides anything or not
        say("output", f"The network returns probabilities{' in percent' if case.percent else ''}, not logits.")
    elif case.sigmoids:
        say("output", "The network returns numbers between 0 and 1, up to both ends, that do not sum to 1: they look "
            "like sigmoids. They are attacked as they are.")  # fmt: skip
    else:
        say("output", "The network returns logits.", passed=True)
    say("surface", f"The cross-entropy attack leaves {percent(hard):.1f}% on logits and {percent(soft):.1f}% on "
        "probabilities.", percent(soft) - percent(hard))  # fmt: skip
    ladder = [row.left for row in case.rows if row.kind == "standard"][:3]
    few("more steps", "More steps raise the accuracy by {}.", _rise(ladder))
    curve = [row.left for row in case.rows if row.kind == "curve"]
    few("larger perturbations", "Larger perturbations raise the accuracy by {}.", _rise(curve))
    unbounded = next(row.left for row in case.rows if row.kind == "unbounded")
    few("unbounded", "With the whole range as perturbation, the gradient attack leaves {}.", unbounded,
        limit=UNBOUNDED_LIMIT)  # fmt: skip
    few("black box", "Square, without gradients, breaks {} beyond all gradient attacks.", white & ~case.left("black"))
    if any(row.kind == "transfer" for row in case.rows):
        few("transfer", "Adversarial images of the other network break {} beyond all gradient attacks.",
            white & ~case.left("transfer"))  # fmt: skip
    else:
        say("transfer", "No other network was given to transfer from.")
    if case.random:
        few("randomness", "The network is random: two passes over the same images differ. Gradients averaged over "
            f"{case.passes} break {{}} of what every standard attack leaves.", standard & ~_all(by, "averaged"),
            passed=None)  # fmt: skip
        cosine = (number["agreement"] or 0.0) / 100
        say("averaging", f"Two gradients averaged over {case.passes} passes have a cosine of {cosine:.2f}; below "
            f"{AGREEMENT:g}, averaged attacks follow noise too.", cosine, AGREEMENT, cosine >= AGREEMENT)  # fmt: skip
    else:
        say("randomness", "Passes over the same images agree.", passed=True)
    cut = ""
    if _is_cut(case):
        there = "in float64 either" if case.wide is not None else "in float32, and there is no float64 copy to ask"
        still = "Even then" if case.found else "No rounding was recognised, and yet"
        cut = f"{still} the margin has no gradient at {number['no_gradient']:.1f}% of the right images, {there}."
    if case.found:
        gain = standard & ~_all(by, "straight-through")
        few("rounding", f"The network has steps without a gradient ({', '.join(case.found)}). With the identity's in "
            "their place, {} of what every standard attack leaves is broken." + f" {cut}".rstrip(), gain,
            passed=None)  # fmt: skip
    elif cut:
        say("rounding", cut, number["no_gradient"])
    else:
        say("rounding", "No rounding or other step without a gradient was seen.", passed=True)
    wide_gaps = 100 * float((case.gaps > UNDERFLOW).double().mean())
    number |= {"median_gap": float(case.gaps.median()), "gaps_above_104": wide_gaps}
    say("gaps", f"The median gap between the top two logits is {number['median_gap']:.3g} nats; {wide_gaps:.1f}% are "
        f"above {UNDERFLOW:g}, where float32's cross-entropy has no gradient.", number["median_gap"])  # fmt: skip

    failed = [item["test"] for item in evidence if item["passed"] is False]
    hides = "hidden" in failed and not case.constant  # a constant answer hides nothing from the gradient
    both = (f"standard gradient attacks leave {percent(standard):.0f}%, all attacks of the audit together "
            f"{percent(left):.0f}%")  # fmt: skip
    at = f"at eps = {case.eps:g}"
    some = int(left.sum()) > chance * n  # as a share, noise or not: nobody knows that it is nothing
    few_images = f"on so few images ({n})"
    if survives and not failed:
        end = f"{percent(left):.0f}% of {n} images survive all attacks of the audit, and no test of the attacks fails"
        return "real", f"Real {at}: {end}.", evidence
    if survives:
        end = f"not all of it is shown to be robustness. Failed: {', '.join(failed)}"
        return "mixed", f"Mixed {at}: {both}; {end}.", evidence
    if hides:
        unseen = int(left.sum()) > int(proven.sum())
        rest = "; no gradient reaches the rest" if unseen else ""
        end = f"Whether the rest is robust cannot be told{'' if unseen else f' {few_images}'}"
        return "masked", f"Masked {at}: {both}{rest}. {end if some else 'It is not robust'}.", evidence
    rest = f" (a constant answer has {100 * chance:.0f}%)" if left.any() else ""
    end = f"Not shown to be robust {few_images}" if some else "Not robust, and the gradient shows it"
    return "none", f"None {at}: {both}{rest}. {end}.", evidence


def _is_cut(case: Case) -> bool:
    """Whether something cuts the gradient, whatever it is; a constant answer has none to cut."""
    of = int(case.right.sum())
    return not case.constant and bool(of) and _above(case.cut, of, LIMIT)


def _kinds(case: Case, evidence: list[dict[str, Any]]) -> dict[str, str]:
    """The kinds of mask that the network is of, each in words; what they hide is for the rule to say.

    Zero gradients are a softmax's fault where the margin has a gradient, or where the gaps are too wide for float32;
    otherwise no loss has one, and something else has cut it.
    """
    failed = {item["test"] for item in evidence if item["passed"] is False}
    lost = max(case.zeros - int((~case.moving).sum()), int((case.gaps > UNDERFLOW).sum()))
    there = {"saturated": "zero gradients" in failed and _above(lost, len(case.y), LIMIT),
             "probabilities": case.probabilities, "sigmoids": case.sigmoids, "rounding": bool(case.found),
             "no gradient": _is_cut(case), "random": case.random}  # fmt: skip
    words = {"saturated": "its softmax is saturated",
             "probabilities": f"it returns probabilities{' in percent' if case.percent else ''}",
             "sigmoids": "it returns what looks like sigmoids",
             "rounding": f"it has steps without a gradient ({', '.join(case.found)})",
             "no gradient": "something in it cuts the gradient", "random": "its answers are random"}  # fmt: skip
    return {kind: words[kind] for kind, seen in there.items() if seen}


def _named(kinds: dict[str, str], verdict: str, hidden: float) -> str:
    """The sentence that names the kinds, to stand after the verdict's; empty where there are none.

    >>> _named({"probabilities": "it returns probabilities", "random": "its answers are random"}, "none", 0.0)
    ' It returns probabilities and its answers are random, which hides nothing here.'
    >>> _named({"rounding": "it has steps without a gradient (round)"}, "masked", 90.0)
    ' It has steps without a gradient (round).'
    """
    if not kinds:
        return ""
    *most, last = kinds.values()
    said = f"{', '.join(most)} and {last}" if most else last
    end = f", which hides {'next to ' if hidden else ''}nothing here" if verdict in ("none", "real") else ""
    return f" {said[0].upper()}{said[1:]}{end}."


def _all(by: dict[tuple[str, str], Tensor], word: str) -> Tensor:
    return torch.stack([left for (name, _), left in by.items() if name.endswith(word)]).all(0)


def _rise(ladder: list[Tensor]) -> int:
    """The most images by which a later attack, the stronger one, leaves more than an earlier one."""
    counts = [int(left.sum()) for left in ladder]
    return max([0, *(late - early for i, early in enumerate(counts) for late in counts[i:])])


def _row(row: Attacked, n: int) -> dict[str, Any]:
    low, high = wilson(int(row.left.sum()), n)
    held = "".join("01"[kept] for kept in row.left.tolist())
    return {"name": row.name, "surface": row.surface, "eps": row.eps, "accuracy": 100 * float(row.left.double().mean()),
            "low": 100 * low, "high": 100 * high, "held": held}  # fmt: skip


def _curve(case: Case) -> dict[str, list[float]]:
    rows = [row for row in case.rows if row.kind in ("clean", "curve", "unbounded")]
    return {"eps": [row.eps for row in rows], "accuracy": [100 * float(row.left.double().mean()) for row in rows]}


def _histogram(gaps: Tensor, bins: int = 20) -> dict[str, list[float]]:
    top = max(float(gaps.max()), 1e-12)
    counts = torch.histc(gaps, bins, 0.0, top)
    return {"edges": torch.linspace(0, top, bins + 1).tolist(), "counts": counts.int().tolist()}


def lines(result: Result) -> list[str]:
    """The verdict, the evidence and the accuracies as lines of text."""
    marks = {True: "ok    ", False: "FAILED", None: "      "}
    text = [result.what, *([result.note] if result.note else []), ""]
    text += [f"{marks[item['passed']]} {item['test']:20s} {item['words']}" for item in result.series["evidence"]]
    text += ["", f"{'attack':38s} {'on':13s} {'eps':>6s} {'accuracy':>9s}   95% interval"]
    for row in result.series["accuracies"]:
        text.append(f"{row['name']:38s} {row['surface']:13s} {row['eps']:6.3g} {100 * row['accuracy']:8.1f}%   "
                    f"{100 * row['low']:.1f} to {100 * row['high']:.1f}%")  # fmt: skip
    return text


def picture(path: str | Path, result: Result) -> Path:
    """Accuracy by attack, accuracy against eps and the histogram of gaps under the verdict: PNG, or SVG by name."""
    from matplotlib.figure import Figure

    eps = result.eps or 0.0
    rows = [row for row in result.series["accuracies"] if row["eps"] in (0.0, eps)]
    figure = Figure(figsize=(11.5, 0.24 * len(rows) + 1.6), layout="constrained")
    bars, curve, gaps = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    names = [f"{row['name']} ({row['surface']})" for row in rows]
    values = [100 * row["accuracy"] for row in rows]
    spans = [[value - 100 * row["low"], 100 * row["high"] - value] for value, row in zip(values, rows)]
    bars.barh(names, values, xerr=np.array(spans).T.clip(0), color="tab:blue", ecolor="0.4", height=0.7)
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=7.5)
    bars.set(xlim=(0, 102), xlabel=f"accuracy (%) at eps = {eps:g}, 95% interval")
    line = result.series["curve"]
    curve.plot(line["eps"], [100 * share for share in line["accuracy"]], marker="o", color="tab:red")
    curve.set_xscale("symlog", linthresh=eps / 4)
    ticks = [0.0, eps, 1.0]
    curve.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    curve.minorticks_off()
    curve.set(ylim=(-3, 103), xlabel="eps", ylabel="accuracy (%)", title="BIM against eps")
    edges, counts = result.series["gaps"]["edges"], result.series["gaps"]["counts"]
    gaps.stairs(counts, edges, fill=True, color="tab:green")
    if edges[-1] > UNDERFLOW:
        gaps.axvline(UNDERFLOW, color="0.3", linestyle=":")
    gaps.set(xlabel="nats", ylabel="images", title="gap of the top two logits")
    title = f"{label(result)} on {result.dataset}. {result.what}"
    figure.suptitle("\n".join(textwrap.wrap(title, 140)), fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg" if Path(path).suffix == ".svg" else "png", dpi=120)
    return write_whole(path, buffer.getvalue())
