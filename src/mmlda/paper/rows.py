"""The rows of the tables as values: a network's head, its recipe, and what else distinguishes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmlda.results import Result, label

Fields = dict[str, Any]  # of a `Result`


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes
    ----------
    head
        "softmax" or "mmlda".
    recipe
        The recipe's name without that of the dataset: "sr", "mmlda-adam", ...
    fine_tuning
        "", "sat" or "hat".
    priors
        "true" where the head knows the class frequencies, else "".
    variant
        For the suspects behind Table 2, what is changed ("" for nothing); None for other networks.
    shipped
        For the suspects, whether it is a network that comes with the package.
    """

    head: str
    recipe: str
    fine_tuning: str = ""
    priors: str = ""
    variant: str | None = None
    shipped: bool = False

    def fields(self, dataset: str) -> Fields:
        """The row as fields of `Result`."""
        cell: dict[str, Any] = {} if self.variant is None else {"variant": self.variant}
        cell |= {"priors": self.priors} if self.priors else {}
        cell |= {"shipped": True} if self.shipped else {}
        names = {"dataset": dataset, "head": self.head, "recipe": f"{dataset}-{self.recipe}"}
        return {**names, "fine_tuning": self.fine_tuning, "cell": cell}

    def has(self, result: Result) -> bool:
        """Whether a result is about this network."""
        wanted = self.fields(result.dataset)
        cell, there = wanted.pop("cell"), result.cell
        same = all(there.get(key) == cell.get(key) for key in ("variant", "priors", "shipped"))
        return same and all(getattr(result, name) == value for name, value in wanted.items())

    def label(self, dataset: str, **fields: Any) -> str:
        """Its label in tables; `fields` are further fields of the result."""
        return label(Result(**{"name": "x", "kind": "", "what": "", "value": None, **self.fields(dataset), **fields}))


SR, SR_ADAM, SR_ROBUST = Row("softmax", "sr"), Row("softmax", "sr-adam"), Row("softmax", "sr-robust")
MMLDA, ADAM, MMLDA_ROBUST = Row("mmlda", "mmlda"), Row("mmlda", "mmlda-adam"), Row("mmlda", "mmlda-robust")
SAT, HAT = Row("softmax", "sat", "sat"), Row("softmax", "hat", "hat")


def plain_rows(dataset: str) -> tuple[Row, ...]:
    """The networks that are not fine-tuned: SR and MM-LDA; on CIFAR-10 also MM-LDA with Adam as the paper names it.

    There `MMLDA` is trained with decoupled weight decay, which is not the paper's recipe.
    """
    return (SR, MMLDA, ADAM) if dataset == "cifar10" else (SR, MMLDA)
