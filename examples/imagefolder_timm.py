"""A folder of JPEGs, a timm backbone and a Max-Mahalanobis head: the way to train on ImageNet, in small.

    pip install '.[timm]' torchvision                              # in the checkout
    python examples/imagefolder_timm.py images --generate          # writes a small folder of images first
    python examples/imagefolder_timm.py /data/imagenet --model resnet50 --size 224 --steps 450000 --batch-size 256

The folder has `train/<class>/*.jpg` and `val/<class>/*.jpg`. Images are decoded by the workers of a `DataLoader`,
travel as bytes and are never in memory all at once. The scaling of pixels is part of the network, so that
`mmlda.evaluate` and `mmlda.audit` can attack it afterwards.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mmlda


class Normalize(nn.Module):
    """Scale pixels in [0, 1] as the backbone expects them."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def generate(folder: Path, classes: int = 20, images: int = 60, size: int = 160) -> None:
    """Write JPEGs of stripes: a class has a direction, a width and a pair of colours; one image in five is for val."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:size, :size] / size
    for k in range(classes):
        angle, waves = math.pi * (k % 5) / 5, (5, 12)[k // 5 % 2]
        dark, bright = ((0.2, 0.3, 0.7), (0.9, 0.6, 0.2)) if k // 10 % 2 else ((0.1, 0.5, 0.3), (0.8, 0.3, 0.8))
        for n in range(images):
            turn = angle + rng.normal(0, 0.05)
            phase = 2 * math.pi * (waves * (math.cos(turn) * columns + math.sin(turn) * rows) + rng.random())
            share = (0.5 + 0.5 * np.sin(phase))[..., None]
            picture = share * bright + (1 - share) * np.array(dark) + rng.normal(0, 0.15, (size, size, 3))
            path = folder / ("val" if n % 5 == 4 else "train") / f"class{k:02d}" / f"{n}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((255 * picture.clip(0, 1)).astype(np.uint8)).save(path, quality=90)


def network(name: str, num_classes: int, pretrained: bool) -> nn.Module:
    """A timm network with a Max-Mahalanobis head, on pixels in [0, 1]."""
    from timm import create_model
    from timm.data import resolve_model_data_config

    net = create_model(name, pretrained=pretrained)
    scaling = resolve_model_data_config(net)
    return mmlda.swap_head(nn.Sequential(Normalize(scaling["mean"], scaling["std"]), net), num_classes=num_classes)


def loaders(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Batches of bytes: random crops to train on, centre crops to measure on."""
    from torchvision import datasets, transforms

    crop = transforms.RandomResizedCrop(args.size, scale=(0.5, 1.0), ratio=(1.0, 1.0))
    centre = [transforms.Resize(round(args.size * 8 / 7)), transforms.CenterCrop(args.size)]
    common = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": args.device == "cuda"}
    made = []
    for part, steps in (("train", [crop]), ("val", centre)):
        images = datasets.ImageFolder(args.folder / part, transforms.Compose([*steps, transforms.PILToTensor()]))
        shuffle, stays = part == "train", args.workers > 0
        made.append(DataLoader(images, shuffle=shuffle, drop_last=shuffle, persistent_workers=stays, **common))
    return made[0], made[1]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with train/<class>/*.jpg and val/<class>/*.jpg")
    parser.add_argument("--generate", action="store_true", help="write 20 classes of 60 images to the folder first")
    parser.add_argument("--model", default="resnet18", help="name of a timm network that ends in a linear layer")
    parser.add_argument("--pretrained", action="store_true", help="start from timm's weights, which it downloads")
    parser.add_argument("--size", type=int, default=128, help="height and width of the crops")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=8, help="processes that decode images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/imagefolder"), help="folder of the run and the network")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.generate:
        generate(args.folder)
    try:
        train, val = loaders(args)
        classes = len(train.dataset.classes)  # type: ignore[attr-defined]
        torch.manual_seed(0)
        model = network(args.model, classes, args.pretrained).to(args.device)
    except ModuleNotFoundError as error:
        raise SystemExit(f"this example needs torchvision and timm, got: {error}") from None
    recipe = mmlda.Recipe(
        steps=args.steps,
        optimizer="adam",
        lr=args.lr,
        decoupled=True,
        weight_decay=0.05,
        schedule="cosine",
        warmup=args.steps // 10,
    )
    run = mmlda.fit(model, train, recipe, out=args.out)  # a stopped run resumes here
    print(f"{run.seconds / run.step * 1000:.1f} ms per step, compilation included")
    found = mmlda.accuracy(model, val)
    print(f"accuracy {found.accuracy:.2%} on {found.n} images of {classes} classes")
    again = mmlda.load(args.out, model=network(args.model, classes, False), device=args.device)
    print(f"loaded from {args.out}: accuracy {mmlda.accuracy(again, val).accuracy:.2%}")


if __name__ == "__main__":
    main()
