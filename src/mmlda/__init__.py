"""Max-Mahalanobis Linear Discriminant Analysis networks (Pang, Du and Zhu, ICML 2018).

    data -> backbone -> latent z -> head (posterior, loss) -> attack -> evaluation -> results -> report

>>> import mmlda
>>> train, test = mmlda.data.load("digits")                               # images as tensors
>>> head = mmlda.MaxMahalanobisHead(num_classes=10, dim=32)               # fixed means, nothing to learn
>>> model = mmlda.Classifier(mmlda.models.conv_net(), head)               # pixels in [0, 1] -> logits
>>> recipe = mmlda.Recipe(steps=60, optimizer="adam", lr=1e-3)
>>> run = mmlda.fit(model, train, recipe, show=False)                     # Algorithm 2
>>> result = mmlda.attacks.BIM(eps=0.1)(model, test.pixels(), test.labels)
>>> result.x_adv.shape
torch.Size([360, 1, 8, 8])
"""

import sys as _sys

# The names users see, in the order in which data flows through them.
from mmlda import attacks, data, models, theory
from mmlda._version import __version__
from mmlda.audit import audit
from mmlda.data import ImageData
from mmlda.evaluation import accuracy, evaluate
from mmlda.models import Classifier, MaxMahalanobisHead, SoftmaxHead, swap_head
from mmlda.paper.verification import verify
from mmlda.results import Result
from mmlda.theory import (
    MaxMahalanobisDistribution,
    cosine_bound,
    generate_opt_means,
    latent_fit,
    max_cosine,
    separated_means,
)
from mmlda.training import RECIPES, Adversary, Job, Recipe, Run, cross_validate, fit, fit_many, recipes, sweep
from mmlda.zoo import load

_sys.modules["mmlda.recipes"] = recipes  # so that `from mmlda.recipes import sat` works too

__all__ = [
    "RECIPES",
    "Adversary",
    "Classifier",
    "ImageData",
    "Job",
    "MaxMahalanobisDistribution",
    "MaxMahalanobisHead",
    "Recipe",
    "Result",
    "Run",
    "SoftmaxHead",
    "__version__",
    "accuracy",
    "attacks",
    "audit",
    "cosine_bound",
    "cross_validate",
    "data",
    "evaluate",
    "fit",
    "fit_many",
    "generate_opt_means",
    "latent_fit",
    "load",
    "max_cosine",
    "models",
    "recipes",
    "separated_means",
    "swap_head",
    "sweep",
    "theory",
    "verify",
]
