"""Heads: from latent features z [N, p] to logits [N, L], each with its losses."""

from mmlda.models.heads.max_mahalanobis import MaxMahalanobisHead
from mmlda.models.heads.softmax import SoftmaxHead

__all__ = ["MaxMahalanobisHead", "SoftmaxHead"]
