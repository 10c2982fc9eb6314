"""audit(): is the robustness real? Attacks that are blind in different ways, compared image by image.

network, images -> profile -> trials -> checks -> verdict
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from mmlda._utils.checks import check_count, invalid
from mmlda._utils.tensors import packed
from mmlda.attacks.surface import Model
from mmlda.audit import figures, record, text
from mmlda.audit.checks import Check, Evidence, Mask, Name, all_checks, recognised
from mmlda.audit.profile import examine
from mmlda.audit.trials import Settings, Trial, run_trials
from mmlda.audit.verdict import Verdict, close_calls, decide, possible
from mmlda.audit.views import copied, undisturbed
from mmlda.data import ImageData, as_images
from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead
from mmlda.results import Result, head_of, measured_on

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Audit", "audit", "default_eps", "replay"]

GREY, COLOUR = 0.12, 0.04  # the paper's perturbations at which BIM leaves its SR 3.4% and 5.5%


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Audit:
    """A verdict and what it rests on. `print(audit)` shows the verdict, the checks and the accuracies.

    Args:
        evidence: what was measured, image by image.
        provenance: the network, the data, the machine and the code.
        notes: what to know before quoting the verdict.
    """

    evidence: Evidence
    provenance: record.Provenance
    notes: tuple[str, ...] = ()

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """Every check, with what it measured, its limit and whether it passed."""
        return all_checks(self.evidence)

    @cached_property
    def verdict(self) -> Verdict:
        """One of "real", "none", "masked" and "mixed"."""
        return decide(self.checks, constant=self.evidence.profile.constant)

    @property
    def accuracies(self) -> tuple[Trial, ...]:
        """The accuracy under each attack. `share` is in [0, 1]; `held` has every image."""
        return self.evidence.trials

    @cached_property
    def masks(self) -> tuple[Mask, ...]:
        """The kinds of mask that were recognised, whether they hide anything or not; an honest network has none."""
        return recognised(self.evidence)

    @cached_property
    def near(self) -> tuple[Check, ...]:
        """The checks so close to their limits that noise may decide the verdict."""
        return close_calls(self.checks, constant=self.evidence.profile.constant)

    @property
    def possible(self) -> frozenset[Verdict]:
        """The verdicts that noise may lead to; the verdict alone if that is clear."""
        return possible(self.checks, constant=self.evidence.profile.constant)

    @property
    def summary(self) -> str:
        """The verdict in a sentence or two."""
        return text.summary(self.evidence, self.checks, self.verdict, self.masks)

    @property
    def clean_accuracy(self) -> float:
        """The share of the images, in [0, 1], that are right without an attack."""
        return int(self.evidence.right.sum()) / self.evidence.n

    @property
    def standard_accuracy(self) -> float:
        """The share that is right after every standard gradient attack."""
        return int(self.evidence.standard.sum()) / self.evidence.n

    @property
    def worst_accuracy(self) -> float:
        """The share that is right after all attacks of the audit within eps."""
        return int(self.evidence.left.sum()) / self.evidence.n

    def check(self, name: Name) -> Check:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        checks = [(check, text.describe(check, self.evidence)) for check in self.checks]
        notes = [note for note in (text.close_call(self.near), " ".join(self.notes)) if note]
        return text.table(self.summary, notes, checks, self.accuracies)

    def __repr__(self) -> str:
        return f"Audit({self.verdict!r}, eps={self.evidence.settings.eps:g}, n={self.evidence.n})"

    def plot(self, path: str | Path | None = None) -> Figure:
        """The accuracies, the curve over eps and the gaps as a figure; written to `path` as PNG or SVG if given."""
        title = f"{self.provenance.model} on {self.provenance.data}. {self.summary}"
        figure = figures.draw(self.evidence, title)
        if path is not None:
            figures.save(figure, path)
        return figure

    def to_result(self) -> Result:
        """The audit as a record to save."""
        return record.to_result(self)


def default_eps(data: ImageData) -> float:
    """The perturbation of an audit by default: 0.12 for images of one channel and 0.04 for others."""
    return GREY if data.shape[0] == 1 else COLOUR


def audit(
    model: Model,
    data: ImageData | tuple[Any, Any] | Dataset[Any],
    *,
    eps: float | None = None,
    surrogate: Model | None = None,
    n: int | None = 200,
    steps: int = 20,
    queries: int = 300,
    passes: int = 16,
    thorough: bool = False,
    batch_size: int = 128,
    name: str = "",
    seed: int = 0,
    device: torch.device | str | None = None,
    show: bool = True,
) -> Audit:
    """Whether the accuracy under attack at the L-infinity radius `eps` is robustness.

    The verdict is "real", "none", "masked" or "mixed". A copy of the model is attacked: the model, its mode, its device
    and the random generators stay as they were.

    Args:
        model: maps images in [0, 1] to logits, or probabilities. `model.features`, if there is one, is attacked too.
        data: an `ImageData`, a pair (x, y) or a `Dataset`.
        eps: 0.12 for images of one channel and 0.04 for others by default: the paper's perturbations at which its
            softmax network keeps next to nothing on MNIST and on CIFAR-10.
        surrogate: another network, whose adversarial images are tried on this one.
        n: attack the first n images; all of them if there are fewer, or if n is None.
        steps: gradient steps of an iterative attack.
        queries: queries of Square.
        passes: passes over a random network, to average its gradients and to judge an image.
        thorough: 5 times the steps and 10 times the queries, in minutes instead of seconds.
        name: what to call the network.
    """
    begin = time.perf_counter()
    data = as_images(data)
    settings = _settings(
        eps=default_eps(data) if eps is None else eps,
        steps=steps * (5 if thorough else 1),
        queries=queries * (10 if thorough else 1),
        passes=passes,
        batch_size=batch_size,
        seed=seed,
    )
    part = _first(data, n)
    if not callable(model):
        raise invalid("model", "a function from images to logits", model)
    if surrogate is not None and not callable(surrogate):
        raise invalid("surrogate", "a function from images to logits", surrogate)
    place = _place(model, data, device)
    with undisturbed(place, seed):
        net = copied(model, place)
        x, y = part.pixels().to(place), part.labels.to(place)
        subject, profile = examine(net, x, y, passes=passes, batch_size=batch_size)
        other = None if surrogate is None else copied(surrogate, place)
        trials, reached = run_trials(subject, profile.surface, settings, other, show)
    evidence = Evidence(settings=settings, profile=profile, trials=trials, reached=reached)
    provenance = record.Provenance(
        model=name or _called(model),
        head=head_of(model),
        data=data.name,
        network_sha256=_digest(net),
        data_sha256=data.digest(),
        surrogate=surrogate is not None,
        seconds=time.perf_counter() - begin,
        **measured_on(place),
    )
    return Audit(evidence=evidence, provenance=provenance, notes=tuple(text.notes(evidence, data.name, len(data))))


def replay(result: Result) -> Audit:
    """The audit behind a stored result: its evidence put through the checks and the rule again."""
    notes = (result.note,) if result.note else ()
    return Audit(evidence=record.stored_evidence(result), provenance=record.stored_provenance(result), notes=notes)


def _settings(**values: Any) -> Settings:
    if not 0 < values["eps"] < 1:
        raise ValueError(f"eps must be a radius between 0 and 1, the range of the images, got {values['eps']!r}")
    for word in ("steps", "queries", "passes", "batch_size"):
        check_count(word, values[word], 1)
    return Settings(**values)


def _first(data: ImageData, n: int | None) -> ImageData:
    """The first n images."""
    part = data if n is None else data.subset(slice(check_count("n", n, 1)))
    if len(part.labels.unique()) < 2:
        raise ValueError(f"data must have at least 2 classes among its first {len(part)} images, got 1")
    return part


def _place(model: Model, data: ImageData, device: torch.device | str | None) -> torch.device:
    """The device to audit on: the one asked for, the model's, or the data's."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device(device) if device is not None else data.device if parameter is None else parameter.device


def _digest(net: Model) -> str | None:
    """SHA-256 of the network's weights, if it has any."""
    weights = net.state_dict() if isinstance(net, nn.Module) else {}
    return hashlib.sha256(packed(weights)).hexdigest() if weights else None


def _called(model: Model) -> str:
    head = getattr(model, "head", None)
    if isinstance(head, MaxMahalanobisHead):
        return "MM-LDA"
    return "SR" if isinstance(head, SoftmaxHead) else getattr(model, "__name__", type(model).__name__)
