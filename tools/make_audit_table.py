"""Write the table of docs/audit.md: `OMP_NUM_THREADS=1 python tools/make_audit_table.py` (three minutes on one core).

Trains every network of the table on the embedded digits and audits it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmlda
from mmlda._utils.files import write_whole
from mmlda.audit import Audit, audit
from mmlda.models import build
from mmlda.results import versions
from mmlda.training.recipes import Adversary, Recipe, network

PAGE = Path(__file__).parents[1] / "docs" / "audit.md"
BEGIN, END = "<!-- begin: tools/make_audit_table.py -->\n", "<!-- end -->\n"
N, SEED = 100, 0
CLOSE = " (close)"  # marks a verdict that noise may decide


@cache
def trained(head: str, robust: bool = False, C: float = 100.0) -> mmlda.Classifier:
    """A small network, trained as usual or on PGD's examples at 0.15."""
    seed = {"softmax": 0, "mmlda": 1}[head] + 2 * robust
    model = build(network(head, "digits", width=16, C=C), seed=seed)
    rate = {"lr": 0.03} if head == "softmax" else {"optimizer": "adam", "lr": 2e-3}
    adversary = Adversary(attack="pgd", eps=0.15, steps=4, step=0.4, random_start=True, share=1.0) if robust else None
    recipe = Recipe(steps=400, milestones=(300,), batch_size=64, adversary=adversary, **rate)
    mmlda.fit(model, mmlda.data.load("digits")[0], recipe, show=False)
    return model.eval()


def sr() -> mmlda.Classifier:
    return trained("softmax")


def mm() -> mmlda.Classifier:
    return trained("mmlda")


def robust() -> mmlda.Classifier:
    return trained("softmax", robust=True)


class Waves(nn.Module):
    """Waves of two nats in fresh directions and phases on the logits, which drown the gradient."""

    def __init__(self, inner: nn.Module, frequency: float) -> None:
        super().__init__()
        self.inner, self.frequency = inner, frequency

    def forward(self, x: Tensor) -> Tensor:
        z, v = self.inner(x), x.flatten(1)
        across = torch.randn(v.shape[1], z.shape[1], dtype=x.dtype)
        phase = 2 * torch.pi * torch.rand(len(x), z.shape[1], dtype=x.dtype)
        return z + 2 * torch.sin(self.frequency * (v @ across) + phase)


class Changed(nn.Module):
    """A network with a function of its images, its features or its logits changed."""

    def __init__(self, inner: mmlda.Classifier, **changes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.changes = inner, changes

    def forward(self, x: Tensor) -> Tensor:
        def same(v: Tensor) -> Tensor:
            return v

        images, features, logits = (self.changes.get(name, same) for name in ("images", "features", "logits"))
        if "features" not in self.changes:
            return logits(self.inner(images(x)))
        return logits(self.inner.head(features(self.inner.features(images(x)))))


def steep(model: mmlda.Classifier) -> mmlda.Classifier:
    model = copy.deepcopy(model)
    model.head = mmlda.MaxMahalanobisHead(num_classes=10, dim=model.head.dim, C=1e6)
    return model


def probabilities(factor: float = 1.0) -> nn.Module:
    return Changed(sr(), logits=lambda z: (factor * z).softmax(1))


def rounded(net: mmlda.Classifier, levels: int) -> nn.Module:
    return Changed(net, images=lambda x: (x * levels).round() / levels)


def noisy(net: mmlda.Classifier, size: float) -> nn.Module:
    return Changed(net, images=lambda x: x + size * torch.randn_like(x))


def dropout(net: mmlda.Classifier, share: float) -> nn.Module:
    return Changed(net, features=lambda z: F.dropout(z, share, training=True))


@dataclass(frozen=True)
class Entry:
    """A network of the table: how to make it, the radii it is audited at, and the passes of a random network."""

    make: Callable[[], nn.Module]
    radii: tuple[float, ...] = (0.12, 0.2)
    passes: int = 16


TABLE: dict[str, dict[str, Entry]] = {
    "plain networks": {
        "SR": Entry(sr, (0.02, 0.05, 0.1, 0.2)),
        "MM-LDA, C = 100": Entry(mm),
    },
    "adversarially trained": {
        "adversarially trained SR": Entry(robust),
        "adversarially trained MM-LDA": Entry(lambda: trained("mmlda", robust=True)),
    },
    "masks on plain networks": {
        "SR, logits x 1e4": Entry(lambda: Changed(sr(), logits=lambda z: 1e4 * z), (0.02, 0.05, 0.15, 0.2)),
        "MM-LDA, head at C = 1e6 after training": Entry(lambda: steep(mm())),
        "MM-LDA, trained at C = 1e6": Entry(lambda: trained("mmlda", C=1e6)),
        "SR, input rounded to 8 levels": Entry(lambda: rounded(sr(), 8)),
        "SR, input cast to bytes": Entry(
            lambda: Changed(sr(), images=lambda x: (x * 16 + 0.5).byte().to(x.dtype) / 16)
        ),
        "SR x 10, probabilities": Entry(lambda: probabilities(10)),
        "SR x 20, probabilities": Entry(lambda: probabilities(20)),
        "SR, random waves on the logits, frequency 10": Entry(lambda: Waves(sr(), 10)),
        "SR, random waves, frequency 100": Entry(lambda: Waves(sr(), 100), (0.12,)),
        "SR, random waves, frequency 10, 64 passes": Entry(lambda: Waves(sr(), 10), (0.12,), passes=64),
    },
    "mild forms": {
        "SR, probabilities": Entry(probabilities),
        "SR, noise of 0.2 on the input": Entry(lambda: noisy(sr(), 0.2)),
        "SR, dropout of 0.5 on the features": Entry(lambda: dropout(sr(), 0.5), (0.12,)),
        "adversarially trained SR, noise of 0.05": Entry(lambda: noisy(robust(), 0.05), (0.12,)),
        "adversarially trained SR, dropout of 0.3 on the features": Entry(lambda: dropout(robust(), 0.3), (0.12,)),
    },
    "masks on an adversarially trained network": {
        "adversarially trained SR, logits x 1e4": Entry(lambda: Changed(robust(), logits=lambda z: 1e4 * z), (0.12,)),
        "adversarially trained SR, input rounded to 16 levels": Entry(lambda: rounded(robust(), 16), (0.12,)),
        "adversarially trained SR, waves, frequency 100": Entry(lambda: Waves(robust(), 100), (0.12,)),
    },
}


def audits(entry: Entry) -> list[Audit]:
    """The audits of a network, one per radius."""
    test, model = mmlda.data.load("digits")[1].subset(slice(N)), entry.make()
    return [audit(model, test, eps=eps, n=None, passes=entry.passes, seed=SEED, show=False) for eps in entry.radii]


def row(name: str, found: list[Audit]) -> str:
    """The line of a network, with one value per radius."""

    def each(words: Iterable[object]) -> str:
        return " / ".join(map(str, words))

    cells = (
        name,
        each(f"{a.settings.eps:g}" for a in found),
        f"{found[0].profile.numbers['median_gap']:.3g}",
        ", ".join(found[0].masks),
        each(f"{100 * a.standard_accuracy:.0f}" for a in found),
        each(f"{100 * a.worst_accuracy:.0f}" for a in found),
        each(a.verdict + (CLOSE if a.near else "") for a in found),
    )
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """The table with its settings and versions."""
    rows = []
    for group, entries in TABLE.items():
        rows += [f"| *{group}* | | | | | | |", *(row(name, audits(entry)) for name, entry in entries.items())]
    made = versions()
    head = [
        f"The first {N} test images of digits, 20 steps, 300 queries, 16 passes unless given, no surrogate;",
        f"seed {SEED}; mmlda {made['mmlda']}, torch {made['torch']}, Python {made['python']}, "
        f"threads: {made['threads']}.",
        "",
        "| network | eps | median gap, nats | recognised | standard, % | worst, % | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(head + rows) + "\n"


def put(page: str, text: str) -> str:
    """The page with the text between its markers."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + text + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    write_whole(PAGE, put(PAGE.read_text(), table()).encode())
