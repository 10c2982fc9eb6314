"""An audit as a `Result`, and the evidence of a stored audit: the only module here that knows the file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from mmlda.audit.checks import LIMIT, Check, Evidence, above
from mmlda.audit.profile import Gaps, Gradients, Output, Profile
from mmlda.audit.text import attack_name, describe
from mmlda.audit.trials import Plan, Settings, Trial, plans, tried
from mmlda.results import Result

if TYPE_CHECKING:
    from mmlda.audit.run import Audit

__all__ = ["Provenance", "stored_evidence", "stored_provenance", "to_result"]

EXTRAS = ("float64", "features", "straight-through", "averaged", "surrogate")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where an audit comes from: the network, the data, the machine and the code."""

    model: str
    data: str
    head: str = ""
    network_sha256: str | None = None
    data_sha256: str | None = None
    surrogate: bool = False
    seconds: float | None = None
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""


def to_result(audit: Audit) -> Result:
    """The audit as a `Result` of kind "audit"."""
    e, at, s = audit.evidence, audit.provenance, audit.evidence.settings
    parts = ("audit", at.data or "data", at.model, f"{s.eps:g}")
    attack = {"eps": s.eps, "steps": s.steps, "queries": s.queries, "passes": s.passes, "batch_size": s.batch_size}
    return Result(
        name="-".join(re.sub(r"[^\w.+]+", "_", part) for part in parts),
        kind="audit",
        what=audit.summary,
        value=audit.verdict,
        dataset=at.data,
        head=at.head,
        eps=s.eps,
        note=" ".join(audit.notes),
        n=e.n,
        seed=s.seed,
        attack_steps=s.steps,
        seconds=at.seconds,
        numbers=_numbers(e),
        series={
            "evidence": [_check(check, e) for check in audit.checks],
            "kinds": list(audit.masks),
            "accuracies": [_row(trial) for trial in e.trials],
            "curve": _curve(e),
            "gaps": {"edges": list(e.profile.gaps.edges), "counts": list(e.profile.gaps.counts)},
        },
        network=at.model,
        network_sha256=at.network_sha256 or "",
        attack_settings={**attack, "surrogate": at.surrogate},
        data={"name": at.data, "sha256": at.data_sha256},
        device=at.device,
        versions=at.versions,
        commit=at.commit,
    )


def _share(count: int | None, of: int) -> float | None:
    return None if count is None or not of else count / of


def _numbers(e: Evidence) -> dict[str, Any]:
    """All are shares, except the median gap."""
    g, gaps, n = e.profile.gradients, e.profile.gaps, e.n

    def share(mask: Tensor) -> float | None:
        return _share(int(mask.sum()), n)

    return {
        "zero_gradient": _share(g.zero, g.of),
        "zero_gradient_float64": _share(g.zero_float64, g.of),
        "zero_gradient_margin": _share(g.zero_margin, g.of),
        "tiny_gradient": _share(g.tiny, g.of),
        "wrong_sign": g.wrong_sign,
        "agreement": g.agreement,
        "no_gradient": _share(g.cut, g.of),
        "unbounded_best_gradients": share(~e.reached),
        "clean_accuracy": share(e.right),
        "standard_accuracy": share(e.standard),
        "worst_accuracy": share(e.left),
        "proven_accuracy": share(e.proven),
        "hidden": share(e.hidden),
        "chance": e.profile.chance,
        "median_gap": gaps.median,
        "gaps_above_104": _share(gaps.above, n),
    }


def _check(check: Check, e: Evidence) -> dict[str, Any]:
    """Shares, except for a cosine and for nats."""
    unit = "" if check.name in ("averaging", "gaps") else "share"
    found = {"value": check.measured, "limit": check.limit, "passed": check.passed, "unit": unit}
    return {"test": check.name, "words": describe(check, e), **found}


def _row(trial: Trial) -> dict[str, Any]:
    low, high = trial.interval
    return {
        "name": attack_name(trial),
        "surface": trial.surface,
        "eps": trial.eps,
        "accuracy": trial.share,
        "low": low,
        "high": high,
        "held": "".join("01"[kept] for kept in trial.held.tolist()),
    }


def _curve(e: Evidence) -> dict[str, list[float]]:
    rows = [trial for trial in e.trials if trial.kind in ("clean", "curve", "unbounded")]
    return {"eps": [trial.eps for trial in rows], "accuracy": [trial.share for trial in rows]}


def stored_provenance(result: Result) -> Provenance:
    data = result.data or {}
    return Provenance(
        model=result.network,
        data=result.dataset,
        head=result.head,
        network_sha256=result.network_sha256,
        data_sha256=data.get("sha256"),
        surrogate=bool((result.attack_settings or {}).get("surrogate")),
        seconds=result.seconds,
        device=result.device,
        versions=result.versions,
        commit=result.commit,
    )


def stored_evidence(result: Result) -> Evidence:
    """The evidence of an audit, from its `Result`.

    A file lacks four facts. `constant` is taken from a cut gradient that is not among the kinds. Which images only the
    best gradients reach is not stored; their number is, and nothing else counts. The names of the steps without a
    gradient and whether probabilities were in percent appear in sentences only; they are left out.
    """
    arguments = {key: value for key, value in (result.attack_settings or {}).items() if key != "surrogate"}
    settings = Settings(seed=result.seed or 0, **arguments)
    profile = _profile(result)
    trials = _trials(result, settings, profile.surface)
    blind = next(trial.held for trial in trials if trial.kind == "unbounded")
    evidence = Evidence(settings=settings, profile=profile, trials=trials, reached=~blind)
    missing = _images(result, "proven_accuracy") - int(evidence.proven.sum())
    reached = ~blind
    reached[(evidence.left & blind).nonzero().flatten()[:missing]] = True
    return Evidence(settings=settings, profile=profile, trials=trials, reached=reached)


def _images(result: Result, name: str) -> int:
    return round(cast(float, result.numbers[name]) * (result.n or 0))


def _profile(result: Result) -> Profile:
    kinds, gaps = result.series["kinds"], result.series["gaps"]
    of = _images(result, "clean_accuracy")

    def number(name: str) -> float | None:
        return cast("float | None", result.numbers[name])

    def count(name: str) -> int | None:
        return None if (value := number(name)) is None else round(value * of)

    sign, cosine, cut = number("wrong_sign"), number("agreement"), count("no_gradient") or 0
    output: Output = next((word for word in ("probabilities", "sigmoids") if word in kinds), "logits")
    no_copy = not any(item["test"] == "float64" for item in result.series["evidence"])
    return Profile(
        n=result.n or 0,
        chance=(number("chance") or 0.0),
        constant=bool(of) and above(cut, of, LIMIT) and "no gradient" not in kinds,
        random="random" in kinds,
        output=output,
        steps=("unknown",) if "rounding" in kinds else (),
        no_float64="unknown" if no_copy else "",
        gradients=Gradients(
            of=of,
            zero=count("zero_gradient") or 0,
            zero_float64=count("zero_gradient_float64"),
            zero_margin=count("zero_gradient_margin") or 0,
            tiny=count("tiny_gradient") or 0,
            cut=cut,
            wrong_sign=None if sign is None else sign,
            agreement=None if cosine is None else cosine,
        ),
        gaps=Gaps(
            median=number("median_gap") or 0.0,
            above=_images(result, "gaps_above_104"),
            edges=tuple(gaps["edges"]),
            counts=tuple(gaps["counts"]),
        ),
    )


def _trials(result: Result, settings: Settings, own: str) -> tuple[Trial, ...]:
    """The attacks of the file, recognised by what the audit would call the attacks it plans with these settings."""

    def key(name: str, surface: str, eps: float) -> tuple[str, str, float]:
        return name, surface, round(eps, 9)

    planned: dict[tuple[str, str, float], Plan] = {
        key(attack_name(plan), plan.surface, plan.eps): plan for plan in plans(settings, own, EXTRAS)
    }
    made = []
    for row in result.series["accuracies"]:
        plan = planned[key(row["name"], row["surface"], row["eps"])]
        made.append(tried(plan, torch.tensor([mark == "1" for mark in row["held"]])))
    return tuple(made)
