"""Behind a linear layer, MM-LDA trained by SGD is softmax regression with another rate and decay in its last layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmlda import Classifier, MaxMahalanobisHead, SoftmaxHead

L, P = 10, 16


class Backbone(nn.Module):
    num_features = 12

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh())

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("C", (1 - 1 / L, 5.0))
def test_both_heads_take_the_same_steps(C):
    torch.manual_seed(0)
    backbone = Backbone()
    soft = Classifier(backbone, SoftmaxHead(num_classes=L, dim=12)).double()
    ours = Classifier(copy.deepcopy(backbone), MaxMahalanobisHead(num_classes=L, dim=P, C=C)).double()
    inverse = torch.linalg.pinv(ours.head.means)  # [P, L]
    with torch.no_grad():
        ours.latent.weight.copy_(inverse @ soft.head.weight)
        ours.latent.bias.copy_(inverse @ soft.head.bias)
    x, y = torch.randn(64, 6, dtype=torch.float64), torch.randint(L, (64,))
    first, times, rest = soft(x).softmax(1), C * L / (L - 1), {"lr": 0.02, "weight_decay": 1e-2}
    last = {"params": soft.head.parameters(), "lr": times * 0.02, "weight_decay": 1e-2 / times}
    for model, groups in (
        (soft, [{"params": backbone.parameters(), **rest}, last]),
        (ours, [{"params": ours.parameters(), **rest}]),
    ):
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        for _ in range(200):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    torch.testing.assert_close(ours(x).softmax(1), soft(x).softmax(1), rtol=0, atol=1e-9)
    assert (soft(x).softmax(1) - first).abs().max() > 0.2  # they have learned
