"""Evidence of an audit made by hand, for tests of its checks, rule and sentences."""

import torch

from mmlda.audit.checks import Evidence
from mmlda.audit.profile import Profile
from mmlda.audit.trials import BOTH, CE, MARGIN, Settings, Trial


def first(count, n=100):
    """True for the first `count` of n images."""
    return torch.arange(n) < count


def profile(n=100, numbers=None, **changes):
    values = {
        "right": n,
        "constant": False,
        "random": False,
        "output": "logits",
        "steps": (),
        "no_float64": "",
        "gaps": {"edges": [0.0, 10.0], "counts": [n]},
        "numbers": {"chance": 0.1, "median_gap": 5.0, "zero_gradient_float64": 0.0, **(numbers or {})},
    }
    return Profile(n=n, **(values | changes))


def made_up(standard, left, proven, *, n=100, more_steps=0, square=None, trials=(), **changes):
    """Evidence where so many of n images are standard, left and proven, and more steps raise the accuracy."""

    def trial(attack, loss, count, kind, surface="logits", eps=0.1, steps=10, view="own"):
        about = {"attack": attack, "loss": loss, "surface": surface, "eps": eps, "kind": kind}
        return Trial(**about, steps=steps, view=view, held=first(count, n))

    rows = [
        trial("none", "", n, "clean", eps=0.0),
        trial("FGSM", CE, standard, "standard", steps=1),
        trial("BIM", CE, standard, "standard"),
        trial("BIM", CE, standard + more_steps, "standard", steps=40),
        trial("PGD", CE, standard, "standard"),
        trial("APGD", CE, left, "white", view="float64"),
        trial("APGD", CE, n, "white", "probabilities"),
        trial("APGD", MARGIN, left, "white"),
        trial("APGD", CE, standard, "standard"),
        trial("Square", "", left if square is None else square, "black"),
        trial("BIM", BOTH, 0, "curve", eps=0.2),  # a larger eps counts for nothing at 0.1
        trial("BIM", BOTH, 0, "unbounded", eps=1.0),
        *(trial(*row[:4], **row[4]) for row in trials),
    ]
    settings = Settings(eps=0.1)
    return Evidence(settings=settings, profile=profile(n, **changes), trials=tuple(rows), reached=first(proven, n))
