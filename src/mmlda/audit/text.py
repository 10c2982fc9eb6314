"""An audit in words: its verdict, its checks, its attacks. Percent appears here and nowhere before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmlda.audit.checks import AGREEMENT, Check, Evidence, Mask, is_cut
from mmlda.audit.profile import UNDERFLOW
from mmlda.audit.trials import BIM_STEPS, Plan, Trial
from mmlda.audit.verdict import Verdict

__all__ = ["attack_name", "close_call", "describe", "notes", "summary", "table"]

MARKS = {True: "ok    ", False: "FAILED", None: "      "}


def attack_name(plan: Plan) -> str:
    """An attack as the table names it."""
    if plan.kind == "clean":
        return "no attack"
    if plan.kind == "transfer":
        return "transfer from the other network"
    if plan.attack == "Square":
        return f"Square, {plan.steps} queries"
    view = [] if plan.view == "own" else [plan.view]
    longer = plan.attack == "BIM" and plan.kind == "standard" and plan.steps != BIM_STEPS
    return ", ".join([plan.attack, plan.loss, *view, *([f"{plan.steps} steps"] if longer else [])])


def table(verdict: str, notes: Sequence[str], checks: Sequence[tuple[Check, str]], trials: Sequence[Trial]) -> str:
    """The verdict, the checks and the accuracies as lines of text."""
    lines = [verdict, *notes, ""]
    lines += [f"{MARKS[check.passed]} {check.name:20s} {words}" for check, words in checks]
    lines += ["", f"{'attack':38s} {'on':13s} {'eps':>6s} {'accuracy':>9s}   95% interval"]
    for trial in trials:
        low, high = trial.interval
        share = f"{trial.surface:13s} {trial.eps:6.3g} {100 * trial.share:8.1f}%"
        lines.append(f"{attack_name(trial):38s} {share}   {100 * low:.1f} to {100 * high:.1f}%")
    return "\n".join(lines)


def notes(e: Evidence, data_name: str, total: int) -> list[str]:
    """How many images were attacked, if not all or only a few, and whether there was a float64 copy."""
    of = f" of {data_name}" if data_name else ""
    made = [f"The first {e.n} of {total} images{of}."] if e.n < total else []
    made += [f"Only {e.n} images."] if e.n < 50 else []
    error = e.profile.no_float64
    return made + ([f"No float64 copy of the network ({error})."] if error else [])


def close_call(checks: Sequence[Check]) -> str:
    """Which checks decide the verdict within their noise; empty if none does.

    >>> close_call([Check(name="survivors", measured=0.22, limit=0.15, passed=True, count=22, of=100)])
    'Close call: survivors is 22 of 100, 1 image from the limit of 15%.'
    """
    return f"Close call: {'; '.join(map(_distance, checks))}." if checks else ""


def _distance(check: Check) -> str:
    if check.margin is None or check.limit is None:
        return f"{check.name} is {check.measured:.2f}, its limit {check.limit:g}"
    images = "1 image" if check.margin == 1 else f"{check.margin} images"
    return f"{check.name} is {check.count} of {check.of}, {images} from the limit of {100 * check.limit:.3g}%"


def summary(e: Evidence, checks: Sequence[Check], verdict: Verdict, masks: Sequence[Mask]) -> str:
    """The verdict in one or two sentences that claim no more than is known."""
    ending = {"real": _real, "mixed": _mixed, "masked": _masked, "none": _none}[verdict](e, checks)
    return f"{verdict.capitalize()} at eps = {e.settings.eps:g}: {ending}.{_masks(e, masks, verdict)}"


def _real(e: Evidence, checks: Sequence[Check]) -> str:
    return f"{_left(e)}% of {e.n} images survive all attacks of the audit, and no test of the attacks fails"


def _mixed(e: Evidence, checks: Sequence[Check]) -> str:
    failed = ", ".join(check.name for check in checks if check.passed is False)
    return f"{_both(e)}; not all of it is shown to be robustness. Failed: {failed}"


def _masked(e: Evidence, checks: Sequence[Check]) -> str:
    unseen = int(e.left.sum()) > int(e.proven.sum())
    rest = "; no gradient reaches the rest" if unseen else ""
    unknown = f"Whether the rest is robust cannot be told{'' if unseen else f' on so few images ({e.n})'}"
    return f"{_both(e)}{rest}. {unknown if _above_chance(e) else 'It is not robust'}"


def _none(e: Evidence, checks: Sequence[Check]) -> str:
    constant = f" (a constant answer has {100 * e.profile.chance:.0f}%)" if e.left.any() else ""
    few = f"Not shown to be robust on so few images ({e.n})"
    return f"{_both(e)}{constant}. {few if _above_chance(e) else 'Not robust, and the gradient shows it'}"


def _above_chance(e: Evidence) -> bool:
    """Whether more is left than a constant answer gets right, within the noise or not."""
    return int(e.left.sum()) > e.profile.chance * e.n


def _left(e: Evidence) -> str:
    return f"{100 * (int(e.left.sum()) / e.n):.0f}"


def _both(e: Evidence) -> str:
    standard = f"{100 * (int(e.standard.sum()) / e.n):.0f}"
    return f"standard gradient attacks leave {standard}%, all attacks of the audit together {_left(e)}%"


def _masks(e: Evidence, masks: Sequence[Mask], verdict: Verdict) -> str:
    """The sentence that names the masks, to stand after the verdict's; empty if there are none."""
    if not masks:
        return ""
    words: dict[Mask, str] = {
        "saturated": "its softmax is saturated",
        "probabilities": f"it returns probabilities{_in_percent(e)}",
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


def _in_percent(e: Evidence) -> str:
    return " in percent" if e.profile.output == "percent" else ""


def describe(check: Check, e: Evidence) -> str:
    """A check in a sentence."""
    return _WORDS[check.name](check, e)


def _percent(check: Check) -> str:
    return f"{100 * (check.measured or 0):.1f}%"


def _survivors(check: Check, e: Evidence) -> str:
    chance = f"a constant answer has {100 * e.profile.chance:.1f}%"
    return f"{_percent(check)} survive all attacks of the audit, where these demonstrably work; {chance}."


def _zero_gradients(check: Check, e: Evidence) -> str:
    exact, of = e.profile.gradients.zero_float64, e.profile.gradients.of
    beside = "" if exact is None else f"; in float64 for {100 * (exact / of):.1f}%"
    return f"The float32 gradient of the cross-entropy is exactly 0 for {_percent(check)} of the right images{beside}."


def _float64(check: Check, e: Evidence) -> str:
    wrong = 100 * (e.profile.gradients.wrong_sign or 0)
    more = f"the same attack breaks {_percent(check)} more images in float64"
    return f"The sign is wrong in float32 at {wrong:.1f}% of the pixels; {more}."


def _output(check: Check, e: Evidence) -> str:
    if e.profile.probabilities:
        return f"The network returns probabilities{_in_percent(e)}, not logits."
    if e.profile.output == "sigmoids":
        looks = "they look like sigmoids. They are attacked as they are."
        return f"The network returns numbers between 0 and 1, up to both ends, that do not sum to 1: {looks}"
    return "The network returns logits."


def _surface(check: Check, e: Evidence) -> str:
    hard, soft = (100 * e.apgd(surface).share for surface in ("logits", "probabilities"))
    return f"The cross-entropy attack leaves {hard:.1f}% on logits and {soft:.1f}% on probabilities."


def _transfer(check: Check, e: Evidence) -> str:
    if check.count is None:
        return "No other network was given to transfer from."
    return f"Adversarial images of the other network break {_percent(check)} beyond all gradient attacks."


def _randomness(check: Check, e: Evidence) -> str:
    if not e.profile.random:
        return "Passes over the same images agree."
    gain = f"Gradients averaged over {e.settings.passes} break {_percent(check)} of what every standard attack leaves."
    return f"The network is random: two passes over the same images differ. {gain}"


def _averaging(check: Check, e: Evidence) -> str:
    two = f"Two gradients averaged over {e.settings.passes} passes have a cosine of {check.measured:.2f}"
    return f"{two}; below {AGREEMENT:g}, averaged attacks follow noise too."


def _rounding(check: Check, e: Evidence) -> str:
    p, cut = e.profile, ""
    if is_cut(p):
        still = "Even then" if p.steps else "No rounding was recognised, and yet"
        where = "in float32, and there is no float64 copy to ask" if p.no_float64 else "in float64 either"
        share = 100 * (p.gradients.cut / p.gradients.of)
        cut = f"{still} the margin has no gradient at {share:.1f}% of the right images, {where}."
    if p.steps:
        gain = f"With the identity's in their place, {_percent(check)} of what every standard attack leaves is broken."
        return f"The network has steps without a gradient ({', '.join(p.steps)}). {gain} {cut}".rstrip()
    return cut or "No rounding or other step without a gradient was seen."


def _gaps(check: Check, e: Evidence) -> str:
    wide = f"{100 * (e.profile.gaps.above / e.n):.1f}% are above {UNDERFLOW:g}"
    median = f"The median gap between the top two logits is {check.measured:.3g} nats"
    return f"{median}; {wide}, where float32's cross-entropy has no gradient."


def _fixed(words: str) -> Callable[[Check, Evidence], str]:
    return lambda check, e: words.format(_percent(check))


_WORDS: dict[str, Callable[[Check, Evidence], str]] = {
    "hidden": _fixed(
        "{} of the images count as robust for standard gradient attacks on the cross-entropy, and are broken by "
        "another attack or out of reach of any gradient."
    ),
    "survivors": _survivors,
    "zero gradients": _zero_gradients,
    "tiny gradients": _fixed("For {} softmax has cost the gradient more than the 24 bits of a float32."),
    "float64": _float64,
    "losses": _fixed("Other losses break {} of the images that every standard attack leaves."),
    "output": _output,
    "surface": _surface,
    "more steps": _fixed("More steps raise the accuracy by {}."),
    "larger perturbations": _fixed("Larger perturbations raise the accuracy by {}."),
    "unbounded": _fixed("With the whole range as perturbation, the gradient attack leaves {}."),
    "black box": _fixed("Square, without gradients, breaks {} beyond all gradient attacks."),
    "transfer": _transfer,
    "randomness": _randomness,
    "averaging": _averaging,
    "rounding": _rounding,
    "gaps": _gaps,
}
