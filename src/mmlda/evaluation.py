"""How good a network is on data: accuracy overall, by class and balanced; and what attacks leave of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
import time
import uuid
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mmlda.attacks import BIM, FGSM, ILCM, PGD, Attack
from mmlda.calibration import calibration_error, fit_temperature
from mmlda.checkpoints import packed, save_tensors, versions
from mmlda.data import ImageData
from mmlda.files import write_json
from mmlda.progress import progress
from mmlda.results import Result, code_version, wilson

__all__ = [
    "Accuracy",
    "Evaluation",
    "accuracy",
    "attack_images",
    "describe_attack",
    "evaluate",
    "predictions",
    "provenance",
    "shares",
]


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
def _logits(model: nn.Module, data: ImageData, device: torch.device | str | None, batch_size: int = 1000) -> Tensor:
    """The logits [N, L], on the CPU; the model is in eval mode meanwhile."""
    place = _place(model, device)
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


def _place(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device asked for, or the one the model is on."""
    first = next(model.parameters(), None)
    return torch.device(device) if device is not None else first.device if first is not None else torch.device("cpu")


def predictions(
    model: nn.Module, data: ImageData, *, device: torch.device | str | None = None, batch_size: int = 1000
) -> Tensor:
    """The predicted classes [N], on the CPU; the model is in eval mode meanwhile."""
    return _logits(model, data, device, batch_size).argmax(1)


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
    guess = predictions(model, data, device=device, batch_size=batch_size)
    return shares(guess, data.labels.cpu(), data.num_classes)


def shares(guess: Tensor, labels: Tensor, num_classes: int) -> Accuracy:
    """Accuracy of predicted classes [N]."""
    right = (guess == labels).double()
    counts = torch.bincount(labels, minlength=num_classes).double()
    per_class = torch.bincount(labels, right, minlength=num_classes) / counts  # [L], NaN for 0 / 0
    return Accuracy(right.mean().item(), per_class[counts > 0].mean().item(), tuple(per_class.tolist()), len(labels))


# --------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found: one result for the clean images, one for each attack. Printed, it is a table."""

    clean: Result
    attacks: tuple[Result, ...]

    @property
    def results(self) -> tuple[Result, ...]:
        return (self.clean, *self.attacks)

    def __str__(self) -> str:
        text = [f"{'':24s} {'accuracy (%)':>12s}  {'95% interval':>16s}  {'median L2':>9s}  {'median L-inf':>12s}"]
        for result in self.results:
            low, high = result.interval or (math.nan, math.nan)
            name = " ".join(str(result.cell[key]) for key in ("attack", "eps") if key in result.cell) or "clean"
            line = f"{name:24s} {result.value:12.2f}  {low:7.2f} .. {high:5.2f}"
            for key, width in (("median_l2", 9), ("median_linf", 12)):
                value = result.numbers.get(key)
                line += f"  {value:{width}.4f}" if value is not None else ""
            text.append(line)
        numbers = self.clean.numbers
        text.append(f"balanced accuracy {numbers['balanced_accuracy']:.4f}, negative log-likelihood "
                    f"{numbers['nll']:.4f}, calibration error {numbers['ece']:.4f}")  # fmt: skip
        if "temperature" in numbers:
            text.append(f"at temperature {numbers['temperature']:.3f}: negative log-likelihood "
                        f"{numbers['nll_scaled']:.4f}, calibration error {numbers['ece_scaled']:.4f}")  # fmt: skip
        return "\n".join(text)


def evaluate(
    model: nn.Module,
    data: ImageData,
    attacks: Sequence[Attack] | Attack = (),
    *,
    n: int | None = None,
    out: str | Path | None = None,
    chunk: int | None = None,
    temperature: ImageData | None = None,
    name: str = "",
    device: torch.device | str | None = None,
    show: bool = True,
) -> Evaluation:
    """Clean and robust accuracy with 95% intervals, distances, and calibration.

    Args:
        n: the first n images; all by default.
        out: folder for the results; an evaluation that was stopped, however hard, goes on there, and finished chunks
            of images are not done again.
        chunk: images at a time; by default many for quick attacks and on a GPU, few for slow ones on a CPU.
        temperature: images to fit a temperature on, for calibration after scaling; not the ones measured on.
        name: the network's, for the results.

    >>> import mmlda
    >>> test = mmlda.data.load("digits")[1]
    >>> model = mmlda.models.build({"backbone": "conv_net", "head": "softmax"}, seed=0).eval()
    >>> found = evaluate(model, test, [mmlda.attacks.FGSM(eps=0.1)], n=50, show=False)
    >>> found.clean.n, found.attacks[0].cell["attack"]
    (50, 'FGSM')
    """
    part = data.subset(slice(_number(n, len(data))))
    if chunk is not None:
        _positive("chunk", chunk)
    place = _place(model, device)
    attacks = [attacks] if isinstance(attacks, Attack) else list(attacks)
    slugs = [_slug(attack) for attack in attacks]
    if len(set(slugs)) != len(slugs):
        raise ValueError("attacks has the same attack with the same settings twice: expected each once")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        clean = _clean(model, part, folder, chunk or 500, temperature, name, place, show)
        found = []
        for attack, slug in zip(attacks, slugs):
            own = folder / slug
            result = attack_images(model, part, attack, out=own, chunk=chunk, name=name, device=place, picture=False,
                                   show=show)  # fmt: skip
            found.append(dataclasses.replace(result, name=slug).save(folder, result.read_outcomes(own)))
    return Evaluation(clean, tuple(found))


def _number(n: int | None, most: int) -> int:
    if n is not None and not 1 <= n <= most:
        raise ValueError(f"n = {n}: expected 1 to {most}, the number of images")
    return most if n is None else n


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value}: expected at least 1")


def _slug(attack: Attack) -> str:
    """A folder's name for an attack: readable, and another one for other settings."""
    about = describe_attack(attack)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    eps = about["settings"].get("eps")
    return "-".join([about["name"].lower(), *([f"{eps:g}"] if isinstance(eps, int | float) else []), digest])


def _clean(
    model: nn.Module,
    data: ImageData,
    folder: Path,
    chunk: int,
    temperature: ImageData | None,
    name: str,
    place: torch.device,
    show: bool,
) -> Result:
    about, chunks = provenance(model, data, place, name), folder / "clean"
    _claim(chunks, {"data": about["data"], "network": about["network"]["sha256"], "chunk": chunk})
    starts, begin = range(0, len(data), chunk), time.perf_counter()
    with progress("clean images", len(data), unit="images", every=10.0, show=show) as report:
        for start in starts:
            if not _done(chunks, start):
                rows = data.subset(slice(start, start + chunk))
                save_tensors(_chunk(chunks, start), {"logits": _logits(model, rows, place)})
            report(min(start + chunk, len(data)))
    z = torch.cat([load_file(_chunk(chunks, start))["logits"] for start in starts]).double()
    if bool(z.isnan().any()):
        raise ValueError(f"model returned NaN for {int(z.isnan().any(1).sum())} of {len(data)} images: expected logits")
    labels, p = data.labels.cpu(), z.softmax(1)
    found = shares(z.argmax(1), labels, data.num_classes)
    numbers = {
        "balanced_accuracy": found.balanced,
        "nll": F.cross_entropy(z, labels).item(),
        "ece": calibration_error(p, labels),
    }
    if temperature is not None:
        t = fit_temperature(_logits(model, temperature, place), temperature.labels.cpu())
        numbers |= {
            "temperature": t,
            "nll_scaled": F.cross_entropy(z / t, labels).item(),
            "ece_scaled": calibration_error((z / t).softmax(1), labels),
        }
    low, high = wilson(round(found.accuracy * len(data)), len(data))
    result = Result(
        name="clean",
        kind="evaluation",
        what=f"accuracy on {len(data)} images of {data.name or 'the data'}",
        cell={"data": data.name, "model": name},
        value=100 * found.accuracy,
        unit="%",
        interval=(100 * low, 100 * high),
        n=len(data),
        seconds=time.perf_counter() - begin,
        numbers={key: value if math.isfinite(value) else None for key, value in numbers.items()},
        series={
            "per_class": [value if math.isfinite(value) else None for value in found.per_class],
            "classes": list(data.classes),
        },
        **about,
    )
    return result.save(folder, packed({"clean": _small(z.argmax(1)), "confidence": p.amax(1).half()}))


def provenance(model: nn.Module, data: ImageData, place: torch.device, name: str = "") -> dict[str, Any]:
    """Where a result came from, as fields of `Result`: data, network, device, versions, commit."""
    return {
        "data": {"name": data.name, "images": len(data), "sha256": data.digest()},
        "network": {"name": name, "sha256": hashlib.sha256(packed(model.state_dict())).hexdigest()},
        "device": versions(place)["device"],
        "versions": versions(place),
        "commit": code_version(),
    }


def _small(classes: Tensor) -> Tensor:
    """Classes in as few bytes as hold them."""
    return classes.to(torch.uint8 if int(classes.max()) < 256 else torch.int32)


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Keep a folder of chunks to one piece of work; a ValueError where it holds another."""
    path, about = folder / "work.json", json.loads(json.dumps(about))
    if path.is_file():
        there = json.loads(path.read_text())
        if changed := sorted(key for key in about if there.get(key) != about[key]):
            what = f"with other {', '.join(changed)}; choose another folder"
            raise ValueError(f"out = {str(folder)!r} holds other work, {what}")
        return
    write_json(path, about)


# --------------------------------------------------------------------------------------------------- attacks

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
    picture: bool = True,
    show: bool = True,
) -> Result:
    """Attack the first `n` images, a chunk at a time; the result, also in `out/result.json`.

    Each finished chunk is a file of its own in `out`, with the adversarial images and what happened to each; a run
    that was stopped goes on after the last of them. What happened to every image is in `out/result.safetensors`, and
    `out/examples.png`, unless `picture` is false, shows some. Noise belongs to an image's place in the data, so the
    chunks' size changes nothing but rounding.
    """
    folder, n = Path(out), _number(n, len(data))
    place = _place(model, device)
    chunk = _chunk_size(attack, data, place) if chunk is None else chunk
    _positive("chunk", chunk)
    model.to(place)
    part = data.subset(slice(n))
    about = {**provenance(model, part, place, name), "attack": describe_attack(attack)}
    asked = {"attack": about["attack"], "data": about["data"], "network": about["network"]["sha256"], "chunk": chunk}
    _claim(folder, asked)
    starts = range(0, n, chunk)
    missing = [start for start in starts if not _done(folder, start)]
    done = n - sum(min(chunk, n - start) for start in missing)
    with progress(type(attack).__name__, n, unit="images", start=done, every=10.0, show=show) as report:
        for start in missing:
            rows = torch.arange(start, min(start + chunk, n), device=data.device)
            x, y = data.pixels(rows).to(place), data.labels[rows].to(place)
            begin = time.perf_counter()
            clean = predictions(model, data.subset(rows), device=place)
            result = attack(model, x, y, index=rows.to(place))
            values = {key: getattr(result, key) for key in OUTCOMES} | {"x_adv": result.x_adv, "clean": clean}
            if result.zero_gradient is not None:
                values["zero_gradient"] = torch.tensor(result.zero_gradient, dtype=torch.float64)
            values["seconds"] = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            save_tensors(_chunk(folder, start), values)
            done += len(rows)
            report(done, success=float(result.success.float().mean()))
    parts = [load_file(_chunk(folder, start)) for start in starts]
    joined = {key: torch.cat([one[key] for one in parts]) for key in (*OUTCOMES, "clean")}
    zero = [float(one["zero_gradient"]) * len(one["success"]) for one in parts if "zero_gradient" in one]
    right = joined["clean"] == part.labels.cpu()
    held = int((right & (joined["prediction"] == part.labels.cpu())).sum())  # not where a target was just missed
    low, high = wilson(held, n)
    eps = about["attack"]["settings"].get("eps")
    found = Result(
        name="result",
        kind="evaluation",
        what=f"accuracy under {type(attack).__name__} on {n} images of {data.name or 'the data'}",
        cell={"data": data.name, "model": name, "attack": type(attack).__name__}
        | ({} if eps is None else {"eps": eps}),
        value=100 * held / n,
        unit="%",
        interval=(100 * low, 100 * high),
        n=n,
        seed=attack.seed,
        seconds=sum(float(one["seconds"]) for one in parts),
        numbers={**_summary(joined, right), "zero_gradient": sum(zero) / n if zero else None},
        **about,
    ).save(folder, packed(_compact(joined)))
    if picture:
        from mmlda.pictures import adversarial_examples

        x_adv = torch.cat([one["x_adv"] for one in parts])
        adversarial_examples(folder / "examples.png", part, x_adv, joined["clean"], joined["prediction"])
    return found


def _chunk(folder: Path, start: int) -> Path:
    return folder / f"images-{start:06d}.safetensors"


def _chunk_size(attack: Attack, data: ImageData, place: torch.device) -> int:
    """So many images that a device is busy, and so few that progress is seen and a kill costs little."""
    slow = not isinstance(attack, FGSM | BIM | ILCM | PGD)
    if place.type == "cpu":
        return min(500, max(20, 60_000 // math.prod(data.shape))) if slow else 500
    return 1000 if slow else 2500


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


def adversarial_images(folder: str | Path) -> Tensor:
    """The adversarial images that `attack_images` left in its folder, [N, C, H, W]."""
    return torch.cat([load_file(path)["x_adv"] for path in sorted(Path(folder).glob("images-*.safetensors"))])


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
    """A function's name and a hash of what it does: its code and what it encloses.

    What can't be told (an object of somebody's, say) is another one each time: work done with it is never taken for
    work done with something else that has the same name.
    """
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    parts: list[bytes] = []

    def add(one: Any) -> None:
        if hasattr(one, "__code__") or hasattr(one, "co_code"):
            code = getattr(one, "__code__", one)
            parts.extend([code.co_code, " ".join(code.co_names).encode()])
            for inner in (*code.co_consts, *(getattr(one, "__defaults__", None) or ())):
                add(inner)
            for cell in getattr(one, "__closure__", None) or ():
                add(cell.cell_contents)
        elif isinstance(one, Tensor):
            parts.append(packed({"t": one}))
        elif isinstance(one, tuple | list | frozenset):
            for inner in sorted(one, key=repr) if isinstance(one, frozenset) else one:
                add(inner)
        elif one is None or isinstance(one, int | float | str | bytes | bool | complex | type):
            parts.append(repr(one).encode())
        else:
            parts.append(uuid.uuid4().bytes)

    add(value)
    return f"{name}#{hashlib.sha256(b'|'.join(parts)).hexdigest()[:12]}"


def _compact(joined: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every image's outcome in nine bytes."""
    labels = {key: _small(joined[key]) for key in ("clean", "prediction")}
    return {"success": joined["success"], **labels, **{k: joined[k].half() for k in ("linf", "l2", "distortion")}}


def _summary(joined: dict[str, Tensor], right: Tensor) -> dict[str, float | None]:
    """Shares over all images; distances over those that were right and were broken."""
    broken = right & joined["success"]
    summary: dict[str, float | None] = {
        "clean_accuracy": right.double().mean().item(),
        "success_rate": (broken.sum() / right.sum().clamp_min(1)).item(),
        "mean_steps": joined["steps"].double().mean().item(),
    }
    for key in ("linf", "l2", "distortion"):
        values = joined[key][broken].double()
        summary[f"mean_{key}"] = values.mean().item() if len(values) else None
        summary[f"median_{key}"] = values.quantile(0.5).item() if len(values) else None
    return summary
