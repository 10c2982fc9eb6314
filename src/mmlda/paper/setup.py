"""What every table and figure shares: where, on what, how long; the networks; and a result's way into its file."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mmlda import data as datasets
from mmlda import zoo
from mmlda.attacks import Attack, CarliniWagner
from mmlda.data import ImageData
from mmlda.evaluation.robustness import attack_images
from mmlda.models import Classifier, build
from mmlda.paper import numbers
from mmlda.results import Result, code_version, versions
from mmlda.training.recipes import RECIPES, Recipe, hat, network, sat
from mmlda.training.sweeps import Job, fit_many, in_hand, sweep

__all__ = ["Net", "Setup", "attacked", "beside", "claim", "networks", "number", "slug", "train", "trained", "tuned",
           "variant"]  # fmt: skip

# Steps of fine-tuning in the paper (B.2), as a share of those of the training before it.
TUNING = {"mnist": 10_000 / 20_000, "cifar10": 30_000 / 90_000, "digits": 0.5}
MOST = 1000  # images, where an attack is costly: JSMA, C&W, the worst case


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where and how a part of the paper is reproduced.

    Args:
        data: digits, mnist or cifar10.
        out: folder for the results, the networks and the work under way; what is there is not done again.
        steps: of training; the paper's by default. Fine-tuning is in proportion, unless `tuning` says otherwise.
        tuning: steps of fine-tuning.
        n: images attacked; all by default (the first 1,000 for JSMA, C&W and the worst case).
        seeds: of the networks.
        shipped: take the networks that come with the package instead of training them.
        at_once: networks trained at the same time on one device.
        ray: address of a Ray cluster to train on, or "local".
    """

    data: str = "digits"
    out: Path = Path("results")
    steps: int | None = None
    tuning: int | None = None
    n: int | None = None
    seeds: tuple[int, ...] = (0,)
    shipped: bool = False
    root: str | None = None
    device: str = "cpu"
    at_once: int = 1
    ray: str | None = None
    show: bool = True

    def __post_init__(self) -> None:
        if self.data not in TUNING:
            raise ValueError(f"data = {self.data!r}: expected one of {', '.join(TUNING)}")
        for name in ("steps", "tuning", "n", "at_once"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: expected at least 1")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds = {list(self.seeds)}: expected different numbers, 0 or more")
        if self.shipped and (self.data == "digits" or self.seeds != (0,) or self.steps is not None):
            raise ValueError("shipped = True: expected data mnist or cifar10, seed 0 and no steps: those ship")
        object.__setattr__(self, "out", Path(self.out))

    @property
    def work(self) -> Path:
        return self.out / "work" / self.data

    def sets(self) -> tuple[ImageData, ImageData]:
        return _sets(self.data, self.root)

    def images(self, most: int | None = None) -> int:
        """How many test images to attack."""
        return min(v for v in (self.n, most, len(self.sets()[1])) if v is not None)

    def recipe(self, row: str, seed: int) -> Recipe:
        """The paper's recipe for a network, at this setup's number of steps."""
        recipe = RECIPES[recipe_name(self.data, row)]
        if row == "SR (Adam)":
            recipe = dataclasses.replace(recipe, optimizer="adam", lr=1e-3)
        return dataclasses.replace(recipe.scaled(self.steps or recipe.steps), seed=seed)

    def tuning_note(self) -> str:
        """The number of fine-tuning steps, where it is not the paper's."""
        full = round(RECIPES[f"{self.data}-sr"].steps * TUNING[self.data])
        return "" if self.tuning in (None, full) else f"{self.tuning} steps of fine-tuning, not {full}"

    def note(self, *more: str, n: int | None = None) -> str:
        """The scale, where it is not the paper's: data, steps, images, and what else there is to say."""
        full, images = RECIPES[f"{self.data}-sr"].steps, len(self.sets()[1])
        words = ["digits are not a data set of the paper"] if self.data == "digits" else []
        if self.steps not in (None, full):
            words.append(f"{self.steps} training steps" + ("" if self.data == "digits" else f", not {full}"))
        if n is not None and n < images:
            words.append(f"the first {n} of {images} test images")
        return "; ".join([*words, *(word for word in more if word)])


@functools.lru_cache(maxsize=2)
def _sets(data: str, root: str | None) -> tuple[ImageData, ImageData]:
    return datasets.load(data, root)


@dataclass(frozen=True)
class Net:
    """A trained network, and what its results say of it."""

    model: Classifier
    name: str
    row: str
    seed: int
    recipe: Recipe

    def about(self) -> dict[str, Any]:
        return {"steps": self.recipe.steps, "recipe": json.loads(json.dumps(dataclasses.asdict(self.recipe)))}


def plain_rows(data: str) -> tuple[str, ...]:
    """The rows of networks that are not fine-tuned: SR and MM-LDA, and on CIFAR-10 the latter by the paper's recipe."""
    return ("SR", "MM-LDA", "MM-LDA (Adam)") if data == "cifar10" else ("SR", "MM-LDA")


def variant(row: str) -> str:
    """What a claim's name ends in where it is about MM-LDA by the paper's recipe beside ours."""
    return "-adam" if row == "MM-LDA (Adam)" else ""


def recipe_name(data: str, row: str) -> str:
    """The recipe a row of a table is trained by. On CIFAR-10, MM-LDA's is not the paper's own, which is "(Adam)"."""
    kinds = {"MM-LDA": "mmlda", "MM-LDA (Adam)": "mmlda-adam", "SR (PGD)": "sr-pgd", "MM-LDA (PGD)": "mmlda-pgd"}
    kind = kinds.get(row, "sr")
    return f"{data}-{kind}"


def networks(setup: Setup, rows: Iterable[str] = ("SR", "MM-LDA")) -> list[Net]:
    """The networks of Table 1, trained, or taken from those that ship; each seed of each row."""
    if setup.shipped:
        nets = []
        for row in rows:
            name = recipe_name(setup.data, row)
            if row != "SR (Adam)" and name in zoo.names():  # that one does not ship
                model = zoo.load(name, device=setup.device)
                assert isinstance(model, Classifier)
                nets.append(Net(model, name, row, 0, Recipe.from_dict(zoo.about(name)["recipe"])))
        return nets
    jobs, pairs = [], [(row, seed) for row in rows for seed in setup.seeds]
    for row, seed in pairs:
        config = network("mmlda" if row.startswith("MM-LDA") else "softmax", setup.data)
        jobs.append(Job(name=f"{setup.data}-{slug(row)}-{seed}", model=config, recipe=setup.recipe(row, seed),
                        data=setup.data, root=setup.root))  # fmt: skip
    train(setup, jobs, "networks")
    return [Net(trained(setup, job, "networks"), job.name, row, seed, job.recipe)
            for job, (row, seed) in zip(jobs, pairs)]  # fmt: skip


def train(setup: Setup, jobs: list[Job], folder: str) -> list[dict[str, Any]]:
    """Do the jobs that are not done yet; the records of all."""
    where: dict[str, Any] = {"device": setup.device, "at_once": setup.at_once, "ray": setup.ray, "show": setup.show}
    return sweep(jobs, setup.out / folder, **where)


def trained(setup: Setup, job: Job, folder: str) -> Classifier:
    """The network a job has left."""
    model = build(job.model)
    model.load_state_dict(load_file(setup.out / folder / f"{job.name}.safetensors"))
    return model.to(setup.device).eval()


def tuned(setup: Setup, net: Net, cells: list[tuple[str, str, float | None]]) -> list[Net]:
    """The SR network fine-tuned on adversarial examples (B.2), for cells (row, attack, eps or None for HAT's range)."""
    steps = setup.tuning or max(1, round(net.recipe.steps * TUNING[setup.data]))
    nets = []
    for row, attack, eps in cells:
        recipe = hat(attack.lower(), steps=steps) if eps is None else sat(attack.lower(), eps, steps=steps)
        recipe = dataclasses.replace(recipe, pad=net.recipe.pad, flip=net.recipe.flip, seed=net.seed)
        name = f"{net.name}-{slug(row)}-{attack.lower()}" + ("" if eps is None else f"-{eps:g}")
        nets.append(Net(copy.deepcopy(net.model), name, row, net.seed, recipe))
    train_set = setup.sets()[0]
    for start in range(0, len(nets), setup.at_once):
        part = nets[start : start + setup.at_once]
        with ExitStack() as stack:  # what another process has in hand is waited for, and then there
            for name in sorted(other.name for other in part):
                stack.callback(in_hand(setup.out / "networks", name).release)
            fit_many([other.model for other in part], train_set, [other.recipe for other in part],
                     out=[setup.out / "networks" / other.name for other in part], device=setup.device,
                     show=setup.show)  # fmt: skip
    for other in nets:
        other.model.eval()
    return nets


def slug(words: str) -> str:
    """A piece of a file's name.

    >>> slug("SR + SAT"), slug("MM-LDA, true priors")
    ('sr-sat', 'mm-lda-true-priors')
    """
    return "-".join("".join(c if c.isalnum() else " " for c in words.lower()).split())


def attacked(
    setup: Setup, net: Net, attack: Attack, *, name: str, n: int, cell: dict[str, Any], **fields: Any
) -> tuple[Result, bytes, Path]:
    """Attack a network's test images, resumably: the result, every image's outcome, and the folder with the images."""
    folder = setup.work / name
    long = isinstance(attack, CarliniWagner) and setup.device.startswith("cuda")  # then compiling is soon made up for
    found = attack_images(net.model, setup.sets()[1], attack, out=folder, n=n, name=net.name, device=setup.device,
                          compile=long, picture=False, show=setup.show)  # fmt: skip
    where = {"data": setup.data, "model": net.row, **cell, "seed": net.seed}
    fields = {"note": setup.note(n=n), **fields}
    result = dataclasses.replace(found, name=name, cell=where, seed=net.seed, **net.about(), **fields)
    return result, found.read_outcomes(folder), folder


def beside(result: Result, paper: float | None) -> Result:
    """The result with the paper's number beside it, and whether that is reproduced."""
    ours = None if result.value is None else number(result)
    holds, rule = numbers.reproduced(result.kind, result.cell["data"], ours, paper)
    series = {**result.series, "rule": rule} if rule else result.series
    return dataclasses.replace(result, paper=paper, holds=holds, series=series)


def number(result: Result) -> float:
    """The value of a result that has a number."""
    assert isinstance(result.value, int | float)
    return float(result.value)


def claim(
    setup: Setup, name: str, what: str, holds: bool | None, *, rule: str, value: float | None = None, **fields: Any
) -> Result:
    """A sentence of the paper beside what was found, with a verdict by a rule: true, false, or None for not decided."""
    series = {**fields.pop("series", {}), "rule": rule}
    return Result(
        name=f"claim-{setup.data}-{name}",
        kind="claim",
        what=what,
        cell={"data": setup.data, "claim": name},
        value=value,
        paper=numbers.SENTENCES[name.split("-")[0]],
        holds=holds,
        note=setup.note(),
        series=series,
        seed=setup.seeds[0],
        **provenance(setup),
        **fields,
    ).save(setup.out)


def provenance(setup: Setup) -> dict[str, Any]:
    found = versions(torch.device(setup.device))
    return {"device": found["device"], "versions": found, "commit": code_version()}
