"""Write the table of docs/audit.md: `OMP_NUM_THREADS=1 python tools/make_audit_table.py`.

Trains every network of the table on the embedded digits, audits it and writes the rows between the page's markers,
with the number of images, the seed and the versions. Takes about three minutes on one core.
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
from mmlda._utils.progress import progress
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
    """A small network, as it comes or adversarially trained by PGD at 0.15."""
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


class Behind(nn.Module):
    """A network with something before it and after it."""

    def __init__(
        self,
        inner: nn.Module,
        before: Callable[[Tensor], Tensor] | None = None,
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x if self.before is None else self.before(x))
        return z if self.after is None else self.after(z)


class Waves(nn.Module):
    """Waves of two nats in fresh directions and phases on the logits: seldom another answer, a drowned gradient."""

    def __init__(self, inner: nn.Module, frequency: float) -> None:
        super().__init__()
        self.inner, self.frequency = inner, frequency

    def forward(self, x: Tensor) -> Tensor:
        z, v = self.inner(x), x.flatten(1)
        across = torch.randn(v.shape[1], z.shape[1], dtype=x.dtype)
        phase = 2 * torch.pi * torch.rand(len(x), z.shape[1], dtype=x.dtype)
        return z + 2 * torch.sin(self.frequency * (v @ across) + phase)


class Dropout(nn.Module):
    """Dropout on the features, at inference too."""

    def __init__(self, inner: mmlda.Classifier, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.head(F.dropout(self.inner.features(x), self.share, training=True))


def steep(model: mmlda.Classifier) -> mmlda.Classifier:
    model = copy.deepcopy(model)
    model.head = mmlda.MaxMahalanobisHead(num_classes=10, dim=model.head.dim, C=1e6)
    return model


def times(net: nn.Module, factor: float) -> nn.Module:
    return Behind(net, after=lambda z: factor * z)


def probabilities(net: nn.Module, factor: float = 1.0) -> nn.Module:
    return Behind(net, after=lambda z: (factor * z).softmax(1))


def rounded(net: nn.Module, levels: int) -> nn.Module:
    return Behind(net, before=lambda x: (x * levels).round() / levels)


def cast(net: nn.Module) -> nn.Module:
    return Behind(net, before=lambda x: (x * 16 + 0.5).byte().to(x.dtype) / 16)


def noisy(net: nn.Module, size: float) -> nn.Module:
    return Behind(net, before=lambda x: x + size * torch.randn_like(x))


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
        "SR, logits x 1e4": Entry(lambda: times(sr(), 1e4), (0.02, 0.05, 0.15, 0.2)),
        "MM-LDA, head at C = 1e6 after training": Entry(lambda: steep(mm())),
        "MM-LDA, trained at C = 1e6": Entry(lambda: trained("mmlda", C=1e6)),
        "SR, input rounded to 8 levels": Entry(lambda: rounded(sr(), 8)),
        "MM-LDA, input rounded to 16 levels": Entry(lambda: rounded(mm(), 16)),
        "SR, input cast to bytes": Entry(lambda: cast(sr())),
        "SR x 10, probabilities": Entry(lambda: probabilities(sr(), 10)),
        "SR x 20, probabilities": Entry(lambda: probabilities(sr(), 20)),
        "SR, random waves on the logits, frequency 10": Entry(lambda: Waves(sr(), 10)),
        "SR, random waves, frequency 30": Entry(lambda: Waves(sr(), 30)),
        "SR, random waves, frequency 100": Entry(lambda: Waves(sr(), 100), (0.12,)),
        "SR, random waves, frequency 10, 64 passes": Entry(lambda: Waves(sr(), 10), (0.12,), passes=64),
        "SR, random waves, frequency 30, 64 passes": Entry(lambda: Waves(sr(), 30), (0.12,), passes=64),
    },
    "mild forms, which hide nothing": {
        "SR, probabilities": Entry(lambda: probabilities(sr())),
        "MM-LDA, probabilities": Entry(lambda: probabilities(mm())),
        "SR, noise of 0.2 on the input": Entry(lambda: noisy(sr(), 0.2)),
        "SR, dropout of 0.5 on the features": Entry(lambda: Dropout(sr(), 0.5), (0.12,)),
        "adversarially trained SR, noise of 0.05": Entry(lambda: noisy(robust(), 0.05), (0.12,)),
        "adversarially trained SR, dropout of 0.3 on the features": Entry(lambda: Dropout(robust(), 0.3), (0.12,)),
    },
    "masks on an adversarially trained network": {
        "adversarially trained SR, logits x 1e4": Entry(lambda: times(robust(), 1e4), (0.12,)),
        "adversarially trained SR, input rounded to 16 levels": Entry(lambda: rounded(robust(), 16), (0.12,)),
        "adversarially trained SR, waves, frequency 10": Entry(lambda: Waves(robust(), 10), (0.12,)),
        "adversarially trained SR, waves, frequency 30": Entry(lambda: Waves(robust(), 30), (0.12,)),
        "adversarially trained SR, waves, frequency 100": Entry(lambda: Waves(robust(), 100), (0.12,)),
    },
}


def audits(entry: Entry) -> list[Audit]:
    """The audits of a network, one per radius."""
    test, model = mmlda.data.load("digits")[1], entry.make()
    return [audit(model, test, eps=eps, n=N, passes=entry.passes, seed=SEED, show=False) for eps in entry.radii]


def row(name: str, found: list[Audit]) -> str:
    """The line of a network, with one value per radius."""

    def each(words: Iterable[object]) -> str:
        return " / ".join(map(str, words))

    cells = (
        name,
        each(f"{a.evidence.settings.eps:g}" for a in found),
        f"{found[0].evidence.profile.gaps.median:.3g}",
        ", ".join(found[0].masks),
        each(f"{100 * a.standard_accuracy:.0f}" for a in found),
        each(f"{100 * a.worst_accuracy:.0f}" for a in found),
        each(a.verdict + (CLOSE if a.near else "") for a in found),
    )
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """The whole table as Markdown, with its settings and versions."""
    rows = []
    with progress("networks", sum(map(len, TABLE.values())), unit="networks") as report:
        done = 0
        for group, entries in TABLE.items():
            rows.append(f"| *{group}* | | | | | | |")
            for name, entry in entries.items():
                rows.append(row(name, audits(entry)))
                report(done := done + 1)
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
    put(PAGE.read_text(), "")  # fail at once if a marker is missing
    made = table()
    write_whole(PAGE, put(PAGE.read_text(), made).encode())
