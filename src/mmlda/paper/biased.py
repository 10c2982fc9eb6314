"""Figure 3: class-biased data, and a control that the paper does not have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmlda import data as datasets
from mmlda._utils.tensors import packed
from mmlda.evaluation.robustness import predictions
from mmlda.evaluation.robustness import provenance as traced
from mmlda.paper.setup import Setup, claim, number, slug, train, trained
from mmlda.results import Result, wilson
from mmlda.training.recipes import network
from mmlda.training.sweeps import Job

__all__ = ["CONTROL", "MODELS", "fig3", "fig3_control", "paired"]

MODELS = ("SR", "MM-LDA", "MM-LDA, true priors")
CONTROL = "SR, MM-LDA's recipe"
PAIRED = "decided where p < 0.05 over the sets; the sets share images and a seed, so p is optimistic"


def fig3(setup: Setup, sets: Sequence[str] | None = None) -> list[Result]:
    """Accuracy on class-biased sets: SR, and MM-LDA with uniform and with true priors; one seed.

    Ends in a paired test over the sets, and in how often uniform and true priors give the same label: on one network
    whose priors are exchanged, and on two that were trained with either.
    """
    jobs = _biased_jobs(setup, sets, MODELS)
    results, labels = _biased(setup, jobs)
    return [*results, *_fig3_claims(setup, jobs, labels, results)]


def fig3_control(setup: Setup, sets: Sequence[str] | None = None) -> list[Result]:
    """SR trained by MM-LDA's own recipe, beside the results of `fig3` in the same folder.

    The two rows of Fig. 3 differ in the optimizer as well as in the head; these and MM-LDA's in the head alone.
    """
    jobs = _biased_jobs(setup, sets, (CONTROL,))
    ours = {}
    for (name, _), job in jobs.items():
        path = setup.out / f"fig3-{setup.data}-{name}-{slug('MM-LDA')}-{setup.seeds[0]}.json"
        if not path.is_file():
            raise ValueError(f"out = {str(setup.out)!r}: expected {path.name} there, a result of fig3")
        ours[name] = there = Result.load(path)
        sha256 = (there.data or {}).get("sha256")
        if there.recipe != json.loads(json.dumps(dataclasses.asdict(job.recipe))) or sha256 != job.sets()[1].digest():
            raise ValueError(f"{path} has another recipe or other images: expected those of {job.name}")
    results, _ = _biased(setup, jobs)
    gaps = [number(ours[r.cell["set"]]) - number(r) for r in results]
    better, mean, p = paired(gaps)
    return [*results, claim(
        setup, "fig3-recipe", f"MM-LDA is better than SR trained by MM-LDA's own recipe on {better} of {len(gaps)} "
        f"class-biased sets, by {mean:+.2f} points in the mean (paired Wilcoxon test: p = {p:.2g})",
        (mean > 0) if p < 0.05 else None, value=mean, unit="points", n=len(gaps), series={"differences": gaps},
        numbers={"p_value": p, "better": better, "sets": len(gaps)}, rule=PAIRED,
    )]  # fmt: skip


def paired(gaps: Sequence[float]) -> tuple[int, float, float]:
    """On how many sets one is better, by how much in the mean, and the p-value of Wilcoxon's test."""
    from scipy.stats import wilcoxon

    return sum(gap > 0 for gap in gaps), float(np.mean(gaps)), float(wilcoxon(gaps).pvalue) if any(gaps) else 1.0


def _biased_jobs(setup: Setup, sets: Sequence[str] | None, rows: Sequence[str]) -> dict[tuple[str, str], Job]:
    seed = setup.seeds[0]
    alphas = {f"BP1-{i + 1}": a for i, a in enumerate(datasets.bp1(seed))}
    alphas |= {f"BP2-{i + 1}": a for i, a in enumerate(datasets.bp2())}
    sets = list(alphas) if sets is None else list(sets)
    if unknown := [name for name in sets if name not in alphas]:
        raise ValueError(f"sets has {unknown[0]!r}: expected BP1-1 to BP1-10, BP2-1 to BP2-10")
    jobs = {}
    for name in sets:
        alpha = [round(v, 3) for v in alphas[name].tolist()]
        for row in rows:
            config = network("softmax" if row.startswith("SR") else "mmlda", setup.data)
            if row == "MM-LDA, true priors":
                config["priors"] = [a / sum(alpha) for a in alpha]
            jobs[name, row] = Job(name=f"fig3-{setup.data}-{name}-{slug(row)}-{seed}", model=config, data=setup.data,
                                  recipe=setup.recipe("SR" if row == "SR" else "MM-LDA", seed),
                                  part=("biased", tuple(alpha), seed), root=setup.root)  # fmt: skip
    return jobs


def _biased(
    setup: Setup, jobs: dict[tuple[str, str], Job]
) -> tuple[list[Result], dict[tuple[str, str], Tensor]]:
    """Each network's accuracy, and its labels of the test images."""
    seed = setup.seeds[0]
    records = dict(zip(jobs, train(setup, list(jobs.values()), "biased")))
    results, labels = [], {}
    for (name, row), record in records.items():
        job = jobs[name, row]
        model, test = trained(setup, job, "biased"), job.sets()[1]
        labels[name, row] = predictions(model, test, device=setup.device)
        n, right = len(test), int((labels[name, row] == test.labels.cpu()).sum())
        low, high = wilson(right, n)
        results.append(Result(
            name=job.name,
            kind="fig3",
            what=f"accuracy of {row} on {name} of {setup.data}",
            cell={"data": setup.data, "model": row, "set": name, "seed": seed},
            value=100 * right / n,
            unit="%",
            interval=(100 * low, 100 * high),
            note=setup.note(),
            n=n,
            seed=seed,
            steps=record["recipe"]["steps"],
            seconds=record["seconds"],
            numbers={"balanced_accuracy": record["balanced_accuracy"], "train_images": record["train_images"]},
            series={"per_class": record["per_class"]},
            recipe=record["recipe"],
            **{**traced(model, test, torch.device(setup.device), job.name),
               "data": {"name": setup.data, "part": list(job.part or ()), "sha256": record["test_sha256"]}},
        ).save(setup.out, packed({"clean": labels[name, row].to(torch.uint8)})))  # fmt: skip
    return results, labels


def _fig3_claims(
    setup: Setup, jobs: dict[tuple[str, str], Job], labels: dict[tuple[str, str], Tensor], results: list[Result]
) -> list[Result]:
    sets = list(dict.fromkeys(name for name, _ in jobs))
    value = {(r.cell["set"], r.cell["model"]): number(r) for r in results}
    gaps = [value[name, "MM-LDA"] - value[name, "SR"] for name in sets]
    better, mean, p = paired(gaps)
    swapped, apart, images = 0, 0, 0
    for name in sets:
        uniform, true = (trained(setup, jobs[name, row], "biased") for row in MODELS[1:])
        apart += int((labels[name, MODELS[1]] == labels[name, MODELS[2]]).sum())
        uniform.head = uniform.head.with_priors(true.head.priors)  # type: ignore[operator]
        again = predictions(uniform, jobs[name, "MM-LDA"].sets()[1], device=setup.device)
        swapped += int((labels[name, MODELS[1]] == again).sum())
        images += len(again)
    shares: dict[str, float | str | None] = {"agreement": swapped / images, "agreement_trained": apart / images}
    return [
        claim(
            setup, "fig3", f"MM-LDA is better than SR on {better} of {len(sets)} class-biased sets, by {mean:+.2f} "
            f"points in the mean (paired Wilcoxon test: p = {p:.2g})", (mean > 0) if p < 0.05 else None,
            value=mean, unit="points", n=len(sets), series={"differences": gaps},
            numbers={"p_value": p, "better": better, "sets": len(sets), **shares},
            rule=PAIRED,
        ),
        claim(
            setup, "priors", f"uniform and true priors give the same label for {100 * swapped / images:.2f}% of the "
            f"test images on one network, {100 * apart / images:.2f}% on two trained with either",
            swapped / images >= 0.99, value=100 * swapped / images, unit="%", n=images, numbers=shares,
            rule="holds if at least 99% on one network whose priors are exchanged",
        ),
    ]  # fmt: skip
