"""How good a network is on data: accuracy overall, by class and balanced; and what an attack leaves of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mmlda.attacks import Attack
from mmlda.checkpoints import packed, save_tensors, versions
from mmlda.data import ImageData
from mmlda.files import write_json
from mmlda.progress import progress

__all__ = ["Accuracy", "accuracy", "attack_images", "predictions"]


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


OUTCOMES = ("success", "prediction", "linf", "l2", "distortion", "steps")


def attack_images(
    model: nn.Module,
    data: ImageData,
    attack: Attack,
    *,
    out: str | Path,
    n: int | None = None,
    chunk: int = 500,
    device: torch.device | str | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Attack the first `n` images, a chunk at a time; the summary, also in `out/result.json`.

    Each finished chunk is a file of its own in `out`, with the adversarial images and what happened to each; a run
    that was stopped goes on after the last of them. `out/examples.png` shows some. Noise belongs to an image's
    place in the data, so the chunks' size changes nothing but rounding.
    """
    folder, n = Path(out), len(data) if n is None else n
    if not 1 <= n <= len(data):
        raise ValueError(f"n = {n}: expected 1 to {len(data)}, the number of images")
    if chunk < 1:
        raise ValueError(f"chunk = {chunk}: expected at least 1")
    place = torch.device(device) if device is not None else next(model.parameters()).device
    model.to(place)
    about = _attack_settings(model, data, attack, n, chunk)
    if (folder / "attack.json").is_file() and (there := json.loads((folder / "attack.json").read_text())) != about:
        changed = sorted(key for key in about if there.get(key) != about[key])
        what = f"with other {', '.join(changed)}; choose another folder"
        raise ValueError(f"out = {str(folder)!r} holds another attack, {what}")
    write_json(folder / "attack.json", about)
    starts = range(0, n, chunk)
    missing = [start for start in starts if not _chunk(folder, start).is_file()]
    done = n - sum(min(chunk, n - start) for start in missing)
    with progress(type(attack).__name__, n, unit="images", start=done, every=10.0, show=show) as report:
        for start in missing:
            rows = torch.arange(start, min(start + chunk, n), device=data.device)
            x, y = data.pixels(rows).to(place), data.labels[rows].to(place)
            begin = time.perf_counter()
            clean = predictions(model, data.subset(rows), device=place)
            result = attack(model, x, y, index=rows.to(place))
            values = {name: getattr(result, name) for name in OUTCOMES} | {"x_adv": result.x_adv, "clean": clean}
            if result.zero_gradient is not None:
                values["zero_gradient"] = torch.tensor(result.zero_gradient, dtype=torch.float64)
            values["seconds"] = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            save_tensors(_chunk(folder, start), values)
            done += len(rows)
            report(done, success=float(result.success.float().mean()))
    parts = [load_file(_chunk(folder, start)) for start in starts]
    summary = {**about, **_summary(parts, data.labels[:n].cpu()), "versions": versions(place)}
    write_json(folder / "result.json", summary)
    from mmlda.pictures import adversarial_examples

    x_adv, clean, prediction = (torch.cat([part[name] for part in parts]) for name in ("x_adv", "clean", "prediction"))
    adversarial_examples(folder / "examples.png", data.subset(slice(n)), x_adv, clean, prediction)
    return summary


def _chunk(folder: Path, start: int) -> Path:
    return folder / f"images-{start:06d}.safetensors"


def _attack_settings(model: nn.Module, data: ImageData, attack: Attack, n: int, chunk: int) -> dict[str, Any]:
    """What decides the outcome, as JSON: attack, data and the very weights."""
    settings = {key: value if value is None or isinstance(value, int | float | str | bool | tuple) else str(value)
                for key, value in dataclasses.asdict(attack).items()}  # fmt: skip
    value = {
        "attack": type(attack).__name__,
        "settings": settings,
        "data": data.name,
        "data_sha256": data.digest(),
        "network_sha256": hashlib.sha256(packed(model.state_dict())).hexdigest(),
        "n": n,
        "chunk": chunk,
    }
    return json.loads(json.dumps(value))


def _summary(parts: list[dict[str, Tensor]], labels: Tensor) -> dict[str, Any]:
    """Accuracy under attack over all images; distances over those that were right and were broken."""
    joined = {name: torch.cat([part[name] for part in parts]) for name in (*OUTCOMES, "clean")}
    right = joined["clean"] == labels
    broken = right & joined["success"]
    zero = [float(part["zero_gradient"]) * len(part["success"]) for part in parts if "zero_gradient" in part]
    summary: dict[str, Any] = {
        "clean_accuracy": right.double().mean().item(),
        "robust_accuracy": (right & ~joined["success"]).double().mean().item(),
        "success_rate": (broken.sum() / right.sum().clamp_min(1)).item(),
        "zero_gradient": sum(zero) / len(labels) if zero else None,
        "seconds": sum(float(part["seconds"]) for part in parts),
    }
    for name in ("linf", "l2", "distortion"):
        values = joined[name][broken].double()
        summary[f"mean_{name}"] = values.mean().item() if len(values) else None
        summary[f"median_{name}"] = values.median().item() if len(values) else None
    assert all(v is None or math.isfinite(v) for v in summary.values())
    return summary
