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
from mmlda.evaluation.robustness import provenance as traced
from mmlda.paper.setup import (
    MOST,
    Net,
    Setup,
    claim,
    networks,
    number,
    plain_rows,
    provenance,
    slug,
    train,
    trained,
    variant,
)
from mmlda.paper.tables import carlini, kept
from mmlda.results import Result, wilson
from mmlda.theory.means import generate_opt_means
from mmlda.training.recipes import network
from mmlda.training.sweeps import fold_jobs

__all__ = ["fig2", "fig4", "fig5", "latent", "semantic", "theory_figure"]


def fig2(setup: Setup, n: int = 1000) -> list[Result]:
    """t-SNE of the latent features of random test images for both heads, and how apart the classes are.

    The silhouette is of the latent features themselves: t-SNE spreads any features into islands.
    """
    test = setup.sets()[1]
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(test))[:n].copy())
    part = test.subset(rows)
    results = [_latent(setup, net, part) for net in networks(setup, plain_rows(setup.data))]
    of: dict[str, list[list[float]]] = {}
    for r in results:
        of.setdefault(r.cell["model"], []).append(r.series["silhouettes"])
    mean = {row: np.array(each).mean(0) for row, each in of.items()}  # over the seeds, image by image
    for row in [row for row in mean if row != "SR"]:
        gaps = mean[row] - mean["SR"]
        gap, half = float(gaps.mean()), 1.96 * float(gaps.std(ddof=1)) / len(gaps) ** 0.5
        results.append(claim(
            setup, f"fig2{variant(row)}", f"the classes' silhouette is {mean['SR'].mean():.3f} for SR, "
            f"{mean[row].mean():.3f} for {row}",
            True if gap - half > 0 else False if gap + half < 0 else None, value=gap, interval=(gap - half, gap + half),
            n=len(part), rule="holds if the silhouette of the classes in the latent space is larger for MM-LDA, does "
            "not if it is smaller, by the 95% interval over the images",
        ))  # fmt: skip
    return results


def _latent(setup: Setup, net: Net, part: ImageData) -> Result:
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_samples

    name = f"fig2-{setup.data}-{slug(net.row)}-{net.seed}"
    about = traced(net.model, part, torch.device(setup.device), net.name)
    there = kept(setup.out / f"{name}.json", about["network"]["sha256"], len(part))
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
        what=f"silhouette of the classes in the latent features of {net.row} on {setup.data}",
        cell={"data": setup.data, "model": net.row, "seed": net.seed},
        value=float(each.mean()),
        note=setup.note(),
        n=len(part),
        seed=net.seed,
        seconds=time.perf_counter() - begin,
        series=series,
        **net.about(),
        **about,
    ).save(setup.out)


def latent(setup: Setup) -> list[Result]:
    """How far the latent features of MM-LDA's test images are from the distribution that the theorems assume."""
    test = setup.sets()[1]
    results = []
    for net in networks(setup, plain_rows(setup.data)[1:]):
        name = f"latent-{setup.data}-{slug(net.row)}-{net.seed}"
        about = traced(net.model, test, torch.device(setup.device), net.name)
        there = kept(setup.out / f"{name}.json", about["network"]["sha256"], len(test))
        if there is None:
            begin = time.perf_counter()
            z = features(net, test.pixels(), setup.device)
            fit = dataclasses.asdict(net.model.head.latent_fit(z, test.labels.cpu()))  # type: ignore[operator]
            there = Result(
                name=name,
                kind="latent",
                what=f"mean of ||z - mu_y||^2 over the test images of {setup.data}, {net.row}",
                cell={"data": setup.data, "model": net.row, "seed": net.seed},
                value=fit["squared_distance"],
                note=setup.note(),
                n=fit.pop("samples"),
                seed=net.seed,
                seconds=time.perf_counter() - begin,
                numbers=fit,
                **net.about(),
                **about,
            ).save(setup.out)
        results.append(there)
    judged = []
    for row in plain_rows(setup.data)[1:]:
        here = [r for r in results if r.cell["model"] == row]
        found = [(float(r.numbers[key] or 0), float(r.numbers[f"{key}_expected"] or 1))
                 for r in here for key in ("squared_distance", "variance", "mean_offset")]  # fmt: skip
        if found:
            (distance, wanted), (spread, unit), (offset, sampling) = found[:3]
            judged.append(claim(
                setup, f"latent{variant(row)}", f"for {row} the mean of ||z - mu_y||^2 is {distance:.1f} where a "
                f"max-Mahalanobis distribution has {wanted:.0f}, the variance within a class {spread:.3f} where it "
                f"has {unit:g}, and the class means lie {offset:.2f} from mu where a sample's lie {sampling:.2f}",
                all(abs(ours / theirs - 1) <= 0.1 for ours, theirs in found), value=distance, n=here[0].n,
                rule="holds if the features' mean squared distance from mu, their variance within a class and the "
                "class means' distance from mu are within 10% of what a sample of the distribution has",
            ))  # fmt: skip
    return [*results, *judged]


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
        raise ValueError(f"noise has {len(noise)} entries: expected at least 2")

    def standard(t: Tensor) -> Tensor:
        t = t.flatten(1).double()
        t = t - t.mean(1, keepdim=True)
        return t / t.norm(dim=1, keepdim=True).clamp_min(1e-30)

    r = standard(noise) @ standard(images).T  # [N, N]
    others = r[~torch.eye(len(r), dtype=torch.bool)].abs()
    limit = float(np.quantile(others.numpy(), 0.999))
    return r.diagonal().abs() > limit, r.diagonal(), limit


def fig4(setup: Setup, *, search_steps: int = 9, steps: int = 10_000, shown: int = 10) -> list[Result]:
    """Images, noises (x* - x) / 2 of C&W, and the share of noises that look like their image."""
    results: list[Result] = []
    found_alike: dict[str, list[tuple[Tensor, float]]] = {}
    for net in networks(setup, ("SR", "MM-LDA")):
        result, _, folder = carlini(setup, net, "untargeted", search_steps=search_steps, steps=steps)
        part = setup.sets()[1].subset(slice(setup.images(MOST)))
        x, x_adv, labels = part.pixels().cpu(), adversarial_images(folder).float(), part.labels.cpu()
        guess = predictions(net.model, dataclasses.replace(part, images=x_adv, labels=part.labels), device=setup.device)
        moved = ((x_adv - x).flatten(1).norm(dim=1) > 0).nonzero().flatten()  # right before, and broken
        if len(moved) < 2:
            continue
        flags, alike, limit = semantic((x_adv - x)[moved] / 2, x[moved])
        count = int(flags.sum())
        low, high = wilson(count, len(moved))
        order = flags.to(torch.int8).argsort(descending=True, stable=True)[:shown]  # semantic ones first
        chosen = moved[order]
        tensors = {"x": (x[chosen] * 255).round().to(torch.uint8), "x_adv": x_adv[chosen].half(),
                   "label": labels[chosen].to(torch.int32), "prediction": guess[chosen].to(torch.int32),
                   "semantic": flags[order], "index": moved.to(torch.int32), "correlation": alike.half()}  # fmt: skip
        found = dataclasses.replace(
            result,
            name=f"fig4-{setup.data}-{slug(net.row)}-{net.seed}",
            kind="fig4",
            what=f"share of C&W noises of {net.row} on {setup.data} that look like their own image",
            value=100 * count / len(moved),
            unit="%",
            interval=(100 * low, 100 * high),
            paper=None,
            holds=None,
            n=len(moved),
            numbers={"correlation_limit": limit, "semantic": count, "weakening": int((flags & (alike < 0)).sum()),
                     "mean_correlation": float(alike.mean())},
            series={"classes": list(part.classes)},
        )
        results.append(found.save(setup.out, packed(tensors)))
        found_alike.setdefault(net.row, []).append((alike, limit))
    if {"SR", "MM-LDA"} <= found_alike.keys():
        results.append(fig4_claim(setup, found_alike["MM-LDA"], found_alike["SR"]))
    return results


def fig4_claim(setup: Setup, ours: list[tuple[Tensor, float]], base: list[tuple[Tensor, float]]) -> Result:
    """What the correlations of noises and images, with the limit of each network, say of the paper's sentence.

    The limit is where chance would put 0.1% of a network's noises. One for both networks is as good, and says something
    else where the networks' noises differ as a whole: so the verdict is one only if it is the same by each.
    """
    limits = [[limit for _, limit in rows] for rows in (ours, base)]
    ways: dict[str, float | None] = {"each by its own limit": None}
    ways |= {f"by {whose} limit for both": float(np.mean(at)) for whose, at in zip(("MM-LDA's", "SR's"), limits)}
    words, verdicts, shares = [], [], []
    for way, at in ways.items():
        over = ([alike.abs() > (own if at is None else at) for alike, own in rows] for rows in (ours, base))
        mine, theirs = (float(np.mean([100 * float(flags.double().mean()) for flags in each])) for each in over)
        words.append(f"{way} {mine:.2f}% for MM-LDA and {theirs:.2f}% for SR")
        verdicts.append(mine >= 1.0 and theirs < mine / 5)
        shares.append((mine, theirs))
    n = min(sum(len(alike) for alike, _ in rows) for rows in (ours, base))
    same = all(verdicts) or not any(verdicts)
    return claim(
        setup, "fig4", f"of the noises, these look like their image: {'; '.join(words)}",
        verdicts[0] if same and n >= 500 else None, value=shares[0][0], unit="%", n=n, numbers={"sr": shares[0][1]},
        rule="holds if at least 1% for MM-LDA and under a fifth of that for SR, on 500 noises or more, by each of the "
        "limits; does not if by none",
    )  # fmt: skip


def fig5(setup: Setup, log10_C: Sequence[float] = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0), folds: int = 5) -> list[Result]:
    """Error against log10(C), cross-validated on the training set; one seed."""
    seed = setup.seeds[0]
    recipe = setup.recipe("MM-LDA", seed)
    values = [10.0**c for c in log10_C]
    jobs = fold_jobs(setup.data, recipe, values, folds, model=network("mmlda", setup.data), root=setup.root)
    records = train(setup, jobs, f"folds/{setup.data}")
    data = setup.sets()[0]
    results = []
    for k, (c, C) in enumerate(zip(log10_C, values)):
        part = slice(k * folds, (k + 1) * folds)
        errors = [100 * (1 - record["accuracy"]) for record in records[part]]
        guesses = torch.zeros(len(data), dtype=torch.uint8)  # each image's, by the network that had not seen it
        for job in jobs[part]:
            held = job.sets()[1]
            guess = predictions(trained(setup, job, f"folds/{setup.data}"), held, device=setup.device)
            guesses[fold_rows(data, *job.part[1:])] = guess.to(torch.uint8)  # type: ignore[index]
        results.append(Result(
            name=f"fig5-{setup.data}-C{c:g}-{seed}",
            kind="fig5",
            what=f"validation error at log10(C) = {c:g} on {setup.data}, mean of {folds} folds",
            cell={"data": setup.data, "C": C, "log10_C": c},
            value=statistics.mean(errors),
            unit="%",
            note=setup.note("" if folds == 5 else f"{folds} folds, not 5"),
            n=len(data),
            seed=seed,
            steps=recipe.steps,
            seconds=sum(record["seconds"] for record in records[part]),
            numbers={"std": statistics.stdev(errors)},
            series={"errors": errors},
            recipe=json.loads(json.dumps(dataclasses.asdict(recipe))),
            network={"name": f"{folds} networks, one a fold", "jobs": [job.name for job in jobs[part]]},
            data={"name": setup.data, "part": "train", "images": len(data), "sha256": data.digest()},
            **provenance(setup),
        ).save(setup.out, packed({"prediction": guesses})))  # fmt: skip
    return [*results, fig5_claim(setup, results)]


def fig5_claim(setup: Setup, results: Sequence[Result]) -> Result:
    """Where the error is lowest, and whether it is so at C = 100."""
    best = min(results, key=number)
    two = next((r for r in results if r.cell["log10_C"] == 2.0), None)
    low, high = _apart(two, best) if two is not None else (math.nan, math.nan)
    return claim(
        setup, "fig5", f"the lowest validation error is {best.value:.2f}% at log10(C) = {best.cell['log10_C']:g}"
        + (f"; at 2 it is {two.value:.2f}%, {number(two) - number(best):+.2f} points (95% interval over the folds "
           f"{low:+.2f} to {high:+.2f})" if two else ""),
        None if two is None else True if two is best else False if low > 0 else None, value=best.cell["log10_C"],
        unit="log10(C)",
        rule="holds if the error is lowest at log10(C) = 2, does not if the 95% interval of its difference from the "
        "lowest, fold by fold, lies above 0",
    )  # fmt: skip


def _apart(first: Result, second: Result) -> tuple[float, float]:
    """A 95% interval for the difference of two errors, in points, fold by fold."""
    from scipy.stats import t

    gaps = np.subtract(first.series["errors"], second.series["errors"])
    if len(gaps) < 2:
        return -math.inf, math.inf
    half = float(t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5)
    return float(gaps.mean()) - half, float(gaps.mean()) + half


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
            cell={"data": "theory"},
            value=ratio,
            paper="|E[d] / Delta - 1/2| < 1e-7 for Delta > 10",
            holds=ratio < 1e-7,
            series={"curves": curves},
            **provenance(setup),
        ).save(setup.out)
    ]
