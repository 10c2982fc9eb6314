"""What a network answers to every image, as given and under attack: kept image by image, a chunk of them at a time.

    network, images -> chunks, a file each -> the outcome of every image -> Result

Each finished chunk is a file, so work that was stopped, however hard, goes on after the last of them; a folder holds
one piece of work and refuses another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
import uuid
import warnings
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mmlda._utils.files import write_json
from mmlda._utils.progress import progress
from mmlda._utils.tensors import packed, save_tensors
from mmlda.attacks import BIM, FGSM, ILCM, PGD, Attack, CarliniWagner, compiled
from mmlda.data import ImageData
from mmlda.results import Result, head_of, traced

__all__ = [
    "adversarial_images",
    "answer_images",
    "answers",
    "attack_images",
    "describe_attack",
    "device_of",
    "first",
    "predictions",
    "small",
]


@torch.no_grad()
def answers(
    model: nn.Module, data: ImageData, *, device: torch.device | str | None = None, batch_size: int = 1000
) -> Tensor:
    """The logits [N, L], on the CPU; the model is in eval mode meanwhile."""
    place = device_of(model, device)
    training = [module for module in model.modules() if module.training]
    model.eval().to(place)
    try:
        parts = [model(data.pixels(rows).to(place))
                 for rows in torch.arange(len(data), device=data.device).split(batch_size)]  # fmt: skip
    finally:
        for module in training:
            module.training = True
    z = torch.cat(parts).cpu()
    if z.ndim != 2 or z.shape[1] < data.num_classes:
        wanted = f"logits [{len(data)}, {data.num_classes}]"
        raise ValueError(f"model returned {list(z.shape)} for {len(data)} images: expected {wanted}")
    return z


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device asked for, or the one the model is on."""
    some = next(model.parameters(), None)
    return torch.device(device) if device is not None else some.device if some is not None else torch.device("cpu")


def predictions(
    model: nn.Module, data: ImageData, *, device: torch.device | str | None = None, batch_size: int = 1000
) -> Tensor:
    """The predicted classes [N], on the CPU; the model is in eval mode meanwhile."""
    return answers(model, data, device=device, batch_size=batch_size).argmax(1)


def first(data: ImageData, n: int | None) -> ImageData:
    """The first n images; all of them where n is None."""
    if n is not None and not 1 <= n <= len(data):
        raise ValueError(f"n = {n}: expected 1 to {len(data)}, the number of images")
    return data.subset(slice(n))


def answer_images(
    model: nn.Module,
    data: ImageData,
    *,
    out: str | Path,
    about: dict[str, Any],
    chunk: int,
    device: torch.device | str | None = None,
    show: bool = True,
) -> Tensor:
    """The logits [N, L] of the images as given, like `answers`; finished chunks stay in `out` and are not done again.

    `about` is what `mmlda.results.traced` returns.
    """
    folder, starts = Path(out), _starts(len(data), chunk)
    _claim(folder, {"data": about["data"], "network": about["network_sha256"], "chunk": chunk})
    with progress("clean images", len(data), unit="images", every=10.0, show=show) as report:
        for start in starts:
            if not _done(folder, start):
                rows = data.subset(slice(start, start + chunk))
                save_tensors(_chunk(folder, start), {"logits": answers(model, rows, device=device)})
            report(min(start + chunk, len(data)))
    return torch.cat([load_file(_chunk(folder, start))["logits"] for start in starts])


OUTCOMES = ("success", "prediction", "linf", "l2", "distortion", "steps")


def attack_images(
    model: nn.Module,
    data: ImageData,
    attack: Attack,
    *,
    out: str | Path,
    n: int | None = None,
    chunk: int | None = None,
    name: str = "",
    device: torch.device | str | None = None,
    compile: bool = False,
    picture: bool = True,
    show: bool = True,
) -> Result:
    """Attack the first `n` images, a chunk at a time; the result, also in `out/result.json`.

    Each finished chunk is a file of its own in `out`, with the adversarial images and what happened to each; a run
    that was stopped goes on after the last of them. What happened to every image is in `out/result.safetensors`, and
    `out/examples.png`, unless `picture` is false, shows some. Noise belongs to an image's place in the data, so the
    chunks' size changes nothing but rounding. `compile` attacks the network as `mmlda.attacks.compiled` makes it: worth
    its while on CUDA, for attacks of thousands of steps.
    """
    folder, part, place = Path(out), first(data, n), device_of(model, device)
    n, chunk = len(part), _chunk_size(attack, data, place) if chunk is None else chunk
    starts = _starts(n, chunk)
    model.to(place)
    about, described = traced(model, part, place, name), describe_attack(attack)
    kind, settings = described["name"], described["settings"]
    asked = {
        "attack": described | ({"compiled": True} if compile else {}),
        "data": about["data"],
        "network": about["network_sha256"],
        "chunk": chunk,
    }
    _claim(folder, asked)
    missing = [start for start in starts if not _done(folder, start)]
    done = n - sum(min(chunk, n - start) for start in missing)
    attacked, seen, won = compiled(model) if compile and missing else model, 0, 0
    with progress(type(attack).__name__, n, unit="images", start=done, every=10.0, show=show) as report:
        for start in missing:
            rows = torch.arange(start, min(start + chunk, n), device=data.device)
            x, y = data.pixels(rows).to(place), data.labels[rows].to(place)
            begin = time.perf_counter()
            clean = predictions(model, data.subset(rows), device=place)
            result = attack(attacked, x, y, index=rows.to(place))
            values = {key: getattr(result, key) for key in OUTCOMES} | {"x_adv": result.x_adv, "clean": clean}
            if result.zero_gradient is not None:
                values["zero_gradient"] = torch.tensor(result.zero_gradient, dtype=torch.float64)
            values["seconds"] = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            save_tensors(_chunk(folder, start), values)
            done, seen, won = done + len(rows), seen + len(rows), won + int(result.success.sum())
            report(done, success=won / seen)
    parts = [load_file(_chunk(folder, start)) for start in starts]
    joined = {key: torch.cat([one[key] for one in parts]) for key in (*OUTCOMES, "clean")}
    zero = [float(one["zero_gradient"]) * len(one["success"]) for one in parts if "zero_gradient" in one]
    right = joined["clean"] == part.labels.cpu()
    held = int((right & (joined["prediction"] == part.labels.cpu())).sum())  # not where a target was just missed
    found = Result.counted(
        held,
        n,
        name="result",
        kind="evaluation",
        what=f"accuracy under {kind} on {n} images of {data.name or 'the data'}",
        dataset=data.name,
        head=head_of(model),
        attack=kind,
        attack_settings=settings,
        attack_steps=settings.get("steps"),
        eps=settings.get("eps"),
        compiled=compile,
        seed=attack.seed,
        seconds=sum(float(one["seconds"]) for one in parts),
        numbers={**_summary(joined, right, part.labels.cpu()), "zero_gradient": sum(zero) / n if zero else None},
        **about,
    ).save(folder, packed(_compact(joined)))
    if picture:
        from mmlda.evaluation.pictures import adversarial_examples

        x_adv = torch.cat([one["x_adv"] for one in parts])
        adversarial_examples(folder / "examples.png", part, x_adv, joined["clean"], joined["prediction"])
    return found


def adversarial_images(folder: str | Path) -> Tensor:
    """The adversarial images that `attack_images` left in its folder, [N, C, H, W]."""
    return torch.cat([load_file(path)["x_adv"] for path in sorted(Path(folder).glob("images-*.safetensors"))])


def _chunk_size(attack: Attack, data: ImageData, place: torch.device) -> int:
    """So many images that a device is busy, and so few that progress is seen and a kill costs little."""
    slow, slowest = not isinstance(attack, FGSM | BIM | ILCM | PGD), isinstance(attack, CarliniWagner)
    if place.type == "cpu":
        return min(50 if slowest else 100, max(20, 60_000 // math.prod(data.shape))) if slow else 500
    return 500 if slowest else 1000 if slow else 2500


def _starts(n: int, chunk: int) -> range:
    if chunk < 1:
        raise ValueError(f"chunk = {chunk}: expected at least 1")
    return range(0, n, chunk)


def _chunk(folder: Path, start: int) -> Path:
    return folder / f"images-{start:06d}.safetensors"


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Keep a folder of chunks to one piece of work; a ValueError where it holds another."""
    path, about = folder / "work.json", json.loads(json.dumps(about))
    if path.is_file() and any(folder.glob("images-*.safetensors")):  # else nothing was done there yet
        try:
            there = dict(json.loads(path.read_text()))
        except (ValueError, TypeError):
            raise ValueError(f"{path} is damaged: expected what the chunks beside it are of") from None
        if changed := sorted(key for key in about if there.get(key) != about[key]):
            what = f"with other {', '.join(changed)}; choose another folder"
            raise ValueError(f"out = {str(folder)!r} holds other work, {what}")
        return
    write_json(path, about)


def _done(folder: Path, start: int) -> bool:
    """Whether a chunk is there and whole; one that a failing disk cut short is done again."""
    path = _chunk(folder, start)
    try:
        if path.is_file():
            load_file(path)
            return True
    except SafetensorError as error:
        warnings.warn(f"chunk refused and done again: {path}: {error}", stacklevel=3)
    return False


def small(classes: Tensor) -> Tensor:
    """Classes in as few bytes as hold them."""
    return classes.to(torch.uint8 if int(classes.max()) < 256 else torch.int32)


def describe_attack(attack: Attack) -> dict[str, Any]:
    """An attack as JSON: its name and every setting; functions by their names.

    >>> from mmlda.attacks import BIM
    >>> describe_attack(BIM(eps=0.04))["settings"]["eps"]
    0.04
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Attack):
            return describe_attack(value)
        if isinstance(value, tuple | list):
            return [plain(one) for one in value]
        if value is None or isinstance(value, int | float | str | bool):
            return value
        return _function(value)

    settings = {field.name: plain(getattr(attack, field.name)) for field in dataclasses.fields(attack)}
    return {"name": type(attack).__name__, "settings": settings}


def _function(value: Any) -> str:
    """A function's name and a hash of what it does: its code and all that it refers to.

    What can't be told (an object of somebody's, say) is another one each time: work done with it is never taken for
    work done with something else that has the same name.
    """
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    parts: list[bytes] = []
    seen: set[int] = set()

    def add(one: Any) -> None:
        if isinstance(one, FunctionType | MethodType | CodeType):
            if id(one) in seen:  # a function that refers to itself
                return
            seen.add(id(one))
        if isinstance(one, MethodType):
            add((one.__func__, one.__self__))
        elif isinstance(one, FunctionType):
            add((one.__code__, one.__defaults__, one.__kwdefaults__))
            for cell in one.__closure__ or ():
                add(cell.cell_contents)
            add([(word, one.__globals__[word]) for word in _names(one.__code__) if word in one.__globals__])
        elif isinstance(one, CodeType):
            parts.extend([one.co_code, " ".join(one.co_names).encode()])
            add(one.co_consts)
        elif isinstance(one, Tensor):
            parts.append(packed({"t": one}))
        elif isinstance(one, dict):
            add(sorted(one.items(), key=repr))
        elif isinstance(one, tuple | list | frozenset):
            for inner in sorted(one, key=repr) if isinstance(one, frozenset) else one:
                add(inner)
        elif one is None or isinstance(one, int | float | str | bytes | bool | complex | type):
            parts.append(repr(one).encode())
        elif isinstance(one, ModuleType | BuiltinFunctionType):
            parts.append(one.__name__.encode())
        else:
            parts.append(uuid.uuid4().bytes)

    add(value)
    return f"{name}#{hashlib.sha256(b'|'.join(parts)).hexdigest()[:12]}"


def _names(code: CodeType) -> list[str]:
    """The names that a function, and those defined inside of it, look up."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return sorted({*code.co_names, *(word for words in inner for word in words)})


def _compact(joined: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every image's outcome in nine bytes."""
    labels = {key: small(joined[key]) for key in ("clean", "prediction")}
    return {"success": joined["success"], **labels, **{k: joined[k].half() for k in ("linf", "l2", "distortion")}}


def _summary(joined: dict[str, Tensor], right: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Shares over all images; distances over those that were right and were broken.

    "plain_accuracy" counts an image that was wrong before and is right under attack too.
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
