"""An audit in words: its verdict, its checks, its attacks. Percent appears here and nowhere before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmlda._utils.text import eps_text
from mmlda.audit.checks import AGREEMENT, Check, Evidence, Mask, is_cut, share
from mmlda.audit.profile import UNDERFLOW, Profile
from mmlda.audit.trials import BIM_STEPS, Trial
from mmlda.audit.verdict import Verdict

MARKS = {True: "ok    ", False: "FAILED", None: "      "}

COMPARED = {
    "gradient": "The gradient does not match the values in {} of the comparisons; there it misleads attacks.",
    "grad mode": "{} of the answers differ with and without autograd.",
    "batches": "{} of the answers, or of their gradients, differ between a batch and a single image.",
    "calls": "{} of the answers differ from the first ones, or from those of an unused copy of the network.",
}


def attack_name(trial: Trial) -> str:
    """An attack as the table names it."""
    if trial.kind == "clean":
        return "no attack"
    if trial.kind == "transfer":
        return "transfer from the other network"
    if trial.attack == "Square":
        return f"Square, {trial.steps} queries"
    view = [] if trial.view == "own" else [trial.view]
    longer = trial.attack == "BIM" and trial.kind == "standard" and trial.steps != BIM_STEPS
    return ", ".join([trial.attack, trial.loss, *view, *([f"{trial.steps} steps"] if longer else [])])


def table(e: Evidence, checks: Sequence[Check], heading: Iterable[str]) -> str:
    """The heading, the checks and the accuracies as lines of text."""
    lines = [*heading, ""]
    lines += [f"{MARKS[check.passed]} {check.name:20s} {describe(check, e)}" for check in checks]
    lines += ["", f"{'attack':38s} {'on':13s} {'eps':>6s} {'accuracy':>9s}   95% interval"]
    for trial in e.trials:
        low, high = trial.interval
        accuracy = f"{trial.surface:13s} {eps_text(trial.eps, 3):>6s} {100 * trial.share:8.1f}%"
        lines.append(f"{attack_name(trial):38s} {accuracy}   {100 * low:.1f} to {100 * high:.1f}%")
    return "\n".join(lines)


def notes(p: Profile, dataset: str, total: int, classes: int) -> tuple[str, ...]:
    """How many of `total` images were attacked, if not all or only a few, and whether there was a float64 copy."""
    said = {
        f"{p.n} of {total} images{f' of {dataset}' if dataset else ''}, of {classes} classes.": p.n < total,
        f"Only {p.n} images.": p.n < 50,
        f"No float64 copy of the network ({p.no_float64}).": p.no_float64,
    }
    return tuple(note for note in said if said[note])


def close_call(checks: Sequence[Check]) -> str:
    """Which checks decide the verdict within their noise; empty if none does.

    >>> close_call([Check(name="survivors", measured=0.22, limit=0.15, passed=True, count=22, of=100)])
    'Close call: survivors is 22 of 100, 1 image from the limit of 15%.'
    """
    return f"Close call: {'; '.join(map(_distance, checks))}." if checks else ""


def _distance(check: Check) -> str:
    if check.margin is None or check.limit is None:
        return f"{check.name} is {check.measured:.2f}, its limit {check.limit:g}"
    images = f"{check.margin} {'comparison' if check.name in COMPARED else 'image'}{'s' * (check.margin > 1)}"
    return f"{check.name} is {check.count} of {check.of}, {images} from the limit of {100 * check.limit:.3g}%"


def summary(e: Evidence, checks: Sequence[Check], verdict: Verdict, masks: Sequence[Mask]) -> str:
    """The verdict in one or two sentences that claim no more than is known."""
    standard, left = (f"{100 * share(mask):.0f}%" for mask in (e.standard, e.left))
    both = f"standard gradient attacks leave {standard}, all attacks of the audit together {left}"
    above_chance = int(e.left.sum()) > e.profile.number("chance") * e.n  # within the noise or not
    if verdict == "real":
        ending = f"{left} of {e.n} images survive all attacks of the audit, and no test of the attacks fails"
    elif verdict == "mixed":
        failed = ", ".join(check.name for check in checks if check.passed is False)
        ending = f"{both}; not all of it is shown to be robustness. Failed: {failed}"
    elif verdict == "masked":
        unseen = int(e.left.sum()) > int(e.proven.sum())
        rest = "; no gradient reaches the rest" if unseen else ""
        unknown = f"Whether the rest is robust cannot be told{'' if unseen else f' on so few images ({e.n})'}"
        ending = f"{both}{rest}. {unknown if above_chance else 'It is not robust'}"
    else:
        constant = f" (a constant answer has {100 * e.profile.number('chance'):.0f}%)" if e.left.any() else ""
        few = f"Not shown to be robust on so few images ({e.n})"
        ending = f"{both}{constant}. {few if above_chance else 'Not robust, and the gradient shows it'}"
    return f"{verdict.capitalize()} at eps = {eps_text(e.settings.eps)}: {ending}.{_masks(e, masks, verdict)}"


def _masks(e: Evidence, masks: Sequence[Mask], verdict: Verdict) -> str:
    """The sentence that names the masks, which follows the verdict's; empty if there are none."""
    if not masks:
        return ""
    words: dict[Mask, str] = {
        "saturated": "its softmax is saturated",
        "probabilities": "it returns probabilities",
        "sigmoids": "it returns what looks like sigmoids",
        "rounding": f"it has steps without a gradient ({', '.join(e.profile.steps)})",
        "no gradient": "something in it cuts the gradient",
        "random": "its answers are random",
    }
    *most, last = (words[mask] for mask in masks)
    said = f"{', '.join(most)} and {last}" if most else last
    nothing = "next to nothing" if e.hidden.any() else "nothing"
    end = f", which hides {nothing} here" if verdict in ("none", "real") else ""
    return f" {said[0].upper()}{said[1:]}{end}."


def describe(check: Check, e: Evidence) -> str:
    """A check in a sentence."""
    p, passes = e.profile, e.settings.passes
    percent = f"{100 * (check.measured or 0):.1f}%"
    if check.name == "zero gradients":
        exact = p.numbers.get("zero_gradient_float64")
        beside = "" if exact is None else f"; in float64 for {100 * exact:.1f}%"
        return f"The float32 gradient of the cross-entropy is exactly 0 for {percent} of the right images{beside}."
    if check.name == "output":
        if p.output == "sigmoids":
            looks = "they look like sigmoids. They are attacked as they are."
            return f"The network returns numbers between 0 and 1, up to both ends, that do not sum to 1: {looks}"
        return f"The network returns {'probabilities, not logits' if p.probabilities else 'logits'}."
    if check.name == "rounding":
        return _rounding(e, percent)
    if check.name == "transfer" and check.count is None:
        return "No other network was given to transfer from."
    if check.name == "randomness" and not p.random:
        return "Passes over the same images agree."
    if check.name in COMPARED:
        return "Not measured." if check.measured is None else COMPARED[check.name].format(percent)
    hard, soft = (100 * e.apgd(surface).share for surface in ("logits", "probabilities"))
    chance, wrong, gap, wide = map(p.number, ("chance", "wrong_sign", "median_gap", "gaps_above_104"))
    return {
        "hidden": f"{percent} of the images count as robust for standard gradient attacks on the cross-entropy, and "
        "are broken by another attack or out of reach of any gradient.",
        "survivors": f"{percent} survive all attacks of the audit, where these demonstrably work; a constant answer "
        f"has {100 * chance:.1f}%.",
        "tiny gradients": f"For {percent} softmax has cost the gradient more than the 24 bits of a float32.",
        "float64": f"The sign is wrong in float32 at {100 * wrong:.1f}% of the pixels; the same attack "
        f"breaks {percent} more images in float64.",
        "losses": f"Other losses break {percent} of the images that every standard attack leaves.",
        "surface": f"The cross-entropy attack leaves {hard:.1f}% on logits and {soft:.1f}% on probabilities.",
        "more steps": f"More steps raise the accuracy by {percent}.",
        "larger perturbations": f"Larger perturbations raise the accuracy by {percent}.",
        "unbounded": f"With the whole range as perturbation, the gradient attack leaves {percent}.",
        "black box": f"Square, without gradients, breaks {percent} beyond all gradient attacks.",
        "transfer": f"Adversarial images of the other network break {percent} beyond all gradient attacks.",
        "randomness": "The network is random: two passes over the same images differ. Gradients averaged over "
        f"{passes} break {percent} of what every standard attack leaves.",
        "averaging": f"Two gradients averaged over {passes} passes have a cosine of {check.measured or 0:.2f}; below "
        f"{AGREEMENT:g}, averaged attacks follow noise too.",
        "gaps": f"The median gap between the top two logits is {gap:.3g} nats; {100 * wide:.1f}% "
        f"are above {UNDERFLOW:g}, where float32's cross-entropy has no gradient.",
    }[check.name]


def _rounding(e: Evidence, percent: str) -> str:
    p, cut = e.profile, ""
    if is_cut(p):
        still = "Even then" if p.steps else "No rounding was recognised, and yet"
        where = "in float32, and there is no float64 copy to ask" if p.no_float64 else "in float64 either"
        cut = (
            f"{still} the margin has no gradient at {100 * p.number('no_gradient'):.1f}% of the right images, {where}."
        )
    if p.steps:
        gain = f"With the identity's in their place, {percent} of what every standard attack leaves is broken."
        return f"The network has steps without a gradient ({', '.join(p.steps)}). {gain} {cut}".rstrip()
    return cut or "No rounding or other step without a gradient was seen."
