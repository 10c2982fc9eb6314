"""Training speed: this package's loop beside the plain PyTorch loop, in one run on the same data and network.

    python benchmarks/training.py --device cuda --out benchmarks/results/training-h200.json
    python benchmarks/training.py --device cpu --out benchmarks/results/training-cpu.json

On the CPU each contender has a process of its own, since how the C library keeps memory is a process's setting; they
take turns all the same. The plain loop is what most people write: a DataLoader as it comes (and, on CUDA, once more
with worker processes), per-image augmentation, eager float32 (with cuDNN's TF32 convolutions, torch's default),
momentum SGD, the loss read every step. Each round runs some steps of every contender, in turn; the numbers are
medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import mmlda
from mmlda.data import ImageData
from mmlda.models import build
from mmlda.results import code_version
from mmlda.training.loop import Options, Run, training_steps
from mmlda.training.recipes import RECIPES, Recipe, network


class Images(Dataset):
    """One image at a time, cropped and mirrored as torchvision's transforms would."""

    def __init__(self, data: ImageData, pad: int, flip: bool):
        self.data, self.pad, self.flip = data, pad, flip

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int):
        x = self.data.images[i].float() / 255
        if self.pad:
            x = F.pad(x, [self.pad] * 4)
            dy, dx = torch.randint(0, 2 * self.pad + 1, (2,)).tolist()
            x = x[:, dy : dy + self.data.shape[1], dx : dx + self.data.shape[2]]
        if self.flip and torch.rand(()) < 0.5:
            x = x.flip(2)
        return x, self.data.labels[i]


def plain(data: ImageData, recipe: Recipe, config: dict, device: str, workers: int):
    model = build(config, seed=0).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=recipe.weight_decay)
    images = Images(data, recipe.pad, recipe.flip)
    loader = DataLoader(
        images,
        recipe.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=device == "cuda",
        persistent_workers=workers > 0,
    )
    while True:
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()  # for the progress bar
            yield


class Batched(Dataset):
    """A batch at a time, as bytes: a loader that is fast enough."""

    def __init__(self, data: ImageData):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, rows: list[int]):
        return self.data.images[rows], self.data.labels[rows]


def loaded(data: ImageData, recipe: Recipe, config: dict, device: str, workers: int):
    """Training from a DataLoader; crops and mirroring are done on the device, as from memory.

    A worker is another process, and torch takes about a millisecond to hand over its batch, as long as a step takes.
    """
    loader = DataLoader(
        Batched(data),
        recipe.batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=device == "cuda",
        persistent_workers=workers > 0,
        collate_fn=tuple,
    )
    return ours(loader, recipe, config, device)


def ours(data: ImageData | DataLoader, recipe: Recipe, config: dict, device: str, **options):
    run = Run(build(config, seed=0), recipe)
    return training_steps(
        run, data, Options(device=device, log_every=1000, **options), report=lambda done, **numbers: None
    )


def many(count: int, data: ImageData, recipe: Recipe, config: dict, device: str, **options):
    """As `fit_many` does: a stream each, one launch in turn. One `next` is one step of every network."""
    shared = data.to(device)
    streams = [torch.cuda.Stream() for _ in range(count)]
    turns = [ours(shared, recipe, config, device, **options) for _ in range(count)]
    torch.cuda.synchronize()
    while True:
        for steps, stream in zip(turns, streams):
            with torch.cuda.stream(stream):
                next(steps)
        yield


def seconds(steps, count: int, device: str) -> float:
    if isinstance(steps, Apart):
        return steps.seconds(count)
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        next(steps)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


class Apart:
    """Steps in a process of their own; `seconds` asks for some of them."""

    def __init__(self, make, *args, **options):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.work, args=(theirs, make, args, options), daemon=True)
        self.process.start()

    @staticmethod
    def work(pipe, make, args, options):
        torch.set_num_threads(pipe.recv())
        steps = make(*args, **options)
        with suppress(EOFError):  # the end of the benchmark
            while True:
                pipe.send(seconds(steps, pipe.recv(), "cpu"))

    def seconds(self, count: int) -> float:
        self.pipe.send(count)
        return self.pipe.recv()


def resident() -> int:
    """Bytes this process holds in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--root", default=None, help="where the data lies; without it, noise of the same shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    name = "cifar10" if cuda else "mnist"
    if args.root:
        data = mmlda.data.load(name, args.root)[0]
    else:
        shape = (50_000, 3, 32, 32) if cuda else (10_000, 1, 28, 28)
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        data = ImageData(pixels, torch.randint(0, 10, shape[:1], generator=generator), tuple("0123456789"), "noise")
    config, recipe = network("softmax", name), RECIPES[f"{name}-sr"]
    if not cuda:
        torch.set_num_threads(args.threads)
    workers = args.workers if cuda else 0
    given = (data, recipe, config, args.device)
    if not cuda:
        contenders = {  # steps, networks a step, steps a round
            "plain": (Apart(plain, *given, 0), 1, 4),
            "ours": (Apart(ours, *given), 1, 4),
            "ours, from a DataLoader": (Apart(loaded, *given, 0), 1, 4),
            "ours, bfloat16": (Apart(ours, *given, amp=True), 1, 4),
        }
        for steps, _, _ in contenders.values():
            steps.pipe.send(args.threads)
    else:
        contenders = {
            "plain": (plain(*given, 0), 1, 40),
            "ours": (ours(*given), 1, 1000),
            "ours, from a DataLoader": (loaded(*given, 0), 1, 1000),
            f"ours, from a DataLoader, {workers} workers": (loaded(*given, workers), 1, 1000),
            f"plain, {workers} workers": (plain(data, recipe, config, args.device, workers), 1, 40),
            "ours, eager": (ours(data, recipe, config, args.device, eager=True), 1, 40),
            "ours, deterministic": (ours(data, recipe, config, args.device, deterministic=True), 1, 300),
            f"ours, {args.models} networks": (many(args.models, data, recipe, config, args.device), args.models, 200),
        }
    times: dict[str, list[float]] = {key: [] for key in contenders}
    for key, (steps, _, _) in contenders.items():
        begin = time.perf_counter()
        seconds(steps, 2 if not cuda else 10, args.device)
        print(f"{key}: warm after {time.perf_counter() - begin:.1f} s", flush=True)
    for _ in range(args.rounds):
        for key, (steps, networks, count) in contenders.items():
            times[key].append(seconds(steps, count, args.device) / networks)
    growth = None
    if not cuda:  # memory over 1,000 steps of the small network
        digits = mmlda.data.load("digits")[0]
        steps = ours(digits, RECIPES["digits-sr"].scaled(1200), network("softmax", "digits"), "cpu")
        seconds(steps, 100, "cpu")
        before = resident()
        seconds(steps, 1000, "cpu")
        growth = resident() - before
        print(f"memory over 1,000 steps: {growth / 2**20:+.1f} MiB")
    else:
        steps = contenders["ours"][0]
        before = torch.cuda.memory_allocated()
        seconds(steps, 1000, "cuda")
        growth = torch.cuda.memory_allocated() - before
        print(f"device memory over 1,000 steps: {growth / 2**20:+.1f} MiB")
    median = {key: statistics.median(value) for key, value in times.items()}
    for key, value in median.items():
        print(f"{key:24s} {1e3 * value:8.3f} ms a step   {median['plain'] / value:6.2f} x plain")
    if cuda:
        at_once = median["ours"] / median[f"ours, {args.models} networks"]
        print(f"90,000 steps: {90_000 * median['ours'] / 60:.2f} minutes")
        print(f"{args.models} networks at once: {at_once:.2f} x the throughput of one after the other")
        print(f"deterministic: {median['ours, deterministic'] / median['ours']:.2f} x the time")
    result = {
        "what": "seconds a step (a network's step), median over rounds",
        "seconds": median,
        "rounds": times,
        "ratio_to_plain": {key: median["plain"] / value for key, value in median.items()},
        "memory_growth_bytes_over_1000_steps": growth,
        "data": {"name": data.name, "images": len(data), "shape": data.shape},
        "network": config,
        "batch_size": recipe.batch_size,
        "workers": workers,
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "commit": code_version(),
        "versions": {"mmlda": mmlda.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
