"""Results: whole or not at all, checked on reading, and readable by later code."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from mmlda import results
from mmlda.results import Result, difference_interval, find_results, load_all, wilson

FULL = {
    "name": "table2-x",
    "kind": "table2",
    "what": "accuracy under BIM",
    "value": 0.125,
    "unit": "share",
    "interval": (0.1, 0.15),
    "paper": 0.879,
    "n": 100,
    "seed": 0,
    "dataset": "mnist",
    "attack": "BIM",
    "eps": 0.04,
    "numbers": {"zero_gradient": 0.0},
    "series": {"x": [1, 2]},
}


def test_a_result_comes_back_as_it_was_with_its_outcomes(tmp_path):
    saved = Result(**FULL).save(tmp_path, b"some bytes")
    again = Result.load(tmp_path / "table2-x.json")
    assert again == saved and again.read_outcomes(tmp_path) == b"some bytes"
    assert again.interval == (0.1, 0.15) and again.difference == 0.125 - 0.879
    assert load_all(tmp_path) == [saved]


def test_priors_and_temperature_are_read_and_may_be_absent(tmp_path):
    Result(**FULL, priors="uniform", temperature=True).save(tmp_path)
    path = tmp_path / "table2-x.json"
    again = Result.load(path)
    assert (again.priors, again.temperature) == ("uniform", True)
    values = json.loads(path.read_text())
    del values["priors"], values["temperature"]  # as older versions wrote it
    path.write_text(json.dumps(values))
    again = Result.load(path)
    assert (again.priors, again.temperature) == (None, False)
    path.write_text(json.dumps({**values, "priors": 3}))
    with pytest.raises(ValueError, match="priors must be"):
        Result.load(path)


def test_a_share_is_made_from_counts_with_its_interval():
    made = Result.counted(30, 40, name="x", kind="table2", what="")
    assert (made.value, made.unit, made.interval, made.n) == (0.75, "share", wilson(30, 40), 40)


def test_altered_missing_and_foreign_outcomes_are_refused(tmp_path):
    saved = Result(**FULL).save(tmp_path, b"some bytes")
    (tmp_path / "table2-x.safetensors").write_bytes(b"some bytez")
    with pytest.raises(ValueError, match="altered"):
        saved.read_outcomes(tmp_path)
    (tmp_path / "table2-x.safetensors").unlink()
    with pytest.raises(ValueError, match="missing"):
        saved.read_outcomes(tmp_path)
    elsewhere = Result(**FULL, outcomes={"file": "../secret", "sha256": "0" * 64})
    with pytest.raises(ValueError, match="beside"):
        elsewhere.read_outcomes(tmp_path)
    with pytest.raises(ValueError, match="must be a result with outcomes"):
        Result(**FULL).read_outcomes(tmp_path)


def test_newer_incomplete_and_damaged_files_are_refused(tmp_path):
    path, full = tmp_path / "x.json", dataclasses.asdict(Result(**FULL))
    for change, words in (
        ({"schema": results.SCHEMA + 1}, "newer mmlda"),
        ({"schema": 0}, "schema must be 1 to 2, got 0"),
        ({"cell": []}, r"cell must be dict\[str, Any\], got \[\]"),
        ({"numbers": 3}, r"numbers must be dict\[str, float \| str \| None\], got 3"),
        ({"n": "100"}, r"n must be int \| None, got '100'"),
        ({"interval": [0.1]}, r"interval must be tuple\[float, float\] \| None, got \[0.1\]"),
        ({"what": {}}, "what must be str, got {}"),
        ({"outcomes": {"file": 3}}, "file must be str, got 3"),
        ({"outcomes": {"file": "x"}}, "outcomes must be given with file and sha256"),
    ):
        path.write_text(json.dumps({**full, **change}))
        with pytest.raises(ValueError, match=words):
            Result.load(path)
    path.write_text(json.dumps({key: value for key, value in full.items() if key != "what"}))
    with pytest.raises(ValueError, match="what must be in every result"):
        Result.load(path)
    path.write_text('{"schema": 1')
    with pytest.raises(ValueError, match="JSON"):
        Result.load(path)
    path.write_text(json.dumps({**full, "a_field_of_tomorrow": 1}))
    assert Result.load(path) == Result(**FULL)


DEEP = "[" * 100_000


def test_deeply_nested_files_are_no_results(tmp_path):
    (tmp_path / "x.json").write_text(DEEP)
    (tmp_path / "x.jsonl").write_text('{"schema": 2, "shared": {}}\n{"name": "x", "cell": ' + DEEP)
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2 must be a packed result"):
        load_all(tmp_path)
    nested = {**dataclasses.asdict(Result(**FULL)), "series": json.loads('{"a":' * 40 + "1" + "}" * 40)}
    (tmp_path / "x.jsonl").unlink()
    (tmp_path / "x.json").write_text(json.dumps(nested))  # not too deep to parse, but to copy
    with pytest.warns(UserWarning, match=r"skipped .*x\.json, which is damaged: JSON must have at most 32 levels"):
        assert load_all(tmp_path) == []


def test_a_pipe_among_the_results_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "x.json")
    Result(**FULL).save(tmp_path)
    assert [r.name for r in load_all(tmp_path)] == ["table2-x"]


def test_load_all_skips_other_json_files_and_names_a_bad_folder(tmp_path):
    (tmp_path / "other.json").write_text('{"name": "x"}')
    (tmp_path / "broken.json").write_text("{")
    Result(**FULL).save(tmp_path / "below")
    assert [r.name for r in load_all(tmp_path)] == ["table2-x"]
    with pytest.raises(ValueError, match="nowhere"):
        load_all(tmp_path / "nowhere")


def test_a_folder_of_work_counts_where_its_result_is_not_stored_above(tmp_path):
    made = Result(name="result", kind="evaluation", what="", value=0.5)
    for folder in ("attack", "evaluation/bim"):
        made.save(tmp_path / folder)
        (tmp_path / folder / "work.json").write_text("{}")
    dataclasses.replace(made, name="bim").save(tmp_path / "evaluation")
    assert list(find_results(tmp_path)) == [str(Path("evaluation/bim.json")), str(Path("attack/result.json"))]


@pytest.mark.parametrize("change", [{"name": "../x"}, {"name": ".x"}, {"name": ""}, {"value": float("nan")}])
def test_bad_values_are_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
        Result(**{**FULL, **change})


@pytest.mark.parametrize("k, n", [(0, 10), (3, 10), (10, 10), (9_130, 10_000), (1, 1)])
def test_wilson_is_scipys(k, n):
    expected = binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_interval_of_a_difference_covers_as_often_as_it_says():
    generator = np.random.default_rng(0)
    k1, k2 = generator.binomial(80, 0.7, 2000), generator.binomial(60, 0.6, 2000)
    hits = sum(low <= 0.1 <= high for low, high in (difference_interval(a, 80, b, 60) for a, b in zip(k1, k2)))
    assert 0.93 <= hits / 2000 <= 0.97


@pytest.mark.parametrize("k, n", [(-1, 3), (4, 3), (0, 0)])
def test_wilson_refuses_what_is_no_share(k, n):
    with pytest.raises(ValueError, match="successes must be 0 to n"):
        wilson(k, n)


def test_only_the_standard_library_is_needed():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['safetensors'] = None\n"
        "import types; p = types.ModuleType('mmlda'); p.__path__ = [sys.argv[1]]; sys.modules['mmlda'] = p\n"
        "import mmlda.results"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(results.__file__).parents[1])], check=True)
