"""Several networks at once, lists of jobs, a real Ray cluster, and cross-validation of C."""

import dataclasses
import json
import statistics

import pytest
import torch
from safetensors.torch import load as load_bytes
from training_cases import SMALL, interrupt_at, same

import mmlda
from mmlda.models import build
from mmlda.training import Diverged, checkpoints, fit, sweeps
from mmlda.training.many import fit_many
from mmlda.training.recipes import RECIPES, Recipe
from mmlda.training.sweeps import Job, JobsFailed, cross_validate, sweep

QUICK = Recipe(steps=20, optimizer="adam", lr=3e-3, batch_size=32)


def alike(a, b):
    return same(a.state_dict(), b.state_dict())


def test_fit_many_is_fit_for_each(digits):
    recipes = [dataclasses.replace(QUICK, seed=s, steps=15 + 5 * s) for s in range(3)]
    together = [build(SMALL, seed=s) for s in range(3)]
    runs = fit_many(together, digits[0], recipes, show=False)
    for s, (model, recipe, run) in enumerate(zip(together, recipes, runs)):
        alone = build(SMALL, seed=s)
        fit(alone, digits[0], recipe, show=False)
        assert alike(model, alone) and run.step == recipe.steps
    with pytest.raises(ValueError, match="recipes must have one entry per model, 3, got 2"):
        fit_many(together, digits[0], recipes[:2], show=False)


def test_fit_many_gives_each_network_its_own_dropout(digits):
    def net():
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 32), torch.nn.Dropout(), torch.nn.Linear(32, 10)
        return torch.nn.Sequential(torch.nn.Flatten(), *layers)

    alone, together = net(), [net(), net()]
    fit(alone, digits[0], QUICK, show=False)
    fit_many(together, digits[0], QUICK, show=False)
    assert alike(together[0], alone) and alike(together[1], alone)
    assert fit_many([], digits[0], QUICK, show=False) == []


WILD = dataclasses.replace(QUICK, optimizer="sgd", lr=1e18, weight_decay=0.0)


def test_a_network_that_diverges_does_not_stop_the_others(digits, tmp_path):
    models = [build(SMALL, seed=s) for s in range(3)]
    alone = build(SMALL, seed=2)
    fit(alone, digits[0], QUICK, show=False)
    with pytest.raises(Diverged, match="not finite"):
        fit_many(models, digits[0], [QUICK, WILD, QUICK], show=False)
    assert alike(models[2], alone)
    some = [Job(name=f"{n}", model=SMALL, recipe=r, data="digits") for n, r in enumerate((QUICK, WILD, QUICK))]
    for at_once in (1, 3):
        with pytest.raises(RuntimeError, match=r"1 of 3 jobs failed.*1: Diverged: .*not finite"):
            sweep(some, tmp_path / str(at_once), at_once=at_once, show=False)
        assert files(tmp_path / str(at_once)).keys() == {"0.json", "2.json"}


def test_a_job_with_bad_data_or_a_bad_network_does_not_stop_the_others(tmp_path):
    good = jobs(1)[0]
    some = [
        dataclasses.replace(good, name="nodata", data="nope"),
        good,
        dataclasses.replace(good, name="badC", model=dict(SMALL, C=-1)),
        dataclasses.replace(good, name="other", model=dict(SMALL, num_classes=3)),
    ]
    for at_once in (1, 4):
        with pytest.raises(JobsFailed, match=r"3 of 4 jobs failed.*nodata: ValueError: source.*badC: .*; other: "):
            sweep(some, tmp_path / str(at_once), at_once=at_once, show=False)
    assert files(tmp_path / "1").keys() == {"seed=0.json"} and files(tmp_path / "1") == files(tmp_path / "4")


def test_ctrl_c_saves_every_network(digits, tmp_path, capsys):
    models = [interrupt_at(build(SMALL, seed=0), 7), build(SMALL, seed=1)]
    outs = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(KeyboardInterrupt, match="stopped at step"):
        fit_many(models, digits[0], QUICK, out=outs, show=False)
    assert capsys.readouterr().err.count("and saved") == 2
    assert [checkpoints.newest(out)[1]["step"] for out in outs] == [7, 7]


def jobs(n=4):
    recipes = [dataclasses.replace(QUICK, seed=s) for s in range(n)]
    return [Job(name=f"seed={r.seed}", model=SMALL, recipe=r, data="digits") for r in recipes]


def files(folder):
    """What a sweep leaves, without what depends on the clock."""
    kept = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        record.pop("seconds")
        record.pop("versions")
        kept[path.name] = (record, path.with_suffix(".safetensors").read_bytes())
    return kept


def test_a_sweep_does_only_what_is_missing(tmp_path, monkeypatch):
    records = sweep(jobs(), tmp_path, show=False)
    assert [r["name"] for r in records] == [f"seed={s}" for s in range(4)]
    assert len({r["accuracy"] for r in records}) > 1 and all(len(r["per_class"]) == 10 for r in records)
    before = files(tmp_path)
    (tmp_path / "seed=2.json").unlink()
    done = []
    real = sweeps.run_jobs
    monkeypatch.setattr(sweeps, "run_jobs", lambda some, **o: done.extend(job.name for job in some) or real(some, **o))
    again = sweep(jobs(), tmp_path, show=False, at_once=3)
    assert done == ["seed=2"]
    assert files(tmp_path) == before and [r["accuracy"] for r in again] == [r["accuracy"] for r in records]


def test_jobs_at_once_are_the_same_jobs(tmp_path):
    sweep(jobs(), tmp_path / "one", show=False)
    sweep(jobs(), tmp_path / "three", show=False, at_once=3)
    assert files(tmp_path / "one") == files(tmp_path / "three")


def test_a_result_of_another_job_is_not_taken_for_this_one(tmp_path):
    sweep(jobs(1), tmp_path, show=False)
    other = dataclasses.replace(jobs(1)[0], recipe=dataclasses.replace(QUICK, lr=0.5))
    with pytest.raises(
        ValueError,
        match=r"the result of this job, got that of another: recipe\.lr is 0\.003 there, but 0\.5 was requested",
    ):
        sweep([other], tmp_path, show=False)
    with pytest.raises(ValueError, match="jobs must have different names"):
        sweep(jobs(1) * 2, tmp_path, show=False)
    with pytest.raises(ValueError, match=r"^name must be"):
        dataclasses.replace(other, name="../x")
    with pytest.raises(ValueError, match=r"^part must be"):
        dataclasses.replace(other, part=("fold", 1))


def test_a_damaged_or_half_lost_result_is_made_again(tmp_path):
    sweep(jobs(2), tmp_path, show=False)
    before = files(tmp_path)
    (tmp_path / "seed=0.json").write_text('{"format": 1, "na')
    (tmp_path / "seed=1.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"result refused: .*seed=0\.json .*doing the job again"):
        sweep(jobs(2), tmp_path, show=False)
    assert files(tmp_path) == before


def test_parts_of_the_data(digits):
    train, test = digits
    job = jobs(1)[0]
    held = [dataclasses.replace(job, part=("fold", k, 5, 0)).sets() for k in range(5)]
    assert sum(len(v) for _, v in held) == len(train) and all(len(t) + len(v) == len(train) for t, v in held)
    alpha = tuple([1.0] + [0.2] * 9)
    biased, biased_test = dataclasses.replace(job, part=("biased", alpha, 0)).sets()
    exact = torch.tensor(alpha, dtype=torch.float64)
    listed = [dataclasses.replace(job, part=["biased", a, 0]) for a in (list(alpha), exact)]
    assert all(other == dataclasses.replace(job, part=("biased", alpha, 0)) for other in listed)
    assert not any("error" in record for record in sweeps.run_jobs(listed))
    assert biased.priors[0] > 0.25 and biased_test.priors[0] > 0.25 and len(biased_test) < len(test)


@pytest.mark.long
def test_a_ray_cluster_of_two_workers_gives_the_same_files(tmp_path):
    ray = pytest.importorskip("ray", reason="the extra mmlda[ray] is not installed")
    sweep(jobs(), tmp_path / "here", show=False)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert ray.cluster_resources()["CPU"] == 2
        half = sweep(jobs()[:2], tmp_path / "ray", ray="local", show=False)
        sweep(jobs(), tmp_path / "ray", ray="local", show=False)
    finally:
        ray.shutdown()
    there, here = files(tmp_path / "ray"), files(tmp_path / "here")
    assert there.keys() == here.keys() and len(half) == 2
    for name in here:
        a, b = here[name][0], there[name][0]
        assert {k: v for k, v in a.items() if k != "loss"} == {k: v for k, v in b.items() if k != "loss"}
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)  # workers may use another number of threads
        mine, theirs = load_bytes(here[name][1]), load_bytes(there[name][1])
        assert all(torch.allclose(mine[key], theirs[key], rtol=1e-3, atol=1e-4) for key in mine)


def test_cross_validation_of_C(tmp_path):
    recipe = Recipe(steps=60, optimizer="adam", lr=3e-3, batch_size=64)
    settings = {"C": [1e-3, 100.0], "model": dict(SMALL, width=16), "out": tmp_path, "folds": 3, "show": False}
    table = cross_validate("digits", recipe, **settings)
    assert [row["log10_C"] for row in table] == [-3.0, 2.0] and all(len(row["errors"]) == 3 for row in table)
    assert table[0]["mean"] > table[1]["mean"] + 0.05  # a far too small C: the classes overlap and training crawls
    assert table[1]["std"] == pytest.approx(statistics.stdev(table[1]["errors"]))
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.json")}
    assert len(stamps) == 6
    assert cross_validate("digits", recipe, **settings) == table
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.json")}


def test_cross_validation_of_a_training_set_in_memory(digits):
    small = digits[0].subset(slice(300))
    recipe = Recipe(steps=8, optimizer="adam", lr=3e-3, batch_size=32)
    table = cross_validate(small, recipe, C=(c for c in [100.0]), folds=2, show=False)
    (row,) = table
    assert row["C"] == 100.0 and len(row["errors"]) == 2 and 0 < row["mean"] < 0.95
    with pytest.raises(ValueError, match=r"part must be a fold where .*, got None"):
        Job(name="x", model=SMALL, recipe=QUICK, data=small)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_several_networks_on_one_gpu_learn(digits):
    models = [build(dict(SMALL, width=16, dim=32), seed=s) for s in range(4)]
    recipe = RECIPES["digits-mmlda"].scaled(300)
    recipes = [dataclasses.replace(recipe, seed=s) for s in range(4)]
    runs = fit_many(models, digits[0], recipes, device="cuda", show=False)
    assert all(run.step == 300 for run in runs)
    assert all(mmlda.accuracy(model, digits[1]).accuracy > 0.93 for model in models)
    assert not alike(models[0], models[1])


def test_a_network_of_another_shape_writes_nothing(tmp_path):
    models = [build({"backbone": "conv_net", "width": 4, "channels": channels}, seed=0) for channels in (1, 3)]
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(ValueError, match="data must fit the network, got images of 1 x 8 x 8 in 'digits'"):
        mmlda.fit_many(models, "digits", Recipe(steps=2), out=folders, show=False)
    assert not list(tmp_path.iterdir())
    config = {"backbone": "conv_net", "width": 4, "channels": 3}
    jobs = [Job(name="wrong", model=config, recipe=Recipe(steps=2), data="digits")]
    with pytest.raises(JobsFailed, match="data must fit the network"):
        sweep(jobs, tmp_path, show=False)
    assert not list(tmp_path.rglob("run.json"))
