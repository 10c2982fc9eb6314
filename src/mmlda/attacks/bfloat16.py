"""A network in bfloat16 on processors that compute with it, with exact decisions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_CLOSE = 0.15  # of the standard deviation of an image's logits: a smaller gap between the largest two is computed again
_IMAGES = 16  # that are compared with float32 at first


def fast_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16 (AVX-512 BF16 or AMX); emulated, it would be slower than float32."""
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(ask is not None and ask() for ask in asked)


class Bfloat16(nn.Module):
    """A network under autocast to bfloat16, for attacks.

    Gradients are those of bfloat16. The logits of images whose two largest are close are computed again in float32, so
    that rounding decides neither the label nor whether an attack has won. A network that is seen to lose more by
    rounding than that allows, on its first images or on those computed twice, is in float32 from then on; one that
    cannot run under autocast always is.

    Parameters
    ----------
    model
        The network, in eval mode.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._near_enough: bool | None = None  # whether bfloat16 is, known after the first images

    def forward(self, x: Tensor) -> Tensor:
        if self._near_enough is None:
            self._near_enough = self._compare(x.detach()[:_IMAGES])
        if not self._near_enough:
            return self.model(x)
        z = self._rounded(x)
        rough = z.detach()
        top = rough.topk(2, 1).values
        close = torch.nonzero(top[:, 0] - top[:, 1] < _CLOSE * rough.std(1))[:, 0]
        if len(close) == 0:
            return z
        with torch.no_grad():
            exact = self.model(x[close])
        self._near_enough = _agree(exact, rough[close])
        return z + torch.zeros_like(rough).index_copy(0, close, exact - rough[close])  # the gradient is that of z

    def _rounded(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = self.model(x)
        return z.float() if z.dtype == torch.bfloat16 else z

    @torch.no_grad()
    def _compare(self, x: Tensor) -> bool:
        exact = self.model(x)
        try:
            z = self._rounded(x)
        except RuntimeError:  # such as an assignment of bfloat16 numbers to part of a float32 tensor
            return False
        return z.dtype == torch.float32 and z.dim() == 2 and z.shape[1] > 1 and _agree(exact, z)


def _agree(exact: Tensor, z: Tensor) -> bool:
    """Whether rounding moves the gap between the two largest logits of each image by less than `_CLOSE`."""
    top = exact.topk(2, 1).indices
    error = (exact - z).gather(1, top)
    return bool(((error[:, 0] - error[:, 1]).abs() < _CLOSE * exact.std(1)).all())
