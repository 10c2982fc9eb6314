"""A network in bfloat16 on processors that compute with it, with close decisions in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_IMAGES = 16  # that are compared with float32 at first
_MARGIN = 3.0  # times the largest error seen so far: a smaller gap between the two largest logits is computed again


def fast_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16 (AVX-512 BF16 or AMX); emulated, it would be slower than float32."""
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(ask is not None and ask() for ask in asked)


class Bfloat16(nn.Module):
    """A network under autocast to bfloat16, for attacks.

    Gradients are those of bfloat16. The logits of images whose two largest are close, by the errors seen so far, are
    computed again in float32, so that rounding hardly ever decides the label or whether an attack has won. A network is
    in float32 if that would be most of its first images, or if it cannot run under autocast.

    Parameters
    ----------
    model
        The network, in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._limit: float | None = None  # gap that is computed again, as a share of the largest logit

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # `head`, `classes` and so on are the network's
            return getattr(super().__getattr__("model"), name)

    def forward(self, x: Tensor) -> Tensor:
        if self._limit is None and len(x):
            self._limit = self._first_limit(x.detach()[:_IMAGES])
        if self._limit is None or self._limit == torch.inf:
            return self.model(x)
        z = self._rounded(x)
        rough = z.detach()
        close = torch.nonzero(_close(rough, self._limit))[:, 0]
        if len(close) == 0:
            return z
        with torch.no_grad():
            exact = self.model(x[close])
        self._limit = max(self._limit, _MARGIN * _error(exact, rough[close]))
        return z + torch.zeros_like(rough).index_copy(0, close, exact - rough[close])  # the gradient is that of z

    def _rounded(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z: Tensor = self.model(x)
        return z.float() if z.dtype == torch.bfloat16 else z

    def _first_limit(self, x: Tensor) -> float:
        """The limit by the first images; infinite for a network that must stay in float32."""
        with torch.no_grad():
            exact = self.model(x)
        if not isinstance(exact, Tensor) or exact.dtype != torch.float32 or exact.dim() != 2 or exact.shape[1] < 2:
            return torch.inf
        try:
            with torch.enable_grad():
                z = self._rounded(v := x.clone().requires_grad_())
                torch.autograd.grad(z.sum(), v)
        except Exception:  # of the network's own code, which may know float32 only, or have no gradient
            return torch.inf
        limit = _MARGIN * _error(exact, z.detach())
        return torch.inf if _close(z.detach(), limit).float().mean() > 0.5 else limit


def _close(z: Tensor, limit: float) -> Tensor:
    """Whether the two largest logits of each image differ by no more than a share of its largest one, or are NaN."""
    top = z.topk(2, 1).values
    return ~(top[:, 0] - top[:, 1] > limit * z.abs().amax(1))


def _error(exact: Tensor, z: Tensor) -> float:
    """The largest error of the gap between an image's two largest logits, as a share of its largest logit."""
    if z.shape != exact.shape or not bool((exact.isfinite() & z.isfinite()).all()):
        return torch.inf
    off = (exact - z).gather(1, exact.topk(2, 1).indices)  # [N, 2]
    scale = exact.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((off[:, 0] - off[:, 1]).abs() / scale).max())
