"""How good a network is on data: accuracy overall, by class and balanced; and what attacks leave of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda._utils.tensors import packed
from mmlda.attacks import Attack
from mmlda.data import ImageData
from mmlda.evaluation.calibration import calibration_error, fit_temperature
from mmlda.evaluation.robustness import (
    answer_images,
    answers,
    attack_images,
    describe_attack,
    device_of,
    first,
    predictions,
    small,
)
from mmlda.results import Result, head_of, traced

__all__ = ["Accuracy", "Evaluation", "accuracy", "evaluate", "shares"]


@dataclass(frozen=True)
class Accuracy:
    """Shares of images whose class was predicted. `per_class` is NaN for a class without images."""

    accuracy: float
    balanced: float  # mean over the classes that have images
    per_class: tuple[float, ...]
    n: int

    @property
    def error(self) -> float:
        """The share of images whose class was not predicted, as in the paper's Table 1."""
        return 1.0 - self.accuracy


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
            name = " ".join(str(word) for word in (result.attack, result.eps) if word not in ("", None)) or "clean"
            line = f"{name:24s} {100 * result.number:12.2f}  {100 * low:7.2f} .. {100 * high:5.2f}"
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
    >>> found.clean.n, found.attacks[0].attack
    (50, 'FGSM')
    """
    part, place = first(data, n), device_of(model, device)
    attacks = [attacks] if isinstance(attacks, Attack) else list(attacks)
    slugs = [_slug(attack) for attack in attacks]
    if len(set(slugs)) != len(slugs):
        raise ValueError("attacks has the same attack with the same settings twice: expected each once")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        clean = _clean(model, part, folder, 500 if chunk is None else chunk, temperature, name, place, show)
        found = []
        for attack, slug in zip(attacks, slugs):
            own = folder / slug
            result = attack_images(model, part, attack, out=own, chunk=chunk, name=name, device=place, picture=False,
                                   show=show)  # fmt: skip
            found.append(dataclasses.replace(result, name=slug).save(folder, result.read_outcomes(own)))
    return Evaluation(clean, tuple(found))


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
    about, begin = traced(model, data, place, name), time.perf_counter()
    z = answer_images(model, data, out=folder / "clean", about=about, chunk=chunk, device=place, show=show).double()
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
        t = fit_temperature(answers(model, temperature, device=place), temperature.labels.cpu())
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
    return result.save(folder, packed({"clean": small(z.argmax(1)), "confidence": p.amax(1).half()}))
