"""Attacks on any classifier: a callable `model(x) -> logits` and the range of its images are all they need.

An attack is an object with its settings; calling it on a model, images and labels returns an `AttackResult`.
"""

from mmlda.attacks.apgd import APGD
from mmlda.attacks.base import Attack, frozen
from mmlda.attacks.carlini import CarliniWagner
from mmlda.attacks.checks import AttackWarning
from mmlda.attacks.fab import FAB
from mmlda.attacks.gradient import BIM, FGSM, ILCM, PGD, ascend
from mmlda.attacks.jsma import JSMA
from mmlda.attacks.losses import kl_divergence, least_likely, score
from mmlda.attacks.memory import keep_memory
from mmlda.attacks.replay import compiled, folded
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.square import Square
from mmlda.attacks.surface import Surface, input_gradient
from mmlda.attacks.worst import WorstCase

__all__ = [
    "APGD",
    "BIM",
    "FAB",
    "FGSM",
    "ILCM",
    "JSMA",
    "PGD",
    "Attack",
    "AttackResult",
    "AttackWarning",
    "CarliniWagner",
    "Square",
    "Surface",
    "WorstCase",
    "ascend",
    "compiled",
    "folded",
    "frozen",
    "input_gradient",
    "keep_memory",
    "kl_divergence",
    "least_likely",
    "measure",
    "score",
]
