"""Figures 2, 4, 5 and the theory's, as the numbers they are drawn from, with the paper's sentence beside each."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmlda import theory
from mmlda._utils.tensors import packed
from mmlda.data import ImageData, fold_rows
from mmlda.evaluation.robustness import adversarial_images, predictions
from mmlda.paper import claims
from mmlda.paper.comparisons import fold_difference, mean_interval, of_row
from mmlda.paper.rows import MMLDA, SR, Fields, Row, plain_rows
from mmlda.paper.setup import MOST, Net, Setup, claim, kept, named, networks, train, trained
from mmlda.paper.tables import PAPERS_SEARCH, carlini
from mmlda.results import Result, measured_on, traced, wilson
from mmlda.theory.means import generate_opt_means
from mmlda.training.recipes import Recipe, network
from mmlda.training.sweeps import Job, fold_jobs


def fig2(setup: Setup, n: int = 1000) -> list[Result]:
    """t-SNE of the latent features of random test images for both heads, and how well the classes are separated.

    The silhouette is that of the latent features themselves: t-SNE spreads any features into islands.

    Parameters
    ----------
    setup
        The data, the networks and the folder for the results.
    n
        Number of test images.
    """
    test = setup.sets()[1]
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(test))[:n].copy())
    part, what = test.subset(rows), "silhouette of the classes in the latent features of {} on {}"
    results = [_of_features(setup, net, part, "fig2", what, _spread) for net in networks(setup, plain_rows(setup.data))]
    base = _silhouettes(results, SR)
    made = []
    for row in plain_rows(setup.data)[1:]:
        ours = _silhouettes(results, row)
        gap, interval = mean_interval(ours - base)
        said = f"the classes' silhouette is {base.mean():.3f} for SR, {ours.mean():.3f} for {row.label(setup.data)}"
        fields: Fields = {"value": gap, "interval": interval, "n": len(part)}
        made.append(claim(setup, "fig2", said, claims.above(interval), row=row, **fields))
    return [*results, *made]


def _silhouettes(results: Sequence[Result], row: Row) -> np.ndarray:
    """The mean over the seeds, image by image."""
    return np.array([result.series["silhouettes"] for result in of_row(results, row)]).mean(0)


def _spread(net: Net, z: Tensor, part: ImageData) -> Fields:
    """Latent features in two dimensions, and each image's silhouette."""
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_samples

    labels = part.labels.numpy()
    tsne = TSNE(perplexity=min(30, (len(part) - 1) // 3), init="pca", random_state=net.seed)
    flat = tsne.fit_transform(z.numpy())  # [n, 2]
    each = silhouette_samples(z.numpy(), labels)
    centres = [[*_rounded(np.median(flat[labels == k], axis=0)), k] for k in part.labels.unique().tolist()]
    series = {
        "x": _rounded(flat[:, 0]),
        "y": _rounded(flat[:, 1]),
        "label": labels.tolist(),
        "centres": centres,
        "classes": list(part.classes),
        "silhouettes": _rounded(each, 4),
    }
    return {"value": float(each.mean()), "n": len(part), "series": series}


def _rounded(values: np.ndarray, digits: int = 2) -> list[float]:
    return [round(float(value), digits) for value in values]


def latent(setup: Setup) -> list[Result]:
    """How far the latent features of MM-LDA's test images are from the distribution that the theorems assume."""
    rows, test = plain_rows(setup.data)[1:], setup.sets()[1]
    what = "mean of ||z - mu_y||^2 over the test images of {1}, {0}"
    results = [_of_features(setup, net, test, "latent", what, _fit) for net in networks(setup, rows)]
    made = []
    for row in rows:
        if here := of_row(results, row):
            found = [pair for result in here for pair in _fitted(result)]
            (distance, wanted), (spread, unit), (offset, sampling) = found[:3]
            said = (
                f"for {row.label(setup.data)} the mean of ||z - mu_y||^2 is {distance:.1f} where a max-Mahalanobis "
                f"distribution has {wanted:.0f}, the variance within a class {spread:.3f} where it has {unit:g}, and "
                f"the class means lie {offset:.2f} from mu where a sample's lie {sampling:.2f}"
            )
            fields: Fields = {"value": distance, "n": here[0].n}
            made.append(claim(setup, "latent", said, claims.features_are_normal(found), row=row, **fields))
    return [*results, *made]


def _fit(net: Net, z: Tensor, test: ImageData) -> Fields:
    fit = dataclasses.asdict(net.model.head.latent_fit(z, test.labels.cpu()))  # type: ignore[operator]
    return {"value": fit["squared_distance"], "n": fit.pop("samples"), "numbers": fit}


def _fitted(result: Result) -> list[tuple[float, float]]:
    """The statistics of the features, each beside that of a max-Mahalanobis distribution."""
    keys = ("squared_distance", "variance", "mean_offset")
    return [(float(result.numbers[key] or 0), float(result.numbers[f"{key}_expected"] or 1)) for key in keys]


def _of_features(
    setup: Setup, net: Net, data: ImageData, kind: str, what: str, measure: Callable[[Net, Tensor, ImageData], Fields]
) -> Result:
    """A result about the latent features of some images; `what` is filled with the network and the dataset."""
    words, name = named(setup, net, kind)
    if (there := kept(setup, name, net, len(data))) is not None:
        return there
    begin = time.perf_counter()
    found = measure(net, features(net, data.pixels(), setup.device), data)
    found |= net.fields(setup.data) | traced(net.model, data, setup.device, net.name)
    found |= {"what": what.format(words, setup.data), "note": setup.note(), "seconds": time.perf_counter() - begin}
    return Result(name=name, kind=kind, **found).save(setup.out)


@torch.no_grad()
def features(net: Net, x: Tensor, device: str) -> Tensor:
    """Latent features [N, p], on the CPU."""
    return torch.cat([net.model.features(part.to(device)).float().cpu() for part in x.split(1000)])


def semantic(noise: Tensor, images: Tensor) -> tuple[Tensor, Tensor, float]:
    """Which noises are semantic, bool [N]; their correlations with their own image; and the limit.

    A noise is semantic if its correlation with its own image, of either sign, exceeds 99.9% of the correlations of
    noises with other images; of noises independent of their image, 0.1% are. A positive correlation repeats the image,
    a negative one removes it: the paper speaks of weakening "the features ... as a whole".

    >>> images = torch.rand(300, 20, generator=torch.Generator().manual_seed(0))
    >>> semantic(images * 0.1, images)[0].all().item(), semantic(-images * 0.1, images)[0].all().item()
    (True, True)
    """
    if len(noise) < 2:
        raise ValueError(f"noise must have at least 2 entries, got {len(noise)}")

    def standard(t: Tensor) -> Tensor:
        t = t.flatten(1).double()
        t = t - t.mean(1, keepdim=True)
        return t / t.norm(dim=1, keepdim=True).clamp_min(1e-30)

    r = standard(noise) @ standard(images).T  # [N, N]
    others = r[~torch.eye(len(r), dtype=torch.bool)].abs()
    limit = float(np.quantile(others.numpy(), 0.999))
    return r.diagonal().abs() > limit, r.diagonal(), limit


SHOWN = 10  # images
Noises = list[tuple[Tensor, float]]  # for each seed the correlations of noises and images, and the limit


def fig4(setup: Setup, *, search: tuple[int, int] = PAPERS_SEARCH) -> list[Result]:
    """Images, noises (x* - x) / 2 of C&W, and the share of noises that look like their image."""
    results: list[Result] = []
    noises: dict[Row, Noises] = {}
    for net in networks(setup, (SR, MMLDA)):
        made = _noises(setup, net, search)
        if made is not None:
            results.append(made[0])
            noises.setdefault(net.row, []).append(made[1])
    if {SR, MMLDA} <= noises.keys():
        results.append(fig4_claim(setup, noises[MMLDA], noises[SR]))
    return results


def _noises(setup: Setup, net: Net, search: tuple[int, int]) -> tuple[Result, tuple[Tensor, float]] | None:
    """One network's noises: the result, the correlations and the limit; None if fewer than two images break."""
    result, _, folder = carlini(setup, net, "untargeted", search)
    part = setup.sets()[1].subset(slice(setup.images(MOST)))
    x, x_adv, labels = part.pixels().cpu(), adversarial_images(folder).float(), part.labels.cpu()
    moved = ((x_adv - x).flatten(1).norm(dim=1) > 0).nonzero().flatten()  # right before, and broken
    if len(moved) < 2:
        return None
    guess = predictions(net.model, dataclasses.replace(part, images=x_adv, labels=part.labels), device=setup.device)
    flags, alike, limit = semantic((x_adv - x)[moved] / 2, x[moved])
    count = int(flags.sum())
    order = flags.to(torch.int8).argsort(descending=True, stable=True)[:SHOWN]  # semantic ones first
    chosen = moved[order]
    tensors = {
        "x": (x[chosen] * 255).round().to(torch.uint8),
        "x_adv": x_adv[chosen].half(),
        "label": labels[chosen].to(torch.int32),
        "prediction": guess[chosen].to(torch.int32),
        "semantic": flags[order],
        "index": moved.to(torch.int32),
        "correlation": alike.half(),
    }
    words, name = named(setup, net, "fig4", attack="CarliniWagner")
    measured: dict[str, float | str | None] = {
        "correlation_limit": limit,
        "semantic": count,
        "weakening": int((flags & (alike < 0)).sum()),
        "mean_correlation": float(alike.mean()),
    }
    what = f"share of C&W noises of {words} on {setup.data} that look like their own image"
    about: Fields = {"name": name, "kind": "fig4", "what": what, "paper": None, "holds": None}
    about |= {"value": count / len(moved), "unit": "share", "interval": wilson(count, len(moved)), "n": len(moved)}
    found = dataclasses.replace(result, numbers=measured, series={"classes": list(part.classes)}, **about)
    return found.save(setup.out, packed(tensors)), (alike, limit)


def fig4_claim(setup: Setup, ours: Noises, base: Noises) -> Result:
    """The verdict on the paper's sentence, from the correlations of noises and images and the networks' limits.

    By chance, 0.1% of a network's noises exceed its limit. One limit for both networks would be as reasonable, so the
    claim is decided only if every choice of limit gives the same verdict.
    """
    one, other = (float(np.mean([limit for _, limit in rows])) for rows in (ours, base))
    ways = {"each by its own limit": None, "by MM-LDA's limit for both": one, "by SR's limit for both": other}
    shares = [(_share(ours, limit), _share(base, limit)) for limit in ways.values()]
    n = min(sum(len(alike) for alike, _ in rows) for rows in (ours, base))
    words = [f"{way} {100 * a:.2f}% for MM-LDA and {100 * b:.2f}% for SR" for way, (a, b) in zip(ways, shares)]
    what = f"of the noises, these look like their image: {'; '.join(words)}"
    fields: Fields = {"value": shares[0][0], "unit": "share", "n": n, "numbers": {"sr": shares[0][1]}}
    return claim(setup, "fig4", what, claims.noise_is_semantic(shares, n), **fields)


def _share(noises: Noises, limit: float | None) -> float:
    """The share of noises above a limit, or each seed's own; the mean over the seeds."""
    over = [alike.abs() > (own if limit is None else limit) for alike, own in noises]
    return float(np.mean([float(flags.double().mean()) for flags in over]))


def fig5(setup: Setup, log10_C: Sequence[float] = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0), folds: int = 5) -> list[Result]:
    """Error against log10(C), cross-validated on the training set; one seed.

    Parameters
    ----------
    setup
        The data, the recipe and the folder for the results.
    log10_C
        The values of log10(C) to train with.
    folds
        Number of folds; the paper has 5.
    """
    recipe = setup.recipe(MMLDA, setup.seeds[0])
    values = [10.0**c for c in log10_C]
    jobs = fold_jobs(setup.data, recipe, values, folds, model=network("mmlda", setup.data), root=setup.root)
    records = train(setup, jobs, f"folds/{setup.data}")
    parts = [slice(k * folds, (k + 1) * folds) for k in range(len(values))]
    results = [_validated(setup, c, recipe, jobs[part], records[part]) for c, part in zip(log10_C, parts)]
    return [*results, fig5_claim(setup, results)]


def _validated(setup: Setup, log10_C: float, recipe: Recipe, jobs: list[Job], records: list[dict[str, Any]]) -> Result:
    """The error at one C over all images, each predicted by the network that had not seen it.

    The errors are counted from the stored predictions. The accuracies in `records` were measured before the networks
    were saved, in another memory format, and on a GPU may differ by a few images.
    """
    data, folds, errors = setup.sets()[0], len(jobs), []
    guesses = torch.zeros(len(data), dtype=torch.uint8)
    for job in jobs:
        held_out, rows = job.sets()[1], fold_rows(data, *job.part[1:])  # type: ignore[index]
        guess = predictions(trained(setup, job, f"folds/{setup.data}"), held_out, device=setup.device)
        guesses[rows] = guess.to(torch.uint8)
        errors.append(float((guess != held_out.labels.cpu()).double().mean()))
    fields = MMLDA.fields(setup.data)
    fields["cell"] = {"C": 10.0**log10_C, "log10_C": log10_C}
    return Result(
        name=f"fig5-{setup.data}-C{log10_C:g}-{setup.seeds[0]}",
        kind="fig5",
        what=f"validation error at log10(C) = {log10_C:g} on {setup.data}, mean of {folds} folds",
        value=float((guesses != data.labels.cpu()).double().mean()),
        unit="share",
        note=setup.note("" if folds == 5 else f"{folds} folds, not 5"),
        n=len(data),
        seed=setup.seeds[0],
        train_steps=recipe.steps,
        seconds=sum(record["seconds"] for record in records),
        numbers={"std": statistics.stdev(errors)},
        series={"errors": errors, "networks": [job.name for job in jobs]},
        recipe_settings=json.loads(json.dumps(dataclasses.asdict(recipe))),
        data={"name": setup.data, "part": "train", "images": len(data), "sha256": data.digest()},
        **fields,
        **measured_on(setup.device),
    ).save(setup.out, packed({"prediction": guesses}))


def fig5_claim(setup: Setup, results: Sequence[Result]) -> Result:
    """Where the error is lowest, and whether it is so at C = 100."""
    best = min(results, key=lambda result: result.number)
    two = next((result for result in results if result.cell["log10_C"] == 2.0), None)
    interval = (math.nan, math.nan) if two is None else fold_difference(two.series["errors"], best.series["errors"])
    lowest = best.cell["log10_C"]
    what = f"the lowest validation error is {100 * best.number:.2f}% at log10(C) = {lowest:g}"
    if two is not None:
        gap, (low, high) = two.number - best.number, interval
        what += f"; at 2 it is {100 * two.number:.2f}%, {100 * gap:+.2f} points (95% interval over the folds "
        what += f"{100 * low:+.2f} to {100 * high:+.2f})"
    holds = claims.lowest_at_100(None if two is None else two is best, interval)
    return claim(setup, "fig5", what, holds, value=lowest, unit="log10(C)")


def theory_figure(setup: Setup) -> list[Result]:
    """E[d], RB and its bound against L and C, from the theorems alone."""
    curves: list[dict[str, Any]] = []

    def add(panel: str, name: str, x: Sequence[float], y: Sequence[Any], xlabel: str, ylabel: str) -> None:
        line = {"panel": panel, "name": name, "x": list(map(float, x)), "y": [round(float(v), 6) for v in y]}
        curves.append({**line, "xlabel": xlabel, "ylabel": ylabel})

    def means(L: int, c: float = 100.0) -> Tensor:
        return generate_opt_means(C=c, p=max(L - 1, 1), L=L)

    C = [float(f"{10 ** (k / 8):.4g}") for k in range(-8, 33)]
    for L in (2, 10, 100):
        distances = [theory.expected_distance(math.sqrt(2 * c * L / (L - 1))) for c in C]
        add("C", f"E[d], L = {L}", C, distances, "C", "distance")
        add("C", f"bound, L = {L}", C, [theory.robustness_bound(L, c) for c in C], "C", "distance")
    Ls = [2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100]
    add("L", "RB at C = 100", Ls, [theory.robustness(means(L)) for L in Ls], "L", "distance")
    add("L", "bound at C = 100", Ls, [theory.robustness_bound(L, 100.0) for L in Ls], "L", "distance")
    for L in (2, 10):
        errors = [theory.bayes_error(means(L, c)) for c in C[:21]]
        add("Bayes error", f"L = {L}", C[:21], errors, "C", "Bayes error")
    ratio = max(abs(float(theory.expected_distance(d)) / d - 0.5) for d in np.linspace(10.0001, 60, 500).tolist())
    found = Result(
        name="theory",
        kind="theory",
        what="largest |E[d] / Delta - 1/2| for Delta > 10",
        value=ratio,
        paper="|E[d] / Delta - 1/2| < 1e-7 for Delta > 10",
        holds=ratio < 1e-7,
        series={"curves": curves},
        **measured_on(setup.device),
    )
    return [found.save(setup.out)]
