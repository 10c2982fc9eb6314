"""The Classifier: scaling, backbone, latent layer and head as one network.

    x in [0, 1] -> scaling -> backbone -> pooled features -> latent linear layer -> z -> head -> logits

The scaling is inside the model, so attacks and users work on plain pixels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda._utils.checks import check_choice, check_count, invalid
from mmlda._utils.device import device_of, eval_mode
from mmlda.models.backbones import ConvNet, ResNet
from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead

__all__ = ["Classifier", "build"]


class Classifier(nn.Module):
    """Scaling, backbone, latent layer and head as one network on pixels in [0, 1].

    `model(x)` returns logits [N, L], `model.features(x)` the latent z [N, p], `model.predict(x)` classes [N] and
    `model.predict_proba(x)` probabilities [N, L]. The pixels become (x - mean) / std; the defaults map them to the
    paper's interval [-0.5, 0.5].

    `latent=None` puts a linear layer between pooled features and a Max-Mahalanobis head (pooled ReLU features
    are never negative, so without it most of the means could not be reached) and none before a softmax head.
    `normalize=True` puts z on the sphere of radius sqrt(C) on which the means lie (unit vectors for softmax).

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
        return self.head.num_classes  # type: ignore[return-value]

    def features(self, x: Tensor) -> Tensor:
        z = self.latent(self.backbone((x - self.mean) / self.std))  # [N, p]
        return z if self.radius is None else self.radius * F.normalize(z.float(), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # [N, L]

    def predict(self, x: Tensor, batch_size: int = 1000) -> Tensor:
        """The most probable class of each image: [N, C, H, W] -> [N] int64.

        Runs `batch_size` images at a time, in eval mode and without a graph; the model's mode does not change.
        """
        return self._logits(x, batch_size).argmax(1)

    def predict_proba(self, x: Tensor, batch_size: int = 1000) -> Tensor:
        """P(y = k | x): [N, C, H, W] -> [N, L] floats, computed as in `predict`."""
        return self._logits(x, batch_size).softmax(1)

    @torch.no_grad()
    def _logits(self, x: Tensor, batch_size: int) -> Tensor:
        place, parts = device_of(self), x.split(check_count("batch_size", batch_size, 1))
        with eval_mode(self):
            return torch.cat([self(part.to(place)) for part in parts])

    @property
    def config(self) -> dict[str, Any]:
        """What `build` needs to make this network again, for the backbones of this module."""
        backbone = getattr(self.backbone, "config", None)
        if backbone is None:
            raise ValueError(
                f"backbone must be one of this package, got {type(self.backbone).__name__} without a config"
            )
        head: dict[str, Any] = {"num_classes": self.num_classes, "dim": self.head.dim}
        if isinstance(self.head, MaxMahalanobisHead):
            head |= {"head": "mmlda", "C": float(self.head.C), "precision": float(self.head.precision)}
            if not bool((self.head.log_priors == self.head.log_priors[0]).all()):
                head["priors"] = self.head.priors.tolist()
        else:
            head |= {"head": "softmax"}
        if self.radius is not None:
            head["normalize"] = True
        return {
            **backbone,
            **head,
            "latent": isinstance(self.latent, nn.Linear),
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
        }


_BACKBONES = {
    "resnet": (ResNet, ("depth", "channels", "width", "preactivation", "activation")),
    "conv_net": (ConvNet, ("channels", "width", "batch_norm")),
}


def build(config: dict[str, Any], *, seed: int | None = None) -> Classifier:
    """The Classifier that a config describes, its weights drawn from the seed (the global generator untouched).

    Keys: backbone ("resnet", "conv_net") and its settings, head ("mmlda", "softmax"), num_classes, dim, C,
    precision, priors, latent, mean, std. What is left out has its class's default.

    >>> model = build({"backbone": "conv_net", "head": "mmlda", "num_classes": 10, "dim": 32, "C": 50.0}, seed=0)
    >>> model.config["C"]
    50.0
    """
    config = dict(config)
    name, head_name = config.pop("backbone", "resnet"), config.pop("head", "mmlda")
    check_choice("backbone", name, _BACKBONES)
    check_choice("head", head_name, ("mmlda", "softmax"))
    kind, keys = _BACKBONES[name]
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        backbone = kind(**{key: config.pop(key) for key in keys if key in config})
        settings = {"num_classes": config.pop("num_classes", 10), "dim": config.pop("dim", backbone.num_features)}
        outer = {key: config.pop(key) for key in ("latent", "normalize", "mean", "std") if key in config}
        for key in ("mean", "std"):
            if isinstance(outer.get(key), list):
                outer[key] = tuple(outer[key])
        if head_name == "mmlda":
            settings |= {key: config.pop(key) for key in ("C", "precision", "priors") if key in config}
        if config:
            raise invalid("config", f"settings of {name} with a {head_name} head", sorted(config))
        head = MaxMahalanobisHead(**settings) if head_name == "mmlda" else SoftmaxHead(**settings)
        return Classifier(backbone, head, **outer)
