"""How good a network is: accuracy, calibration, and accuracy under attack."""

from mmlda.evaluation.accuracy import Accuracy, accuracy, predictions, shares
from mmlda.evaluation.evaluation import Evaluation, evaluate
from mmlda.evaluation.robustness import attack_images

__all__ = ["Accuracy", "Evaluation", "accuracy", "attack_images", "evaluate", "predictions", "shares"]
