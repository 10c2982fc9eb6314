"""Networks: heads, backbones, and the Classifier that joins them."""

from mmlda.models.backbones import MLP, ConvNet, ResNet, conv_net, resnet, resnet32
from mmlda.models.classifier import Classifier, build
from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead
from mmlda.models.swap import SwappedHead, swap_head

__all__ = [
    "MLP",
    "Classifier",
    "ConvNet",
    "MaxMahalanobisHead",
    "ResNet",
    "SoftmaxHead",
    "SwappedHead",
    "build",
    "conv_net",
    "resnet",
    "resnet32",
    "swap_head",
]
