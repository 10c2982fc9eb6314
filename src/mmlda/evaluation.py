"""How good a network is on data: accuracy overall, by class and balanced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmlda.data import ImageData

__all__ = ["Accuracy", "accuracy", "predictions"]


@dataclass(frozen=True)
class Accuracy:
    """Shares of images whose class was predicted. `per_class` is NaN for a class without images."""

    accuracy: float
    balanced: float  # mean over the classes that have images
    per_class: tuple[float, ...]
    n: int

    @property
    def error(self) -> float:
        """Test error in percent, as in the paper's Table 1."""
        return 100.0 * (1.0 - self.accuracy)


@torch.no_grad()
def predictions(
    model: nn.Module, data: ImageData, *, device: torch.device | str | None = None, batch_size: int = 1000
) -> Tensor:
    """The predicted classes [N], on the CPU; the model is in eval mode meanwhile."""
    first = next(model.parameters(), None)
    device = torch.device(device) if device is not None else first.device if first is not None else data.device
    training = [module for module in model.modules() if module.training]
    model.eval().to(device)
    try:
        parts = [model(data.pixels(rows).to(device)).argmax(1)
                 for rows in torch.arange(len(data), device=data.device).split(batch_size)]  # fmt: skip
    finally:
        for module in training:
            module.training = True
    return torch.cat(parts).cpu()


def accuracy(
    model: nn.Module, data: ImageData, *, device: torch.device | str | None = None, batch_size: int = 1000
) -> Accuracy:
    """Accuracy of a network on data, in float32.

    >>> data = ImageData(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1]), ("cat", "dog"))
    >>> always_dog = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=True))
    >>> _ = always_dog[1].bias.data.copy_(torch.tensor([-1e3, 1e3]))
    >>> result = accuracy(always_dog, data)
    >>> round(result.accuracy, 3), result.balanced, result.per_class
    (0.667, 0.5, (0.0, 1.0))
    """
    labels = data.labels.cpu()
    right = (predictions(model, data, device=device, batch_size=batch_size) == labels).double()
    counts = torch.bincount(labels, minlength=data.num_classes).double()
    per_class = torch.bincount(labels, right, minlength=data.num_classes) / counts  # [L], NaN for 0 / 0
    return Accuracy(right.mean().item(), per_class[counts > 0].mean().item(), tuple(per_class.tolist()), len(data))
