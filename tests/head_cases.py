"""Heads and features that several test files share."""

import torch

from mmlda.models.heads import MaxMahalanobisHead

F64 = torch.float64
PRIORS = [0.4, 0.3, 0.2, 0.05, 0.05]


def make(num_classes=5, dim=8, C=100.0, **more):
    return MaxMahalanobisHead(num_classes=num_classes, dim=dim, C=C, **more)


def features(n=6, dim=8, dtype=torch.float32, scale=3.0, seed=0):
    return (torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=F64) * scale).to(dtype)


def relative_error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
