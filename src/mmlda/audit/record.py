"""An audit: its verdict, and the file it is stored in. Only this module knows the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mmlda._utils.figures import save_figure
from mmlda._utils.text import eps_text
from mmlda.audit import figures, text
from mmlda.audit.checks import Check, Evidence, Mask, all_checks, is_cut, recognised, share
from mmlda.audit.profile import Profile
from mmlda.audit.trials import Settings, Trial, plans
from mmlda.audit.verdict import Verdict, close_calls, decide, possible
from mmlda.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = ("dataset", "head", "seconds", "network", "network_sha256", "data", "priors", "device", "versions", "commit")
FACTS = ("attack", "loss", "surface", "eps", "kind", "steps", "view")  # of an attack
EXTRAS = ("float64", "features", "straight-through", "averaged", "surrogate")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Audit(Evidence):
    """A verdict and the evidence for it. `print(audit)` shows the verdict, the checks and the accuracies.

    Attributes
    ----------
    about
        The network, the data, the machine and the code, as fields of `Result`.
    notes
        What to know before quoting the verdict.
    """

    about: dict[str, Any]
    notes: tuple[str, ...] = ()

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """Every check, with its measured value, its limit and whether it passed."""
        return all_checks(self)

    @cached_property
    def verdict(self) -> Verdict:
        """One of "real", "none", "masked" and "mixed"."""
        return decide(self.checks, constant=self.profile.constant)

    @property
    def accuracies(self) -> tuple[Trial, ...]:
        """The accuracy under each attack: `share` is in [0, 1], `held` has one entry per image."""
        return self.trials

    @cached_property
    def masks(self) -> tuple[Mask, ...]:
        """The recognised kinds of gradient masking, whether or not they hide anything; empty for an honest network."""
        return recognised(self)

    @cached_property
    def near(self) -> tuple[Check, ...]:
        """The checks so close to their limits that noise may decide the verdict."""
        return close_calls(self.checks, constant=self.profile.constant)

    @property
    def possible(self) -> frozenset[Verdict]:
        """The verdicts that noise may lead to; only `verdict` if it is clear."""
        return possible(self.checks, constant=self.profile.constant)

    @property
    def summary(self) -> str:
        """The verdict in one or two sentences."""
        return text.summary(self, self.checks, self.verdict, self.masks)

    @property
    def clean_accuracy(self) -> float:
        """The share of images, in [0, 1], classified correctly without an attack."""
        return share(self.right)

    @property
    def standard_accuracy(self) -> float:
        """The share of images classified correctly after every standard gradient attack."""
        return share(self.standard)

    @property
    def worst_accuracy(self) -> float:
        """The share of images classified correctly after all attacks of the audit within eps."""
        return share(self.left)

    def check(self, name: str) -> Check:
        """Find a check.

        Parameters
        ----------
        name
            Its name in the table.

        Returns
        -------
        Check
            The check.
        """
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        heading = filter(None, [self.summary, text.close_call(self.near), " ".join(self.notes)])
        return text.table(self, self.checks, heading)

    def __repr__(self) -> str:
        return f"Audit({self.verdict!r}, eps={eps_text(self.settings.eps)}, n={self.n})"

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the accuracies, the accuracy against eps and the logit gaps.

        Parameters
        ----------
        path
            A .png, .svg or .pdf file to write the figure to (default: none).

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        figure = figures.draw(self, f"{self.about['network']} on {self.about['dataset']}. {self.summary}")
        if path is not None:
            save_figure(path, figure)
        return figure

    def to_result(self) -> Result:
        """Convert the audit to a `Result` of kind "audit", from which `replay` restores it.

        Returns
        -------
        Result
            The result, to save as a file.
        """
        s, about = self.settings, self.about
        parts = ("audit", about["dataset"] or "data", about["network"], f"{s.eps:g}")
        settings = {name: value for name, value in asdict(s).items() if name != "seed"}
        settings["surrogate"] = any(trial.kind == "transfer" for trial in self.trials)
        images = {
            "unbounded_best_gradients": ~self.reached,
            "clean_accuracy": self.right,
            "standard_accuracy": self.standard,
            "worst_accuracy": self.left,
            "proven_accuracy": self.proven,
            "hidden": self.hidden,
        }
        return Result(
            name="-".join(re.sub(r"[^\w.+]+", "_", part) for part in parts),
            kind="audit",
            what=self.summary,
            value=self.verdict,
            eps=s.eps,
            note=" ".join(self.notes),
            n=self.n,
            seed=s.seed,
            attack_steps=s.steps,
            numbers={**self.profile.numbers, **{name: share(mask) for name, mask in images.items()}},
            series={
                "evidence": [_entry(check, self) for check in self.checks],
                "kinds": list(self.masks),
                "accuracies": [_row(trial) for trial in self.trials],
                "curve": self.curve(),
                "gaps": self.profile.gaps,
            },
            attack_settings=settings,
            **about,
        )

    def save(self, folder: str | Path) -> Result:
        """Write the result and the figure to a folder, as `audit.json` and `audit.png`.

        Parameters
        ----------
        folder
            Created if missing.

        Returns
        -------
        Result
            The result as written.
        """
        result = replace(self.to_result(), name="audit").save(folder)
        self.plot(Path(folder) / "audit.png")
        return result


def _entry(check: Check, e: Evidence) -> dict[str, Any]:
    found = {"value": check.measured, "limit": check.limit, "passed": check.passed, "unit": check.unit}
    return {"test": check.name, "words": text.describe(check, e), **found}


def _row(trial: Trial) -> dict[str, Any]:
    low, high = trial.interval
    held = "".join("01"[kept] for kept in trial.held.tolist())
    facts = {name: getattr(trial, name) for name in FACTS}
    return {"name": text.attack_name(trial), **facts, "accuracy": trial.share, "low": low, "high": high, "held": held}


def replay(result: Result) -> Audit:
    """Restore an audit from its result and apply the checks and the rule again.

    A file lacks three facts. `constant` is inferred from a cut gradient that is not among the kinds. The images that
    only the best gradients reach are not stored, but their number is, and only that counts. The names of the steps
    without a gradient appear in sentences only and are lost.

    Parameters
    ----------
    result
        A result of kind "audit".

    Returns
    -------
    Audit
        The audit.
    """
    numbers, kinds = cast(dict[str, float], result.numbers), result.series["kinds"]
    n = result.n or 0
    profile = Profile(
        n=n,
        right=round(numbers["clean_accuracy"] * n),
        constant=False,
        random="random" in kinds,
        output="probabilities" if "probabilities" in kinds else "sigmoids" if "sigmoids" in kinds else "logits",
        steps=("unknown",) if "rounding" in kinds else (),
        no_float64="" if any(item["test"] == "float64" for item in result.series["evidence"]) else "unknown",
        gaps=result.series["gaps"],
        numbers={**numbers},
    )
    profile = replace(profile, constant=is_cut(profile) and "no gradient" not in kinds)
    arguments = {name: value for name, value in (result.attack_settings or {}).items() if name != "surrogate"}
    settings = Settings(seed=result.seed or 0, **arguments)
    trials = tuple(_trials(result.series["accuracies"], plans(settings, profile.surface, EXTRAS)))
    reached = ~trials[-1].held  # the unbounded attack comes last
    about, notes = {name: getattr(result, name) for name in ABOUT}, (result.note,) if result.note else ()
    audit = Audit(settings=settings, profile=profile, trials=trials, reached=reached, about=about, notes=notes)
    missing = round(numbers["proven_accuracy"] * n) - int(audit.proven.sum())
    blind = (audit.left & ~reached).nonzero().flatten()
    return replace(audit, reached=reached.index_fill(0, blind[:missing], True))


def _trials(rows: list[dict[str, Any]], planned: list[Trial]) -> Iterator[Trial]:
    """The attacks of a file; older files have their names only, which are those of the attacks an audit plans."""
    by_name = {(text.attack_name(plan), plan.surface, round(plan.eps, 9)): plan for plan in planned}
    for row in rows:
        known = {name: row[name] for name in FACTS} if "attack" in row else None
        trial = by_name[row["name"], row["surface"], round(row["eps"], 9)] if known is None else Trial(**known)
        yield replace(trial, held=torch.tensor([mark == "1" for mark in row["held"]]))
