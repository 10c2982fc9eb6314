"""Prediction with other class priors than those of the network."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmlda._utils.checks import check_choice, invalid
from mmlda._utils.device import device_of
from mmlda.attacks.checks import warn_caller
from mmlda.data import images_for


def exchange_priors(model: Any, data: Any, priors: str) -> tuple[Any, Any]:
    """The model with uniform or empirical class priors; the data with it, which is read where its labels are needed."""
    check_choice("priors", priors, ("uniform", "empirical"))
    if not hasattr(model, "with_priors"):
        raise invalid("priors", "None for a network that is not an mmlda.Classifier", priors)
    if priors == "uniform":
        before = getattr(getattr(model, "head", None), "log_priors", None)
        if isinstance(before, Tensor) and bool((before == before[0]).all()):
            warn_caller(
                "the network's priors are uniform already, so priors='uniform' changes nothing; if its training set "
                "was not balanced, use model.with_priors(None, old=<class shares of the training set>)"
            )
        return model.with_priors(None), data
    data = images_for(model, data)
    return model.with_priors(priors, data.labels.to(device_of(model))), data
