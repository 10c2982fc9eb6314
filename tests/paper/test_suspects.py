"""The suspects behind Table 2: every network in every view, and the rule that judges them."""

import dataclasses
import sys

import pytest
import torch

from mmlda import data as datasets
from mmlda import paper
from mmlda.attacks import BIM
from mmlda.paper import Setup, numbers
from mmlda.paper.rows import MMLDA, SR, Row
from mmlda.paper.setup import networks
from mmlda.paper.suspects import VARIANTS, VIEWS, WORST, clipped, suspect_rows, verdicts
from mmlda.results import Result, label


def test_every_variant_changes_one_thing():
    for model, recipe in VARIANTS.values():
        assert bool(model) != bool(recipe) and len(model | recipe) == 1
    rows = suspect_rows("cifar10")
    assert len(rows) == 10 and {row.recipe for row in rows} == {"sr", "mmlda-adam"}  # the paper's recipe
    assert {row.recipe for row in suspect_rows("mnist")} == {"sr", "mmlda"}


def test_every_suspect_is_tried_in_every_view(tmp_path, monkeypatch):
    setup = Setup(data="digits", out=tmp_path, steps=40, n=4, show=False)
    chosen = [row for row in suspect_rows("digits") if row.variant in ("", "centre loss", "soft targets")]
    *found, claim = paper.suspects(setup, chosen)
    cells = {(label(r), r.cell["view"], r.attack, r.eps): r for r in found}
    assert len(cells) == 4 * 3 * (1 + 2 * len(VIEWS))
    for (model, *where), r in cells.items():  # at C = 100 the soft targets are 0 and 1 in float32: the same network
        assert ("the very weights of MM-LDA" in r.note) == (model == "soft targets")
        if model == "soft targets":
            assert r.value == cells["MM-LDA", *where].value and r.outcomes["file"] == f"{r.name}.safetensors"
    assert claim.claim == "suspects" and "no numbers to explain" in claim.what
    recipes = {r.cell["variant"]: r.recipe_settings for r in found if r.head == "mmlda"}
    assert recipes["centre loss"]["loss"] == "centre" and recipes[""]["loss"] == "ce"
    assert [r.value for r in paper.suspects(setup, chosen)] == [r.value for r in (*found, claim)]  # nothing twice
    module = sys.modules["mmlda.paper.suspects"]
    item = {"recipe": "digits-mmlda", "variant": "centre loss", "view": "logits", "verdict": "explains"}
    monkeypatch.setattr(module, "verdicts", lambda results: [item, {**item, "variant": "", "verdict": "no"}])
    monkeypatch.setattr(module, "audited", lambda setup, *what: what)
    (net, base, eps, n) = paper.suspects(setup, chosen)[-2]  # what explains the table is audited
    assert (net.row.variant, base.row.head, eps, n) == ("centre loss", "softmax", 0.12, 4)


def test_networks_that_ship_are_seen_in_the_views_beside_their_worst_case(setup, tmp_path, monkeypatch):
    nets = networks(setup, (SR, MMLDA))
    monkeypatch.setattr(sys.modules["mmlda.paper.suspects"], "networks", lambda setup, rows: nets)
    monkeypatch.setattr("mmlda.paper.setup._sets", lambda data, root: datasets.load("digits"))
    here = Setup(data="mnist", out=tmp_path, shipped=True, n=8, show=False)
    with pytest.raises(ValueError, match=r"out must have worst-mnist-sr-0\.04-0, a result of table3"):
        paper.suspects(here)
    for row, name in ((SR, "sr"), (MMLDA, "mm-lda")):
        for eps in numbers.EPS:
            fields = {**row.fields("mnist"), "kind": "worst", "attack": "WorstCase", "eps": eps}
            Result(name=f"worst-mnist-{name}-{eps:.4g}-0", what="", value=0.0, **fields).save(tmp_path)
    *cells, claim = paper.suspects(here)
    assert {label(r) for r in cells} == {"SR (ships)", "MM-LDA (ships)"} and len(cells) == 2 * 3 * 2 * len(VIEWS)
    assert [r.paper for r in cells[:2]] == [numbers.table2("mnist", SR, kind, 0.04) for kind in ("FGSM", "BIM")]
    x, y = datasets.load("digits")[1].pixels()[:8], datasets.load("digits")[1].labels[:8]
    by_hand = BIM(eps=0.12)(nets[1].model, x, y)
    (found,) = (r for r in cells if r.name == "suspect-mnist-mm-lda-ships-logits-bim-0.12-0")
    assert found.value == float((by_hand.prediction == y).double().mean())
    assert claim.name == "claim-mnist-suspects-shipped" and len(claim.series["verdicts"]) == len(VIEWS)


def test_clipped_probabilities_stand_still_where_logits_do_not():
    """A confident network: a gap of 20 nats is nothing to float32, and too much for clipped probabilities."""
    x = torch.full((3, 1, 2, 2), 0.5)
    y = torch.zeros(3, dtype=torch.int64)

    def model(t):
        s = t.flatten(1).sum(1)
        return torch.stack([20 - 5 * (s - 2), 5 * (s - 2)], 1)

    assert BIM(eps=0.1)(model, x, y).zero_gradient == 0
    still = BIM(eps=0.1, loss=clipped)(model, x, y)
    assert still.zero_gradient == 1 and torch.equal(still.x_adv, x)


NEAR, APART, FAR = {"FGSM": -0.09, "BIM": 0.05}, {"FGSM": -0.09, "BIM": -0.6}, {"FGSM": -0.3, "BIM": -0.6}


@pytest.mark.parametrize(
    "shift, worst, control, word",
    [
        (NEAR, 0.0, 0.04, "explains"),
        (APART, 0.0, 0.04, "in part"),
        (FAR, 0.0, 0.04, "no"),
        (NEAR, 0.6, 0.04, "no"),  # it is robust
        (NEAR, 0.0, 0.8, "no"),  # SR looks robust too
    ],
)
def test_the_suspects_are_judged_by_the_rule(shift, worst, control, word):
    """Results made up to look like the paper, in part, or not; and the two ways in which a look does not count."""
    row = Row("mmlda", "mmlda-adam", variant="C = 10")

    def result(row, view, kind, eps, value):
        fields = row.fields("cifar10")
        fields["cell"]["view"] = view
        says = numbers.table2("cifar10", MMLDA, kind, eps)
        fields |= {"name": "x", "kind": "suspect", "what": "", "attack": kind, "eps": eps, "paper": says}
        return Result(value=value, **fields)

    results = [result(dataclasses.replace(SR, variant=""), "logits", "BIM", 0.12, control)]
    for eps in numbers.EPS:
        results.append(result(row, WORST, "WorstCase", eps, worst))
        for kind in ("FGSM", "BIM"):
            says = numbers.table2("cifar10", MMLDA, kind, eps)
            results.append(result(row, "logits", kind, eps, says + shift[kind]))
    expected = {"recipe": "cifar10-mmlda-adam", "variant": "C = 10", "view": "logits", "verdict": word}
    assert verdicts(results) == [expected]
