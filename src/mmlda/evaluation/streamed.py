"""Clean and attacked images of a `DataLoader`, one batch in memory at a time."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mmlda._utils.device import Model
from mmlda._utils.progress import progress
from mmlda.attacks import Attack
from mmlda.data.loaders import batches_for, loader_length
from mmlda.evaluation.accuracy import answers
from mmlda.evaluation.robustness import attack_part


@dataclass
class Streamed:
    """What is kept of a loader's images: labels [N], logits [N, L], and the outcomes of each attack per batch."""

    labels: Tensor
    classes: tuple[str, ...]
    sha256: str
    logits: Tensor
    passes: int
    seconds: float
    attacks: dict[int, list[dict[str, Tensor]]]
    unit: str
    name: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of classes L."""
        return len(self.classes)

    def digest(self) -> str:
        """As that of `ImageData`; empty if the loader does not know its length, or only some images are bytes."""
        return self.sha256


def stream(
    model: Model, net: Model, loader: DataLoader[Any], attacks: Sequence[Attack], place: torch.device, *, show: bool
) -> Streamed:
    """Read a loader once, and measure each batch clean and under every attack; `net` is the model at its place."""
    labels, logits, outcomes = [], [], defaultdict(list)
    classes: tuple[str, ...] = ()
    unit = "images"
    passes, count, seconds, total = None, 0, 0.0, loader_length(loader) or 0
    hasher, kinds = hashlib.sha256(), set()
    with progress("images", total, unit="images", every=10.0, show=show) as report:
        for images in batches_for(model, loader):
            if not count:
                hasher.update(f"{images.images.dtype} {[total, *images.images.shape[1:]]}".encode())
            hasher.update(images.images.cpu().contiguous().numpy().data)
            kinds.add(images.images.dtype)
            unit = images.unit
            begin = time.perf_counter()
            z, passes = answers(net, images, device=place, batch_size=len(images), passes=passes)
            seconds += time.perf_counter() - begin
            for number, attack in enumerate(attacks):
                part = attack_part(net, images, count, attack, place)
                outcomes[number].append({key: value.cpu() for key, value in part.items() if key != "x_adv"})
            labels.append(images.labels.cpu())
            logits.append(z)
            classes = max(classes, images.classes, key=len)
            count += len(images)
            report(count)
    joined = torch.cat(labels)
    hasher.update(joined.numpy().data)
    sha256 = hasher.hexdigest() if count == total and len(kinds) == 1 else ""
    return Streamed(joined, classes, sha256, torch.cat(logits).double(), passes or 1, seconds, dict(outcomes), unit)
