"""Training: recipes, the loop, checkpoints, and sweeps over many networks."""

from mmlda.training.folder import Run
from mmlda.training.journal import Diverged
from mmlda.training.loop import Options, fit
from mmlda.training.many import fit_many
from mmlda.training.recipes import RECIPES, Adversary, Recipe
from mmlda.training.sweeps import Job, JobsFailed, cross_validate, sweep

__all__ = [
    "RECIPES",
    "Adversary",
    "Diverged",
    "Job",
    "JobsFailed",
    "Options",
    "Recipe",
    "Run",
    "cross_validate",
    "fit",
    "fit_many",
    "sweep",
]
