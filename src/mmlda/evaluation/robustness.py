"""Accuracy under one attack, with the outcome of every image, resumable chunk by chunk.

model, images -> chunks, one file each -> the outcome of every image -> Result
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mmlda._utils.device import Model, device_of, on_device
from mmlda._utils.progress import progress
from mmlda._utils.tensors import packed
from mmlda.attacks import BIM, FGSM, ILCM, PGD, Attack, CarliniWagner, compiled
from mmlda.data import ImageData, as_images
from mmlda.evaluation.accuracy import first, predictions
from mmlda.evaluation.chunks import Chunks, chunk_files
from mmlda.evaluation.provenance import check_reproducible, describe_attack, identity
from mmlda.results import Result, head_of, traced

__all__ = ["adversarial_images", "attack_images", "small"]

OUTCOMES = ("success", "prediction", "linf", "l2", "distortion", "steps")


def attack_images(
    model: Model,
    data: Any,
    attack: Attack,
    *,
    out: str | Path | None = None,
    n: int | None = None,
    chunk: int | None = None,
    name: str = "",
    device: torch.device | str | None = None,
    compile: bool = False,
    picture: bool = True,
    show: bool = True,
) -> Result:
    """Attack the first `n` images, one chunk after another: the accuracy that is left, as a `Result`.

    With `out`, that folder receives `result.json`, the outcome of every image in `result.safetensors`, one file with
    the adversarial images per finished chunk, and some of them in `examples.png`. The same call resumes after the
    last finished chunk. Random noise depends on an image's position in the data, so the chunk size changes nothing
    but rounding.

    Args:
        model: images in [0, 1] -> logits: a module or any function. Its device and mode do not change.
        data: anything `mmlda.data.as_images` takes: an `ImageData`, a pair (x, y), a `Dataset`, a `DataLoader`.
        attack: where results are saved, its loss must be a name or a module-level function, so that a later call can
            tell whether it may resume.
        n: how many images, the first of `data`; all by default.
        chunk: images per chunk; by default many for fast attacks and on a GPU, few for slow ones on the CPU.
        name: of the network, for the result; required with `out` for a plain function.
        device: where to compute; the model's own device by default.
        compile: attack the network as `mmlda.attacks.compiled` makes it: worthwhile on CUDA, for thousands of steps.
        picture: whether to write `examples.png`.
    """
    place, net, images = device_of(model, device), on_device(model, device), first(as_images(data), n)
    about, described = traced(net, images, place, name), describe_attack(attack)
    if out is not None:
        check_reproducible(attack)
    size = _chunk_size(attack, images, place) if chunk is None else chunk
    asked = described | ({"compiled": True} if compile else {})
    chunks = Chunks(out, len(images), size, {} if out is None else identity(about, attack=asked))
    _attack_missing(net, images, attack, chunks, place, compile=compile, show=show)
    parts = chunks.load()
    joined = {key: torch.cat([part[key] for part in parts]) for key in (*OUTCOMES, "clean")}
    head = head_of(net)
    about |= {"head": head, "attack": described["name"], "attack_settings": described["settings"], "compiled": compile}
    result = _result(attack, images, joined, parts, about)
    if out is None:
        return result
    result = result.save(out, packed(_compact(joined)))
    if picture:
        from mmlda.evaluation.pictures import adversarial_examples

        x_adv = torch.cat([part["x_adv"] for part in parts])
        adversarial_examples(Path(out) / "examples.png", images, x_adv, joined["clean"], joined["prediction"])
    return result


def adversarial_images(folder: str | Path) -> Tensor:
    """The adversarial images that `attack_images` left in its folder, [N, C, H, W]."""
    return torch.cat([load_file(path)["x_adv"] for path in chunk_files(folder)])


def _attack_missing(
    model: Model, data: ImageData, attack: Attack, chunks: Chunks, place: torch.device, *, compile: bool, show: bool
) -> None:
    """Attack the chunks that are not finished."""
    missing = chunks.missing()
    done = len(data) - sum(map(len, missing))
    attacked = compiled(model) if compile and missing else model  # type: ignore[arg-type]
    seen = won = 0
    with progress(type(attack).__name__, len(data), unit="images", start=done, every=10.0, show=show) as report:
        for part in missing:
            rows = torch.arange(part.start, part.stop, device=data.device)
            begin = time.perf_counter()
            clean = predictions(model, data.subset(rows), device=place)
            result = attack(attacked, data.pixels(rows).to(place), data.labels[rows].to(place), index=rows.to(place))
            values = {key: getattr(result, key) for key in OUTCOMES} | {"x_adv": result.x_adv, "clean": clean}
            if result.zero_gradient is not None:
                values["zero_gradient"] = torch.tensor(result.zero_gradient, dtype=torch.float64)
            values["seconds"] = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            chunks.save(part.start, values)
            done, seen, won = done + len(rows), seen + len(rows), won + int(result.success.sum())
            report(done, success=won / seen)


def _chunk_size(attack: Attack, data: ImageData, place: torch.device) -> int:
    """Enough images to keep a device busy, few enough to see progress and to lose little to a kill."""
    slow, slowest = not isinstance(attack, FGSM | BIM | ILCM | PGD), isinstance(attack, CarliniWagner)
    if place.type == "cpu":
        return min(50 if slowest else 100, max(20, 60_000 // math.prod(data.shape))) if slow else 500
    return 500 if slowest else 1000 if slow else 2500


def _result(
    attack: Attack, data: ImageData, joined: dict[str, Tensor], parts: list[dict[str, Tensor]], about: dict[str, Any]
) -> Result:
    """The accuracy over all images. An image that was wrong before the attack counts as wrong."""
    labels, n = data.labels.cpu(), len(data)
    right = joined["clean"] == labels
    held = int((right & (joined["prediction"] == labels)).sum())  # a missed target does not count as held
    settings = about["attack_settings"]
    zero = [float(part["zero_gradient"]) * len(part["success"]) for part in parts if "zero_gradient" in part]
    return Result.counted(
        held,
        n,
        name="result",
        kind="evaluation",
        what=f"accuracy under {about['attack']} on {n} images of {data.name or 'the data'}",
        dataset=data.name,
        eps=settings.get("eps"),
        attack_steps=settings.get("steps"),
        seed=attack.seed,
        seconds=sum(float(part["seconds"]) for part in parts),
        numbers={**_summary(joined, right, labels), "zero_gradient": sum(zero) / n if zero else None},
        **about,
    )


def _summary(joined: dict[str, Tensor], right: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Shares over all images; distances over those that were right and are broken.

    "plain_accuracy" also counts an image that was wrong before and is right under attack.
    """
    broken = right & joined["success"]
    summary: dict[str, float | None] = {
        "clean_accuracy": right.double().mean().item(),
        "plain_accuracy": (joined["prediction"] == labels).double().mean().item(),
        "success_rate": (broken.sum() / right.sum().clamp_min(1)).item(),
        "mean_steps": joined["steps"].double().mean().item(),
    }
    for key in ("linf", "l2", "distortion"):
        values = joined[key][broken].double()
        summary[f"mean_{key}"] = values.mean().item() if len(values) else None
        summary[f"median_{key}"] = values.quantile(0.5).item() if len(values) else None
    return summary


def _compact(joined: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outcome of every image in nine bytes."""
    labels = {key: small(joined[key]) for key in ("clean", "prediction")}
    return {"success": joined["success"], **labels, **{k: joined[k].half() for k in ("linf", "l2", "distortion")}}


def small(classes: Tensor) -> Tensor:
    """Classes in as few bytes as hold them."""
    return classes.to(torch.uint8 if int(classes.max()) < 256 else torch.int32)
