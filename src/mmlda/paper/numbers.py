"""What the paper says: its numbers, and its sentences word for word."""

from __future__ import annotations

__all__ = ["ATTACKS", "DATASETS", "EPS", "ROWS", "SENTENCES", "TABLE1", "TABLE2", "TABLE3", "reproduced", "table2"]

DATASETS = ("mnist", "cifar10")
ROWS = ("SR", "SR + SAT", "SR + HAT", "MM-LDA")
ATTACKS = ("FGSM", "BIM", "ILCM", "JSMA")
EPS = (0.04, 0.12, 0.20)

TABLE1 = {("mnist", "SR"): 0.38, ("mnist", "MM-LDA"): 0.35, ("cifar10", "SR"): 7.13, ("cifar10", "MM-LDA"): 8.04}

# By data and row: the attacks of one perturbation after the other; None where the paper has no number.
TABLE2: dict[tuple[str, str], tuple[tuple[float | None, ...], ...]] = {
    ("mnist", "SR"): ((93.6, 87.9, 94.8, 92.9), (28.1, 3.4, 20.9, 56.0), (15.5, 0.3, 1.7, 25.6)),
    ("mnist", "SR + SAT"): ((86.7, 68.5, 98.4, None), (40.5, 8.7, 88.8, None), (17.3, 1.1, 69.4, None)),
    ("mnist", "SR + HAT"): ((88.7, 96.3, 99.8, None), (40.3, 40.1, 92.6, None), (10.1, 10.5, 46.1, None)),
    ("mnist", "MM-LDA"): ((99.2, 99.2, 99.0, 99.1), (99.3, 98.6, 99.6, 99.7), (97.5, 97.3, 96.6, 99.6)),
    ("cifar10", "SR"): ((20.0, 5.5, 0.2, 65.6), (10.2, 4.1, 0.3, 20.5), (10.7, 4.2, 0.6, 11.5)),
    ("cifar10", "SR + SAT"): ((24.4, 7.0, 0.4, None), (88.2, 6.9, 0.1, None), (91.7, 9.4, 0.0, None)),
    ("cifar10", "SR + HAT"): ((30.3, 5.3, 1.3, None), (44.1, 8.7, 0.0, None), (40.7, 6.0, 0.2, None)),
    ("cifar10", "MM-LDA"): ((91.3, 91.2, 70.0, 91.2), (90.7, 90.1, 42.5, 91.1), (89.5, 89.7, 31.2, 91.8)),
}

TABLE3 = {("mnist", "SR"): 8.56, ("cifar10", "SR"): 0.67, ("mnist", "MM-LDA"): 16.32, ("cifar10", "MM-LDA"): 2.80}

# On CIFAR-10 MM-LDA has two rows, ours and that of Adam as the paper names it. The paper's numbers are for both.
TABLE1["cifar10", "MM-LDA (Adam)"] = TABLE1["cifar10", "MM-LDA"]
TABLE2["cifar10", "MM-LDA (Adam)"] = TABLE2["cifar10", "MM-LDA"]
TABLE3["cifar10", "MM-LDA (Adam)"] = TABLE3["cifar10", "MM-LDA"]

SENTENCES = {
    "table1": "the MM-LDA network maintains state-of-the-art performance on normal examples",
    "adam": "the momentum SGD makes Resnet-32 (SR) have lower error rates on both datasets [than Adam]",
    "table2": "the MM-LDA network is indeed much more robust to adversarial examples than the SR networks, even when "
    "the SR networks are enhanced by the adversarial training methods",
    "table3": "the average minimal distortions of adversarial examples on the MM-LDA networks are much larger than "
    "those on the SR networks",
    "success": "the crafted adversarial examples can evade both the SR and MM-LDA networks with nearly 100% success "
    "rate",
    "fig2": "the trained MM-LDA network maps the data distribution in the input space to a much more regular "
    "distribution in the latent feature space",
    "latent": "in the MM-LDA networks, normal examples distribute as a MMD in the latent feature space",
    "fig3": "the MM-LDA networks still perform better than the SR networks on almost all the datasets constructed by "
    "the counterparts of BP1 and BP2",
    "priors": "the difference of F_MM(x) between the two settings [uniform and true priors] is small, which most "
    "likely leads to the same predicted label",
    "fig4": "some of the adversarial noises have the same semantic meanings as their corresponding normal examples "
    "(around 1%~5% of all noises), while similar phenomenon can hardly be observed when attacking on the SR networks "
    "(less than 0.1% of all noise)",
    "suspects": "[MM-LDA keeps 91.2% of CIFAR-10 and 99.2% of MNIST under BIM at 0.04: Table 2]",
    "fig5": "when log10(C)=2, i.e., C=100 the MM-LDA network has the lowest average validation error rate with a small "
    "value of standard deviation",
}


# How near a number must be to count as reproduced: points for the first two, a share of the paper's for the third.
NEAR = {("table1", "mnist"): 0.1, ("table1", "cifar10"): 0.5, ("table2", "mnist"): 5.0, ("table2", "cifar10"): 5.0,
        ("table3", "mnist"): 0.2, ("table3", "cifar10"): 0.2}  # fmt: skip


def reproduced(kind: str, data: str, ours: float | None, paper: float | None) -> tuple[bool | None, str]:
    """Whether a number is the paper's, near enough, and the rule in words; None where the paper has none.

    >>> reproduced("table1", "cifar10", 7.02, 7.13), reproduced("table3", "mnist", 5.0, 8.56)[0]
    ((True, 'within 0.5 points of the paper'), False)
    """
    if ours is None or paper is None:
        return None, ""
    near = NEAR[kind, data]
    if kind == "table3":
        return abs(ours - paper) <= near * paper, f"within {100 * near:.0f}% of the paper"
    return abs(ours - paper) <= near, f"within {near:g} points of the paper"


def table2(data: str, row: str, attack: str, eps: float) -> float | None:
    """The paper's accuracy (%) in a cell of Table 2; None where it has none.

    >>> table2("cifar10", "MM-LDA", "BIM", 0.04), table2("mnist", "SR + SAT", "JSMA", 0.04)
    (91.2, None)
    """
    if (data, row) not in TABLE2 or eps not in EPS or attack not in ATTACKS:
        return None
    return TABLE2[data, row][EPS.index(eps)][ATTACKS.index(attack)]
