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

# The names users see, in the order in which data flows through them.
from mmlda import attacks, data, models, recipes, theory
from mmlda._version import __version__
from mmlda.distribution import MaxMahalanobisDistribution
from mmlda.evaluation import accuracy, evaluate
from mmlda.head import MaxMahalanobisHead, SoftmaxHead, latent_fit
from mmlda.masking import audit
from mmlda.means import cosine_bound, generate_opt_means, max_cosine, separated_means
from mmlda.models import Classifier, swap_head
from mmlda.recipes import RECIPES, Recipe
from mmlda.sweeps import cross_validate, fit_many, sweep
from mmlda.training import Run, fit
from mmlda.zoo import load

__all__ = [
    "RECIPES",
    "Classifier",
    "MaxMahalanobisDistribution",
    "MaxMahalanobisHead",
    "Recipe",
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
]
