"""Write the README's table from results/: `python tools/make_readme.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from from_results import ROOT, load, mean, on_all_images, percent, select, table, write

from mmlda import zoo
from mmlda.paper import numbers
from mmlda.paper.rows import ADAM, MMLDA, SR, Row
from mmlda.results import Result

SCRIPT = Path(__file__).name
HEAD = "softmax / MM-LDA | the paper says | we measured | does the claim hold?"
CENTRE = Row("mmlda", "mmlda", variant="centre loss")
VERDICTS = {True: "yes", False: "**no**", None: "not decided"}


def pair(softmax: float | None, mmlda: float | None, digits: int = 1) -> str:
    """Two shares in percent, softmax's first."""
    return f"{percent(softmax, digits)}% / {percent(mmlda, digits)}%"


def overview(results: list[Result]) -> str:
    """The table: one row per claim."""

    def one(kind: str, **fields: Any) -> Result:
        (found,) = select(results, kind, **fields)
        return found

    def value(kind: str, **fields: Any) -> float | None:
        return mean(select(results, kind, **fields))

    def verdict(claim: str, **fields: Any) -> str:
        return VERDICTS[one("claim", claim=claim, **fields).holds]

    def both(kind: str, rows: tuple[Row, Row] = (SR, MMLDA), digits: int = 1, **fields: Any) -> str:
        return pair(*(value(kind, row=row, **fields) for row in rows), digits=digits)

    def bim(data: str, eps: float) -> tuple[str, str]:
        paper = pair(*(numbers.table2(data, row, "BIM", eps) for row in (SR, MMLDA)))
        return paper, both("table2", dataset=data, attack="BIM", eps=eps, seed=0)

    def error(data: str) -> tuple[str, str]:
        paper = pair(*(numbers.TABLE1[data, row] for row in (SR, MMLDA)), digits=2)
        return paper, both("table1", dataset=data, digits=2)

    def under_autoattack(name: str) -> dict[float, float]:
        return on_all_images(zoo.about(name), "autoattack")

    cifar10 = {"dataset": "cifar10"}
    adam = f" (with the paper's Adam {percent(value('table1', row=ADAM, **cifar10), 2)}%)"
    variance = one("latent", row=MMLDA, **cifar10).numbers["variance"]
    moved = [value("table3", target="random", seed=0, row=row, **cifar10) or 0.0 for row in (SR, MMLDA)]
    centre = {"dataset": "mnist", "eps": 0.12, "row": CENTRE}
    blind, seeing = (
        value("suspect", attack="BIM", view="logits", **centre),
        value("suspect", attack="WorstCase", **centre),
    )
    fig3 = one("claim", claim="fig3", **cifar10)
    paper, ours = error("cifar10")
    rows = [
        (
            "Test error, CIFAR-10",
            paper,
            ours + adam,
            f"{verdict('table1', row=MMLDA, **cifar10)} (Adam: {verdict('table1', row=ADAM, **cifar10)})",
        ),
        ("Test error, MNIST", *error("mnist"), verdict("table1", dataset="mnist")),
        ("Accuracy under BIM at 0.04, CIFAR-10", *bim("cifar10", 0.04), verdict("table2", row=MMLDA, **cifar10)),
        ("Accuracy under BIM at 0.12, MNIST", *bim("mnist", 0.12), verdict("table2", dataset="mnist")),
        (
            "The same, MM-LDA with the centre loss",
            "–",
            f"BIM {percent(blind)}%, all attacks {percent(seeing)}%",
            "–",
        ),
        (
            "Change C&W needs to a random target, CIFAR-10 (RMS, 0 to 255)",
            " / ".join(f"{numbers.TABLE3['cifar10', row]:.2f}" for row in (SR, MMLDA)),
            " / ".join(f"{distance:.2f}" for distance in moved),
            verdict("table3", target="random", row=MMLDA, **cifar10),
        ),
        (
            "Features follow the assumed Gaussians (variance in a class)",
            "1",
            f"{variance:.3f}",
            verdict("latent", row=MMLDA, **cifar10),
        ),
        (
            "Imbalanced CIFAR-10, 10,000 steps: MM-LDA beats softmax",
            "on almost all of 20 sets",
            f"on {fig3.numbers['better']} of {fig3.numbers['sets']}, by {percent(fig3.value, 2)} points on average",
            VERDICTS[fig3.holds],
        ),
        (
            "Trained on adversarial examples, AutoAttack at 8/255, CIFAR-10",
            "–",
            pair(*(under_autoattack(name)[8 / 255] for name in ("cifar10-sr-robust", "cifar10-mmlda-robust"))),
            "–",
        ),
    ]
    return table(HEAD, rows)


def pages() -> dict[Path, dict[str, str]]:
    """The generated parts of each page."""
    return {ROOT / "README.md": {"results": overview(load())}}


if __name__ == "__main__":
    write(SCRIPT, pages())
