"""What all tables and figures share: the setup, the networks, and how results are stored."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmlda import data as datasets
from mmlda import zoo
from mmlda._utils.checks import check_choice, check_count, invalid
from mmlda._utils.tensors import read_tensors
from mmlda.attacks import Attack, AttackWarning, CarliniWagner
from mmlda.data import ImageData
from mmlda.evaluation.robustness import attack_images
from mmlda.models import Classifier, build
from mmlda.models.saved import fill
from mmlda.paper import numbers
from mmlda.paper.claims import RULES
from mmlda.paper.rows import ADAM, HAT, MMLDA, SAT, SR, SR_ADAM, Row
from mmlda.results import Result, find_result, measured_on, weights_digest
from mmlda.training.many import fit_many
from mmlda.training.recipes import RECIPES, Recipe, hat, network, sat
from mmlda.training.sweeps import Job, in_hand, sweep

# Fine-tuning steps in the paper (B.2), as a share of the training steps before them.
TUNING = {"mnist": 10_000 / 20_000, "cifar10": 30_000 / 90_000, "digits": 0.5}
MOST = 1000  # images, where an attack is costly: JSMA, C&W, the worst case


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where and how a part of the paper is reproduced.

    Parameters
    ----------
    data
        "digits", "mnist" or "cifar10".
    out
        Folder for the results, the networks and unfinished work; existing results are not computed again.
    steps
        Training steps; the paper's by default.
    tuning
        Fine-tuning steps; by default in the paper's proportion to `steps`.
    n
        Number of images to attack; by default all, or the first 1,000 for JSMA, C&W and the worst case.
    seeds
        Random seeds of the networks.
    shipped
        Use the networks that come with the package instead of training.
    root
        Folder of the dataset.
    device
        Where to train and to attack.
    at_once
        Number of networks to train at the same time on one device.
    ray
        Address of a Ray cluster to train on, or "local".
    show
        Print progress to stderr.

    Raises
    ------
    ValueError
        If an argument is out of range, or nothing ships for `data`, `steps` and `seeds`.

    Examples
    --------
    >>> Setup(data="digits", n=50).images()
    50
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
        check_choice("data", self.data, TUNING)
        for name in ("steps", "tuning", "n", "at_once"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value, 1)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise invalid("seeds", "different numbers, 0 or more", list(self.seeds))
        if self.shipped and (self.data == "digits" or self.seeds != (0,) or self.steps is not None):
            raise invalid("shipped", "False unless data is mnist or cifar10, the seed 0 and steps None", True)
        object.__setattr__(self, "out", Path(self.out))

    @property
    def work(self) -> Path:
        """Folder for unfinished work."""
        return self.out / "work" / self.data

    def sets(self) -> tuple[ImageData, ImageData]:
        """Load the data.

        Returns
        -------
        tuple of ImageData
            Training and test set.
        """
        return _sets(self.data, self.root)

    def images(self, most: int | None = None) -> int:
        """Number of test images to attack.

        Parameters
        ----------
        most
            Upper limit (default: none).

        Returns
        -------
        int
            Number of images.
        """
        return min(v for v in (self.n, most, len(self.sets()[1])) if v is not None)

    def recipe(self, row: Row, seed: int) -> Recipe:
        """The paper's recipe for a network, with this setup's number of steps.

        Parameters
        ----------
        row
            Row of a table.
        seed
            Random seed.

        Returns
        -------
        Recipe
            The recipe.
        """
        if row == SR_ADAM:
            recipe = dataclasses.replace(RECIPES[f"{self.data}-sr"], optimizer="adam", lr=1e-3)
        else:
            recipe = RECIPES[f"{self.data}-{row.recipe}"]
        return dataclasses.replace(recipe.scaled(self.steps or recipe.steps), seed=seed)

    def tuning_note(self) -> str:
        """The number of fine-tuning steps in words, if it is not the paper's.

        Returns
        -------
        str
            A remark, or "".
        """
        full = round(RECIPES[f"{self.data}-sr"].steps * TUNING[self.data])
        return "" if self.tuning in (None, full) else f"{self.tuning} steps of fine-tuning, not {full}"

    def note(self, *more: str, n: int | None = None) -> str:
        """The scale in words, if it is not the paper's: data, steps, images, and further remarks.

        Parameters
        ----------
        more
            Further remarks.
        n
            Number of images.

        Returns
        -------
        str
            The remarks, or "".
        """
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
    """A trained network."""

    model: Classifier
    name: str
    row: Row
    seed: int
    recipe: Recipe

    def digest(self) -> str:
        """The SHA-256 of its weights."""
        return weights_digest(self.model.state_dict())

    def fields(self, dataset: str) -> dict[str, Any]:
        """What a result records of the network: fields of `Result`."""
        settings = json.loads(json.dumps(dataclasses.asdict(self.recipe)))
        about = {"seed": self.seed, "train_steps": self.recipe.steps, "recipe_settings": settings}
        return {**self.row.fields(dataset), **about}


def networks(setup: Setup, rows: Iterable[Row] = (SR, MMLDA)) -> list[Net]:
    """The networks of some rows, each with each seed: trained, or loaded from those that ship."""
    if setup.shipped:
        return [_shipped(setup, row) for row in rows if f"{setup.data}-{row.recipe}" in zoo.names()]
    jobs, pairs = [], [(row, seed) for row in rows for seed in setup.seeds]
    for row, seed in pairs:
        config, recipe = network(row.head, setup.data), setup.recipe(row, seed)
        name = f"{setup.data}-{slug(row.label(setup.data))}-{seed}"
        jobs.append(Job(name=name, model=config, recipe=recipe, data=setup.data, root=setup.root))
    train(setup, jobs, "networks")
    models = [trained(setup, job, "networks") for job in jobs]
    return [Net(model, job.name, row, seed, job.recipe) for model, job, (row, seed) in zip(models, jobs, pairs)]


def _shipped(setup: Setup, row: Row) -> Net:
    name = f"{setup.data}-{row.recipe}"
    model = zoo.load(name, device=setup.device)
    assert isinstance(model, Classifier)
    return Net(model, name, row, 0, Recipe.from_dict(zoo.about(name)["recipe"]))


def train(setup: Setup, jobs: list[Job], folder: str) -> list[dict[str, Any]]:
    """Run the jobs that are not finished, and return the records of all."""
    where: dict[str, Any] = {"device": setup.device, "at_once": setup.at_once, "ray": setup.ray, "show": setup.show}
    return sweep(jobs, setup.out / folder, **where)


def trained(setup: Setup, job: Job, folder: str) -> Classifier:
    """The network that a job has trained."""
    model = build(job.model)
    path = setup.out / folder / f"{job.name}.safetensors"
    fill(model, read_tensors(path)[0], path)
    return model.to(setup.device).eval()


Cell = tuple[Row, str, float]  # of Table 2: a fine-tuned network, the attack and the perturbation


def tuned_cells(eps: Sequence[float] = numbers.EPS) -> list[Cell]:
    """The cells of Table 2's fine-tuned rows, or of the same rows at other perturbations."""
    return list(itertools.product((SAT, HAT), ("FGSM", "BIM", "ILCM"), eps))


def tuned_for(setup: Setup, net: Net, cells: Sequence[Cell]) -> dict[Cell, Net]:
    """The SR network fine-tuned on adversarial examples (B.2) for some cells.

    A HAT network serves every perturbation: its range, 0.02 to 0.20, contains Table 2's.
    """
    steps = setup.tuning or max(1, round(net.recipe.steps * TUNING[setup.data]))
    nets: dict[str, Net] = {}
    names: dict[Cell, str] = {}
    for row, attack, eps in cells:
        kind = attack.lower()
        recipe = tuning_recipe(net.recipe, row, kind, eps, steps=steps, seed=net.seed)
        words = [net.name, slug(row.label(setup.data)), kind, *([] if row == HAT else [f"{eps:g}"])]
        name = names[row, attack, eps] = "-".join(words)
        if name not in nets:
            nets[name] = Net(copy.deepcopy(net.model), name, row, net.seed, recipe)
    made = list(nets.values())
    for start in range(0, len(made), setup.at_once):
        _tune(setup, made[start : start + setup.at_once])
    return {cell: nets[name] for cell, name in names.items()}


def tuning_recipe(base: Recipe, row: Row, kind: str, eps: float, *, steps: int, seed: int) -> Recipe:
    """How a network that was trained by `base` is fine-tuned for a row, SAT or HAT, on an attack such as "bim"."""
    recipe = hat(kind, steps=steps) if row == HAT else sat(kind, eps, steps=steps)
    return dataclasses.replace(recipe, pad=base.pad, flip=base.flip, seed=seed)


def _tune(setup: Setup, nets: list[Net]) -> None:
    """Fine-tune several networks at once; wait for those that another process is training."""
    folder = setup.out / "networks"
    models, recipes = [net.model for net in nets], [net.recipe for net in nets]
    with ExitStack() as stack:
        for name in sorted(net.name for net in nets):
            stack.callback(in_hand(folder, name).release)
        runs = [folder / net.name for net in nets]
        fit_many(models, setup.sets()[0], recipes, out=runs, device=setup.device, show=setup.show)
    for model in models:
        model.eval()


def named(setup: Setup, net: Net, kind: str, *parts: str, attack: str = "") -> tuple[str, str]:
    """The label of a network in a table of this kind, and the name of a result about it."""
    settings = net.fields(setup.data)["recipe_settings"]
    words = net.row.label(setup.data, kind=kind, attack=attack, recipe_settings=settings)
    return words, "-".join([kind, setup.data, slug(words), *parts, str(net.seed)])


def slug(words: str) -> str:
    """A piece of a file's name.

    >>> slug("SR + SAT"), slug("MM-LDA, true priors")
    ('sr-sat', 'mm-lda-true-priors')
    """
    return "-".join("".join(c if c.isalnum() else " " for c in words.lower()).split())


def attacked(
    setup: Setup, net: Net, attack: Attack, *, name: str, n: int, cell: dict[str, Any] | None = None, **fields: Any
) -> tuple[Result, bytes, Path]:
    """Attack a network's test images, resumably: the result, every image's outcome, and the folder with the images."""
    folder, part = setup.work / name, setup.sets()[1].subset(slice(n))  # the first images, as in the committed results
    how: dict[str, Any] = {"device": setup.device, "show": setup.show, "picture": False}
    how["compile"] = isinstance(attack, CarliniWagner) and setup.device.startswith("cuda")  # long enough to repay it
    with warnings.catch_warnings(action="ignore", category=AttackWarning):
        found = attack_images(net.model, part, attack, out=folder, name=net.name, **how)
    about = net.fields(setup.data)
    about["cell"] = {**about["cell"], **(cell or {})}
    result = dataclasses.replace(found, **{"name": name, "note": setup.note(n=n), **about, **fields})
    return result, found.read_outcomes(folder), folder


def kept(setup: Setup, name: str, net: Net, n: int) -> Result | None:
    """An existing result, if it is about the same network and at least as many images."""
    there = find_result(setup.out, name)
    same = there is not None and there.network_sha256 == net.digest()
    return there if there is not None and same and there.n is not None and there.n >= n else None


def required(setup: Setup, name: str, part: str) -> Result:
    """A result of another part of the paper in the same folder."""
    found = find_result(setup.out, name)
    if found is None:
        raise ValueError(f"out must have {name}, a result of {part}, got {str(setup.out)!r} without it")
    return found


def beside(result: Result, paper: float | None) -> Result:
    """The result with the paper's number beside it, and whether that is reproduced."""
    ours = None if result.value is None else result.number
    holds, rule = numbers.reproduced(result.kind, result.dataset, ours, paper)
    series = {**result.series, "rule": rule} if rule else result.series
    return dataclasses.replace(result, paper=paper, holds=holds, series=series)


def claim(
    setup: Setup, key: str, what: str, holds: bool | None, *, row: Row | None = None, name: str = "", **fields: Any
) -> Result:
    """A sentence of the paper with our finding and a verdict by the claim's rule.

    `row` is the network it is about, where a key has several claims. `name` is appended to the file's name, and "adam"
    for MM-LDA by the paper's own recipe.
    """
    about: dict[str, Any] = {"value": None, "dataset": setup.data} | (row.fields(setup.data) if row else {}) | fields
    about["series"] = {**about.get("series", {}), "rule": RULES[key]}
    return Result(
        name="-".join(filter(None, ["claim", setup.data, key, name, "adam" if row == ADAM else ""])),
        kind="claim",
        what=what,
        paper=numbers.SENTENCES[key],
        holds=holds,
        note=setup.note(),
        seed=setup.seeds[0],
        claim=key,
        **about,
        **measured_on(setup.device),
    ).save(setup.out)
