"""What would explain Table 2: networks that differ in one thing, attacked in different views.

The suspects, the experiment and the rule were written down in docs/suspects.md before this was run.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmlda import attacks
from mmlda._utils.tensors import packed
from mmlda.audit import default_eps
from mmlda.data import ImageData
from mmlda.evaluation.robustness import describe_attack, predictions
from mmlda.paper import numbers
from mmlda.paper.rows import MMLDA, SR, Fields, Row, plain_rows
from mmlda.paper.setup import MOST, Net, Setup, claim, kept, named, networks, required, slug, train, trained
from mmlda.paper.worst import AUDITED, audited
from mmlda.results import Result, label, traced
from mmlda.training.recipes import network
from mmlda.training.sweeps import Job

# What is changed in the network and in the recipe; `steps` is a factor.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "C = 10": ({"C": 10.0}, {}),
    "C = 1000": ({"C": 1e3}, {}),
    "C = 10000": ({"C": 1e4}, {}),
    "precision 2": ({"precision": 2.0}, {}),
    "no weight decay": ({}, {"weight_decay": 0.0}),
    "four times the steps": ({}, {"steps": 4}),
    "centre loss": ({}, {"loss": "centre"}),
    "soft targets": ({}, {"loss": "soft"}),
}


@dataclass(frozen=True, kw_only=True)
class View:
    """What an attack is given: a number format, an output, and labels to move the images away from."""

    dtype: torch.dtype = torch.float32
    output: Literal["logits", "probabilities", "clipped"] = "logits"
    predicted: bool = False


VIEWS = {
    "logits": View(),
    "logits, float64": View(dtype=torch.float64),
    "probabilities": View(output="probabilities"),
    "probabilities, float64": View(output="probabilities", dtype=torch.float64),
    "clipped probabilities": View(output="clipped"),
    "predicted labels": View(predicted=True),
}
WORST = "worst case"  # in the place of a view
ATTACKS = ("FGSM", "BIM")
LOOKS = 0.1  # from the paper's accuracy
HOLLOW = 0.2  # what the worst case leaves
CONTROL = 0.5  # what BIM leaves SR in the same view


def suspect_rows(dataset: str) -> tuple[Row, ...]:
    """SR and MM-LDA by the paper's recipe, and MM-LDA with one thing changed."""
    recipe = "mmlda-adam" if dataset == "cifar10" else "mmlda"
    return Row("softmax", "sr", variant=""), *(Row("mmlda", recipe, variant=name) for name in ("", *VARIANTS))


def clipped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """-log P(y) with probabilities clipped to [1e-7, 1 - 1e-7], as Keras has it."""
    return -model(x).softmax(1).gather(1, y[:, None]).squeeze(1).clamp(1e-7, 1 - 1e-7).log()


def suspects(setup: Setup, rows: Sequence[Row] | None = None) -> list[Result]:
    """Every network in every view under FGSM and BIM, beside the worst case; then what explains the paper's table.

    A network that explains it is also audited, which is not part of the rule. With `setup.shipped`, only the networks
    that ship are attacked, in the same views, beside their results under the worst case.
    """
    if setup.shipped:
        return _shipped(setup)
    seed = setup.seeds[0]
    jobs = {row: suspect_job(setup, row, seed) for row in rows or suspect_rows(setup.data)}
    train(setup, list(jobs.values()), "suspects")
    nets = [Net(trained(setup, job, "suspects"), job.name, row, seed, job.recipe) for row, job in jobs.items()]
    results: list[Result] = []
    for net, eps in itertools.product(nets, numbers.EPS):
        results.append(_cell(setup, net, WORST, attacks.WorstCase(eps=eps), eps, results))
        for view, kind in itertools.product(VIEWS, ATTACKS):
            results.append(_cell(setup, net, view, getattr(attacks, kind)(eps=eps), eps, results))
    found = verdicts(results)
    explaining = {(item["recipe"], item["variant"]) for item in found if item["verdict"] == "explains"}
    eps, n = default_eps(setup.sets()[1]), setup.images(AUDITED)
    base = next((net for net in nets if net.row.head == "softmax"), nets[0])  # without SR nothing is explained
    masked = [net for net in nets if (f"{setup.data}-{net.row.recipe}", net.row.variant) in explaining]
    return [*results, *(audited(setup, net, base, eps, n) for net in masked), _judged(setup, results, found)]


def _shipped(setup: Setup) -> list[Result]:
    """The networks of Table 2 themselves, trained for as long as the paper's: what a view alone can do."""
    results, worst = [], []
    for net in networks(setup, plain_rows(setup.data)):
        shown = dataclasses.replace(net, row=dataclasses.replace(net.row, shipped=True))
        for eps in numbers.EPS:
            there = required(setup, named(setup, net, "worst", f"{eps:.4g}")[1], "table3")
            cell = {**there.cell, "shipped": True, "view": WORST}
            worst.append(dataclasses.replace(there, cell=cell))
            for view in VIEWS:
                results += [_cell(setup, shown, view, getattr(attacks, kind)(eps=eps), eps) for kind in ATTACKS]
    return [*results, _judged(setup, results, verdicts([*results, *worst]))]


def suspect_job(setup: Setup, row: Row, seed: int) -> Job:
    change, other = VARIANTS.get(row.variant or "", ({}, {}))
    recipe = setup.recipe(row, seed)
    if "steps" in other:
        recipe = recipe.scaled(recipe.steps * other["steps"])
    else:
        recipe = dataclasses.replace(recipe, **other)
    name = f"suspect-{setup.data}-{slug(row.label(setup.data))}-{seed}"
    config = {**network(row.head, setup.data), **change}
    return Job(name=name, model=config, recipe=recipe, data=setup.data, root=setup.root)


def twin_note(note: str, network: str) -> str:
    """The note of a network that has the weights, and therefore the result, of another one."""
    return f"{note}; the network has the very weights of {network}, whose result this is"


def _cell(
    setup: Setup, net: Net, view: str, attack: attacks.Attack, eps: float, others: Sequence[Result] = ()
) -> Result:
    """One attack on a network in a view; accuracy is that of the network itself, on the true labels.

    It counts every adversarial image that is classified correctly, as the paper seems to: from a predicted label an
    attack may also make a wrong image right. A network with the same weights as one of the `others` has its results.
    """
    kind = type(attack).__name__
    n = setup.images(MOST)
    fields = suspect_fields(setup, net, view, attack, eps, n)
    if (found := kept(setup, fields["name"], net, n)) is not None:
        return found
    for other in others:
        if other.network_sha256 == net.digest() and (other.cell["view"], other.attack, other.eps) == (view, kind, eps):
            note = twin_note(other.note, label(other))
            twin = dataclasses.replace(other, **{**fields, "note": note, "network": net.name})
            return twin.save(setup.out, other.read_outcomes(setup.out))
    data, begin = setup.sets()[1].subset(slice(n)), time.perf_counter()
    x_adv, zero = attacked_in_view(net.model, data, attack, view, setup.device)
    both = (data, dataclasses.replace(data, images=x_adv))
    clean, guess = (predictions(net.model, images, device=setup.device) for images in both)
    return Result.counted(
        int((guess == data.labels.cpu()).sum()),
        n,
        seconds=time.perf_counter() - begin,
        numbers={"zero_gradient": zero},
        **fields,
        **traced(net.model, data, setup.device, net.name),
    ).save(setup.out, packed({"clean": clean.to(torch.uint8), "prediction": guess.to(torch.uint8)}))


def suspect_fields(setup: Setup, net: Net, view: str, attack: attacks.Attack, eps: float, n: int) -> Fields:
    """The fields of a result about a suspect."""
    kind, settings = type(attack).__name__, describe_attack(attack)["settings"]
    words, name = named(setup, net, "suspect", slug(view), kind.lower(), f"{eps:g}")
    fields = net.fields(setup.data)
    fields["cell"] = {**fields["cell"], "view": view}
    return {
        **fields,
        "name": name,
        "kind": "suspect",
        "what": f"accuracy of {words} under {kind} at {eps:g} on {setup.data}, {view}",
        "paper": numbers.table2(setup.data, SR if net.row.head == "softmax" else MMLDA, kind, eps),
        "note": dataclasses.replace(setup, steps=None if net.row.shipped else net.recipe.steps).note(n=n),
        "attack": kind,
        "eps": eps,
        "attack_settings": settings,
        "attack_steps": settings.get("steps"),
    }


def attacked_in_view(
    model: nn.Module,
    data: ImageData,
    attack: attacks.Attack,
    view: str,
    device: torch.device | str,
    index: Tensor | None = None,
) -> tuple[Tensor, float | None]:
    """The adversarial images as float32, and the share of images where the gradient was exactly 0 at the start."""
    how = VIEWS.get(str(view), View())  # the worst case is given logits too
    seen: nn.Module = copy.deepcopy(model).to(how.dtype).eval()
    if how.output == "probabilities":
        seen = nn.Sequential(seen, nn.Softmax(dim=1)).eval()
    x = data.pixels(dtype=how.dtype).to(device)
    y = (predictions(model, data, device=device) if how.predicted else data.labels).to(device)
    if how.output == "clipped":
        attack = dataclasses.replace(attack, loss=clipped)  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model seems to return prob")  # that is what the view is about
        warnings.simplefilter("ignore", attacks.AttackWarning)  # the share of zero gradients is part of the result
        found = dataclasses.replace(attack, batch_size=500)(seen, x, y, index=index, show=False)
    return found.x_adv.float().cpu(), found.zero_gradient


def verdicts(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The rule of docs/suspects.md: "explains", "in part" or "no" for each MM-LDA network and view of one dataset."""
    at = {(*_network(r), r.cell["view"], r.attack, r.eps): r for r in results}
    softmax = [r for r in results if (r.head, r.attack, r.eps) == ("softmax", "BIM", 0.12)]
    control = {(_network(r)[2], r.cell["view"]): r for r in softmax}
    found = []
    pairs = {(_network(r), r.cell["view"]): r for r in results if r.head == "mmlda" and r.cell["view"] != WORST}
    for (net, view), result in pairs.items():
        six = [at[*net, view, kind, eps] for kind in ATTACKS for eps in numbers.EPS]
        near = sum(r.difference is not None and round(abs(r.difference), 12) <= LOOKS for r in six)
        hollow = all(at[*net, WORST, "WorstCase", eps].number < HOLLOW for eps in (0.12, 0.2))
        sr = control.get((net[2], view))
        fair = sr is not None and sr.number < CONTROL
        look = "explains" if near == 6 else "in part" if near >= 3 else "no"
        cell: dict[str, Any] = {key: result.cell[key] for key in ("variant", "shipped") if key in result.cell}
        found.append({"recipe": net[0], **cell, "view": view, "verdict": look if hollow and fair else "no"})
    return found


def _network(result: Result) -> tuple[str, str | None, bool]:
    """What distinguishes the networks of one dataset: recipe, variant, and whether it ships."""
    return result.recipe, result.cell.get("variant"), bool(result.cell.get("shipped"))


def _judged(setup: Setup, results: list[Result], found: list[dict[str, Any]]) -> Result:
    named = {_network(result): label(result) for result in results}

    def names(verdict: str) -> str:
        those = [item for item in found if item["verdict"] == verdict]
        nets = [(item["recipe"], item.get("variant"), bool(item.get("shipped"))) for item in those]
        return ", ".join(f"{named[net]} ({item['view']})" for net, item in zip(nets, those))

    full, part = names("explains"), names("in part")
    among = "Among the networks that ship" if setup.shipped else "Among networks that differ in one thing"
    if setup.data not in numbers.DATASETS:
        what = f"{len(found)} cells on {setup.data}, for which the paper has no numbers to explain"
    elif full:
        what = f"{among}, the look of Table 2 under FGSM and BIM is explained by {full}"
        what += f"; in part by {part}" if part else ""
    else:
        what = f"{among}, none explains the look of Table 2 under FGSM and BIM"
        what += f"; in part it looks like {part}" if part else ""
    fields: dict[str, Any] = {"name": "shipped", "cell": {"shipped": True}} if setup.shipped else {}
    fields |= {"value": float(sum(item["verdict"] == "explains" for item in found)), "unit": "cells"}
    n = min(r.n for r in results if r.cell["view"] != WORST and r.n is not None)
    # our own question, not a claim of the paper
    return claim(setup, "suspects", what, None, series={"verdicts": found}, n=n, **fields)
