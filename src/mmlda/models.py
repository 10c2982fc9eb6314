"""Backbones that return features, the Classifier around them, and a head for anyone's network.

    x in [0, 1] -> scaling -> backbone -> pooled features -> latent linear layer -> z -> head -> logits

The scaling is inside the model, so attacks and users work on plain pixels. A backbone is any module with a
`num_features` attribute whose output is [N, num_features].
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda.head import MaxMahalanobisHead, SoftmaxHead
from mmlda.kernels import conv3x3

__all__ = ["Classifier", "ConvNet", "ResNet", "build", "conv_net", "resnet", "resnet32", "swap_head"]

log = logging.getLogger("mmlda")


class _Conv3(nn.Conv2d):
    """A 3x3 convolution without bias. `fast` (a captured step of training) and `in_cuda_graph` (set by
    `mmlda.attacks.compiled`; in TF32 too) take the package's own programs where they beat cuDNN's: outside a CUDA graph
    their launches cost more than they save."""

    fast = False
    in_cuda_graph = False

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__(inputs, outputs, 3, stride, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Somebody may have folded a batch norm into it, or spread its filter.
        as_made = self.bias is None and self.padding == self.dilation == (1, 1)
        if as_made and (self.fast or self.in_cuda_graph):
            return conv3x3(x, self.weight, self.stride[0], tf32=self.in_cuda_graph)
        return super().forward(x)


class _Norm(nn.BatchNorm2d):
    """Batch normalisation that does not count batches: at a fixed momentum nobody reads the count, and counting
    is a kernel a layer."""

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum or 0.1, self.eps)


def fast_convolutions(model: nn.Module, fast: bool) -> None:
    """Choose the convolutions of this module's networks inside `model`; others have none to choose from."""
    for module in model.modules():
        if isinstance(module, _Conv3):
            module.fast = fast


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (He 2015's option A: subsample, pad with zeros).

    Post-activation (He 2015): relu(x + BN(conv(relu(BN(conv(x)))))).
    Pre-activation (He 2016):  x + conv(relu(BN(conv(relu(BN(x)))))).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, preactivation: bool):
        super().__init__()
        self.preactivation, self.stride, self.extra = preactivation, stride, outputs - inputs
        self.conv1, self.conv2 = _Conv3(inputs, outputs, stride), _Conv3(outputs, outputs)
        self.norm1 = _Norm(inputs if preactivation else outputs)
        self.norm2 = _Norm(outputs)

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.extra:
            x = F.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))  # zeros on both sides
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.preactivation:
            h = self.conv1(F.relu(self.norm1(x)))
            return self.shortcut(x) + self.conv2(F.relu(self.norm2(h)))
        # In place where nothing else needs the values, to spare memory traffic.
        h = F.relu_(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        h += self.shortcut(x)
        return F.relu_(h)


class ResNet(nn.Module):
    """The CIFAR Resnet of He et al.: a convolution, three stages of (depth - 2) / 6 blocks, global average.

    Any number of input channels and any size from 8 x 8. `preactivation=False` is He 2015, `True` is He 2016.

    >>> net = ResNet(depth=8, channels=1)
    >>> net(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 64])
    """

    def __init__(self, *, depth: int = 32, channels: int = 3, width: int = 16, preactivation: bool = False):
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth = {depth}: expected 6n + 2 with n >= 1 (8, 14, 20, 32, 44, 56, 110, ...)")
        for name, value in (("channels", channels), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} = {value}: expected a positive whole number")
        self.config = {"backbone": "resnet", "depth": depth, "channels": channels, "width": width,
                       "preactivation": preactivation}
        self.num_features = 4 * width
        self.preactivation = preactivation
        self.conv = _Conv3(channels, width)
        self.norm = _Norm(self.num_features if preactivation else width)
        blocks, inputs = [], width
        for stage in range(3):
            for block in range((depth - 2) // 6):
                outputs = width * 2**stage
                blocks.append(_Block(inputs, outputs, 2 if stage and not block else 1, preactivation))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or min(x.shape[2:]) < 8:
            raise ValueError(f"x has shape {tuple(x.shape)}: expected [N, channels, H, W] with H, W >= 8")
        h = self.conv(x)
        if self.preactivation:
            h = F.relu(self.norm(self.blocks(h)))
        else:
            h = self.blocks(F.relu(self.norm(h)))
        return h.mean((2, 3))  # [N, 4 * width]


def resnet(depth: int = 32, *, channels: int = 3, width: int = 16, preactivation: bool = False) -> ResNet:
    """A CIFAR Resnet of the given depth (6n + 2); see `ResNet`."""
    return ResNet(depth=depth, channels=channels, width=width, preactivation=preactivation)


def resnet32(*, channels: int = 3, preactivation: bool = False) -> ResNet:
    """Resnet-32, the paper's backbone. With a softmax head on CIFAR-10 it has 464,154 parameters.

    >>> from mmlda import Classifier, SoftmaxHead
    >>> model = Classifier(resnet32(), SoftmaxHead(num_classes=10, dim=64))
    >>> sum(parameter.numel() for parameter in model.parameters())
    464154
    """
    return ResNet(depth=32, channels=channels, preactivation=preactivation)


class ConvNet(nn.Module):
    """Three 3x3 convolutions and a global average: a network for 8 x 8 digits that trains in seconds.

    `batch_norm=False` leaves no coupling between the images of a batch.
    """

    def __init__(self, *, channels: int = 1, width: int = 32, batch_norm: bool = True):
        super().__init__()
        self.config = {"backbone": "conv_net", "channels": channels, "width": width, "batch_norm": batch_norm}
        self.num_features = 2 * width
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((channels, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm2d(outputs))
            layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))  # [N, 2 * width]


def conv_net(*, channels: int = 1, width: int = 32, batch_norm: bool = True) -> ConvNet:
    """The small network for `digits`; see `ConvNet`."""
    return ConvNet(channels=channels, width=width, batch_norm=batch_norm)


class Classifier(nn.Module):
    """Scaling, backbone, latent layer and head as one network on pixels in [0, 1].

    `model(x)` gives logits [N, L], `model.features(x)` the latent z [N, p]. The pixels become
    (x - mean) / std; the defaults are the paper's interval [-0.5, 0.5].

    `latent=None` puts a linear layer between pooled features and a Max-Mahalanobis head (pooled ReLU features
    are never negative, so without it most of the means could not be reached) and none before a softmax head.

    >>> from mmlda import MaxMahalanobisHead
    >>> model = Classifier(conv_net(), MaxMahalanobisHead(num_classes=10, dim=16))
    >>> x = torch.rand(4, 1, 8, 8)
    >>> model.features(x).shape, model(x).shape
    (torch.Size([4, 16]), torch.Size([4, 10]))
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        *,
        latent: bool | None = None,
        mean: float | tuple[float, ...] = 0.5,
        std: float | tuple[float, ...] = 1.0,
    ):
        super().__init__()
        features, dim = getattr(backbone, "num_features", None), getattr(head, "dim", None)
        if not isinstance(features, int):
            raise ValueError("backbone has no whole number `num_features`: set it to the width of its output")
        if not isinstance(dim, int):
            raise ValueError(f"head = {type(head).__name__}: expected a MaxMahalanobisHead or a SoftmaxHead")
        if latent is None:
            latent = isinstance(head, MaxMahalanobisHead)
        if not latent and features != dim:
            raise ValueError(f"head.dim = {dim}: expected backbone.num_features = {features} without a latent layer")
        scale = torch.atleast_1d(torch.as_tensor(std, dtype=torch.float32))
        if not bool((scale > 0).all()):
            raise ValueError(f"std = {std}: expected positive numbers")
        self.register_buffer("mean", torch.atleast_1d(torch.as_tensor(mean, dtype=torch.float32)).view(1, -1, 1, 1))
        self.register_buffer("std", scale.view(1, -1, 1, 1))
        self.backbone = backbone
        self.latent = nn.Linear(features, dim) if latent else nn.Identity()
        self.head = head

    @property
    def num_classes(self) -> int:
        return self.head.num_classes  # type: ignore[return-value]

    def features(self, x: Tensor) -> Tensor:
        return self.latent(self.backbone((x - self.mean) / self.std))  # [N, p]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # [N, L]

    @property
    def config(self) -> dict[str, Any]:
        """What `build` needs to make this network again, for the backbones of this module."""
        backbone = getattr(self.backbone, "config", None)
        if backbone is None:
            raise ValueError(f"backbone = {type(self.backbone).__name__}: only this package's own have a config")
        head: dict[str, Any] = {"num_classes": self.num_classes, "dim": self.head.dim}
        if isinstance(self.head, MaxMahalanobisHead):
            head |= {"head": "mmlda", "C": float(self.head.C), "precision": float(self.head.precision)}
            if not bool((self.head.log_priors == self.head.log_priors[0]).all()):
                head["priors"] = self.head.priors.tolist()
        else:
            head |= {"head": "softmax"}
        return {**backbone, **head, "latent": isinstance(self.latent, nn.Linear),
                "mean": self.mean.flatten().tolist(), "std": self.std.flatten().tolist()}


_BACKBONES = {"resnet": (ResNet, ("depth", "channels", "width", "preactivation")),
              "conv_net": (ConvNet, ("channels", "width", "batch_norm"))}  # fmt: skip


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
    if name not in _BACKBONES:
        raise ValueError(f"backbone = {name!r}: expected one of {sorted(_BACKBONES)}")
    if head_name not in ("mmlda", "softmax"):
        raise ValueError(f"head = {head_name!r}: expected 'mmlda' or 'softmax'")
    kind, keys = _BACKBONES[name]
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        backbone = kind(**{key: config.pop(key) for key in keys if key in config})
        settings = {"num_classes": config.pop("num_classes", 10), "dim": config.pop("dim", backbone.num_features)}
        outer = {key: config.pop(key) for key in ("latent", "mean", "std") if key in config}
        for key in ("mean", "std"):
            if isinstance(outer.get(key), list):
                outer[key] = tuple(outer[key])
        if head_name == "mmlda":
            settings |= {key: config.pop(key) for key in ("C", "precision", "priors") if key in config}
        if config:
            raise ValueError(f"config has {sorted(config)}: not a setting of {name} with a {head_name} head")
        head = MaxMahalanobisHead(**settings) if head_name == "mmlda" else SoftmaxHead(**settings)
        return Classifier(backbone, head, **outer)


class SwappedHead(nn.Sequential):
    """What `swap_head` puts in: the latent layer, then the head. Printing the model shows what was there before."""

    def __init__(self, latent: nn.Module, head: nn.Module, name: str, old: nn.Linear):
        super().__init__()
        self.latent, self.head = latent, head
        self.replaced = f"{name}: {old}"

    def extra_repr(self) -> str:
        return f"replaced {self.replaced}"


def swap_head(
    model: nn.Module,
    num_classes: int,
    *,
    dim: int | None = None,
    C: float = 100.0,
    priors: Any = None,
    precision: float = 1.0,
    head: nn.Module | None = None,
    layer: str | None = None,
) -> nn.Module:
    """A copy of any network with its last `nn.Linear` replaced by a latent layer and a Max-Mahalanobis head.

    Works on torchvision's and timm's models and on your own; all other modules keep their weights, and the model
    given is left as it was. The name of what was replaced is logged and kept in `.replaced` of the new layer.
    `dim` is the latent dimension (default: the replaced layer's inputs, at least num_classes - 1); `head` puts in
    another head of that dimension; `layer` names the layer to replace where the last one is not the classifier.
    In a `Classifier`, and in a network that `swap_head` has made, the latent layer and the head change together.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> new = swap_head(net, num_classes=10)
    >>> new[3].replaced
    '3: Linear(in_features=32, out_features=10, bias=True)'
    >>> new(torch.rand(2, 64)).shape
    torch.Size([2, 10])
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        # attention's output projection is used through its weight alone, its forward never runs
        if isinstance(module, nn.Linear)
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    }
    if not linears:
        raise ValueError(f"model = {type(model).__name__}: expected a network with an nn.Linear, found none")
    name = next(reversed(linears)) if layer is None else layer
    if name not in linears:
        raise ValueError(f"layer = {layer!r}: expected the name of an nn.Linear, one of {list(linears)[-5:]}")
    old = linears[name]
    if isinstance(old, nn.LazyLinear):
        raise ValueError(f"layer = {name!r} is a LazyLinear without a size: expected a batch through the model first")
    # where a latent layer and a head stand already, one alone would no longer fit the other
    whole = next((m for at, m in model.named_modules() if isinstance(m, Classifier | SwappedHead)
                  and f".{name}.".startswith(f".{at}." if at else ".")), None)  # fmt: skip
    inputs: Any = old.in_features
    if whole is not None:
        if layer is not None and not (old is whole.latent or old is whole.head):
            raise ValueError(f"layer = {layer!r} is before a latent layer and a head: expected layer=None, for these")
        inputs = whole.backbone.num_features if isinstance(whole, Classifier) else whole.latent.in_features
    if head is None:
        if dim is None:
            dim = max(inputs, num_classes - 1)
        head = MaxMahalanobisHead(num_classes=num_classes, dim=dim, C=C, priors=priors, precision=precision)
    elif head.num_classes != num_classes or (dim is not None and head.dim != dim):
        raise ValueError(f"head has num_classes = {head.num_classes}, dim = {head.dim}: expected {num_classes}, {dim}")
    width: int = head.dim  # type: ignore[assignment]
    latent = nn.Linear(inputs, width, device=old.weight.device, dtype=old.weight.dtype)
    if whole is not None:
        log.info("replaced %s and %s by %s -> %s", whole.latent, whole.head, latent, type(head).__name__)
        memo = {id(whole.latent): latent, id(whole.head): head.to(old.weight.device)}
        return copy.deepcopy(model, memo)
    new = SwappedHead(latent, head.to(old.weight.device), name, old)
    if name:
        memo = {id(old): new}  # the copy takes the new layer wherever the old one stood
        model = copy.deepcopy(model, memo)
    else:
        return new  # the model was that one layer
    log.info("replaced %s by %s -> %s", new.replaced, latent, type(head).__name__)
    return model
