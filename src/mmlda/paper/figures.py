"""Figures 2, 4, 5 and the theory's, as the numbers they are drawn from, with the paper's sentence beside each."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmlda import theory
from mmlda._utils.tensors import packed
from mmlda.data import ImageData, fold_rows
from mmlda.evaluation.robustness import adversarial_images, predictions
from mmlda.paper import claims, wording
from mmlda.paper.comparisons import fold_difference, mean_interval, of_row
from mmlda.paper.rows import MMLDA, SR, Row, plain_rows
from mmlda.paper.setup import MOST, Net, Setup, claim, claim_of, kept, networks, slug, train, trained
from mmlda.paper.tables import PAPERS_SEARCH, carlini
from mmlda.results import Result, measured_on, traced, wilson
from mmlda.theory.means import generate_opt_means
from mmlda.training.recipes import Recipe, network
from mmlda.training.sweeps import Job, fold_jobs

__all__ = ["fig2", "fig4", "fig5", "latent", "semantic", "theory_figure"]


def fig2(setup: Setup, n: int = 1000) -> list[Result]:
    """t-SNE of the latent features of random test images for both heads, and how apart the classes are.

    The silhouette is of the latent features themselves: t-SNE spreads any features into islands.
    """
    test = setup.sets()[1]
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(test))[:n].copy())
    part = test.subset(rows)
    results = [_latent(setup, net, part) for net in networks(setup, plain_rows(setup.data))]
    base = _silhouettes(results, SR)
    made = []
    for row in plain_rows(setup.data)[1:]:
        ours = _silhouettes(results, row)
        gap, interval = mean_interval(ours - base)
        what = wording.silhouettes(row.label(setup.data), float(ours.mean()), float(base.mean()))
        fields: dict[str, Any] = {"value": gap, "interval": interval, "n": len(part)}
        made.append(claim_of(setup, "fig2", row, what, claims.features_are_regular(interval), **fields))
    return [*results, *made]


def _silhouettes(results: Sequence[Result], row: Row) -> np.ndarray:
    """The mean over the seeds, image by image."""
    return np.array([result.series["silhouettes"] for result in of_row(results, row)]).mean(0)


def _latent(setup: Setup, net: Net, part: ImageData) -> Result:
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_samples

    words = net.label(setup.data, "fig2")
    name = f"fig2-{setup.data}-{slug(words)}-{net.seed}"
    there = kept(setup, name, net, len(part))
    if there is not None:
        return there
    begin = time.perf_counter()
    z = features(net, part.pixels(), setup.device)
    tsne = TSNE(perplexity=min(30, (len(part) - 1) // 3), init="pca", random_state=net.seed)
    flat = tsne.fit_transform(z.numpy())  # [n, 2]
    each = silhouette_samples(z.numpy(), part.labels.numpy())
    centres = []
    for k in part.labels.unique().tolist():
        x, y = np.median(flat[(part.labels == k).numpy()], axis=0)
        centres.append([round(float(x), 2), round(float(y), 2), k])
    series = {"x": [round(float(v), 2) for v in flat[:, 0]], "y": [round(float(v), 2) for v in flat[:, 1]],
              "label": part.labels.tolist(), "centres": centres, "classes": list(part.classes),
              "silhouettes": [round(float(v), 4) for v in each]}  # fmt: skip
    return Result(
        name=name,
        kind="fig2",
        what=f"silhouette of the classes in the latent features of {words} on {setup.data}",
        value=float(each.mean()),
        note=setup.note(),
        n=len(part),
        seconds=time.perf_counter() - begin,
        series=series,
        **net.fields(setup.data),
        **traced(net.model, part, setup.device, net.name),
    ).save(setup.out)


def latent(setup: Setup) -> list[Result]:
    """How far the latent features of MM-LDA's test images are from the distribution that the theorems assume."""
    rows = plain_rows(setup.data)[1:]
    results = [_latent_fit(setup, net) for net in networks(setup, rows)]
    made = []
    for row in rows:
        if here := of_row(results, row):
            found = [pair for result in here for pair in _fitted(result)]
            what = wording.latent_fit(row.label(setup.data), found[:3])
            judged = claims.features_are_normal(found)
            made.append(claim_of(setup, "latent", row, what, judged, value=found[0][0], n=here[0].n))
    return [*results, *made]


def _latent_fit(setup: Setup, net: Net) -> Result:
    test, words = setup.sets()[1], net.label(setup.data, "latent")
    name = f"latent-{setup.data}-{slug(words)}-{net.seed}"
    there = kept(setup, name, net, len(test))
    if there is not None:
        return there
    begin = time.perf_counter()
    z = features(net, test.pixels(), setup.device)
    fit = dataclasses.asdict(net.model.head.latent_fit(z, test.labels.cpu()))  # type: ignore[operator]
    return Result(
        name=name,
        kind="latent",
        what=f"mean of ||z - mu_y||^2 over the test images of {setup.data}, {words}",
        value=fit["squared_distance"],
        note=setup.note(),
        n=fit.pop("samples"),
        seconds=time.perf_counter() - begin,
        numbers=fit,
        **net.fields(setup.data),
        **traced(net.model, test, setup.device, net.name),
    ).save(setup.out)


def _fitted(result: Result) -> list[tuple[float, float]]:
    """The statistics of the features, each with what a max-Mahalanobis distribution has."""
    keys = ("squared_distance", "variance", "mean_offset")
    return [(float(result.numbers[key] or 0), float(result.numbers[f"{key}_expected"] or 1)) for key in keys]


@torch.no_grad()
def features(net: Net, x: Tensor, device: str) -> Tensor:
    """Latent features [N, p], on the CPU."""
    return torch.cat([net.model.features(part.to(device)).float().cpu() for part in x.split(1000)])


def semantic(noise: Tensor, images: Tensor) -> tuple[Tensor, Tensor, float]:
    """Which noises are semantic, bool [N]; their correlations with their own image; and the limit.

    A noise is semantic where its correlation with its own image, of either sign, is larger than 99.9% of the
    correlations of noises with the other images; of noises that know nothing of their image, 0.1% are. A positive one
    draws the image again, a negative one takes it away: the paper speaks of weakening "the features ... as a whole".

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


Noises = list[tuple[Tensor, float]]  # for each seed the correlations of noises and images, and the limit


def fig4(
    setup: Setup, *, search_steps: int = PAPERS_SEARCH[0], steps: int = PAPERS_SEARCH[1], shown: int = 10
) -> list[Result]:
    """Images, noises (x* - x) / 2 of C&W, and the share of noises that look like their image."""
    results: list[Result] = []
    noises: dict[Row, Noises] = {}
    for net in networks(setup, (SR, MMLDA)):
        made = _noises(setup, net, search_steps, steps, shown)
        if made is not None:
            results.append(made[0])
            noises.setdefault(net.row, []).append(made[1])
    if {SR, MMLDA} <= noises.keys():
        results.append(fig4_claim(setup, noises[MMLDA], noises[SR]))
    return results


def _noises(
    setup: Setup, net: Net, search_steps: int, steps: int, shown: int
) -> tuple[Result, tuple[Tensor, float]] | None:
    """One network's noises: the result, the correlations and the limit; None where fewer than two images break."""
    result, _, folder = carlini(setup, net, "untargeted", search_steps=search_steps, steps=steps)
    part = setup.sets()[1].subset(slice(setup.images(MOST)))
    x, x_adv, labels = part.pixels().cpu(), adversarial_images(folder).float(), part.labels.cpu()
    moved = ((x_adv - x).flatten(1).norm(dim=1) > 0).nonzero().flatten()  # right before, and broken
    if len(moved) < 2:
        return None
    guess = predictions(net.model, dataclasses.replace(part, images=x_adv, labels=part.labels), device=setup.device)
    flags, alike, limit = semantic((x_adv - x)[moved] / 2, x[moved])
    count = int(flags.sum())
    order = flags.to(torch.int8).argsort(descending=True, stable=True)[:shown]  # semantic ones first
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
    words = net.label(setup.data, "fig4", "CarliniWagner")
    found = dataclasses.replace(
        result,
        name=f"fig4-{setup.data}-{slug(words)}-{net.seed}",
        kind="fig4",
        what=f"share of C&W noises of {words} on {setup.data} that look like their own image",
        value=count / len(moved),
        unit="share",
        interval=wilson(count, len(moved)),
        paper=None,
        holds=None,
        n=len(moved),
        numbers={
            "correlation_limit": limit,
            "semantic": count,
            "weakening": int((flags & (alike < 0)).sum()),
            "mean_correlation": float(alike.mean()),
        },
        series={"classes": list(part.classes)},
    )
    return found.save(setup.out, packed(tensors)), (alike, limit)


def fig4_claim(setup: Setup, ours: Noises, base: Noises) -> Result:
    """What the correlations of noises and images, with the limit of each network, say about the paper's sentence.

    The limit is where chance would put 0.1% of a network's noises. One limit for both networks is as good, and differs
    where the networks' noises differ as a whole: the claim is decided only if every way gives the same verdict.
    """
    limits = [float(np.mean([limit for _, limit in rows])) for rows in (ours, base)]
    ways: dict[str, float | None] = {
        "each by its own limit": None,
        "by MM-LDA's limit for both": limits[0],
        "by SR's limit for both": limits[1],
    }
    shares = [(_share(ours, limit), _share(base, limit)) for limit in ways.values()]
    n = min(sum(len(alike) for alike, _ in rows) for rows in (ours, base))
    return claim(
        setup,
        "fig4",
        wording.semantic([(way, *pair) for way, pair in zip(ways, shares)]),
        claims.noise_is_semantic(shares, n),
        value=shares[0][0],
        unit="share",
        n=n,
        numbers={"sr": shares[0][1]},
    )


def _share(noises: Noises, limit: float | None) -> float:
    """The share of noises above a limit, or each seed's own; the mean over the seeds."""
    over = [alike.abs() > (own if limit is None else limit) for alike, own in noises]
    return float(np.mean([float(flags.double().mean()) for flags in over]))


def fig5(setup: Setup, log10_C: Sequence[float] = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0), folds: int = 5) -> list[Result]:
    """Error against log10(C), cross-validated on the training set; one seed."""
    recipe = setup.recipe(MMLDA, setup.seeds[0])
    values = [10.0**c for c in log10_C]
    jobs = fold_jobs(setup.data, recipe, values, folds, model=network("mmlda", setup.data), root=setup.root)
    records = train(setup, jobs, f"folds/{setup.data}")
    results = []
    for k, (c, C) in enumerate(zip(log10_C, values)):
        part = slice(k * folds, (k + 1) * folds)
        results.append(_validated(setup, c, C, recipe, jobs[part], records[part]))
    return [*results, fig5_claim(setup, results)]


def _validated(
    setup: Setup, log10_C: float, C: float, recipe: Recipe, jobs: list[Job], records: list[dict[str, Any]]
) -> Result:
    """The error at one C: the mean over the folds."""
    data, folds = setup.sets()[0], len(jobs)
    errors = [1 - record["accuracy"] for record in records]
    guesses = torch.zeros(len(data), dtype=torch.uint8)  # each image's, by the network that had not seen it
    for job in jobs:
        guess = predictions(trained(setup, job, f"folds/{setup.data}"), job.sets()[1], device=setup.device)
        guesses[fold_rows(data, *job.part[1:])] = guess.to(torch.uint8)  # type: ignore[index]
    fields = MMLDA.fields(setup.data)
    fields["cell"] = {"C": C, "log10_C": log10_C}
    return Result(
        name=f"fig5-{setup.data}-C{log10_C:g}-{setup.seeds[0]}",
        kind="fig5",
        what=f"validation error at log10(C) = {log10_C:g} on {setup.data}, mean of {folds} folds",
        value=statistics.mean(errors),
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
    return claim(
        setup,
        "fig5",
        wording.lowest_error((lowest, best.number), None if two is None else two.number, interval),
        claims.lowest_at_100(None if two is None else two is best, interval),
        value=lowest,
        unit="log10(C)",
    )


def theory_figure(setup: Setup) -> list[Result]:
    """E[d], RB and its bound against L and C, from the theorems alone."""
    curves: list[dict[str, Any]] = []

    def add(panel: str, name: str, x: list[float], y: list[float], xlabel: str, ylabel: str) -> None:
        curves.append({"panel": panel, "name": name, "x": x, "y": [round(v, 6) for v in y], "xlabel": xlabel,
                       "ylabel": ylabel})  # fmt: skip

    C = [float(f"{10 ** (k / 8):.4g}") for k in range(-8, 33)]
    for L in (2, 10, 100):
        delta = [math.sqrt(2 * c * L / (L - 1)) for c in C]
        add("C", f"E[d], L = {L}", C, [float(theory.expected_distance(d)) for d in delta], "C", "distance")
        add("C", f"bound, L = {L}", C, [float(theory.robustness_bound(L, c)) for c in C], "C", "distance")
    Ls = [2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100]
    mu = {L: generate_opt_means(C=100.0, p=max(L - 1, 1), L=L) for L in Ls}
    xs = [float(L) for L in Ls]
    add("L", "RB at C = 100", xs, [float(theory.robustness(mu[L])) for L in Ls], "L", "distance")
    add("L", "bound at C = 100", xs, [float(theory.robustness_bound(L, 100.0)) for L in Ls], "L", "distance")
    for L in (2, 10):
        small = [float(f"{10 ** (k / 8):.4g}") for k in range(-8, 13)]
        errors = [float(theory.bayes_error(generate_opt_means(C=c, p=max(L - 1, 1), L=L))) for c in small]
        add("Bayes error", f"L = {L}", small, errors, "C", "Bayes error")
    ratio = max(abs(float(theory.expected_distance(d)) / d - 0.5) for d in np.linspace(10.0001, 60, 500).tolist())
    return [
        Result(
            name="theory",
            kind="theory",
            what="largest |E[d] / Delta - 1/2| for Delta > 10",
            value=ratio,
            paper="|E[d] / Delta - 1/2| < 1e-7 for Delta > 10",
            holds=ratio < 1e-7,
            series={"curves": curves},
            **measured_on(setup.device),
        ).save(setup.out)
    ]
