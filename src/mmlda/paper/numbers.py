"""The paper's numbers, as shares and distortions, and its sentences, word for word."""

from __future__ import annotations

from mmlda.paper.rows import ADAM, HAT, MMLDA, SAT, SR, Row

DATASETS = ("mnist", "cifar10")
ROWS = (SR, SAT, HAT, MMLDA)
ATTACKS = ("FGSM", "BIM", "ILCM", "JSMA")
EPS = (0.04, 0.12, 0.20)

# Test errors.
TABLE1 = {("mnist", SR): 0.0038, ("mnist", MMLDA): 0.0035, ("cifar10", SR): 0.0713, ("cifar10", MMLDA): 0.0804}

# Accuracies by data and row: the attacks at one perturbation after the other; None where the paper has no number.
TABLE2: dict[tuple[str, Row], tuple[tuple[float | None, ...], ...]] = {
    ("mnist", SR): ((0.936, 0.879, 0.948, 0.929), (0.281, 0.034, 0.209, 0.56), (0.155, 0.003, 0.017, 0.256)),
    ("mnist", SAT): ((0.867, 0.685, 0.984, None), (0.405, 0.087, 0.888, None), (0.173, 0.011, 0.694, None)),
    ("mnist", HAT): ((0.887, 0.963, 0.998, None), (0.403, 0.401, 0.926, None), (0.101, 0.105, 0.461, None)),
    ("mnist", MMLDA): ((0.992, 0.992, 0.99, 0.991), (0.993, 0.986, 0.996, 0.997), (0.975, 0.973, 0.966, 0.996)),
    ("cifar10", SR): ((0.2, 0.055, 0.002, 0.656), (0.102, 0.041, 0.003, 0.205), (0.107, 0.042, 0.006, 0.115)),
    ("cifar10", SAT): ((0.244, 0.07, 0.004, None), (0.882, 0.069, 0.001, None), (0.917, 0.094, 0.0, None)),
    ("cifar10", HAT): ((0.303, 0.053, 0.013, None), (0.441, 0.087, 0.0, None), (0.407, 0.06, 0.002, None)),
    ("cifar10", MMLDA): ((0.913, 0.912, 0.7, 0.912), (0.907, 0.901, 0.425, 0.911), (0.895, 0.897, 0.312, 0.918)),
}

# Mean smallest distortions of C&W.
TABLE3 = {("mnist", SR): 8.56, ("cifar10", SR): 0.67, ("mnist", MMLDA): 16.32, ("cifar10", MMLDA): 2.80}

# On CIFAR-10 MM-LDA has two rows, ours and Adam as the paper names it. The paper's numbers are for both.
TABLE1["cifar10", ADAM] = TABLE1["cifar10", MMLDA]
TABLE2["cifar10", ADAM] = TABLE2["cifar10", MMLDA]
TABLE3["cifar10", ADAM] = TABLE3["cifar10", MMLDA]

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
SENTENCES["fig3-recipe"] = SENTENCES["fig3"]


# How near a number must be to count as reproduced: a difference of shares, and for Table 3 a share of the paper's.
NEAR = {("table1", "mnist"): 0.001, ("table1", "cifar10"): 0.005}
NEAR |= {("table2", data): 0.05 for data in DATASETS} | {("table3", data): 0.2 for data in DATASETS}


def reproduced(kind: str, dataset: str, ours: float | None, paper: float | None) -> tuple[bool | None, str]:
    """Whether a number is the paper's, near enough, and the rule in words; None if the paper has none.

    >>> reproduced("table1", "cifar10", 0.0702, 0.0713), reproduced("table3", "mnist", 5.0, 8.56)[0]
    ((True, 'within 0.5 points of the paper'), False)
    """
    if ours is None or paper is None:
        return None, ""
    near = NEAR[kind, dataset]
    apart = round(abs(ours - paper), 12)  # without the rounding of decimal fractions
    if kind == "table3":
        return apart <= near * paper, f"within {100 * near:.0f}% of the paper"
    return apart <= near, f"within {100 * near:g} points of the paper"


def table2(dataset: str, row: Row, attack: str, eps: float | None) -> float | None:
    """The paper's accuracy in a cell of Table 2, a share; None if it has none.

    >>> table2("cifar10", MMLDA, "BIM", 0.04), table2("mnist", SAT, "JSMA", 0.04)
    (0.912, None)
    """
    if (dataset, row) not in TABLE2 or eps not in EPS or attack not in ATTACKS:
        return None
    return TABLE2[dataset, row][EPS.index(eps)][ATTACKS.index(attack)]
