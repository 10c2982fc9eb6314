"""Clean accuracy, accuracy under attacks and calibration of one network, as a table."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmlda._utils.device import Model, device_of, on_device
from mmlda._utils.figures import save_figure
from mmlda._utils.progress import progress
from mmlda._utils.tensors import packed
from mmlda.attacks import Attack
from mmlda.data import ImageData, as_images
from mmlda.evaluation.accuracy import first, logits, shares
from mmlda.evaluation.calibration import calibration_error, fit_temperature
from mmlda.evaluation.chunks import Chunks
from mmlda.evaluation.provenance import check_reproducible, describe_attack, identity
from mmlda.evaluation.robustness import attack_images, small
from mmlda.results import Result, head_of, traced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """One result for the clean images and one per attack. Printing it shows a table, `plot` draws it."""

    clean: Result
    attacks: tuple[Result, ...]

    @property
    def results(self) -> tuple[Result, ...]:
        """The clean result, then those of the attacks."""
        return (self.clean, *self.attacks)

    def __str__(self) -> str:
        text = [f"{'':24s} {'accuracy (%)':>12s}  {'95% interval':>16s}  {'median L2':>9s}  {'median L-inf':>12s}"]
        for result in self.results:
            low, high = result.interval or (math.nan, math.nan)
            line = f"{_label(result):24s} {100 * result.number:12.2f}  {100 * low:7.2f} .. {100 * high:5.2f}"
            for key, width in (("median_l2", 9), ("median_linf", 12)):
                value = result.numbers.get(key)
                line += f"  {value:{width}.4f}" if value is not None else ""
            text.append(line)
        # None is infinite: a class with prior 0 that does occur
        shown = {key: "inf" if value is None else f"{value:.4f}" for key, value in self.clean.numbers.items()}
        scores = "negative log-likelihood {}, calibration error {}"
        balanced = f"balanced accuracy {shown['balanced_accuracy']}"
        text.append(f"{balanced}, {scores.format(shown['nll'], shown['ece'])}")
        if "temperature" in shown:
            scaled = scores.format(shown["nll_scaled"], shown["ece_scaled"])
            text.append(f"at temperature {shown['temperature']}: {scaled}")
        return "\n".join(text)

    def plot(self, path: str | Path | None = None) -> Figure:
        """The accuracies with their intervals as a bar chart; written to `path` (.png, .svg, .pdf) if given."""
        from mmlda.evaluation.pictures import accuracy_bars

        values = [(_label(result), result.number, result.interval or (math.nan, math.nan)) for result in self.results]
        figure = accuracy_bars(values)
        if path is not None:
            save_figure(path, figure)
        return figure


def evaluate(
    model: Model,
    data: Any,
    attacks: Sequence[Attack] | Attack = (),
    *,
    n: int | None = None,
    out: str | Path | None = None,
    chunk: int | None = None,
    temperature: Any = None,
    name: str = "",
    device: torch.device | str | None = None,
    show: bool = True,
) -> Evaluation:
    """Clean and robust accuracy with 95% intervals, distances, and calibration.

    Args:
        model: images in [0, 1] -> logits: a module or any function. Its device and mode do not change.
        data: anything `mmlda.data.as_images` takes: an `ImageData`, a pair (x, y), a `Dataset`, a `DataLoader`.
        n: how many images, the first of `data`; all by default.
        out: folder for the results. The same call resumes an evaluation that was stopped, after its last finished
            chunk of images.
        chunk: images per chunk; by default many for fast attacks and on a GPU, few for slow ones on the CPU.
        temperature: other images, on which to fit a temperature for calibration after scaling.
        name: of the network, for the results.
        device: where to compute; the model's own device by default.

    >>> import mmlda
    >>> test = mmlda.data.load("digits")[1]
    >>> model = mmlda.models.build({"backbone": "conv_net", "head": "softmax"}, seed=0).eval()
    >>> found = evaluate(model, test, [mmlda.attacks.FGSM(eps=0.1)], n=50, show=False)
    >>> found.clean.n, found.attacks[0].attack
    (50, 'FGSM')
    """
    place, net, images = device_of(model, device), on_device(model, device), first(as_images(data), n)
    attacks = [attacks] if isinstance(attacks, Attack) else list(attacks)
    if any(one == other for one, other in itertools.combinations(attacks, 2)):
        raise ValueError("attacks must differ from each other, got the same attack with the same settings twice")
    folder = None if out is None else Path(out)
    if folder is not None:
        for attack in attacks:
            check_reproducible(attack)
    clean = _clean(net, images, folder, 500 if chunk is None else chunk, temperature, name, place, show)
    found = []
    for attack in attacks:
        slug = _slug(attack)
        own = None if folder is None else folder / slug
        result = attack_images(
            net, images, attack, out=own, chunk=chunk, name=name, device=place, picture=False, show=show
        )
        outcomes = None if own is None else result.read_outcomes(own)
        result = dataclasses.replace(result, name=slug)
        found.append(result if folder is None else result.save(folder, outcomes))
    return Evaluation(clean, tuple(found))


def _label(result: Result) -> str:
    return " ".join(str(word) for word in (result.attack, result.eps) if word not in ("", None)) or "clean"


def _slug(attack: Attack) -> str:
    """A folder's name for an attack: readable, and different for other settings."""
    about = describe_attack(attack)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    eps = about["settings"].get("eps")
    return "-".join([about["name"].lower(), *([f"{eps:g}"] if isinstance(eps, int | float) else []), digest])


def _clean(
    model: Model,
    data: ImageData,
    folder: Path | None,
    chunk: int,
    temperature: Any,
    name: str,
    place: torch.device,
    show: bool,
) -> Result:
    """Accuracy and calibration on the images as they are."""
    about, begin = traced(model, data, place, name), time.perf_counter()
    own, who = (None, {}) if folder is None else (folder / "clean", identity(about))
    z = _chunked_logits(model, data, Chunks(own, len(data), chunk, who), place, show).double()
    if bool(z.isnan().any()):
        bad = int(z.isnan().any(1).sum())
        raise ValueError(f"model must return finite logits, got NaN for {bad} of {len(data)} images")
    labels, p = data.labels.cpu(), z.softmax(1)
    found = shares(z.argmax(1), labels, data.num_classes)
    numbers = {
        "balanced_accuracy": found.balanced,
        "nll": F.cross_entropy(z, labels).item(),
        "ece": calibration_error(p, labels),
    }
    if temperature is not None:
        other = as_images(temperature)
        t = fit_temperature(logits(model, other, device=place), other.labels.cpu())
        numbers |= {
            "temperature": t,
            "nll_scaled": F.cross_entropy(z / t, labels).item(),
            "ece_scaled": calibration_error((z / t).softmax(1), labels),
        }
    result = Result.counted(
        round(found.accuracy * len(data)),
        len(data),
        name="clean",
        kind="evaluation",
        what=f"accuracy on {len(data)} images of {data.name or 'the data'}",
        dataset=data.name,
        head=head_of(model),
        seconds=time.perf_counter() - begin,
        numbers={key: value if math.isfinite(value) else None for key, value in numbers.items()},
        series={
            "per_class": [value if math.isfinite(value) else None for value in found.per_class],
            "classes": list(data.classes),
        },
        **about,
    )
    outcomes = {"clean": small(z.argmax(1)), "confidence": p.amax(1).half()}
    return result if folder is None else result.save(folder, packed(outcomes))


def _chunked_logits(model: Model, data: ImageData, chunks: Chunks, place: torch.device, show: bool) -> Tensor:
    """The logits [N, L], like `logits`, but finished chunks are not computed again."""
    with progress("clean images", len(data), unit="images", every=10.0, show=show) as report:
        for rows in chunks.missing():
            part = data.subset(slice(rows.start, rows.stop))
            chunks.save(rows.start, {"logits": logits(model, part, device=place)})
            report(rows.stop)
    return torch.cat([part["logits"] for part in chunks.load()])
