"""Attacks on classifiers.

A leaf: it knows a callable `model(x) -> logits`, the image range and nothing else of this project.
"""

from mmlda.attacks.apgd import APGD
from mmlda.attacks.carlini import CarliniWagner
from mmlda.attacks.fab import FAB
from mmlda.attacks.gradient import BIM, FGSM, ILCM, PGD, ascend
from mmlda.attacks.jsma import JSMA
from mmlda.attacks.replay import compiled
from mmlda.attacks.result import AttackResult, measure
from mmlda.attacks.square import Square
from mmlda.attacks.surface import Attack, Surface
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
    "CarliniWagner",
    "Square",
    "Surface",
    "WorstCase",
    "ascend",
    "compiled",
    "measure",
]
