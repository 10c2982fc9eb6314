"""Random numbers that belong to a sample, not to its place in a batch.

A counter-based generator: every number is a hash of (seed, index of the sample, draw, element), so a sample
sees the same noise whatever else is in its batch, on the CPU and on CUDA, and no other generator advances. It is
tensor arithmetic throughout, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Shape = tuple[int, ...]


def _signed(word: int) -> int:
    """The 64-bit word as the int64 that holds its bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift(h: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own one copies the sign bit."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def _mix(h: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), a bijection of 64-bit words."""
    h = (h ^ _shift(h, 30)) * _MIX_1
    h = (h ^ _shift(h, 27)) * _MIX_2
    return h ^ _shift(h, 31)


class Noise:
    """The streams of the samples `index` [N] under `seed`; `draw` numbers what is drawn.

    >>> whole = Noise(0, torch.arange(4)).uniform((3,), draw=1)
    >>> torch.equal(whole[2:], Noise(0, torch.tensor([2, 3])).uniform((3,), draw=1))
    True
    """

    def __init__(self, seed: int, index: Tensor) -> None:
        word = torch.full((), _signed(seed % (1 << 64)), dtype=torch.int64, device=index.device)
        start = _mix(word + _GOLDEN)
        self._stream = _mix(start + index.to(torch.int64) * _GOLDEN)  # [N]

    def bits(self, shape: Shape, draw: int | Tensor) -> Tensor:
        """64 random bits per element: int64 [N, *shape]. `draw` may be an int64 tensor [] or [N]."""
        turn = draw * _MIX_1 if isinstance(draw, Tensor) else _signed(draw * _MIX_1 % (1 << 64))
        stream = _mix(self._stream ^ turn)  # [N]
        count = math.prod(shape)
        element = torch.arange(1, count + 1, device=stream.device) * _GOLDEN
        return _mix(stream[:, None] + element).view(len(stream), *shape)

    def uniform(self, shape: Shape, draw: int | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform in [0, 1), the same 24 bits in every dtype (rounded in half): [N, *shape]."""
        wide = torch.promote_types(dtype, torch.float32)
        return (_shift(self.bits(shape, draw), 40).to(wide) * 2.0**-24).to(dtype)

    def normal(self, shape: Shape, draw: int | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal by Box and Muller: [N, *shape]."""
        word = self.bits(shape, draw)
        wide = torch.promote_types(dtype, torch.float32)
        radius = (-2.0 * torch.log((_shift(word, 40).to(wide) + 0.5) * 2.0**-24)).sqrt()
        angle = (word & 0xFFFFFF).to(wide) * (2.0 * math.pi * 2.0**-24)
        return (radius * torch.cos(angle)).to(dtype)

    def integers(self, high: int | Tensor, shape: Shape, draw: int | Tensor) -> Tensor:
        """Uniform in 0 .. high - 1 (to within high / 2^31): int64 [N, *shape]; `high` broadcasts."""
        return _shift(self.bits(shape, draw), 33) % high
