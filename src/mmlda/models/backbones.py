"""Backbones that return features: the CIFAR Resnets, and a small network for 8 x 8 digits.

A backbone is any module with a `num_features` attribute whose output is [N, num_features].
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mmlda._utils.checks import check_count, invalid
from mmlda.models.convolutions import conv3x3

__all__ = ["ConvNet", "ResNet", "conv_net", "fast_convolutions", "resnet", "resnet32"]


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
    """Batch normalisation that does not count batches: the count is unused at a fixed momentum, and updating it
    costs one kernel per layer."""

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum or 0.1, self.eps)


def fast_convolutions(model: nn.Module, fast: bool) -> None:
    """Choose the convolutions of this module's networks inside `model`; other layers are not affected."""
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

    >>> import torch
    >>> net = ResNet(depth=8, channels=1)
    >>> net(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 64])
    """

    def __init__(self, *, depth: int = 32, channels: int = 3, width: int = 16, preactivation: bool = False):
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise invalid("depth", "6n + 2 with n >= 1 (8, 14, 20, 32, 44, 56, 110, ...)", depth)
        for name, value in (("channels", channels), ("width", width)):
            check_count(name, value, 1)
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
            raise ValueError(f"x must have shape [N, channels, H, W] with H, W >= 8, got {list(x.shape)}")
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
