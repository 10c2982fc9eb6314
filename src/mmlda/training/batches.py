"""The batches of training data on the device, augmented: each a function of (seed, step) alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mmlda._utils.checks import invalid
from mmlda.data import ImageData, augment, draw_augmentation
from mmlda.data.images import gather
from mmlda.training.recipes import Recipe


def share() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) outside torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def check_augmentation(images: Tensor, recipe: Recipe) -> None:
    """Raise ValueError if a recipe would crop or mirror the rows of a table."""
    if images.dim() == 2 and (recipe.pad or recipe.flip):
        raise invalid("pad and flip", "0 and False for a table", (recipe.pad, recipe.flip))


class Batches:
    """The images on the device, and each epoch's order and random draws, a function of (seed, epoch) alone.

    An epoch has N // batch_size whole batches; what is left over is another part of the images in every epoch.
    """

    def __init__(self, data: ImageData, recipe: Recipe, device: torch.device):
        check_augmentation(data.images, recipe)
        self.recipe, self.device, self.shape = recipe, device, data.shape
        self.images, self.labels = data.images.to(device), data.labels.to(device)
        self.parts = None if data.parts is None else data.parts.to(device)
        self.adversarial: Tensor | None = None  # [N, C, H, W] float32, crafted once
        self.size = min(recipe.batch_size, len(data))
        self.per_epoch = len(data) // self.size
        shape = (self.per_epoch, self.size)
        self.order = torch.zeros(shape, dtype=torch.int64, device=device)
        self.draws = torch.zeros((3, *shape), dtype=torch.int64, device=device)  # dy, dx, flip
        self.uniform = torch.zeros(shape, device=device)  # for a perturbation drawn per image
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # the batch of the epoch that comes next

    def seek(self, step: int) -> None:
        """Make the batch of `step` the next one. Needed at the start and whenever an epoch begins."""
        epoch, place = divmod(step, self.per_epoch)
        generator = torch.Generator(self.device).manual_seed((self.recipe.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(self.labels), generator=generator, device=self.device)
        self.order.copy_(order[: self.order.numel()].view_as(self.order))
        draws = draw_augmentation(*self.order.shape, pad=self.recipe.pad, generator=generator, device=self.device)
        self.draws.copy_(torch.stack([draw.to(torch.int64) for draw in draws]))
        self.uniform.copy_(torch.rand(self.order.shape, generator=generator, device=self.device))
        self.place.fill_(place)

    def take(self, part: int, parts: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Part `part` of `parts` of the next batch: pixels, labels, crafted pixels if any, uniform draws, rows."""
        rows = self.order.index_select(0, self.place)[0, part::parts]  # [n]
        dy, dx, flip = self.draws.index_select(1, self.place)[:, 0, part::parts]  # [n] each
        uniform = self.uniform.index_select(0, self.place)[0, part::parts]
        crafted = None if self.adversarial is None else self.pixels(self.adversarial, rows, dy, dx, flip)
        return self.pixels(None, rows, dy, dx, flip), self.labels[rows], crafted, uniform, rows

    def pixels(self, images: Tensor | None, rows: Tensor, dy: Tensor, dx: Tensor, flip: Tensor) -> Tensor:
        """Augmented pixels of the rows of `images`, by default the data's."""
        x = gather(self.images, self.parts, rows) if images is None else images[rows]
        return to_pixels(x, dy, dx, flip, self.recipe)

    def advance(self) -> None:
        self.place.add_(1)

    def for_any_length(self) -> None:
        """Mark the length of datasets as dynamic for the compiler, so that one program serves all of them.

        Otherwise each length is compiled separately, and the compiler gives up at the ninth.
        """
        tensors = (self.images, self.labels, self.parts, self.adversarial)
        per_image = [(tensor, 0) for tensor in tensors if tensor is not None]
        for tensor, dim in (*per_image, (self.order, 0), (self.draws, 1), (self.uniform, 0)):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def to_pixels(x: Tensor, dy: Tensor, dx: Tensor, flip: Tensor, recipe: Recipe) -> Tensor:
    """Images as the network takes them: augmented, floats in [0, 1], channels last."""
    if recipe.pad or recipe.flip:
        x = augment(x, dy, dx, flip == 1 if recipe.flip else None, pad=recipe.pad)
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
