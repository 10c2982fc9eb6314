"""Packed results: the same as in files of their own, never lost, and checked on reading."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load, load_file, save

from mmlda import report
from mmlda.results import Result, find_result, find_results, load_all, pack, packing

RECIPE = {"steps": 100, "lr": 0.1}


def outcomes(k):
    generator = torch.Generator().manual_seed(k)
    return save(
        {
            "clean": torch.randint(10, (7,), generator=generator).to(torch.uint8),
            "distortion": torch.rand(7, generator=generator).half(),
            "l2": torch.rand(7, generator=generator, dtype=torch.float64),
            "success": torch.rand(7, generator=generator) > 0.5,
        }
    )


def made(name, value=0.5, kind="table2", dataset="digits", **more):
    fields = {"n": 7, "recipe_settings": RECIPE, "versions": {"torch": "2.0"}, "commit": "0" * 12, **more}
    return Result(name=name, kind=kind, what=f"number {name}", value=value, dataset=dataset, **fields)


@pytest.fixture
def folder(tmp_path):
    """Five results in two tables and one outside of them, some with outcomes."""
    for k, name in enumerate(["b-1", "a", "b"]):
        made(name, k / 7, interval=(0.0, 1.0), numbers={"more": k}).save(tmp_path, outcomes(k))
    made("verdict", "real", "audit", series={"x": [1, 2]}).save(tmp_path)
    made("nothing", None, "audit", series={"x": [1, 2]}, note="é").save(tmp_path)
    made("theory", 1.0, "theory", "", holds=True).save(tmp_path)
    return tmp_path


def content(folder):
    """Every result with its outcomes, whatever files they are in."""
    return {
        r.name: (
            {key: value for key, value in dataclasses.asdict(r).items() if key != "outcomes"},
            r.outcomes and (r.outcomes["sha256"], r.read_outcomes(folder)),
        )
        for r in load_all(folder)
    }


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


TABLES = ["digits/audit.jsonl", "digits/table2.jsonl", "digits/table2.safetensors", "theory.jsonl"]


def test_packed_results_are_the_same(folder):
    before = content(folder)
    assert pack(folder) == (["a", "b", "b-1", "nothing", "verdict", "theory"], [])
    assert files(folder) == TABLES and content(folder) == before


def test_a_table_has_one_line_per_result_and_what_they_share_once(folder):
    pack(folder)
    header, *lines = (folder / "digits" / "table2.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["a", "b", "b-1"]
    assert header.count('"lr"') == 1 and not any('"lr"' in line for line in lines)
    columns = load_file(folder / "digits" / "table2.safetensors")
    assert torch.equal(columns["b/l2"], load(outcomes(2))["l2"]) and len(columns) == 12


def test_the_same_results_make_the_same_bytes_in_one_go_or_two(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for k, result in enumerate(load_all(folder)):
        result.save(other, result.outcomes and result.read_outcomes(folder))
        if k == 2:
            pack(other)
    pack(folder)
    pack(other)
    assert files(other) == TABLES
    assert all((other / name).read_bytes() == (folder / name).read_bytes() for name in TABLES)


def test_each_result_is_found_by_its_name_and_its_reference(folder):
    before = {r.name: r for r in load_all(folder)}
    assert find_result(folder, "b-1") == before["b-1"] and find_results(folder)["a.json"] == before["a"]
    pack(folder)
    assert find_result(folder, "b-1").read_outcomes(folder) == outcomes(0)
    assert Result.load(folder / "digits" / "table2.jsonl#b").read_outcomes(folder / "digits") == outcomes(2)
    assert find_result(folder, "c") is None and find_result(folder, "") is None
    assert list(find_results(folder))[:2] == ["digits/table2.jsonl#a", "digits/table2.jsonl#b"]
    with pytest.raises(ValueError, match=r"path must be the JSON of a result, or table.jsonl#name, got .*#c"):
        Result.load(folder / "digits" / "table2.jsonl#c")
    with pytest.raises(ValueError, match="path must be the JSON of a result"):
        Result.load(folder / "digits" / "nothing.jsonl#c")


def test_another_value_is_replaced_only_on_request(folder):
    pack(folder)
    new = made("a", 6 / 7).save(folder, outcomes(9))
    made("a2", 3 / 7).save(folder)
    assert find_result(folder, "a").value == new.value and len(load_all(folder)) == 7  # the newer one is read
    assert pack(folder) == (["a2"], ["a"])
    assert Result.load(folder / "digits" / "table2.jsonl#a").value == 1 / 7 and find_result(folder, "a") == new
    assert pack(folder, replace=True) == (["a"], [])
    assert files(folder) == TABLES and find_result(folder, "a").value == 6 / 7
    assert find_result(folder, "a").read_outcomes(folder) == outcomes(9)
    assert find_result(folder, "b").read_outcomes(folder) == outcomes(2)


def test_the_same_value_is_packed_again_with_its_new_provenance(folder):
    pack(folder)
    made("a", 1 / 7, commit="1" * 12).save(folder)
    assert pack(folder) == (["a"], [])
    assert find_result(folder, "a").commit == "1" * 12 and find_result(folder, "a").outcomes is None
    assert not any(key.startswith("a/") for key in load_file(folder / "digits" / "table2.safetensors"))


@pytest.mark.parametrize("after", range(5))
def test_nothing_is_lost_when_packing_is_stopped(folder, monkeypatch, after):
    pack(folder)
    made("a", 1 / 7, note="again").save(folder, outcomes(8))
    made("c").save(folder, outcomes(9))
    made("late", "none", "audit").save(folder)
    before, write, calls = content(folder), packing.write_whole, []

    def stop(path, data):
        calls.append(path)
        if len(calls) > after:
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(packing, "write_whole", stop)
    if after < 3:  # two tables, one of them with outcomes
        with pytest.raises(KeyboardInterrupt):
            pack(folder)
    else:
        pack(folder)
    assert content(folder) == before
    monkeypatch.undo()
    pack(folder)
    assert files(folder) == TABLES and content(folder) == before


def test_a_result_that_a_job_writes_meanwhile_stays(folder, monkeypatch):
    write = packing.write_whole

    def meanwhile(path, data):
        write(path, data)
        made("a", 0.75).save(folder, outcomes(9))

    monkeypatch.setattr(packing, "write_whole", meanwhile)
    pack(folder)
    assert find_result(folder, "a").value == 0.75 and find_result(folder, "a").read_outcomes(folder) == outcomes(9)


def test_altered_outcomes_are_not_packed(folder):
    (folder / "a.safetensors").write_bytes(outcomes(5))
    there = files(folder)
    with pytest.raises(ValueError, match="truncated or altered"):
        pack(folder)
    assert set(there) <= {*files(folder), "nothing.json", "theory.json", "verdict.json"}


def test_altered_and_foreign_packed_files_are_refused(folder):
    pack(folder)
    table, beside = (folder / "digits" / f"table2.{end}" for end in ("jsonl", "safetensors"))
    good = beside.read_bytes()
    for bad in (good[:-1], good[:-1] + bytes([good[-1] ^ 1]), b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[]"):
        beside.write_bytes(bad)
        with pytest.raises(ValueError, match=r"truncated or altered|must be a whole safetensors file"):
            [r.read_outcomes(folder) for r in load_all(folder) if r.outcomes]
    beside.unlink()
    with pytest.raises(ValueError, match=r"must be the outcomes of .*, got no such file"):
        find_result(folder, "a").read_outcomes(folder)
    header = table.read_text().splitlines()[0]
    for line in ("{", "3", '{"name": "x", "versions": "not there"}', '{"name": "x", "outcomes": 3}'):
        table.write_text(f"{header}\n{line}\n")
        with pytest.raises(ValueError, match="line 2 must be a packed result, got another line"):
            load_all(folder)
    table.write_text(f'{header}\n{{"name": "x"}}\n')
    with pytest.raises(ValueError, match="line 2: kind must be in every result, got none"):
        load_all(folder)
    table.write_text('{"schema": 99, "shared": {}}\n{"name": "x", "kind": "y"}\n')
    with pytest.raises(ValueError, match="made by a newer mmlda"):
        load_all(folder)
    for other in ("", "[]\n", '{"name": "a log of something"}\n{"name": "x"}\n', "no JSON\n"):
        table.write_text(other)  # files of another kind
        assert [r.name for r in load_all(folder)] == ["nothing", "theory", "verdict"]


def test_words_from_a_file_do_not_become_paths(tmp_path):
    made("x", kind="../../up", dataset="/etc").save(tmp_path)
    pack(tmp_path)
    assert files(tmp_path) == ["-etc/-up.jsonl"]


def test_a_report_of_packed_results_is_the_same(folder):
    def page(name):
        return report.build(folder, folder.parent / f"{name}.html").read_text()

    singles = page("singles")
    pack(folder)
    assert page("packed").replace("digits/table2.safetensors#", "") == singles.replace('.safetensors"', '"')
