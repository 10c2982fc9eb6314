"""How good a network is: accuracy, calibration, and accuracy under attack."""

from mmlda.evaluation.accuracy import Accuracy, Evaluation, accuracy, evaluate, shares
from mmlda.evaluation.calibration import calibration_error, fit_temperature

__all__ = ["Accuracy", "Evaluation", "accuracy", "calibration_error", "evaluate", "fit_temperature", "shares"]
