"""How good a network is: accuracy, calibration, and accuracy under attack."""

from mmlda.evaluation.accuracy import Accuracy, accuracy, predictions, shares
from mmlda.evaluation.calibration import calibration_error, fit_temperature
from mmlda.evaluation.evaluation import Evaluation, evaluate
from mmlda.evaluation.robustness import adversarial_images, attack_images

__all__ = [
    "Accuracy",
    "Evaluation",
    "accuracy",
    "adversarial_images",
    "attack_images",
    "calibration_error",
    "evaluate",
    "fit_temperature",
    "predictions",
    "shares",
]
