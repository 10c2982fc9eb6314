"""Accuracy on a validation set along the way: the best network, and when to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmlda._utils.checks import check_count
from mmlda._utils.device import device_of
from mmlda.data import ImageData
from mmlda.evaluation.accuracy import accuracy
from mmlda.training.batches import share
from mmlda.training.loader import describe_loader
from mmlda.training.step import Average


@dataclass
class Validation:
    """A validation set, what its accuracy determines, and the best measurement so far.

    Parameters
    ----------
    data
        The validation set; a `DataLoader` is read again for each measurement.
    every
        Steps between two measurements; there is one after the last step too.
    keep_best
        Keep the weights of the best measurement, which become the network at the end.
    patience
        Stop after this many measurements in a row without improvement; None never stops.
    """

    data: ImageData | DataLoader[Any]
    every: int
    keep_best: bool = False
    patience: int | None = None
    best: float = -1.0  # accuracy
    best_step: int = 0
    waited: int = 0  # measurements since then
    weights: dict[str, Tensor] = field(default_factory=dict)  # of the best, with keep_best

    def __post_init__(self) -> None:
        check_count("validate_every", self.every, 1)
        if self.patience is not None:
            check_count("patience", self.patience, 1)

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def describe(self) -> dict[str, Any]:
        """What determines a run's result, for its run.json."""
        if isinstance(self.data, DataLoader):
            about = describe_loader(self.data)
        else:
            about = {"images": len(self.data), "sha256": self.data.digest()}
        return {**about, "every": self.every, "keep_best": self.keep_best, "patience": self.patience}

    def measure(self, model: nn.Module, average: Average | None, step: int) -> float:
        """The accuracy of the current network, with averaged weights if there are any."""
        with _as_network(model, average), torch.random.fork_rng(devices=[]):  # a loader draws a seed for its workers
            found = torch.tensor(accuracy(model, self.data).accuracy, dtype=torch.float64)
            if share()[1] > 1:  # batch norm's statistics differ between processes, and all must decide alike
                found = found.to(device_of(model))
                dist.broadcast(found, 0)
            value = float(found)
            self.waited += 1
            if value > self.best:
                self.best, self.best_step, self.waited = value, step, 0
                if self.keep_best:
                    self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        return value

    def state(self) -> dict[str, Any]:
        """The numbers of a checkpoint's record."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}


@contextmanager
def _as_network(model: nn.Module, average: Average | None) -> Iterator[None]:
    """The model with its averaged weights; in place, as a captured step reads its tensors."""
    kept = {} if average is None else {name: tensor.clone() for name, tensor in average.current.items()}
    if average is not None:
        average.store()
    try:
        yield
    finally:
        for name, tensor in kept.items():
            average.current[name].copy_(tensor)  # type: ignore[union-attr]
