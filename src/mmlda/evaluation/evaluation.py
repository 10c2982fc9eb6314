"""Clean accuracy, accuracy under attacks and calibration of one network, as a table."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from mmlda import attacks as ours
from mmlda._utils.checks import invalid
from mmlda._utils.device import Model, device_of, on_device
from mmlda._utils.figures import save_figure
from mmlda._utils.files import json_digest
from mmlda._utils.progress import progress
from mmlda._utils.settings import parse_attack
from mmlda._utils.tensors import packed
from mmlda.attacks import Attack, AttackWarning
from mmlda.data import ImageData, holdout, images_for
from mmlda.data.loaders import sample_for
from mmlda.evaluation.accuracy import answers, logits, shares
from mmlda.evaluation.calibration import calibration_error, fit_temperature
from mmlda.evaluation.chunks import Chunks
from mmlda.evaluation.priors import exchange_priors
from mmlda.evaluation.robustness import attack_images, attack_result, describe_attack, identity, small, unreliable
from mmlda.evaluation.streamed import Streamed, stream
from mmlda.results import Result, attack_labels, head_of, traced

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Evaluation:
    """The results of `evaluate`. Printing it shows a table.

    Parameters
    ----------
    clean
        Result for the clean images.
    attacks
        One result per attack.
    unit
        What was measured: "images", or "rows" of a table.
    """

    clean: Result
    attacks: tuple[Result, ...]
    unit: str = "images"

    @property
    def results(self) -> tuple[Result, ...]:
        """The clean result, then those of the attacks."""
        return (self.clean, *self.attacks)

    def __str__(self) -> str:
        classes = sum(share is not None for share in self.clean.series["per_class"])
        what = f"{self.clean.n} {self.unit}, {classes} classes"
        labels = attack_labels(self.results)
        reasons = [unreliable(result) for result in self.results]
        names = [label + " *" * bool(why) for label, why in zip(labels, reasons)]
        width = max(24, *map(len, names))
        text = [
            f"{what:{width}s} {'accuracy (%)':>12s}  {'95% interval':>16s}  {'median L2':>9s}  {'median L-inf':>12s}"
        ]
        for name, result in zip(names, self.results):
            low, high = result.interval or (math.nan, math.nan)
            line = f"{name:{width}s} {100 * result.number:12.2f}  {100 * low:7.2f} .. {100 * high:5.2f}"
            for key, digits in (("median_l2", 9), ("median_linf", 12)):
                value = result.numbers.get(key)
                line += f"  {value:{digits}.4f}" if value is not None else ""
            text.append(line)
        text += [f"* {label}: {why}" for label, why in zip(labels, reasons) if why]
        # None is infinite: a class with prior 0 that does occur
        shown = {key: "inf" if value is None else f"{value:.4f}" for key, value in self.clean.numbers.items()}
        scores = "negative log-likelihood {}, calibration error {}"
        balanced = f"balanced accuracy {shown['balanced_accuracy']}"
        text.append(f"{balanced}, {scores.format(shown['nll'], shown['ece'])}")
        if self.clean.priors is not None:
            text.append(f"class priors: {self.clean.priors}, in place of the network's own")
        if "temperature" in shown:
            scaled = scores.format(shown["nll_scaled"], shown["ece_scaled"])
            text.append(f"at temperature {shown['temperature']}: {scaled}")
        return "\n".join(text)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the accuracies with their intervals as a bar chart.

        Parameters
        ----------
        path
            A .png, .svg or .pdf file to write the figure to (default: none).

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        from matplotlib.figure import Figure

        values = np.array([result.number for result in self.results])
        low, high = np.array([result.interval for result in self.results]).T
        figure = Figure(figsize=(6.4, 1.0 + 0.4 * len(values)), layout="constrained")
        axis = figure.subplots()
        errors = 100 * np.stack([values - low, high - values])
        names = attack_labels(self.results)
        axis.barh(names, 100 * values, xerr=errors, color="#4c78a8", ecolor="0.3", capsize=3)
        axis.set(xlim=(0, 100), xlabel="accuracy (%), 95% interval")
        axis.invert_yaxis()  # the clean images first
        if path is not None:
            save_figure(path, figure)
        return figure


def evaluate(
    model: Model,
    data: Any,
    attacks: Sequence[Attack | str] | Attack | str = (),
    *,
    n: int | None = None,
    out: str | Path | None = None,
    chunk: int | None = None,
    temperature: Any = None,
    priors: str | None = None,
    name: str = "",
    device: torch.device | str | None = None,
    show: bool = True,
) -> Evaluation:
    """Clean and robust accuracy with 95% intervals, distances, and calibration.

    Calibration needs the logits `[N, L]` of all images, which stay in memory; `accuracy` does not.

    Parameters
    ----------
    model : callable
        Images in [0, 1] -> logits: a module or any function. Its device and mode do not change.
    data : ImageData or pair or Dataset or DataLoader
        Anything that `mmlda.data.as_images` takes. A `DataLoader` is read once, batch by batch, with one batch of
        images in memory; with `n` only that sample is read; with `out` alone, everything is read into memory.
    attacks : Attack or str, or a sequence of them
        Objects, or names such as "pgd:8/255" or "worst:0.1,norm=l2", as on the command line.
    n : int, optional
        How many images, a stratified sample (`mmlda.data.stratified`); all by default.
    out : path, optional
        Folder for the results. The same call resumes an evaluation that was stopped, after its last finished chunk.
    chunk : int, optional
        Images per chunk; by default many for fast attacks and on a GPU, few for slow ones on the CPU.
    temperature : like data, or True, optional
        Other images to fit a temperature on, for calibration after scaling; True for those that `n` leaves out.
    priors : str, optional
        Predict with other class priors, where the model is an `mmlda.Classifier`: "uniform", or "empirical" for the
        shares of the classes in `data`. They replace the priors of the network's head, and with them an adjustment by
        `with_priors(None, old=...)`. Where the head's priors are uniform already, as after training without any,
        "uniform" changes nothing and warns.
    name : str
        Name of the network in the results.
    device : torch.device or str, optional
        Where to compute; the model's own device by default.
    show : bool
        Whether to show progress.

    Returns
    -------
    Evaluation
        Printing it shows a table, in which rows that do not measure robustness are marked and explained.

    Raises
    ------
    ValueError
        If an argument is invalid, an attack is given twice, or the model returns NaN.

    Examples
    --------
    >>> import mmlda
    >>> test = mmlda.data.load("digits")[1]
    >>> model = mmlda.models.build({"backbone": "conv_net", "head": "softmax"}, seed=0).eval()
    >>> found = evaluate(model, test, ["fgsm:0.1"], n=50, show=False)
    >>> found.clean.n, found.attacks[0].attack
    (50, 'FGSM')
    """
    place = device_of(model, device)
    listed = attacks if isinstance(attacks, Iterable) and not isinstance(attacks, str) else [attacks]
    chosen: list[Attack] = [parse_attack(one, ours) if isinstance(one, str) else one for one in listed]
    for given in chosen:
        if not isinstance(given, Attack):
            raise invalid("attacks", "attacks such as PGD(eps=8/255) or names such as 'pgd:8/255'", given)
    if any(one == other for one, other in itertools.combinations(chosen, 2)):
        raise ValueError("attacks must differ from each other, got the same attack with the same settings twice")
    folder = None if out is None else Path(out)
    slugs = [_slug(describe_attack(attack, reproducible=out is not None)) for attack in chosen]
    if priors is not None:
        model, data = exchange_priors(model, data, priors)
    if temperature is True:
        data = images_for(model, data)
        if n is None or not 0 < n < len(data):
            raise invalid("n", f"from 1 to {len(data) - 1}, as a temperature needs the other images", n)
        temperature, data = holdout(data, n)  # the same images as without a temperature
    net = on_device(model, device)
    how: dict[str, Any] = {"network": name, "priors": priors, "temperature": temperature is not None}
    if isinstance(data, DataLoader) and n is None and folder is None:
        return _from_loader(model, data, chosen, slugs, temperature, how, place, show)
    images, _ = sample_for(model, data, n)
    clean = _clean(net, images, folder, 500 if chunk is None else chunk, temperature, how, place, show)
    found = []
    for slug, attack in zip(slugs, chosen):
        own = None if folder is None else folder / slug
        with warnings.catch_warnings(action="ignore", category=AttackWarning):  # the table marks the row
            one = attack_images(
                net, images, attack, out=own, chunk=chunk, name=name, device=place, picture=False, show=show
            )
        outcomes = None if own is None else one.read_outcomes(own)
        one = dataclasses.replace(one, name=slug, **how)
        found.append(one if folder is None else one.save(folder, outcomes))
    return Evaluation(clean, tuple(found), images.unit)


def _from_loader(
    model: Model,
    loader: DataLoader[Any],
    attacks: list[Attack],
    names: list[str],
    other: Any,
    how: dict[str, Any],
    place: torch.device,
    show: bool,
) -> Evaluation:
    """Everything in one pass over a loader, with one batch of images in memory at a time."""
    net = on_device(model, place)
    data = stream(model, net, loader, attacks, place, show=show)
    about = {**traced(net, data, place), **how}
    clean = _clean_result(net, data, data.logits, data.passes, other, place, {**about, "seconds": data.seconds})
    found = [attack_result(net, data, attack, data.attacks[k], about)[0] for k, attack in enumerate(attacks)]
    results = tuple(dataclasses.replace(one, name=slug) for one, slug in zip(found, names))
    return Evaluation(clean, results, data.unit)


def _slug(about: dict[str, Any]) -> str:
    """A folder's name for an attack: readable, and different for other settings."""
    eps = about["settings"].get("eps")
    size = [f"{eps:g}"] if isinstance(eps, int | float) else []
    return "-".join([about["name"].lower(), *size, json_digest(about)[:8]])


def _clean(
    model: Model,
    data: ImageData,
    folder: Path | None,
    chunk: int,
    other: Any,
    how: dict[str, Any],
    place: torch.device,
    show: bool,
) -> Result:
    """Accuracy and calibration on the clean images, saved in the folder."""
    about, begin = {**traced(model, data, place), **how}, time.perf_counter()
    own, who = (None, {}) if folder is None else (folder / "clean", identity(about, priors=how["priors"]))
    z, passes = _chunked_logits(model, data, Chunks(own, len(data), chunk, who), place, show)
    about["seconds"] = time.perf_counter() - begin
    result = _clean_result(model, data, z, passes, other, place, about)
    outcomes = {"clean": small(z.argmax(1)), "confidence": z.softmax(1).amax(1).half()}
    return result if folder is None else result.save(folder, packed(outcomes))


def _clean_result(
    model: Model,
    data: ImageData | Streamed,
    z: Tensor,
    passes: int,
    other: Any,
    place: torch.device,
    about: dict[str, Any],
) -> Result:
    """Accuracy and calibration from the logits [N, L]; the temperature is fitted on the `other` images."""
    if bool(z.isnan().any()):
        bad = int(z.isnan().any(1).sum())
        raise ValueError(f"model must return finite logits, got NaN for {bad} of {len(data)} {data.unit}")
    labels = data.labels.cpu()
    found = shares(z.argmax(1), labels, data.num_classes)
    numbers = {"balanced_accuracy": found.balanced, **_calibration(z, labels)}
    if passes > 1:
        numbers["passes"] = passes
    if other is not None:
        other = images_for(model, other)
        t = fit_temperature(logits(model, other, device=place), other.labels.cpu())
        numbers |= {"temperature": t, **{f"{key}_scaled": value for key, value in _calibration(z / t, labels).items()}}
    return Result.counted(
        round(found.accuracy * len(data)),
        len(data),
        name="clean",
        kind="evaluation",
        what=f"accuracy on {len(data)} {data.unit} of {data.name or 'the data'}",
        dataset=data.name,
        head=head_of(model),
        numbers={key: _finite(value) for key, value in numbers.items()},
        series={"per_class": [*map(_finite, found.per_class)], "classes": list(data.classes)},
        **about,
    )


def _calibration(z: Tensor, labels: Tensor) -> dict[str, float]:
    return {"nll": F.cross_entropy(z, labels).item(), "ece": calibration_error(z.softmax(1), labels)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _chunked_logits(
    model: Model, data: ImageData, chunks: Chunks, place: torch.device, show: bool
) -> tuple[Tensor, int]:
    """Logits [N, L] in float64 and the passes behind them, like `answers`; finished chunks are not computed again."""
    with progress(f"clean {data.unit}", len(data), unit=data.unit, every=10.0, show=show) as report:
        for rows in chunks.missing():
            z, passes = answers(model, data.subset(slice(rows.start, rows.stop)), device=place)
            chunks.save(rows.start, {"logits": z, "passes": torch.tensor(passes)})
            report(rows.stop)
    parts = chunks.load()
    z = torch.cat([part["logits"] for part in parts]).double()
    return z, max(int(part.get("passes", 1)) for part in parts)
