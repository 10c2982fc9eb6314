"""Labels are made from fields."""

import pytest

from mmlda.results import Result, label, network_label, plain_head


def made(**fields):
    return Result(**{"name": "x", "kind": "table1", "what": "", "value": None, "dataset": "cifar10", **fields})


BIM = {"adversary": {"attack": "bim", "eps": 0.04}}
SAT = {"head": "softmax", "recipe": "cifar10-sat", "fine_tuning": "sat", "recipe_settings": BIM}


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"head": "softmax", "recipe": "cifar10-sr"}, "SR"),
        ({"head": "softmax", "recipe": "cifar10-sr-adam"}, "SR (Adam)"),
        ({"head": "mmlda", "recipe": "cifar10-mmlda"}, "MM-LDA"),
        ({"head": "mmlda", "recipe": "cifar10-mmlda-adam"}, "MM-LDA (Adam)"),
        ({"head": "mmlda", "recipe": "cifar10-mmlda-robust"}, "MM-LDA (robust)"),
        ({"head": "softmax", "recipe": "cifar10-mmlda"}, "SR, MM-LDA's recipe"),
        ({"head": "mmlda", "recipe": "cifar10-mmlda", "cell": {"priors": "true"}}, "MM-LDA, true priors"),
        ({"head": "mmlda", "recipe": "cifar10-mmlda-adam", "cell": {"variant": ""}}, "MM-LDA"),
        ({"head": "mmlda", "recipe": "cifar10-mmlda-adam", "cell": {"variant": "C = 10"}}, "C = 10"),
        ({"head": "mmlda", "recipe": "cifar10-mmlda-adam", "cell": {"shipped": True}}, "MM-LDA (Adam) (ships)"),
        ({**SAT, "kind": "table2", "attack": "BIM", "eps": 0.04}, "SR + SAT"),
        ({**SAT, "kind": "worst", "attack": "WorstCase", "eps": 0.04}, "SR + SAT (BIM)"),
        ({**SAT, "kind": "audit", "eps": 0.04}, "SR + SAT (BIM 0.04)"),
        ({**SAT, "fine_tuning": "hat", "kind": "audit", "eps": 0.04}, "SR + HAT (BIM)"),
        ({"kind": "evaluation", "network": "runs/mine", "head": "mmlda"}, "runs/mine"),
        ({"kind": "evaluation", "head": "mmlda"}, "MM-LDA"),
        ({"kind": "evaluation", "network": "runs/mine", "priors": "uniform"}, "runs/mine, uniform priors"),
        (
            {"network": "mine", "priors": "empirical", "temperature": True},
            "mine, empirical priors, fitted temperature",
        ),
        ({"temperature": True}, "fitted temperature"),
        ({}, ""),
    ],
)
def test_a_network_is_called_what_its_fields_say(fields, words):
    assert label(made(**fields)) == words


def test_exchanged_priors_change_the_label_but_not_the_network():
    fields = {"head": "mmlda", "recipe": "cifar10-mmlda", "kind": "audit"}
    own, uniform = made(**fields), made(**fields, priors="uniform")
    assert (label(own), label(uniform)) == ("MM-LDA", "MM-LDA, uniform priors")
    assert network_label(own) == network_label(uniform) == "MM-LDA"
    assert (plain_head(own), plain_head(uniform)) == ("mmlda", "")
