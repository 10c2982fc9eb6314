"""The Classifier: scaling, backbone, latent layer and head as one network.

    x in [0, 1] -> scaling -> backbone -> pooled features -> latent linear layer -> z -> head -> logits

The scaling is inside the model, so attacks and users work on plain pixels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda._utils.checks import check_choice, check_count, invalid
from mmlda._utils.device import eval_mode
from mmlda.models.backbones import MLP, ConvNet, ResNet
from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead


class Classifier(nn.Module):
    """Scaling, backbone, latent layer and head as one network on pixels in [0, 1].

    `model(x)` returns logits `[N, L]` for images `[N, C, H, W]`.

    Parameters
    ----------
    backbone
        Module with an attribute `num_features` whose output is `[N, num_features]`.
    head
        `MaxMahalanobisHead` or `SoftmaxHead`.
    latent
        Whether to put a linear layer before the head. The default (None) does so for a Max-Mahalanobis head only:
        pooled ReLU features are never negative, so without it they could not reach most of the means.
    normalize
        Whether to project z onto the sphere of radius sqrt(C) that holds the means (the unit sphere for softmax).
    mean, std
        The backbone sees (x - mean) / std; a number, or one per channel. The defaults map pixels to the paper's
        interval [-0.5, 0.5].

    Attributes
    ----------
    classes
        Names of the classes, which `mmlda.fit` sets and files keep: data is matched with them by name. None if unknown.
    bounds
        Range of each column of the training table, [2, D]; None for images.

    Raises
    ------
    ValueError
        If backbone and head do not fit together, or `std` is not positive.

    Examples
    --------
    >>> from mmlda import MaxMahalanobisHead
    >>> from mmlda.models import conv_net
    >>> model = Classifier(conv_net(), MaxMahalanobisHead(num_classes=10, dim=16))
    >>> x = torch.rand(4, 1, 8, 8)
    >>> model.features(x).shape, model(x).shape
    (torch.Size([4, 16]), torch.Size([4, 10]))
    >>> model.predict(x).dtype, model.predict_proba(x).shape
    (torch.int64, torch.Size([4, 10]))
    """

    mean: Tensor
    std: Tensor
    classes: tuple[str, ...] | None = None
    bounds: Tensor | None = None

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        *,
        latent: bool | None = None,
        normalize: bool = False,
        mean: float | tuple[float, ...] = 0.5,
        std: float | tuple[float, ...] = 1.0,
    ):
        super().__init__()
        features, dim = getattr(backbone, "num_features", None), getattr(head, "dim", None)
        if not isinstance(features, int):
            raise ValueError(f"backbone must have an integer num_features, the width of its output, got {features!r}")
        if not isinstance(dim, int):
            raise ValueError(f"head must be a MaxMahalanobisHead or a SoftmaxHead, got {type(head).__name__}")
        if latent is None:
            latent = isinstance(head, MaxMahalanobisHead)
        if not latent and features != dim:
            raise invalid("head.dim", f"backbone.num_features = {features} without a latent layer", dim)
        scale = torch.atleast_1d(torch.as_tensor(std, dtype=torch.float32))
        if not bool((scale > 0).all()):
            raise invalid("std", "positive", std)
        self.register_buffer("mean", torch.atleast_1d(torch.as_tensor(mean, dtype=torch.float32)).view(1, -1, 1, 1))
        self.register_buffer("std", scale.view(1, -1, 1, 1))
        self.backbone = backbone
        self.latent = nn.Linear(features, dim) if latent else nn.Identity()
        self.head = head
        self.radius = math.sqrt(getattr(head, "C", 1.0)) if normalize else None

    @property
    def num_classes(self) -> int:
        """Number of classes L."""
        return self.head.num_classes  # type: ignore[return-value]

    def features(self, x: Tensor) -> Tensor:
        """Compute latent features.

        Parameters
        ----------
        x
            Images `[N, C, H, W]` in [0, 1], or rows `[N, D]`.

        Returns
        -------
        Tensor
            Features z `[N, p]`.
        """
        mean, std = self.mean, self.std
        if x.dim() == 2:  # rows of a table
            mean, std = mean.flatten(1), std.flatten(1)
        return self._latent(self.backbone((x - mean) / std))

    def _latent(self, h: Tensor) -> Tensor:
        """Latent features z of the backbone's output h."""
        z = self.latent(h)  # [N, p]
        return z if self.radius is None else self.radius * F.normalize(z.float(), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits.

        Parameters
        ----------
        x
            Images `[N, C, H, W]` in [0, 1], or rows `[N, D]`.

        Returns
        -------
        Tensor
            Logits `[N, L]`.
        """
        return self.head(self.features(x))  # [N, L]

    def for_attack_images(self, x: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Hook for `mmlda.attacks.compiled`: the network folded, where there are kernels for it and images like x."""
        from mmlda.models import folded
        from mmlda.models.kernels import tf32_allowed

        fits = tf32_allowed() and folded.foldable(self, tuple(x.shape[1:]))
        return folded.folded(self, torch.float16) if fits and folded.agrees(self, x[:16], torch.float16) else None

    def predict(self, x: Tensor | np.ndarray, batch_size: int = 1000) -> Tensor:
        """Predict the most probable class of each image, in eval mode and without gradients.

        Parameters
        ----------
        x
            Images `[N, C, H, W]` in [0, 1] or uint8, or rows `[N, D]`: a tensor on any device, or an array.
        batch_size
            Images per forward pass.

        Returns
        -------
        Tensor
            Classes `[N]`, int64, on the model's device.
        """
        return self._each(x, batch_size, lambda part: self.head.predict(self.features(part)))  # type: ignore[operator]

    def predict_proba(self, x: Tensor | np.ndarray, batch_size: int = 1000) -> Tensor:
        """Predict the probability of each class, in eval mode and without gradients.

        Parameters
        ----------
        x, batch_size
            As in `predict`.

        Returns
        -------
        Tensor
            Probabilities `[N, L]`, on the model's device.
        """
        return self._each(x, batch_size, self).softmax(1)

    def with_priors(self, priors: Any, labels: Any = None, *, old: Any = None) -> Classifier:
        """Replace the class priors of the head; the backbone is shared.

        Train with the priors of the training set and predict with others: uniform ones for balanced accuracy after
        training on a long-tailed set. For a softmax head this is logit adjustment.

        Parameters
        ----------
        priors
            L numbers, None for uniform, or "empirical" for the shares of the classes among `labels`.
        labels
            Integers [N], only with "empirical".
        old
            Class shares `[L]` of the training set, if it was not balanced and the head did not have them as priors. The
            new priors contain this correction, which another `with_priors` would replace.

        Returns
        -------
        Classifier
            A network that shares its layers with this one, except the head.

        Examples
        --------
        >>> from mmlda.models import build
        >>> model = build({"backbone": "conv_net", "num_classes": 2, "priors": [0.9, 0.1]}, seed=0)
        >>> model.with_priors(None).head.priors.tolist()
        [0.5, 0.5]
        """
        model = copy.copy(self)
        model._modules = dict(self._modules)
        model.head = self.head.with_priors(priors, labels, old=old)  # type: ignore[operator]
        return model

    @torch.no_grad()
    def _each(self, x: Tensor | np.ndarray, batch_size: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of each batch, in eval mode and on the model's device; bytes become pixels in [0, 1]."""
        x = torch.as_tensor(x)
        scale = 255 if x.dtype == torch.uint8 else 1
        with eval_mode(self):
            parts = x.split(check_count("batch_size", batch_size, 1))
            return torch.cat([function(part.to(self.mean) / scale) for part in parts])

    @property
    def config(self) -> dict[str, Any]:
        """Settings from which `build` makes this network again; raises ValueError for a custom backbone."""
        backbone = getattr(self.backbone, "config", None)
        if backbone is None:
            raise invalid("backbone", "one of this package, which has a config", type(self.backbone).__name__)
        head: dict[str, Any] = {"num_classes": self.num_classes, "dim": self.head.dim}
        if isinstance(self.head, MaxMahalanobisHead):
            head |= {"head": "mmlda", "C": float(self.head.C), "precision": float(self.head.precision)}
        else:
            head |= {"head": "softmax"}
        priors = getattr(self.head, "log_priors", None)
        if priors is not None and not bool((priors == priors[0]).all()):
            head["priors"] = priors.exp().tolist()
        if self.radius is not None:
            head["normalize"] = True
        scaling = {"mean": self.mean.flatten().tolist(), "std": self.std.flatten().tolist()}
        return {**backbone, **head, "latent": isinstance(self.latent, nn.Linear), **scaling}


BACKBONES = {
    "resnet": (ResNet, ("depth", "channels", "width", "preactivation", "activation")),
    "conv_net": (ConvNet, ("channels", "width", "batch_norm")),
    "mlp": (MLP, ("inputs", "hidden")),
}


def build(config: dict[str, Any], *, seed: int | None = None, means: Tensor | None = None) -> Classifier:
    """Build the Classifier that a config describes.

    Parameters
    ----------
    config
        `backbone` ("resnet", "conv_net", "mlp") and its settings, `head` ("mmlda" or "softmax"), `num_classes`, `dim`,
        `C`, `precision`, `priors`, `latent`, `normalize`, `mean`, `std`. Missing keys take the default of their class.
    seed
        Seed of the weights; torch's global generator is left as it was. None (default) draws from the global generator.
    means
        Directions of the means of a Max-Mahalanobis head (default: the head's own).

    Returns
    -------
    Classifier
        With new weights.

    Raises
    ------
    ValueError
        If the config has an unknown key or value.

    Examples
    --------
    >>> model = build({"backbone": "conv_net", "head": "mmlda", "num_classes": 10, "dim": 32, "C": 50.0}, seed=0)
    >>> model.config["C"]
    50.0
    """
    config = dict(config)
    name, head_name = config.pop("backbone", "resnet"), config.pop("head", "mmlda")
    check_choice("backbone", name, BACKBONES)
    check_choice("head", head_name, ("mmlda", "softmax"))
    kind, keys = BACKBONES[name]
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        backbone = kind(**{key: config.pop(key) for key in keys if key in config})
        settings = {"num_classes": config.pop("num_classes", 10), "dim": config.pop("dim", backbone.num_features)}
        outer = {key: config.pop(key) for key in ("latent", "normalize", "mean", "std") if key in config}
        own = ("C", "precision", "priors") if head_name == "mmlda" else ("priors",)
        settings |= {key: config.pop(key) for key in own if key in config}
        if config:
            raise invalid("config", f"settings of {name} with a {head_name} head", sorted(config))
        head = MaxMahalanobisHead(**settings, means=means) if head_name == "mmlda" else SoftmaxHead(**settings)
        return Classifier(backbone, head, **outer)
