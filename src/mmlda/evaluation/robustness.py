"""Accuracy under one attack, with the outcome of every image, resumable chunk by chunk.

model, images -> chunks, one file each -> the outcome of every image -> Result
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmlda._utils.checks import invalid
from mmlda._utils.device import Model, device_of, on_device
from mmlda._utils.figures import save_figure
from mmlda._utils.progress import progress
from mmlda._utils.tensors import packed, read_tensors
from mmlda.attacks import BIM, FGSM, ILCM, PGD, Attack, AttackWarning, CarliniWagner, compiled
from mmlda.attacks.base import BLIND
from mmlda.data import ImageData
from mmlda.data.loaders import sample_for
from mmlda.evaluation.accuracy import predictions
from mmlda.evaluation.chunks import Chunks, chunk_files
from mmlda.results import Result, head_of, traced

if TYPE_CHECKING:
    from mmlda.evaluation.streamed import Streamed


DISTANCES = ("linf", "l2", "distortion")
OUTCOMES = ("success", "prediction", *DISTANCES, "steps")


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
    """Measure the accuracy under one attack, one chunk of images after another.

    With `out`, that folder receives `result.json`, the outcome of every image in `result.safetensors`, one file with
    the adversarial images per finished chunk, and some of them in `examples.png`. The same call resumes after the
    last finished chunk. Random noise depends on an image's position in the data, so the chunk size changes nothing
    but rounding.

    Parameters
    ----------
    model : callable
        Images in [0, 1] -> logits: a module or any function. Its device and mode do not change.
    data : ImageData or pair or Dataset or str or path
        Anything that `mmlda.data.as_images` takes.
    attack : Attack
        Where results are saved, its loss must be a name or a module-level function, so that a later call can tell
        whether it may resume.
    out : path, optional
        Folder for the results.
    n : int, optional
        How many images, a stratified sample (`mmlda.data.stratified`); all by default.
    chunk : int, optional
        Images per chunk; by default many for fast attacks and on a GPU, few for slow ones on the CPU.
    name : str
        Name of the network in the result; required with `out` for a plain function.
    device : torch.device or str, optional
        Where to compute; the model's own device by default.
    compile : bool
        Attack the copy that `mmlda.attacks.compiled` makes: worthwhile for long attacks.
    picture : bool
        Whether to write `examples.png`.
    show : bool
        Whether to show progress.

    Returns
    -------
    Result
        The accuracy under attack, with its interval and distances.

    Raises
    ------
    ValueError
        If an argument is invalid, or the folder holds other work.
    """
    place, net = device_of(model, device), on_device(model, device)
    images, _ = sample_for(model, data, n)
    about, described = traced(net, images, place, name), describe_attack(attack, reproducible=out is not None)
    size = _chunk_size(attack, images, place) if chunk is None else chunk
    asked = described | ({"compiled": True} if compile else {})
    chunks = Chunks(out, len(images), size, {} if out is None else identity(about, attack=asked))
    _attack_missing(net, images, attack, chunks, place, compile=compile, show=show)
    parts = chunks.load()
    result, joined = attack_result(net, images, attack, parts, {**about, "compiled": compile})
    if why := unreliable(result):
        warnings.warn(f"{result.attack}: {why}", AttackWarning, stacklevel=2)
    if out is None:
        return result
    result = result.save(out, packed(_compact(joined)))
    if picture and not images.is_table:
        x_adv = torch.cat([part["x_adv"] for part in parts])
        adversarial_examples(Path(out) / "examples.png", images, x_adv, joined["clean"], joined["prediction"])
    return result


def unreliable(result: Result) -> str:
    """Why an accuracy under attack may not measure robustness; empty if there is no known reason."""
    blind, passes = float(result.numbers.get("blind") or 0), int(result.numbers.get("passes") or 1)
    why = []
    if blind >= BLIND:
        why.append(f"blind, since the gradient was exactly zero for {blind:.1%} of the images: not robustness")
    if result.numbers.get("black_box"):
        why.append("the model has no gradient: only the attacks that need none, such as Square, were run")
    if passes > 1:
        why.append(f"the model is random: judged by the mean probabilities of {passes} passes")
    return "; ".join(why)


def adversarial_images(folder: str | Path) -> Tensor:
    """The adversarial images that `attack_images` left in its folder, [N, C, H, W]."""
    return torch.cat([read_tensors(path)[0]["x_adv"] for path in chunk_files(folder)])


def identity(about: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What must be the same for saved work to be resumed: data and network of `mmlda.results.traced`, and `more`.

    A network without a hash is identified by its name, so it must have one.
    """
    network = about["network_sha256"] or about["network"]
    if not network:
        raise invalid("name", "given for a model without weights where results are saved", network)
    return {"data": about["data"], "network": network, **more}


def describe_attack(attack: Attack, *, reproducible: bool = False) -> dict[str, Any]:
    """An attack as JSON: its name and every setting; functions by `module.qualname`.

    With `reproducible`, raise unless the description identifies the attack, in another process too.

    >>> from mmlda.attacks import BIM
    >>> describe_attack(BIM(eps=0.04))["settings"]["eps"]
    0.04
    """

    def plain(name: str, value: Any) -> Any:
        if isinstance(value, Attack):
            return describe_attack(value, reproducible=reproducible)
        if isinstance(value, tuple | list):
            return [plain(name, one) for one in value]
        if value is None or isinstance(value, int | float | str | bool):
            return value
        qualname = getattr(value, "__qualname__", "")
        text = f"{value.__module__}.{qualname}" if qualname else repr(value)
        if reproducible and ("<" in qualname or " at 0x" in text):  # <lambda>, <locals>, an address
            what = "a named loss or a module-level function where results are saved"
            raise ValueError(f"{name} must be {what}, got {qualname or text}")
        return text

    settings = {field.name: plain(field.name, getattr(attack, field.name)) for field in dataclasses.fields(attack)}
    return {"name": type(attack).__name__, "settings": settings}


def _attack_missing(
    model: Model, data: ImageData, attack: Attack, chunks: Chunks, place: torch.device, *, compile: bool, show: bool
) -> None:
    """Attack the chunks that are not finished."""
    missing = chunks.missing()
    done = len(data) - sum(map(len, missing))
    attacked = compiled(model) if compile and missing else model  # type: ignore[arg-type]
    seen = won = 0
    with progress(type(attack).__name__, len(data), unit=data.unit, start=done, every=10.0, show=show) as report:
        for part in missing:
            values = attack_part(model, data.subset(slice(part.start, part.stop)), part.start, attack, place, attacked)
            chunks.save(part.start, values)
            done, seen, won = done + len(part), seen + len(part), won + int(values["success"].sum())
            report(done, success=won / seen)


def attack_part(
    model: Model, data: ImageData, start: int, attack: Attack, place: torch.device, attacked: Model | None = None
) -> dict[str, Tensor]:
    """The outcomes of some images, whose positions begin at `start`; `attacked` is the compiled model."""
    begin, index = time.perf_counter(), torch.arange(start, start + len(data), device=place)
    with warnings.catch_warnings(action="ignore", category=AttackWarning):  # one for all chunks follows
        result = attack(attacked or model, data.pixels().to(place), data.labels.to(place), index=index, show=False)
    random = result.passes > 1 and result.clean_prediction is not None
    clean = result.clean_prediction if random else predictions(model, data, device=place)
    values = {key: getattr(result, key) for key in OUTCOMES} | {"x_adv": result.x_adv, "clean": clean}
    for key, value in (("blind", result.blind_share), ("passes", result.passes), ("black_box", result.black_box)):
        values[key] = torch.tensor(value, dtype=torch.float64)
    if result.zero_gradient is not None:
        values["zero_gradient"] = torch.tensor(result.zero_gradient, dtype=torch.float64)
    values["seconds"] = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    return values


def _chunk_size(attack: Attack, data: ImageData, place: torch.device) -> int:
    """Enough images to keep a device busy, few enough to see progress and to lose little to a kill."""
    slow, slowest = not isinstance(attack, FGSM | BIM | ILCM | PGD), isinstance(attack, CarliniWagner)
    if place.type == "cpu":
        return min(50 if slowest else 100, max(20, 60_000 // math.prod(data.shape))) if slow else 500
    return 500 if slowest else 1000 if slow else 2500


def attack_result(
    model: Model, data: ImageData | Streamed, attack: Attack, parts: list[dict[str, Tensor]], about: dict[str, Any]
) -> tuple[Result, dict[str, Tensor]]:
    """The accuracy over all images, and their outcomes. An image that was wrong before the attack counts as wrong."""
    joined = {key: torch.cat([part[key] for part in parts]) for key in (*OUTCOMES, "clean")}
    labels, n = data.labels.cpu(), len(data)
    right = joined["clean"] == labels
    described = describe_attack(attack)
    settings = described["settings"]
    blind = sum(float(part.get("blind", 0.0)) * len(part["success"]) for part in parts) / n
    passes = max(int(part.get("passes", 1)) for part in parts)
    after = joined["prediction"] == labels  # a missed target does not count as held
    # Not for a random network, whose predictions before and after may disagree without an attack.
    held = int((after if passes > 1 else right & after).sum())
    black_box = max(float(part.get("black_box", 0.0)) for part in parts)
    doubts = {"blind": blind, "passes": passes if passes > 1 else 0, "black_box": black_box}
    doubts = {key: value for key, value in doubts.items() if value}
    zero = [float(part["zero_gradient"]) * len(part["success"]) for part in parts if "zero_gradient" in part]
    result = Result.counted(
        held,
        n,
        name="result",
        kind="evaluation",
        what=f"accuracy under {described['name']} on {n} {data.unit} of {data.name or 'the data'}",
        dataset=data.name,
        head=head_of(model),
        attack=described["name"],
        attack_settings=settings,
        eps=settings.get("eps"),
        attack_steps=settings.get("steps"),
        seed=attack.seed,
        seconds=sum(float(part["seconds"]) for part in parts),
        numbers={**summary(joined, right, labels), "zero_gradient": sum(zero) / n if zero else None, **doubts},
        **about,
    )
    return result, joined


def summary(joined: dict[str, Tensor], right: Tensor, labels: Tensor) -> dict[str, float | None]:
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
    for key in DISTANCES:
        values = joined[key][broken].double()
        summary[f"mean_{key}"] = values.mean().item() if len(values) else None
        summary[f"median_{key}"] = values.quantile(0.5).item() if len(values) else None
    return summary


def _compact(joined: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outcome of every image in nine bytes."""
    labels = {key: small(joined[key]) for key in ("clean", "prediction")}
    return {"success": joined["success"], **labels, **{k: joined[k].half() for k in DISTANCES}}


def small(classes: Tensor) -> Tensor:
    """Classes in as few bytes as hold them."""
    return classes.to(torch.uint8 if int(classes.max()) < 256 else torch.int32)


def adversarial_examples(
    path: str | Path, data: ImageData, x_adv: Tensor, clean: Tensor, prediction: Tensor, count: int = 8
) -> Path:
    """Originals, noises (x* - x) / 2 and adversarial images, in three rows, as a PNG file.

    Shown are images that were right and are broken, of different classes where there are; where an attack broke
    none, images that it left.
    """
    from matplotlib.figure import Figure

    labels = data.labels.cpu()
    broken = (clean == labels) & (prediction != labels)
    rows = (broken if broken.any() else clean == labels).nonzero().flatten()
    if not len(rows):
        rows = torch.arange(len(labels))
    # first one image of each class, then a second one, ...
    turn = F.one_hot(labels[rows]).cumsum(0).gather(1, labels[rows, None]).flatten()
    rows = rows[turn.argsort(stable=True)][:count]
    x, moved = data.pixels(rows).cpu(), x_adv[rows].float().cpu()
    figure = Figure(figsize=(1.25 * len(rows) + 0.9, 4.3), layout="constrained")
    axes = figure.subplots(3, len(rows), squeeze=False)
    scale = float((moved - x).abs().max()) or 1.0
    for column, row in enumerate(rows.tolist()):
        pictures = (x[column], 0.5 + (moved - x)[column] / (2 * scale), moved[column])
        words = (data.classes[int(labels[row])], "", data.classes[int(prediction[row])])
        for axis, picture, word in zip(axes[:, column], pictures, words):
            image = picture.permute(1, 2, 0).clamp(0, 1).numpy()
            axis.imshow(image[..., 0] if image.shape[2] == 1 else image, cmap="gray", vmin=0, vmax=1)
            axis.set_title(word, fontsize=9)
            axis.set(xticks=[], yticks=[])
    for axis, word in zip(axes[:, 0], ("image", f"noise,\n±{scale:.3f} shown\nfull scale", "adversarial")):
        axis.set_ylabel(word, fontsize=9)
    return save_figure(path, figure)
