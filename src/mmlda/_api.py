"""The names users see, in the order in which data flows through them. `mmlda` imports them on first use."""

from mmlda import attacks, data, models, theory
from mmlda._version import __version__
from mmlda.audit import audit
from mmlda.data import ImageData
from mmlda.evaluation import accuracy, evaluate
from mmlda.integrations.export import export
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
from mmlda.zoo import load, save

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
    "export",
    "fit",
    "fit_many",
    "generate_opt_means",
    "latent_fit",
    "load",
    "max_cosine",
    "models",
    "recipes",
    "save",
    "separated_means",
    "swap_head",
    "sweep",
    "theory",
    "verify",
]
