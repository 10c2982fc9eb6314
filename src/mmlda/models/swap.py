"""A Max-Mahalanobis head for any network."""

from __future__ import annotations

import copy
import logging
from typing import Any

from torch import nn

from mmlda._utils.checks import invalid
from mmlda.models.classifier import Classifier
from mmlda.models.heads import MaxMahalanobisHead

__all__ = ["SwappedHead", "swap_head"]

log = logging.getLogger("mmlda")


class SwappedHead(nn.Sequential):
    """The latent layer and the head that `swap_head` inserts. Printing the model shows which layer they replaced."""

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

    >>> import torch
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
        if isinstance(module, nn.Linear) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    }
    if not linears:
        raise ValueError(f"model must contain an nn.Linear, got {type(model).__name__} without one")
    name = next(reversed(linears)) if layer is None else layer
    if name not in linears:
        raise invalid("layer", f"the name of an nn.Linear, such as {list(linears)[-5:]}", layer)
    old = linears[name]
    if isinstance(old, nn.LazyLinear):
        raise ValueError(f"layer must have a size, got the LazyLinear {name!r}: run one batch through the model first")
    # where a latent layer and a head stand already, one alone would no longer fit the other
    whole = next(
        (
            module
            for path, module in model.named_modules()
            if isinstance(module, Classifier | SwappedHead) and f".{name}.".startswith(f".{path}." if path else ".")
        ),
        None,
    )
    inputs: Any = old.in_features
    if whole is not None:
        if layer is not None and not (old is whole.latent or old is whole.head):
            raise invalid("layer", "None in a network with a latent layer and a head, which change together", layer)
        inputs = whole.backbone.num_features if isinstance(whole, Classifier) else whole.latent.in_features
    if head is None:
        if dim is None:
            dim = max(inputs, num_classes - 1)
        head = MaxMahalanobisHead(num_classes=num_classes, dim=dim, C=C, priors=priors, precision=precision)
    elif head.num_classes != num_classes or (dim is not None and head.dim != dim):
        wanted = f"num_classes = {num_classes}" + ("" if dim is None else f" and dim = {dim}")
        raise ValueError(f"head must have {wanted}, got {head.num_classes} and {head.dim}")
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
