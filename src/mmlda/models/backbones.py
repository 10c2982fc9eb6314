"""Backbones that return features: the CIFAR Resnets, a small network for 8 x 8 digits, and an MLP for tables.

A backbone is any module with an attribute `num_features` whose output is [N, num_features].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda._utils.checks import check_choice, check_count, invalid
from mmlda.models import training_pass


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution without bias."""
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


class _Norm(nn.BatchNorm2d):
    """Batch normalisation that does not count batches.

    The count is unused at a fixed momentum, and updating it costs one kernel launch per layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum or 0.1, self.eps)


def fold_norms(convs: Sequence[Any], norms: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Weights and biases of convolutions with the batch norm after each, in eval mode, folded in; few launches."""
    scales = torch._foreach_add([norm.running_var for norm in norms], [norm.eps for norm in norms])
    torch._foreach_sqrt_(scales)
    scales = torch._foreach_div([norm.weight.detach() for norm in norms], scales)
    weights = torch._foreach_mul([conv.weight.detach() for conv in convs], [s.view(-1, 1, 1, 1) for s in scales])
    shifts = torch._foreach_mul([norm.running_mean for norm in norms], scales)
    return weights, torch._foreach_sub([norm.bias.detach() for norm in norms], shifts)


def _fold(conv: Any, norm: nn.Module) -> nn.Module:
    """Fold the batch norm after a convolution, in eval mode, into its weight and bias; what takes the norm's place.

    Anything else after a convolution, such as what folding left there, stays.
    """
    if not isinstance(norm, _Norm) or norm.running_mean is None or norm.running_var is None or conv.bias is not None:
        return norm
    (weight,), (bias,) = fold_norms([conv], [norm])
    conv.weight, conv.bias = (nn.Parameter(values, requires_grad=False) for values in (weight, bias))
    return nn.Identity()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu_, "silu": F.silu}


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (He 2015's option A: subsample, pad with zeros).

    Post-activation (He 2015): relu(x + BN(conv(relu(BN(conv(x)))))).
    Pre-activation (He 2016):  x + conv(relu(BN(conv(relu(BN(x)))))).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, preactivation: bool, activation: str = "relu"):
        super().__init__()
        self.activation = _ACTIVATIONS[activation]
        self.preactivation, self.stride, self.extra = preactivation, stride, outputs - inputs
        self.conv1, self.conv2 = _conv3(inputs, outputs, stride), _conv3(outputs, outputs)
        self.norm1: nn.Module = _Norm(inputs if preactivation else outputs)
        self.norm2: nn.Module = _Norm(outputs)

    def for_fixed_weights(self) -> None:
        """Hook for `mmlda.attacks.compiled`."""
        if self.preactivation:
            self.norm2 = _fold(self.conv1, self.norm2)
        else:
            self.norm1, self.norm2 = _fold(self.conv1, self.norm1), _fold(self.conv2, self.norm2)

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.extra:
            x = F.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))  # zeros on both sides
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.preactivation:
            h = self.conv1(self.activation(self.norm1(x)))
            return self.shortcut(x) + self.conv2(self.activation(self.norm2(h)))
        # In place where nothing else needs the values, to save memory traffic.
        h = self.activation(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        h += self.shortcut(x)
        return self.activation(h)


class ResNet(nn.Module):
    """The CIFAR Resnet of He et al.: a convolution, three stages of (depth - 2) / 6 blocks, global average pooling.

    Maps images `[N, channels, H, W]`, H and W at least 8, to features `[N, 4 * width]`.

    Parameters
    ----------
    depth
        Number of layers: 8, 14, 20, 26, 32, ...
    channels
        Channels of the images.
    width
        Channels of the first stage.
    preactivation
        False (default) is He et al. 2015; True is He et al. 2016.
    activation
        "relu" (default), or the smooth "silu".

    Raises
    ------
    ValueError
        If `depth` is not 6n + 2 with n >= 1, or the activation is unknown.

    Examples
    --------
    >>> import torch
    >>> net = ResNet(depth=8, channels=1)
    >>> net(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 64])
    """

    own_pass = False  # see `training_pass.own_pass`

    def __init__(
        self,
        *,
        depth: int = 32,
        channels: int = 3,
        width: int = 16,
        preactivation: bool = False,
        activation: str = "relu",
    ):
        super().__init__()
        check_choice("activation", activation, _ACTIVATIONS)
        if depth < 8 or (depth - 2) % 6:
            raise invalid("depth", "6n + 2 with n >= 1 (8, 14, 20, 32, 44, 56, 110, ...)", depth)
        check_count("channels", channels, 1)
        check_count("width", width, 1)
        self.config = {"backbone": "resnet", "depth": depth, "channels": channels, "width": width}
        self.config["preactivation"] = preactivation
        if activation != "relu":
            self.config["activation"] = activation
        self.num_features = 4 * width
        self.activation = _ACTIVATIONS[activation]
        self.preactivation = preactivation
        self.conv = _conv3(channels, width)
        self.norm: nn.Module = _Norm(self.num_features if preactivation else width)
        blocks, inputs = [], width
        for stage in range(3):
            for block in range((depth - 2) // 6):
                outputs = width * 2**stage
                blocks.append(_Block(inputs, outputs, 2 if stage and not block else 1, preactivation, activation))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def for_fixed_weights(self) -> None:
        """Hook for `mmlda.attacks.compiled`."""
        if not self.preactivation:
            self.norm = _fold(self.conv, self.norm)

    def forward(self, x: Tensor) -> Tensor:
        """Compute features.

        Parameters
        ----------
        x
            Images `[N, channels, H, W]`.

        Returns
        -------
        Tensor
            Features `[N, 4 * width]`.

        Raises
        ------
        ValueError
            If the images are smaller than 8 x 8.
        """
        if x.dim() != 4 or min(x.shape[2:]) < 8:
            raise ValueError(f"x must have shape [N, channels, H, W] with H, W >= 8, got {list(x.shape)}")
        if self.own_pass and self.training and not x.requires_grad:
            return training_pass.features(self, x)
        h = self.conv(x)
        if self.preactivation:
            h = self.activation(self.norm(self.blocks(h)))
        else:
            h = self.blocks(self.activation(self.norm(h)))
        return h.mean((2, 3))  # [N, 4 * width]


def resnet(depth: int = 32, *, channels: int = 3, width: int = 16, preactivation: bool = False) -> ResNet:
    """A `ResNet` of the given depth.

    Parameters
    ----------
    depth, channels, width, preactivation
        As in `ResNet`.

    Returns
    -------
    ResNet
        The backbone.

    Examples
    --------
    >>> resnet(20).num_features
    64
    """
    return ResNet(depth=depth, channels=channels, width=width, preactivation=preactivation)


def resnet32(*, channels: int = 3, preactivation: bool = False) -> ResNet:
    """Resnet-32, the paper's backbone. With a softmax head on CIFAR-10 it has 464,154 parameters.

    Parameters
    ----------
    channels, preactivation
        As in `ResNet`.

    Returns
    -------
    ResNet
        The backbone.

    Examples
    --------
    >>> from mmlda import Classifier, SoftmaxHead
    >>> model = Classifier(resnet32(), SoftmaxHead(num_classes=10, dim=64))
    >>> sum(parameter.numel() for parameter in model.parameters())
    464154
    """
    return ResNet(depth=32, channels=channels, preactivation=preactivation)


class ConvNet(nn.Module):
    """Three 3x3 convolutions and global average pooling: a network for 8 x 8 digits that trains in seconds.

    Maps images `[N, channels, H, W]` to features `[N, 2 * width]`.

    Parameters
    ----------
    channels
        Channels of the images.
    width
        Channels of the first convolution.
    batch_norm
        Whether to normalise batches (default). Without it, the images of a batch do not influence each other.

    Examples
    --------
    >>> import torch
    >>> ConvNet(width=8)(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 16])
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
        """Compute features.

        Parameters
        ----------
        x
            Images `[N, channels, H, W]`.

        Returns
        -------
        Tensor
            Features `[N, 2 * width]`.
        """
        return self.layers(x).mean((2, 3))  # [N, 2 * width]


def conv_net(*, channels: int = 1, width: int = 32, batch_norm: bool = True) -> ConvNet:
    """The small network for 8 x 8 digits: a `ConvNet`.

    Parameters
    ----------
    channels, width, batch_norm
        As in `ConvNet`.

    Returns
    -------
    ConvNet
        The backbone.

    Examples
    --------
    >>> conv_net(width=8).num_features
    16
    """
    return ConvNet(channels=channels, width=width, batch_norm=batch_norm)


class MLP(nn.Module):
    """Linear layers, each followed by ReLU, for rows of a table.

    Maps rows `[N, inputs]` to features `[N, hidden[-1]]`.

    Parameters
    ----------
    inputs
        Numbers per row.
    hidden
        Width of each layer, at least one.

    Raises
    ------
    ValueError
        If a width is not a positive integer.

    Examples
    --------
    >>> import torch
    >>> MLP(inputs=4, hidden=(32, 16))(torch.rand(2, 4)).shape
    torch.Size([2, 16])
    """

    def __init__(self, *, inputs: int, hidden: Sequence[int] = (64, 64)):
        super().__init__()
        if not hidden:
            raise invalid("hidden", "at least one width", hidden)
        widths = [check_count("inputs", inputs, 1), *(check_count("hidden", width, 1) for width in hidden)]
        self.config = {"backbone": "mlp", "inputs": widths[0], "hidden": widths[1:]}
        self.inputs, self.num_features = widths[0], widths[-1]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Compute features.

        Parameters
        ----------
        x
            Rows `[N, inputs]`.

        Returns
        -------
        Tensor
            Features `[N, hidden[-1]]`.

        Raises
        ------
        ValueError
            If the rows have another length.
        """
        if x.ndim != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"x must have shape [N, {self.inputs}], got {list(x.shape)}")
        return self.layers(x)  # [N, hidden[-1]]
