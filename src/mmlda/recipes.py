"""`mmlda.training.recipes` under its public name."""

from mmlda.training.recipes import *  # noqa: F403
from mmlda.training.recipes import __all__ as __all__
