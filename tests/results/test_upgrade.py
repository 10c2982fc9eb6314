"""Files of schema 1, real ones of every kind, in the fields of schema 2."""

import json
from pathlib import Path

import pytest

from mmlda.results import SCHEMA, Result, label

OLD = Path(__file__).parent / "old"


def old(name):
    """The stored values, and the result made of them."""
    return json.loads((OLD / f"{name}.json").read_text()), Result.load(OLD / f"{name}.json")


@pytest.mark.parametrize("name", sorted(path.stem for path in OLD.glob("*.json")))
def test_an_old_file_keeps_its_value_and_label(name, tmp_path):
    before, result = old(name)
    assert before["schema"] == 1 and result.schema == SCHEMA
    scale = 100 if before["unit"] in ("%", "points") else 1
    if isinstance(before["value"], float):
        assert scale * result.value == pytest.approx(before["value"], rel=1e-12)
    else:
        assert result.value == before["value"]
    if before["interval"] is not None:
        assert [scale * end for end in result.interval] == pytest.approx(before["interval"], rel=1e-12)
    if "model" in before["cell"]:
        assert label(result) == before["cell"]["model"]
    assert (result.outcomes, result.commit, result.n) == tuple(before[key] for key in ("outcomes", "commit", "n"))
    assert Result.load(result.save(tmp_path) and tmp_path / f"{name}.json") == result  # and it stays as it is


FIELDS = {
    "table1-cifar10-mm-lda-adam-1": {"head": "mmlda", "recipe": "cifar10-mmlda-adam", "seed": 1, "cell": {}},
    "table2-mnist-sr-jsma-0.04-softmax-random-0": {
        "attack": "JSMA",
        "eps": 0.04,
        "target": "random",
        "cell": {"surface": "softmax"},
        "recipe": "mnist-sr",
    },
    "table2-mnist-sr-sat-bim-0.12-0": {"fine_tuning": "sat", "recipe": "mnist-sat", "attack": "BIM", "eps": 0.12},
    "table3-mnist-sr-random-0": {"attack": "CarliniWagner", "target": "random", "compiled": True, "unit": "distortion"},
    "worst-mnist-sr-hat-bim-0.12-0": {"attack": "WorstCase", "fine_tuning": "hat", "train_steps": 10_000},
    "fig3-cifar10-BP2-10-mm-lda-true-priors-0": {
        "recipe": "cifar10-mmlda",
        "cell": {"set": "BP2-10", "priors": "true", "family": "BP2", "index": 10},
    },
    "fig5-cifar10-C2-0": {"head": "mmlda", "network": "", "cell": {"C": 100.0, "log10_C": 2.0}},
    "suspect-mnist-centre-loss-logits-bim-0.12-0": {
        "recipe": "mnist-mmlda",
        "cell": {"view": "logits", "variant": "centre loss"},
        "attack_steps": 10,
    },
    "suspect-mnist-sr-ships-logits-bim-0.12-0": {"recipe": "mnist-sr", "cell": {"view": "logits", "shipped": True}},
    "claim-cifar10-table3-random-adam": {
        "claim": "table3",
        "target": "random",
        "head": "mmlda",
        "recipe": "cifar10-mmlda-adam",
    },
    "audit-mnist-sr-sat-bim-0-04-0.12-0": {
        "attack": "",
        "eps": 0.12,
        "attack_steps": 20,
        "fine_tuning": "sat",
        "train_steps": 10_000,
    },
    "theory": {"dataset": "", "cell": {}},
}


@pytest.mark.parametrize("name", FIELDS)
def test_facts_of_display_strings_become_fields(name):
    _, result = old(name)
    assert {key: getattr(result, key) for key in FIELDS[name]} == FIELDS[name]
    assert "device" not in result.versions and result.device


def test_the_centre_loss_has_its_new_name():
    before, result = old("suspect-mnist-centre-loss-logits-bim-0.12-0")
    assert before["recipe"]["loss"] == "joint" and result.recipe_settings["loss"] == "centre"


def test_numbers_of_an_audit_become_shares():
    before, result = old("audit-mnist-sr-sat-bim-0-04-0.12-0")
    for key, value in before["numbers"].items():
        scale = 1 if key == "median_gap" else 100
        assert value is None or scale * result.numbers[key] == pytest.approx(value), key
    for was, item in zip(before["series"]["evidence"], result.series["evidence"], strict=True):
        scale = 100 if item["unit"] == "share" else 1
        assert was["value"] is None or scale * item["value"] == pytest.approx(was["value"]), item["test"]
    assert {item["test"] for item in result.series["evidence"] if item["unit"] != "share"} <= {"gaps", "averaging"}
    for was, row in zip(before["series"]["accuracies"], result.series["accuracies"], strict=True):
        assert [100 * row[key] for key in ("accuracy", "low", "high")] == pytest.approx(
            [was[key] for key in ("accuracy", "low", "high")]
        )
        assert row["accuracy"] == pytest.approx(row["held"].count("1") / len(row["held"]))


def test_errors_by_fold_and_networks_by_fold_are_kept():
    before, result = old("fig5-cifar10-C2-0")
    assert [100 * error for error in result.series["errors"]] == pytest.approx(before["series"]["errors"])
    assert result.series["networks"] == before["network"]["jobs"]
    assert 100 * result.numbers["std"] == pytest.approx(before["numbers"]["std"])


def test_verdicts_on_suspects_name_the_network_by_fields():
    before, result = old("claim-mnist-suspects")
    words = [item["verdict"] for item in result.series["verdicts"]]
    assert words == [word for _, _, word in before["series"]["verdicts"]]
    assert {"recipe": "mnist-mmlda", "variant": "centre loss", "view": "logits", "verdict": "explains"} in (
        result.series["verdicts"]
    )


def test_a_minimal_old_file_loads(tmp_path):
    path = tmp_path / "old.json"
    given = {"schema": 1, "name": "old", "kind": "table1", "what": "test error", "cell": {}, "value": 0.4}
    path.write_text(json.dumps({**given, "a_field_since_removed": 1}))
    assert Result.load(path).value == 0.4
    path.write_text(json.dumps({**given, "cell": []}))
    with pytest.raises(ValueError, match=r"old\.json: fields must be those of schema 1, got others"):
        Result.load(path)
