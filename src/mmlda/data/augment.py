"""Random crops and mirror images, a whole batch in one gather."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_augmentation(
    *size: int, pad: int = 4, generator: torch.Generator | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw random (dy, dx, flip) for `augment`.

    Parameters
    ----------
    size
        Shape of each: N for a batch, (steps, N) for an epoch.
    pad
        As in `augment`.
    generator, device
        As in `torch.randint`; the device is that of the generator by default.

    Returns
    -------
    dy, dx, flip : Tensor
        dy and dx are uniform over 0..2 pad (int64), flip is true half the time (bool).

    Examples
    --------
    >>> dy, dx, flip = draw_augmentation(5, pad=2)
    >>> dy.shape, bool((dx <= 4).all()), flip.dtype
    (torch.Size([5]), True, torch.bool)
    """
    device = device or (generator.device if generator is not None else None)
    dy, dx = torch.randint(2 * pad + 1, (2, *size), generator=generator, device=device)
    return dy, dx, torch.randint(2, size, generator=generator, device=device) == 1


def augment(x: Tensor, dy: Tensor, dx: Tensor, flip: Tensor | None = None, pad: int = 4) -> Tensor:
    """Pad with black, crop back to size at (dy, dx), mirror where `flip`: a whole batch in one gather::

        out[n, c, i, j] = padded[n, c, i + dy_n, j' + dx_n],   j' = W-1-j if flip_n else j

    It draws no random numbers (`draw_augmentation` does) and reads no values back, so it can be compiled and captured
    in a CUDA graph.

    Parameters
    ----------
    x
        Images [N, C, H, W], any dtype, contiguous or channels_last.
    dy, dx
        Integers [N] in 0..2 pad; dy = dx = pad leaves an image where it is.
    flip
        Bool [N], or None for no mirroring.
    pad
        Pixels to pad on each side.

    Returns
    -------
    Tensor
        [N, C, H, W], with the dtype and layout of x.

    Examples
    --------
    >>> x = torch.arange(4.0).view(1, 1, 2, 2)
    >>> augment(x, torch.tensor([1]), torch.tensor([2]), pad=1)  # one to the left
    tensor([[[[1., 0.],
              [3., 0.]]]])
    """
    N, C, H, W = x.shape
    i = torch.arange(H, device=x.device) + (dy - pad)[:, None]  # [N, H]
    j = torch.arange(W, device=x.device).expand(N, W)
    if flip is not None:
        j = torch.where(flip[:, None], W - 1 - j, j)
    j = j + (dx - pad)[:, None]  # [N, W]
    inside = ((i >= 0) & (i < H))[:, :, None] & ((j >= 0) & (j < W))[:, None, :]  # [N, H, W]
    at = i.clamp(0, H - 1)[:, :, None] * W + j.clamp(0, W - 1)[:, None, :]  # [N, H, W]
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        rows = x.permute(0, 2, 3, 1).view(N, H * W, C)
        moved = rows.gather(1, at.view(N, -1, 1).expand(N, H * W, C)).view(N, H, W, C)
        return (moved * inside[..., None]).permute(0, 3, 1, 2)
    moved = x.flatten(2).gather(2, at.view(N, 1, -1).expand(N, C, H * W)).view(N, C, H, W)
    return moved * inside[:, None]
