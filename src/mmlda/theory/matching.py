"""Which class gets which mean: similar classes similar means."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmlda._utils.checks import check_count, invalid
from mmlda.theory.arguments import check_means, lift

_MOST = 10**8  # entries of the matrix of the assignment, which takes 12 s a round at 10,000 x 10,000


def match_means(means: Any, vectors: Any, *, rounds: int = 20) -> Any:
    r"""Choose a mean for each class so that classes with similar vectors get similar means.

    With more classes than p + 1 the means are not all equally far from each other, and a network learns faster if the
    nearer ones belong to classes that look alike. Two steps alternate, each of which increases the sum of cosines
    `sum_k mu_k . R v_k`, until nothing changes: the best assignment of classes to means, and the best rotation R.
    The means themselves, and so all their distances, stay. A code often has more means at the same largest cosine than
    there are classes (`separated_means(4224, 64)` for 1,000 classes): more to choose from is a better match.

    Parameters
    ----------
    means
        Means `[M, p]` of equal norm, M >= L, with M L up to 10^8.
    vectors
        What describes each class, `[L, ...]`: the mean of its images (`ImageData.class_means`) or features, or a word's
        embedding. They are centred, reduced to their p principal components and scaled to norm 1.
    rounds
        Largest number of rounds.

    Returns
    -------
    Tensor or ndarray
        L of the means, `[L, p]`, like `means`.

    Raises
    ------
    ValueError
        If the shapes do not fit, a value is not finite, or there are too many classes.

    Examples
    --------
    >>> import mmlda
    >>> angle = torch.linspace(0, 6.28, 9)[:8]
    >>> circle = torch.stack([angle.cos(), angle.sin()], 1)  # class k resembles k - 1 and k + 1
    >>> means = mmlda.separated_means(8, 2, C=1.0)[[3, 1, 0, 6, 7, 2, 5, 4]]
    >>> matched = mmlda.theory.match_means(means, circle)
    >>> (matched * matched.roll(1, 0)).sum(1).min().item() > 0.7  # neighbours on the circle of means, too
    True
    """
    from scipy.optimize import linear_sum_assignment

    check_count("rounds", rounds, 1)
    (mu, v), back = lift(means=means, vectors=vectors)
    M, p = check_means(mu).shape
    if v.dim() < 2 or not 0 < len(v) <= M or not v.numel():
        raise invalid("vectors", f"[L, ...], one row per class, for at most {M} means", list(v.shape))
    if M * len(v) > _MOST:
        raise ValueError(f"means must be at most {_MOST // len(v):,} for {len(v):,} classes, got {M:,}")
    units = mu / mu.norm(dim=1, keepdim=True)
    v = (v - v.mean(0)).flatten(1)
    _, _, components = torch.linalg.svd(v, full_matrices=False)
    v = v @ components[:p].T  # [L, at most p]
    v = v / v.norm(dim=1, keepdim=True).clamp(min=1e-12)
    rotation = _random_rotation(v.shape[1], p).to(v)
    order, value = None, -1.0
    for _ in range(rounds):
        cosines = (v @ rotation) @ units.T  # [L, M]
        rows, columns = linear_sum_assignment(-cosines.cpu().numpy())
        if (total := float(cosines.cpu().numpy()[rows, columns].sum())) <= value + 1e-9 * len(v):
            break
        order, value = torch.from_numpy(columns).to(mu.device), total
        left, _, right = torch.linalg.svd(v.T @ units[order], full_matrices=False)
        rotation = left @ right
    return back(mu[order])


def _random_rotation(q: int, p: int) -> Tensor:
    """Orthonormal rows [q, p] with q <= p, always the same."""
    return torch.linalg.qr(torch.from_numpy(np.random.default_rng(0).standard_normal((p, q))))[0].T
