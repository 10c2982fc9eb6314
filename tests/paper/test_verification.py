"""A committed number is recomputed, and a false one is found out."""

import dataclasses
import hashlib
import json
import re

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from mmlda import Result, evaluate, paper, zoo
from mmlda.attacks import BIM
from mmlda.evaluation.robustness import describe_attack, summary
from mmlda.paper.agreement import CLEAN, SIZE, TESTS, Agreement, honest_rate, two_sided
from mmlda.paper.rows import SR
from mmlda.paper.setup import Net, networks, train, trained
from mmlda.paper.suspects import _cell, suspect_job, suspect_rows
from mmlda.paper.verification import verify
from mmlda.paper.worst import worst_case


@pytest.fixture
def copied(setup, bim_on_sr, tmp_path):
    """Saves a changed copy of a result beside its networks; the path."""
    (tmp_path / "networks").symlink_to(setup.out / "networks")

    def write(lied=None, *, of=bim_on_sr, **fields):
        content = of.read_outcomes(setup.out) if lied is None else save(lied)
        made = dataclasses.replace(of, **fields).save(tmp_path, content)
        return tmp_path / f"{made.name}.json"

    return write


@pytest.fixture(scope="session")
def table1(setup):
    return paper.table1(setup, [SR])[0]


@pytest.fixture(scope="session")
def table3(setup):
    return paper.table3(setup, targets=("untargeted",), search=(6, 60))[0]


@pytest.fixture(scope="session")
def big(setup, tmp_path_factory):
    """BIM on SR on all test images."""
    wide = dataclasses.replace(setup, n=None, out=tmp_path_factory.mktemp("wide"))
    (wide.out / "networks").symlink_to(setup.out / "networks")
    return wide, next(r for r in paper.table2(wide, ("BIM",), (0.12,), cells=[]) if r.head == "softmax")


def consistent(result, columns, labels):
    """The fields of a forger who has thought of everything: they follow from the outcomes."""
    right = columns["clean"] == labels
    held = int((right & (columns["prediction"] == labels)).sum())
    made = Result.counted(held, len(labels), name="x", kind="", what="")
    numbers = summary({**columns, "steps": torch.zeros(len(labels))}, right, labels)
    kept = {key: result.numbers[key] for key in ("mean_steps", "zero_gradient")}
    return {"value": made.value, "interval": made.interval, "numbers": {**numbers, **kept}}


def test_true_results_of_every_kind_agree(setup, table1, table2, table3, tmp_path):
    for result in (table1, table3, *table2):
        found = verify(setup.out / f"{result.name}.json", n=10)
        assert found.agrees and found.n == 10, str(found)
    found = verify(setup.out / "table2-digits-sr-hat-bim-0.12-0.json")
    assert found.agrees and found.n == 24 and found.outcomes.differ == 0 and "agrees on 24 of its 24" in str(found)
    assert "not checked: that the network was trained as" in str(found) and "note" in found.unchecked
    assert verify(setup.out / f"{table1.name}.json").n == 360  # all of them: without an attack that is cheap
    worst = worst_case(dataclasses.replace(setup, n=5), eps=(0.2,))[0]
    assert verify(setup.out / f"{worst.name}.json").agrees


def test_suspects_are_verified_in_their_view(setup):
    rows = suspect_rows("digits")[:2]
    small = dataclasses.replace(setup, n=10)
    jobs = [suspect_job(small, row, 0) for row in rows]
    train(small, jobs, "suspects")
    (small.out / "views").mkdir()
    (small.out / "views" / "networks").symlink_to(small.out / "suspects")
    shown = dataclasses.replace(small, out=small.out / "views")
    for row, job, view in zip(rows, jobs, ("clipped probabilities", "predicted labels")):
        net = Net(trained(small, job, "suspects"), job.name, row, 0, job.recipe)
        result = _cell(shown, net, view, BIM(eps=0.12), 0.12)
        assert verify(shown.out / f"{result.name}.json").agrees
        dataclasses.replace(result, cell={**result.cell, "view": "logits"}).save(shown.out)
        assert not verify(shown.out / f"{result.name}.json").agrees


def test_evaluations_are_verified(setup, tmp_path):
    net = networks(setup, (SR,))[0]
    (tmp_path / "networks").symlink_to(setup.out / "networks")
    attacks = ["bim:0.12", "bim:0.12,step_size=1e-9"]
    made = evaluate(net.model, "digits", attacks, n=50, out=tmp_path, name=net.name, show=False)
    for result in made.results:
        found = verify(tmp_path / f"{result.name}.json")
        assert found.agrees, str(found)
        weak = (result.attack_settings or {}).get("step_size") == 1e-9
        assert ("whether step_size=1e-09, which is not the default, is a fair choice" in found.unchecked) == weak
    dataclasses.replace(made.clean, series={**made.clean.series, "per_class": [0.5] * 10}).save(tmp_path)
    assert "series must be" in str(verify(tmp_path / "clean.json"))


# ---- Forgeries


def test_a_table_without_errors_is_found_out(setup, table1, copied):
    labels = setup.sets()[1].labels
    wrong = int((load(table1.read_outcomes(setup.out))["clean"] != labels).sum())
    path = copied(
        {"clean": labels.to(torch.uint8)},
        of=table1,
        value=0.0,
        interval=Result.counted(0, 360, name="x", kind="", what="").interval,
        numbers={"balanced_accuracy": 1.0},
    )
    found = verify(path)
    assert not found.agrees and not found.faults and (found.labels.lost, found.labels.won) == (wrong, 0)
    assert found.limit <= wrong / 360


@pytest.mark.parametrize("change", [{"step_size": 1e-9}, {"norm": "l2"}, {"steps": 1}, {"seed": 1}, {"eps": 0.01}])
def test_a_weaker_attack_than_the_tables_is_found_out(setup, big, change, tmp_path):
    wide, result = big
    (tmp_path / "networks").symlink_to(wide.out / "networks")
    net, test = networks(setup, (SR,))[0].model, setup.sets()[1]
    attack = dataclasses.replace(BIM(eps=0.12), **change)
    made = attack(net, test.pixels(), test.labels)
    columns = load(result.read_outcomes(wide.out))
    columns |= {"success": made.success, "prediction": made.prediction.to(torch.uint8)}
    columns |= {key: getattr(made, key).half() for key in ("l2", "linf", "distortion")}
    settings = describe_attack(attack)["settings"]
    lied = dataclasses.replace(result, attack_settings=settings, **consistent(result, columns, test.labels))
    lied.save(tmp_path, save(columns))
    found = verify(tmp_path / f"{result.name}.json", n=50)
    assert not found.agrees and any("those of the table's BIM" in fault for fault in found.faults)
    lied = dataclasses.replace(lied, attack_settings=result.attack_settings, attack_steps=result.attack_steps)
    lied.save(tmp_path, save(columns))
    if "seed" not in change:  # BIM draws nothing
        assert not verify(tmp_path / f"{result.name}.json").agrees  # of the table's attack there are other outcomes


def test_flipped_outcomes_are_found_out_beyond_the_limit(big, tmp_path):
    wide, result = big
    labels, columns = wide.sets()[1].labels, load(result.read_outcomes(wide.out))
    (tmp_path / "networks").symlink_to(wide.out / "networks")
    limit = verify(wide.out / f"{result.name}.json").limit
    broken = (columns["success"] & (columns["clean"] == labels)).nonzero().flatten()
    flipped = broken[: round(limit * 360)]
    assert 0 < limit < 0.05 and len(flipped) == round(limit * 360)
    columns["success"][flipped], columns["prediction"][flipped] = False, labels[flipped].to(torch.uint8)
    dataclasses.replace(result, **consistent(result, columns, labels)).save(tmp_path, save(columns))
    found = verify(tmp_path / f"{result.name}.json")
    assert not found.agrees and not found.faults and found.outcomes.lost == len(flipped)


def test_false_distances_are_found_out(setup, table3, copied):
    columns = load(table3.read_outcomes(setup.out))
    doubled = {**columns, "l2": columns["l2"] * 2, "distortion": columns["distortion"] * 2}
    found = verify(copied(doubled, of=table3), n=8)
    assert not found.agrees and found.distance < 0.6 and found.outcomes.differ >= 4
    assert "value must be" in str(found) and "detection limit: " in str(found)
    for l2, distortion in ((1.0, 1.08), (1.08, 1.0), (1.0, torch.nan)):  # each within the rounding of one image
        lied = {**columns, "l2": columns["l2"] * l2, "distortion": columns["distortion"] * distortion}
        assert not abs(verify(copied(lied, of=table3), n=8).distance - 1) <= 0.02
    with pytest.raises(ValueError, match="search_steps and steps must be at most the paper's 9 and 10000, got"):
        verify(copied(of=table3, attack_settings={**table3.attack_settings, "steps": 10**9}))


CHANGES = {
    "name": "table2-digits-sr-bim-0.2-0",
    "what": "accuracy of SR under BIM at 0.12 on digits, certified",
    "value": 0.912,
    "unit": "distortion",
    "interval": (0.99, 0.999),
    "paper": 0.034,
    "holds": True,
    "note": "",
    "n": 23,
    "seed": 1,
    "dataset": "mnist",
    "head": "mmlda",
    "recipe": "digits-mmlda",
    "fine_tuning": "hat",
    "eps": 0.04,
    "target": "random",
    "claim": "table2",
    "cell": {"surface": "logits"},
    "train_steps": 600,
    "attack_steps": 100,
    "numbers": {"certified_accuracy": 0.9},
    "series": {"rule": "near enough"},
    "recipe_settings": {},
}


def test_a_result_without_settings_of_its_attack_is_found_out(copied):
    assert "attack_settings must be" in str(verify(copied(attack_settings=None), n=1))


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_that_follows_from_others_is_compared(field, copied):
    found = verify(copied(**{field: CHANGES[field]}), n=2, seed=3)
    assert not found.agrees and found.faults and found.seed == 3


def changed(value, draw):
    """Another value of the same type, in a table of one of its entries."""
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: changed(value[key], draw)}
    kinds = {bool: st.booleans(), int: st.integers(0, 10**6), float: st.floats(0, 10), dict: st.just({"x": 1.0})}
    kinds |= {tuple: st.tuples(st.floats(0, 1), st.floats(0, 1)), list: st.lists(st.floats(0, 1))}
    kinds |= {type(None): st.sampled_from([True, 0.5])}
    return draw(kinds.get(type(value), st.text("abc-/.0", max_size=5)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), field=st.sampled_from([field.name for field in dataclasses.fields(Result)]))
def test_any_changed_field_is_noticed_or_listed(data, field, bim_on_sr, copied):
    assume(field not in ("outcomes", "schema"))
    value = changed(getattr(bim_on_sr, field), data.draw)
    assume(value != getattr(bim_on_sr, field))
    try:
        found = verify(copied(**{field: value}), n=1, seed=0)
    except ValueError:  # there is no such result, network, data or attack
        return
    names = [field]
    if field == "numbers":
        names = [f"numbers: {key}" for key in value if value[key] != bim_on_sr.numbers[key]]
    assert found.faults or all(name in found.unchecked for name in names), (field, value)


# ---- What cannot be verified


def test_another_network_and_other_data_are_found_out(setup, bim_on_sr, copied, monkeypatch):
    with pytest.raises(ValueError, match="must be one with weights of SHA-256 000000000000"):
        verify(copied(network_sha256="0" * 64))
    with pytest.raises(ValueError, match="must be the test images"):
        verify(copied(data={**bim_on_sr.data, "sha256": "0" * 64}))
    with pytest.raises(ValueError, match=r"network \(--network\) must be the path of 'x'"):
        verify(copied(network="x"))
    net = networks(setup, (SR,))[0].model
    monkeypatch.setattr(zoo, "names", lambda: ["digits-sr"])
    monkeypatch.setattr(zoo, "load", lambda name: net)
    monkeypatch.setattr(zoo, "about", lambda name: {"recipe": bim_on_sr.recipe_settings})
    found = verify(copied(network="x"))  # it ships under another name
    assert found.outcomes.holds and found.labels.holds and "network" in found.unchecked


def test_names_in_a_result_are_not_paths(bim_on_sr, copied, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    with pytest.raises(ValueError, match="dataset must be one of digits, mnist"):
        verify(copied(data={**bim_on_sr.data, "name": str(folder)}))
    for name in (f"../networks/{bim_on_sr.network}", str(tmp_path / "networks" / bim_on_sr.network), "..", ""):
        with pytest.raises(ValueError, match=r"network \(--network\) must be the path of"):
            verify(copied(network=name))


def test_incomplete_results_are_refused(setup, bim_on_sr, copied, tmp_path):
    for fields, words in (
        ({"attack": ""}, "attack must be one of FGSM, BIM, ILCM, JSMA, got ''"),
        ({"attack": "Attack"}, "attack must be one of FGSM"),
        ({"eps": None}, "eps must be the attack's, got None"),
        ({"kind": "evaluation", "attack_settings": None}, "settings of BIM must be some of"),
        ({"kind": "evaluation", "attack_settings": {}}, "settings of BIM must be complete, got []"),
        ({"kind": "evaluation", "attack_settings": {"eps": 0.1, "steps": "9"}}, "steps must be int"),
        (
            {"kind": "evaluation", "attack": "WorstCase", "attack_settings": {"eps": 0.1, "attacks": 5}},
            "attacks must be",
        ),
        ({"kind": "evaluation", "attack": "Attack"}, "attack must be one of this package, got 'Attack'"),
        ({"data": {**bim_on_sr.data, "images": "24"}}, "must be a whole number, got '24'"),
        ({"network_sha256": ""}, "network_sha256 must be"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            verify(copied(**fields))
    (tmp_path / "somebodys").mkdir()
    for name in (str(tmp_path / "somebodys"), "somebodys", ["digits"]):  # a dataset is a known name, never a path
        with pytest.raises(ValueError, match=r"dataset must be one of digits, mnist"):
            verify(copied(data={**bim_on_sr.data, "name": name}))
    path = copied()
    path.with_suffix(".safetensors").write_bytes(b"damaged")
    about = {"file": path.with_suffix(".safetensors").name, "sha256": hashlib.sha256(b"damaged").hexdigest()}
    path.write_text(json.dumps({**json.loads(path.read_text()), "outcomes": about}))
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        verify(path)
    columns = load(bim_on_sr.read_outcomes(setup.out))
    for lied, words in (
        ({k: v for k, v in columns.items() if k != "prediction"}, "outcomes must have prediction"),
        ({k: v for k, v in columns.items() if k != "linf"}, "outcomes must have linf"),
        ({**columns, "clean": torch.tensor(1)}, "clean in the outcomes of"),
        ({**columns, "clean": columns["clean"].to(torch.uint16)}, "got 'torch.uint16 [24]'"),
        ({**columns, "success": columns["success"].float()}, "must be one of torch.bool for each image"),
        ({**columns, "l2": columns["l2"][:, None].clone()}, "got 'torch.float16 [24, 1]'"),
        ({k: v[:-1].clone() for k, v in columns.items()}, "outcomes must be of 24 images, got [23]"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            verify(copied(lied))
    theory = paper.theory_figure(setup)[0]
    with pytest.raises(ValueError, match=r"an outcome for each image.*got theory"):
        verify(setup.out / f"{theory.name}.json")


# ---- Chance


def test_rounding_changes_sides_both_ways_and_a_lie_only_one():
    assert two_sided(0, 0) == 1.0 and two_sided(7, 6) > 0.9
    assert two_sided(13, 0) < SIZE / TESTS < two_sided(12, 0)
    for lost, won, holds in ((8, 8, True), (15, 0, False), (60, 60, False)):
        assert Agreement(1000, 10_000, lost + won, lost, won, honest_rate("BIM")).holds == holds


def test_a_true_record_fails_as_seldom_as_said_and_a_false_one_is_noticed_as_often():
    rng, n, rate = torch.Generator().manual_seed(0), 1000, honest_rate("BIM")
    made = [Agreement(n, 10_000, 0, 0, 0, rate)]
    sides = torch.binomial(torch.full((20_000, 2), float(n)), torch.full((20_000, 2), rate / 2), generator=rng)
    honest = [Agreement(n, 10_000, int(a + b), int(a), int(b), rate) for a, b in set(map(tuple, sides.tolist()))]
    counts = {(a.lost, a.won): a.holds for a in honest}
    failed = sum(not counts[int(a), int(b)] for a, b in sides.tolist())
    assert failed <= 20_000 * SIZE / 2  # two of the four tests
    false = round(made[0].limit * 10_000)
    draws = torch.stack([torch.randperm(10_000, generator=rng)[:n] for _ in range(300)]) < false
    noticed = [not Agreement(n, 10_000, int(k), int(k), 0, rate).holds for k in draws.sum(1)]
    assert sum(noticed) / 300 > 0.9


def test_the_limit_falls_with_the_images_and_with_the_rate():
    limits = [Agreement(n, 10_000, 0, 0, 0, CLEAN).limit for n in (2, 5, 50, 200, 1000, 10_000)]
    assert limits == sorted(limits, reverse=True) and limits[0] > 0.9 and limits[-1] < 0.001
    assert Agreement(200, 10_000, 0, 0, 0, 0.02).limit > Agreement(200, 10_000, 0, 0, 0, CLEAN).limit
