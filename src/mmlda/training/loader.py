"""Training batches from a `DataLoader`, for data that does not fit in memory.

Each batch is copied beside the computation into buffers at a fixed address, which a captured step reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from mmlda._utils.checks import invalid
from mmlda.attacks.checks import warn_caller
from mmlda.data import ImageData, draw_augmentation
from mmlda.data.alignment import relabelled, rescaled
from mmlda.data.convert import as_batch, as_labels, as_pair, dataset_bounds, dataset_classes, with_bounds
from mmlda.data.loaders import listed_classes, loader_length, loader_sampler
from mmlda.training.batches import Batches, check_augmentation, share, to_pixels
from mmlda.training.recipes import Recipe

DRAWN = 64  # steps whose random numbers are drawn at once: their launches would take longer than a step
AHEAD = 2  # batches that may wait on the device, so that a host far ahead of it does not fill its memory


def batch_size(loader: DataLoader[Any]) -> int:
    """Images per training step: those of the loader's batch, times the number of processes.

    Where the loader does not state it (`batch_size=None`, or a batch sampler of the user's), it is that of the first
    batch, which is read for this.
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        with torch.random.fork_rng(devices=[]):
            batch = next(iter(loader), None)
        if batch is None:
            raise ValueError("data must have at least one image, got an empty DataLoader")
        size = len(as_labels(as_pair(batch, "a batch of data")[1], dataset_classes(loader))[0])
    return size * share()[1]


def whole_batches(loader: DataLoader[Any], size: int) -> int | None:
    """How many batches of `size` images an epoch has; None if unknown, as for a batch sampler of the user's own."""
    sampler: Any = loader.batch_sampler
    if sampler is None and not isinstance(loader.dataset, IterableDataset):  # each item of the dataset is a batch
        return len(loader)
    if isinstance(sampler, list | tuple):
        return sum(len(rows) == size for rows in sampler)
    if type(sampler) is not BatchSampler:
        return None
    images = loader_length(loader)
    if images is not None and images < size:
        raise ValueError(f"data must have at least one whole batch of {size} images, got {images}")
    return None if images is None else images // size


def describe_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    """The part of a run's description that a loader can give without being read."""
    return {"name": type(loader.dataset).__name__, "images": loader_length(loader), "sha256": None}


class LoaderBatches(Batches):
    """The batches of a `DataLoader`.

    Every epoch reads the loader once, with torch's random numbers a function of (seed, epoch, process), and skips
    incomplete batches. A resumed run reads and discards the batches of its epoch that were already used, so it sees
    the same batches again. A loader without a length starts a new epoch instead. Workers that persist keep their random
    numbers from epoch to epoch, so what they draw after a resume differs; the order of the images does not.

    `recipe.batch_size` is that of `batch_size`. `names` and `bounds` are the network's: labels follow the one, the rows
    of a table the other.
    """

    shape: tuple[int, ...] = ()  # of an image; unknown before the first batch

    def __init__(
        self,
        loader: DataLoader[Any],
        recipe: Recipe,
        device: torch.device,
        num_classes: int | None,
        names: tuple[str, ...] | None = None,
        bounds: Tensor | None = None,
    ):
        if recipe.adversary is not None and recipe.adversary.craft == "once":
            raise invalid("craft", "'online' for a DataLoader", "once")
        self.rank, self.world = share()
        self.sampler, self.iterable = loader_sampler(loader), isinstance(loader.dataset, IterableDataset)
        if self.world > 1 and not (self.iterable or isinstance(self.sampler, DistributedSampler)):
            raise ValueError("data must be a DataLoader with a DistributedSampler in several processes, got another")
        self.loader, self.recipe, self.device, self.num_classes = loader, recipe, device, num_classes
        self.size, self.per_epoch = recipe.batch_size, 1  # the loop seeks before every epoch: here, every step
        self.local = self.size // self.world
        self.whole = whole_batches(loader, self.local)
        listed, self.names = listed_classes(loader), names
        self.classes = None if listed is None else listed.classes
        self.numbers = None if listed is None else relabelled(names, listed).labels  # the network's, of each class
        self.own, self.bounds = dataset_bounds(loader), bounds  # of a table, and those that its rows shall have
        self.clipped = ""  # a warning about values outside the bounds
        self.seen: set[int] = set()  # labels of the first epoch
        self.step, self.epoch = -1, 0
        self.batches: Iterator[Any] | None = None
        self.random = torch.Generator().get_state()  # torch's random numbers as the loader sees them
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied: deque[torch.cuda.Event] = deque()
        self.rows = torch.arange(self.local, device=device)
        self.draws = torch.zeros(3, DRAWN, self.local, dtype=torch.int64, device=device)  # dy, dx, flip
        self.uniform = torch.zeros(DRAWN, self.local, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # the step among those drawn

    def seek(self, step: int) -> None:
        """Make the batch of `step` the next one."""
        if step == self.step:
            return
        with self._own_random():
            x, y = self._read(step)
        if self.step < 0:
            check_augmentation(x, self.recipe)
            self._check_shards(x)
            self.images, self.labels = torch.empty_like(x, device=self.device), torch.empty_like(y, device=self.device)
            self.shape = tuple(x.shape[1:])
        elif x.shape != self.images.shape or x.dtype != self.images.dtype:
            wanted = f"{self.images.dtype} {list(self.images.shape)} like the first"
            raise ValueError(f"every batch of data must be {wanted}, got {x.dtype} {list(x.shape)}")
        self._copy(x, y)
        if step != self.step + 1 or step % DRAWN == 0:
            self._draw(step)
        self.step = step

    def _draw(self, step: int) -> None:
        """Random numbers of the steps around this one: a function of (seed, step, process)."""
        part, place = divmod(step, DRAWN)
        self.place.fill_(place)
        if not (self.recipe.pad or self.recipe.flip or self.recipe.adversary is not None):
            return
        seed = (self.recipe.seed * 1_000_003 + part * self.world + self.rank) % 2**63
        generator = torch.Generator(self.device).manual_seed(seed)
        draws = draw_augmentation(DRAWN, self.local, pad=self.recipe.pad, generator=generator)
        self.draws.copy_(torch.stack([draw.to(torch.int64) for draw in draws]))
        self.uniform.copy_(torch.rand(self.uniform.shape, generator=generator, device=self.device))

    def _read(self, step: int) -> tuple[Tensor, Tensor]:
        """The next whole batch, on the host; after a jump, the batch of `step`."""
        if self.batches is None or step != self.step + 1:
            epoch, done = divmod(step, self.whole) if self.whole else (step, 0)
            self._begin(epoch)
            for _ in range(done):
                next(self.batches, None)  # type: ignore[arg-type]
            self.seen = {0} if done else set()  # unknown
        fresh = False
        while True:
            batch = next(self.batches, None)  # type: ignore[arg-type]
            if batch is None:
                if fresh:
                    raise ValueError(f"data must have at least one whole batch of {self.local} images, got none")
                self._warn_of_labels_from_1()
                self._begin(self.epoch + 1)
                fresh = True
                continue
            x, y = as_batch(batch, self.classes, self.num_classes, self.names)
            if len(y) > self.local:
                raise ValueError(f"every batch of data must be at most {self.local} images, got {len(y)}")
            if self.epoch == 0 and self.classes is None:
                self.seen.update(y.tolist())
            if len(y) == self.local:
                return self._rescaled(x), y if self.numbers is None else self.numbers[y]

    def _rescaled(self, x: Tensor) -> Tensor:
        """Rows of a table in the network's bounds; other images unchanged."""
        if self.own is None or self.bounds is None or torch.equal(self.own, self.bounds.to(self.own)):
            return x
        labels = torch.zeros(len(x), dtype=torch.int64)
        data, clipped = rescaled(with_bounds(ImageData(x, labels, ("any",)), self.own), self.bounds)
        if clipped and not self.clipped:
            warn_caller(f"{clipped}; later batches are clipped without a warning")
        self.clipped = self.clipped or clipped
        return data.images

    def _warn_of_labels_from_1(self) -> None:
        """Warn where an epoch had all classes of the network except class 0, and classes have no names."""
        L = self.num_classes or 0
        if self.epoch == 0 and L > 2 and 0 not in self.seen and len(self.seen) == L - 1:
            warn_caller(f"class 0 of {L} has no images: subtract 1 if the labels begin at 1")

    def _check_shards(self, x: Tensor) -> None:
        """Raise where an `IterableDataset` begins with the same batch in every process."""
        if self.world == 1 or not self.iterable:
            return
        low = x.double().mean().to(self.device)
        high = low.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        if bool(low == high):
            raise ValueError("data must yield other images in each process, got one IterableDataset in all of them")

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        generator = torch.Generator().manual_seed(((self.recipe.seed * 1_000_003 + epoch) * 8191 + self.rank) % 2**63)
        torch.set_rng_state(generator.get_state())
        if self.loader.generator is None and getattr(self.loader, "_iterator", None) is not None:
            torch.empty((), dtype=torch.int64).random_()  # what new workers are seeded with; those that persist are not
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)
        self.batches = iter(self.loader)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Give the loader a state of torch's generator that dropout and the like in the network do not share."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.random)
        try:
            yield
        finally:
            self.random = torch.get_rng_state()
            torch.set_rng_state(before)

    def _copy(self, x: Tensor, y: Tensor) -> None:
        if self.stream is None:
            self.images.copy_(x)
            self.labels.copy_(y)
            return
        if len(self.copied) == AHEAD:
            self.copied.popleft().synchronize()
        with torch.cuda.stream(self.stream):  # while the step before still computes
            pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in (x, y)]
            arrived = [tensor.to(self.device, non_blocking=True) for tensor in pinned]
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for buffer, tensor in zip((self.images, self.labels), arrived):
            buffer.copy_(tensor)
            tensor.record_stream(current)
        self.copied.append(current.record_event())

    def take(self, part: int, parts: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Part `part` of `parts` of the batch over all processes, of which this one holds its own: see `Batches`."""
        here = slice(part // self.world, None, parts // self.world)
        dy, dx, flip = self.draws.index_select(1, self.place)[:, 0, here]
        uniform = self.uniform.index_select(0, self.place)[0, here]
        x = to_pixels(self.images[here], dy, dx, flip, self.recipe)
        return x, self.labels[here], None, uniform, self.rows[here]

    def first(self) -> ImageData:
        """The first image of the batch that comes next."""
        return ImageData(self.images[:1], self.labels[:1] * 0, ("any",), describe_loader(self.loader)["name"])

    def advance(self) -> None:
        self.place.add_(1)

    def for_any_length(self) -> None:
        """Nothing: all batches have one length."""
