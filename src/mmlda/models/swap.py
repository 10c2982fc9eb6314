"""A Max-Mahalanobis head for any network."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

from mmlda._utils.checks import invalid
from mmlda._utils.device import eval_mode
from mmlda._utils.training_data import class_names
from mmlda.models.classifier import Classifier
from mmlda.models.heads import MaxMahalanobisHead
from mmlda.models.heads.max_mahalanobis import simplex_dim

log = logging.getLogger("mmlda")


class SwappedHead(nn.Sequential):
    """The latent layer and the head that `swap_head` inserts. Printing the model shows which layer they replaced.

    Parameters
    ----------
    latent
        Linear layer to the head's dimension.
    head
        Head on latent features.
    name, old
        Name and module of the replaced layer.

    Examples
    --------
    >>> net = swap_head(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), num_classes=10)
    >>> type(net[1]).__name__, net[1].latent.out_features
    ('SwappedHead', 64)
    """

    headless = False  # return features instead of logits

    def __init__(self, latent: nn.Module, head: nn.Module, name: str, old: nn.Linear):
        super().__init__()
        self.latent, self.head = latent, head
        self.replaced = f"{name}: {old}"

    def extra_repr(self) -> str:
        """Describe the replaced layer."""
        return f"replaced {self.replaced}"

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits.

        Parameters
        ----------
        x
            Inputs of the replaced layer.

        Returns
        -------
        Tensor
            Logits `[N, L]`.
        """
        z = self.latent(x)
        return z if self.headless else self.head(z)

    def features(self, model: nn.Module, x: Tensor) -> Tensor:
        """Compute the latent features of the network whose last layer this is; `head.loss` needs no logits then.

        Parameters
        ----------
        model
            The network that `swap_head` returned.
        x
            Its inputs.

        Returns
        -------
        Tensor
            Features z `[N, p]`.

        Examples
        --------
        >>> import torch
        >>> net = swap_head(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), num_classes=100_000, dim=256)
        >>> z = net[1].features(net, torch.rand(2, 64))
        >>> z.shape, net[1].head.loss(z, torch.tensor([3, 99_999])).shape
        (torch.Size([2, 256]), torch.Size([]))
        """
        self.headless = True
        try:
            return model(x)
        finally:
            self.headless = False

    def is_last(self, model: nn.Module, x: Tensor) -> bool:
        """Whether the logits of this layer are what the network returns, tried with inputs `x`."""
        seen: list[Tensor] = []
        hook = self.register_forward_hook(lambda _, inputs, z: seen.append(z))
        try:
            with torch.no_grad(), eval_mode(model):
                z = self.features(model, x)
        except (RuntimeError, IndexError):  # what follows needs L columns
            return False
        finally:
            hook.remove()
        return len(seen) == 1 and z is seen[0] and z.ndim == 2


def structured_end(model: nn.Module) -> SwappedHead | None:
    """The one `SwappedHead` of a network, if its head is structured. Whether nothing follows it, `is_last` tells."""
    ends = [module for module in model.modules() if isinstance(module, SwappedHead)]
    return ends[0] if len(ends) == 1 and getattr(ends[0].head, "structured", False) else None


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
    keep: bool = False,
) -> nn.Module:
    """Copy a network, with its last `nn.Linear` replaced by a latent layer and a Max-Mahalanobis head.

    Works with models of torchvision and timm and with your own. All other modules keep their weights; the given model
    does not change. The replaced layer is logged and kept in `.replaced` of the new one. In a `Classifier`, and in a
    network from `swap_head`, the latent layer and the head are replaced together.

    Parameters
    ----------
    model
        Any network with an `nn.Linear`.
    num_classes
        Number of classes.
    dim
        Latent dimension (default: the inputs of the replaced layer, at least num_classes - 1). Required for more than
        8,192 classes.
    C, priors, precision
        As in `MaxMahalanobisHead`.
    head
        Head to insert (default: a new `MaxMahalanobisHead`).
    layer
        Name of the layer to replace, if the last one is not the classifier.
    keep
        Start at the classifier that the network has, instead of at a random latent layer: the posterior of each image
        stays the same, to rounding. This needs as many classes as before and num_classes <= dim + 1.

    Returns
    -------
    nn.Module
        The new network.

    Raises
    ------
    ValueError
        If there is no such layer, `dim` is missing, `head` does not have `num_classes` and `dim`, or the classifier
        cannot be kept.

    Examples
    --------
    >>> import torch
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> new = swap_head(net, num_classes=10)
    >>> new[3].replaced
    '3: Linear(in_features=32, out_features=10, bias=True)'
    >>> new(torch.rand(2, 64)).shape
    torch.Size([2, 10])
    >>> x, same = torch.rand(2, 64), swap_head(net, num_classes=10, keep=True)
    >>> torch.allclose(same(x).softmax(1), net(x).softmax(1), atol=1e-5)
    True
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        # attention uses only the weight of its output projection and never calls the layer
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
    # replacing only one of an existing latent layer and head would leave them incompatible
    wholes = (module for module in model.modules() if isinstance(module, Classifier | SwappedHead))
    whole: Any = next((module for module in wholes if old in module.modules()), None)
    inputs: Any = old.in_features
    if whole is not None:
        if layer is not None and not (old is whole.latent or old is whole.head):
            raise invalid("layer", "None in a network with a latent layer and a head, which change together", layer)
        inputs = whole.backbone.num_features if isinstance(whole, Classifier) else whole.latent.in_features
    if head is None:
        if dim is None:
            dim = max(inputs, simplex_dim(num_classes))
        head = MaxMahalanobisHead(num_classes=num_classes, dim=dim, C=C, priors=priors, precision=precision)
    elif head.num_classes != num_classes or (dim is not None and head.dim != dim):
        wanted = f"num_classes = {num_classes}" + ("" if dim is None else f" and dim = {dim}")
        raise ValueError(f"head must have {wanted}, got {head.num_classes} and {head.dim}")
    width: int = head.dim  # type: ignore[assignment]
    latent = nn.Linear(inputs, width, device=old.weight.device, dtype=old.weight.dtype)
    head = head.to(old.weight.device)
    if keep:
        if getattr(whole, "radius", None) is not None:
            raise invalid("keep", "False for a Classifier with normalize=True", keep)
        _keep_classifier(old if whole is None else nn.Sequential(whole.latent, whole.head), latent, head)
    # deepcopy's memo puts the new layers in place of the old ones, even if the model is that one layer
    if whole is not None:
        log.info("replaced %s and %s by %s -> %s", whole.latent, whole.head, latent, type(head).__name__)
        swapped = copy.deepcopy(model, {id(whole.latent): latent, id(whole.head): head})
    else:
        new = SwappedHead(latent, head, name, old)
        log.info("replaced %s by %s -> %s", new.replaced, latent, type(head).__name__)
        swapped = copy.deepcopy(model, {id(old): new})
    if class_names(swapped) is not None and not keep:  # the new head has not learnt them
        swapped.classes = None  # type: ignore[assignment]
    return swapped


@torch.no_grad()
def _keep_classifier(end: nn.Module, latent: nn.Linear, head: nn.Module) -> None:
    """Set a latent layer so that the head's logits are those of an affine `end`, up to a constant per image."""

    def affine(layer: nn.Module, inputs: int) -> tuple[Tensor, Tensor]:
        """The matrix [inputs, L] and the offset [L] of a layer."""
        eye = torch.eye(inputs, dtype=torch.float64, device=latent.weight.device)
        layer = copy.deepcopy(layer).double()
        offset = layer(torch.zeros_like(eye[:1]))[0]
        return layer(eye) - offset, offset

    L, dim = head.num_classes, latent.out_features
    if L > dim + 1:  # type: ignore[operator]
        raise invalid("dim", f"at least num_classes - 1 = {L - 1} with keep=True", dim)  # type: ignore[operator]
    (matrix, offset), (means, own) = affine(end, latent.in_features), affine(head, dim)
    if matrix.shape[1] != L:
        raise invalid("num_classes", f"{matrix.shape[1]}, as before, with keep=True", L)
    wanted = torch.cat([matrix, (offset - own)[None]])  # [inputs + 1, L]
    wanted = wanted - wanted.mean(1, keepdim=True)
    finite = bool(means.isfinite().all() & wanted.isfinite().all())
    found = wanted @ torch.linalg.pinv(means) if finite else wanted  # [inputs + 1, dim]
    if not finite or bool((found @ means - wanted).norm() > 1e-6 * wanted.norm()):
        raise ValueError("head must have means that span L - 1 dimensions and priors > 0 with keep=True, got others")
    latent.weight.copy_(found[:-1].T)
    latent.bias.copy_(found[-1])
