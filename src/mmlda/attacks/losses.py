"""Losses that attacks maximise, per sample, and the choice of the target class.

Every loss is maximised. With Z the logits, y the true class and t the target if there is one:

| name       | without a target                      | with a target                                     |
|------------|---------------------------------------|---------------------------------------------------|
| "ce"       | -log P(y)                             | log P(t)                                          |
| "margin"   | max_{k != y} Z_k - Z_y                | Z_t - max_{k != t} Z_k                            |
| "dlr"      | (max_{k != y} Z_k - Z_y) / (Z_1 - Z_3) | (Z_t - Z_y) / (Z_1 - (Z_3 + Z_4) / 2)            |
| "targeted" | -                                     | Z_t - Z_y                                         |

where Z_1 >= Z_2 >= ... are the sorted logits (Croce and Hein 2020). Where the gap between the logits is so large
that the gradient of "ce" underflows (100 nats and more in float32), it is zero and the attack reports it; "margin"
and "targeted" do not saturate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmlda.attacks.checks import invalid
from mmlda.attacks.noise import Noise

LOSSES = ("ce", "margin", "dlr", "targeted")

# A name, or a function (model, x, y) -> [N] to be maximised; with a target, y is the target.
Loss = str | Callable[..., Tensor]


def check_loss(name: str, loss: Loss) -> None:
    if not callable(loss) and loss not in LOSSES:
        raise invalid(name, f"one of {', '.join(map(repr, LOSSES))}, or a function (model, x, y) -> [N]", loss)


def score(loss: str, z: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """Compute a loss that attacks maximise from logits, per sample.

    Parameters
    ----------
    loss
        "ce", "margin", "dlr" or "targeted".
    z
        Logits [N, L].
    y
        Labels, int64 [N].
    target
        Target classes, int64 [N] (default: None, untargeted).

    Returns
    -------
    Tensor
        Losses [N].

    Raises
    ------
    ValueError
        If the loss is unknown, needs a target, or needs more classes ("dlr": 3, or 4 with a target).

    Examples
    --------
    >>> z = torch.tensor([[3.0, 1.0, 0.0, -1.0]])
    >>> score("margin", z, torch.tensor([0])).item(), score("dlr", z, torch.tensor([0])).item()
    (-2.0, -0.6666666865348816)
    >>> score("targeted", z, torch.tensor([0]), torch.tensor([3])).item()
    -4.0
    """
    L = z.shape[1]
    if loss == "ce":
        if target is None:
            return F.cross_entropy(z, y, reduction="none")
        return -F.cross_entropy(z, target, reduction="none")
    if loss == "margin":
        return margin(z, y) if target is None else -margin(z, target)
    if loss == "dlr":
        least, case = (3, "") if target is None else (4, " with a target")
        if L < least:
            expected = f'"margin" for a model of fewer than {least} classes{case}'
            raise ValueError(f'loss must be {expected}, got "dlr" and {L} classes')
        top = z.topk(least, dim=1).values
        if target is None:
            return margin(z, y) / (top[:, 0] - top[:, 2] + 1e-12)
        return (at(z, target) - at(z, y)) / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + 1e-12)
    if loss == "targeted":
        if target is None:
            raise ValueError('target must be given for loss="targeted", in the attack or in the call, got None')
        return at(z, target) - at(z, y)
    raise invalid("loss", f"one of {', '.join(map(repr, LOSSES))}", loss)


def at(z: Tensor, label: Tensor) -> Tensor:
    """Z_label: [N]."""
    return z.gather(1, label[:, None]).squeeze(1)


def margin(z: Tensor, label: Tensor) -> Tensor:
    """max_{k != label} Z_k - Z_label: [N]; positive where `label` has lost.

    The label is masked with -inf, not with a large constant, so that logits may be of any size and sign.
    """
    others = z.scatter(1, label[:, None], -torch.inf)
    return others.amax(1) - at(z, label)


def moderate(size: Tensor) -> Tensor:
    """A power of two that brings a size [N] near 1 if it is below 1e-3 or above 1e9, and 1 otherwise: [N].

    >>> moderate(torch.tensor([5.0, 1e20, 1e-20])) * torch.tensor([5.0, 1e20, 1e-20]) < 6
    tensor([True, True, True])
    """
    extreme = (size > 0) & size.isfinite() & ((size < 1e-3) | (size > 1e9))
    return torch.ldexp(torch.ones_like(size), torch.where(extreme, -torch.frexp(size).exponent, 0).clamp_max(126))


def kl_divergence(z: Tensor, clean: Tensor) -> Tensor:
    """Kullback-Leibler divergence KL(softmax(clean) || softmax(z)), which TRADES maximises (Zhang et al. 2019).

    Parameters
    ----------
    z
        Logits of the adversarial images [N, L].
    clean
        Logits of the clean images [N, L].

    Returns
    -------
    Tensor
        Divergences [N].

    Examples
    --------
    >>> z = torch.tensor([[1.0, 0.0]])
    >>> kl_divergence(z, z).item(), round(kl_divergence(-z, z).item(), 4)
    (0.0, 0.4621)
    """
    return F.kl_div(z.log_softmax(1), clean.log_softmax(1), reduction="none", log_target=True).sum(1)


def least_likely(z: Tensor, y: Tensor) -> Tensor:
    """The class other than `y` with the lowest logit. Probabilities would tie at 0 in float32.

    Parameters
    ----------
    z
        Logits [N, L].
    y
        Labels, int64 [N].

    Returns
    -------
    Tensor
        Classes, int64 [N].

    Examples
    --------
    >>> least_likely(torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]), torch.tensor([0, 1]))
    tensor([1, 2])
    """
    return z.scatter(1, y[:, None], torch.inf).argmin(1)


def choose_target(kind: str, z: Tensor, y: Tensor, noise: Noise) -> Tensor:
    """A target class other than `y` from the clean logits `z` [N, L]: [N]; "random" is keyed by sample."""
    if kind == "least-likely":
        return least_likely(z, y)
    L = z.shape[1]
    return (y + 1 + noise.integers(L - 1, (), draw=-1)) % L


def other_classes(z: Tensor, y: Tensor) -> Tensor:
    """The classes other than y by their logits `z` [N, L], the most likely first: int64 [N, L - 1]."""
    order = z.argsort(dim=1, descending=True, stable=True)
    # y itself goes to the end explicitly: its logit would not put it there if another one is -inf.
    return order.gather(1, (order == y[:, None]).to(torch.int8).argsort(dim=1, stable=True)[:, :-1])
