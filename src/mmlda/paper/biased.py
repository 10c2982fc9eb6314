"""Figure 3: class-biased data, and a control that the paper does not have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmlda import data as datasets
from mmlda._utils.tensors import packed
from mmlda.evaluation.robustness import predictions
from mmlda.paper import claims
from mmlda.paper.comparisons import wilcoxon_test
from mmlda.paper.rows import MMLDA, SR, Fields, Row
from mmlda.paper.setup import Setup, claim, required, slug, train, trained
from mmlda.results import Result, traced
from mmlda.training.recipes import Recipe, network
from mmlda.training.sweeps import Job

TRUE_PRIORS = Row("mmlda", "mmlda", priors="true")
MODELS = (SR, MMLDA, TRUE_PRIORS)
CONTROL = Row("softmax", "mmlda")  # SR trained by MM-LDA's recipe
SETS = {f"{family}-{i}": (family, i) for family in ("BP1", "BP2") for i in range(1, 11)}
Jobs = dict[tuple[str, Row], Job]
Labels = dict[tuple[str, Row], Tensor]


def fig3(setup: Setup, sets: Sequence[str] | None = None) -> list[Result]:
    """Accuracy on class-biased sets: SR, and MM-LDA with uniform and with true priors; one seed.

    Then a paired test over the sets, and how often uniform and true priors give the same label: on one network whose
    priors are exchanged, and on two networks, each trained with one of them.
    """
    jobs = _biased_jobs(setup, sets, MODELS)
    results, labels = _biased(setup, jobs)
    return [*results, *_fig3_claims(setup, jobs, labels, results)]


def fig3_control(setup: Setup, sets: Sequence[str] | None = None) -> list[Result]:
    """SR trained by MM-LDA's own recipe, beside the results of `fig3` in the same folder.

    The two rows of Fig. 3 differ in the optimizer and in the head; this control and MM-LDA differ only in the head.
    """
    jobs = _biased_jobs(setup, sets, (CONTROL,))
    ours = {name: _same_job(setup, name, job) for (name, _), job in jobs.items()}
    results, _ = _biased(setup, jobs)
    gaps = [ours[result.cell["set"]].number - result.number for result in results]
    return [*results, _sets_claim(setup, "fig3-recipe", "SR trained by MM-LDA's own recipe", gaps)]


def _same_job(setup: Setup, name: str, job: Job) -> Result:
    """MM-LDA's result on a set, which must have the recipe and the images of a job."""
    there = required(setup, _name(setup, name, MMLDA), "fig3")
    same = (there.data or {}).get("sha256") == job.sets()[1].digest()
    if not same or Recipe.from_dict(there.recipe_settings or {}) != job.recipe:
        raise ValueError(f"{there.name} must have the recipe and the images of {job.name}, got others")
    return there


def _sets_claim(setup: Setup, key: str, other: str, gaps: Sequence[float], **more: float) -> Result:
    """MM-LDA beside another network, set by set."""
    better, mean, p = wilcoxon_test(gaps)
    what = (
        f"MM-LDA is better than {other} on {better} of {len(gaps)} class-biased sets, by {100 * mean:+.2f} points in "
        f"the mean (paired Wilcoxon test: p = {p:.2g})"
    )
    measured = {"p_value": p, "better": better, "sets": len(gaps), **more}
    fields: Fields = {"value": mean, "unit": "share difference", "n": len(gaps), "numbers": measured}
    return claim(setup, key, what, claims.better_on_sets(mean, p), series={"differences": list(gaps)}, **fields)


def _name(setup: Setup, name: str, row: Row) -> str:
    return f"fig3-{setup.data}-{name}-{slug(row.label(setup.data))}-{setup.seeds[0]}"


def _biased_jobs(setup: Setup, sets: Sequence[str] | None, rows: Sequence[Row]) -> Jobs:
    seed = setup.seeds[0]
    alphas = dict(zip(SETS, [*datasets.bp1(seed), *datasets.bp2()], strict=True))
    sets = list(alphas) if sets is None else list(sets)
    if unknown := [name for name in sets if name not in alphas]:
        raise ValueError(f"sets must be some of BP1-1 to BP1-10 and BP2-1 to BP2-10, got {unknown[0]!r}")
    jobs = {}
    for name in sets:
        alpha = [round(v, 3) for v in alphas[name].tolist()]
        for row in rows:
            config = network(row.head, setup.data)
            if row.priors == "true":
                config["priors"] = [a / sum(alpha) for a in alpha]
            of: Fields = {"data": setup.data, "part": ("biased", tuple(alpha), seed), "root": setup.root}
            jobs[name, row] = Job(name=_name(setup, name, row), model=config, recipe=setup.recipe(row, seed), **of)
    return jobs


def _biased(setup: Setup, jobs: Jobs) -> tuple[list[Result], Labels]:
    """Each network's accuracy, and its labels of the test images."""
    records = dict(zip(jobs, train(setup, list(jobs.values()), "biased")))
    results, labels = [], {}
    for (name, row), record in records.items():
        job = jobs[name, row]
        model, test = trained(setup, job, "biased"), job.sets()[1]
        labels[name, row] = guess = predictions(model, test, device=setup.device)
        fields = row.fields(setup.data) | traced(model, test, setup.device, job.name)
        fields["data"] = {"name": setup.data, "part": list(job.part or ()), "sha256": record["test_sha256"]}
        family, index = SETS[name]
        fields["cell"] = {**fields["cell"], "set": name, "family": family, "index": index}
        result = Result.counted(
            int((guess == test.labels.cpu()).sum()),
            len(test),
            name=job.name,
            kind="fig3",
            what=f"accuracy of {row.label(setup.data)} on {name} of {setup.data}",
            note=setup.note(),
            seed=setup.seeds[0],
            train_steps=record["recipe"]["steps"],
            seconds=record["seconds"],
            numbers={"balanced_accuracy": record["balanced_accuracy"], "train_images": record["train_images"]},
            series={"per_class": record["per_class"]},
            recipe_settings=record["recipe"],
            **fields,
        )
        results.append(result.save(setup.out, packed({"clean": guess.to(torch.uint8)})))
    return results, labels


def _fig3_claims(setup: Setup, jobs: Jobs, labels: Labels, results: list[Result]) -> list[Result]:
    sets = list(dict.fromkeys(name for name, _ in jobs))
    value = {(r.cell["set"], row): r.number for r in results for row in MODELS if row.has(r)}
    gaps = [value[name, MMLDA] - value[name, SR] for name in sets]
    exchanged, apart, images = _agreements(setup, jobs, labels, sets)
    agreement = {"agreement": exchanged, "agreement_trained": apart}
    fields: Fields = {"value": exchanged, "unit": "share", "n": images, "numbers": agreement}
    what = f"uniform and true priors give the same label for {100 * exchanged:.2f}% of the test images on one network, "
    what += f"{100 * apart:.2f}% on two trained with either"
    same = claim(setup, "priors", what, exchanged >= claims.NEARLY_ALL, **fields)
    return [_sets_claim(setup, "fig3", "SR", gaps, **agreement), same]


def _agreements(setup: Setup, jobs: Jobs, labels: Labels, sets: Sequence[str]) -> tuple[float, float, int]:
    """How often uniform and true priors give the same label: on one network, on two, and of how many images."""
    exchanged, apart, images = 0, 0, 0
    for name in sets:
        uniform, true = (trained(setup, jobs[name, row], "biased") for row in (MMLDA, TRUE_PRIORS))
        apart += int((labels[name, MMLDA] == labels[name, TRUE_PRIORS]).sum())
        uniform.head = uniform.head.with_priors(true.head.priors)  # type: ignore[operator]
        again = predictions(uniform, jobs[name, MMLDA].sets()[1], device=setup.device)
        exchanged += int((labels[name, MMLDA] == again).sum())
        images += len(again)
    return exchanged / images, apart / images, images
