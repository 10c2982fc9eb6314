"""The folder of a run: resuming, refusing another run, locking, damaged metrics and descriptions."""

import dataclasses
import json
import shutil
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from torch.utils.data import DataLoader
from training_cases import QUICK, SMALL, break_off, same, train, weights

import mmlda
from mmlda._utils.files import json_digest
from mmlda.models import build
from mmlda.training import Adversary, Recipe, fit, folder


def test_a_resumed_run_ends_with_the_same_bits_and_metrics(digits, tmp_path):
    whole, run = train(digits[0], out=tmp_path / "a", log_every=4, checkpoint_every=5)
    break_off(digits[0], QUICK, tmp_path / "b", 18, log_every=4, checkpoint_every=5)
    again, rerun = train(digits[0], out=tmp_path / "b", log_every=4, checkpoint_every=5)
    assert same(whole, again)
    drop = ("seconds", "steps_per_second")
    plain = [[{k: v for k, v in entry.items() if k not in drop} for entry in r.history] for r in (run, rerun)]
    assert plain[0] == plain[1]
    lines = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in lines] == [entry["step"] for entry in rerun.history]


def test_a_finished_run_is_loaded_not_repeated(digits, tmp_path):
    first, run = train(digits[0], out=tmp_path)
    stamp = (tmp_path / "model.safetensors").stat().st_mtime_ns
    second, again = train(digits[0], out=tmp_path)
    assert same(first, second) and again.step == 24 and again.loss == run.loss
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == stamp
    loaded = mmlda.load(tmp_path)
    assert not loaded.training and same(weights(loaded), first)


def test_another_recipe_network_or_data_in_the_same_folder_is_refused(digits, tmp_path):
    train(digits[0], out=tmp_path)
    with pytest.raises(ValueError, match=r"recipe\.lr is 0\.001 there, but 0\.01 was requested"):
        train(digits[0], dataclasses.replace(QUICK, lr=0.01), out=tmp_path)
    with pytest.raises(ValueError, match=r"model\.C"):
        train(digits[0], config=dict(SMALL, C=10.0), out=tmp_path)
    with pytest.raises(ValueError, match=r"data\."):
        train(digits[1], out=tmp_path)
    with pytest.raises(ValueError, match=r"model\.priors"):
        train(digits[0], config=dict(SMALL, priors=[0.55] + [0.05] * 9), out=tmp_path)
    assert mmlda.load(tmp_path)


def test_more_steps_are_not_given_as_the_reason(digits, tmp_path):
    train(digits[0], out=tmp_path / "memory")
    more = dataclasses.replace(QUICK, steps=30)
    with pytest.raises(ValueError, match=r"model\.C is 100\.0 there, but 10\.0 was requested"):
        train(digits[0], more, config=dict(SMALL, C=10.0), out=tmp_path / "memory")
    train(DataLoader(digits[0], batch_size=32), out=tmp_path / "loader")
    with pytest.raises(ValueError, match=r"data\.images is 1437 there, but 96 was requested"):
        train(DataLoader(digits[0].subset(slice(96)), batch_size=32), more, out=tmp_path / "loader")
    with pytest.raises(ValueError, match=r"recipe\.steps is 24 there, but 12 was requested"):
        train(digits[0], dataclasses.replace(QUICK, steps=12), out=tmp_path / "memory")


def test_two_processes_do_not_train_in_one_folder(digits, tmp_path):
    script = f"""
        import sys, mmlda
        def wait(module, inputs):
            if module.training:  # in a step, when the folder is locked
                print("training", flush=True)
                sys.stdin.read()
        model = mmlda.models.build({SMALL!r}, seed=0)
        model.register_forward_pre_hook(wait)
        mmlda.fit(model, mmlda.data.load("digits")[0], mmlda.Recipe(steps=10**6), out={str(tmp_path)!r}, show=False)
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        try:
            assert other.stdout.readline() == "training\n"
            with pytest.raises(ValueError, match="out must be a folder in which no other process trains"):
                train(digits[0], Recipe(steps=10**6), out=tmp_path)
        finally:
            other.kill()
    (tmp_path / ".step-00000001.json.x.tmp").write_text("half")
    with pytest.raises(ValueError, match=r"out must be a folder without another run, got .*: recipe\."):
        train(digits[0], out=tmp_path)  # the dead process's lock is gone, but the folder holds its run
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("rank, kept", [(0, False), (1, True)])
def test_only_the_first_process_removes_the_temporary_files_of_a_killed_run(tmp_path, monkeypatch, rank, kept):
    stray = tmp_path / ".run.json.abc.tmp"  # for rank 1, perhaps one that rank 0 is still writing
    stray.touch()
    monkeypatch.setattr("mmlda.training.folder.share", lambda: (rank, 2))
    folder.lock(tmp_path).release()
    assert stray.exists() == kept


def as_older_versions_wrote_it(out):
    """Remove the digest of run.json, and that of the run in each checkpoint; run.json."""
    about = json.loads((out / "run.json").read_text())
    for path in out.glob("step-*.json"):
        record = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("run", "record")}
        path.write_text(json.dumps({**record, "record": json_digest(record)}))
    about = {key: value for key, value in about.items() if key not in ("sha256", "start")}
    (out / "run.json").write_text(json.dumps(about))
    return about


def test_an_older_run_is_resumed_and_lengthened(digits, tmp_path):
    whole, _ = train(digits[0], dataclasses.replace(QUICK, steps=30))
    break_off(digits[0], QUICK, tmp_path, 12, checkpoint_every=6)
    as_older_versions_wrote_it(tmp_path)
    longer, run = train(digits[0], dataclasses.replace(QUICK, steps=30), out=tmp_path)
    assert same(longer, whole) and run.step == 30
    assert same(weights(mmlda.load(tmp_path)), whole)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"amp": "false"}, "amp must be bool, got 'false'"),
        ({"amp": True}, "SHA-256 differs"),
        ({"recipe": {"steps": "24"}}, "steps must be int, got '24'"),
        ({"recipe": {"steps": 24, "lr": [0.1]}}, r"lr must be float, got \[0.1\]"),
        ({"recipe": {"steps": 24, "adversary": {"attack": "pgd"}}}, "adversary must be given with eps"),
        ({"model": {"backbone": "resnet", "depth": 600_002}}, "depth must be at most 2000, got 600002"),
        ({"model": {"backbone": "mlp", "inputs": 3, "hidden": 5}}, r"hidden must be Sequence\[int\], got 5"),
        ({"model": {"backbone": "conv_net", "width": 2**40}}, "width must be at most"),
        ({"model": {"backbone": "conv_net", "mean": "x"}}, "mean must be"),
        ({"model": {"backbone": {}}}, "backbone must be str, got {}"),
        ({"model": 5}, "model must be"),
        ({"data": {"name": "x"}}, "must be given with images, sha256"),
    ],
)
def test_a_run_json_is_checked_before_anything_is_built_from_it(digits, tmp_path, change, words):
    break_off(digits[0], QUICK, tmp_path, 12, checkpoint_every=6)
    path = tmp_path / "run.json"
    about = {**json.loads(path.read_text()), **change}
    if "SHA" not in words:  # a file that is false, but whole
        del about["sha256"]
        about["sha256"] = json_digest(about)
    path.write_text(json.dumps(about))
    for call in (lambda: train(digits[0], out=tmp_path), lambda: mmlda.load(tmp_path)):
        with pytest.raises(ValueError, match=f"run.json must be as a run writes it .*{words}"):
            call()


def test_checkpoints_and_networks_of_another_run_are_refused(digits, tmp_path):
    whole, _ = train(digits[0])
    other = dataclasses.replace(QUICK, lr=0.01)
    break_off(digits[0], QUICK, tmp_path / "a", 12, checkpoint_every=6)
    break_off(digits[0], other, tmp_path / "b", 18, checkpoint_every=6)
    for path in (tmp_path / "b").glob("step-00000018*"):
        shutil.copy(path, tmp_path / "a")
    with pytest.warns(UserWarning, match="checkpoint refused: .*18.json: it must be part of this run"):
        assert same(train(digits[0], out=tmp_path / "a")[0], whole)
    train(digits[0], other, out=tmp_path / "b")
    shutil.copy(tmp_path / "b" / "model.safetensors", tmp_path / "a")
    with pytest.warns(UserWarning, match="network refused: .*it must be part of this run"):
        assert same(weights(mmlda.load(tmp_path / "a")), whole)


def test_the_start_of_another_fine_tuning_is_another_run(digits, tmp_path):
    for seed in (0, 1):
        break_off(digits[0], QUICK, tmp_path / str(seed), 12 + 6 * seed, build(SMALL, seed=seed), checkpoint_every=6)
    for path in (tmp_path / "1").glob("step-00000018*"):
        shutil.copy(path, tmp_path / "0")
    with pytest.warns(UserWarning, match="it must be part of this run"):
        train(digits[0], out=tmp_path / "0")


def test_other_threads_or_versions_on_resuming_are_named(digits, tmp_path, monkeypatch):
    break_off(digits[0], QUICK, tmp_path, 12, checkpoint_every=6)
    now = folder.versions()
    monkeypatch.setattr(folder, "versions", lambda: {**now, "threads": "64", "torch": "9.9"})
    with pytest.warns(
        UserWarning, match=r"was begun with torch .*, now 9\.9; threads .*, now 64: its weights may differ"
    ):
        train(digits[0], out=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(digits[0], out=tmp_path)  # it is finished: nothing is computed


NEW_FIELDS = ("schedule", "average")  # of a recipe; of an adversary: pairing


def test_a_run_of_an_older_version_without_the_new_fields_is_resumed(digits, tmp_path):
    adversary = Adversary(attack="pgd", eps=0.1, steps=2, random_start=True, share=1.0)
    recipe = dataclasses.replace(QUICK, adversary=adversary)
    whole, _ = train(digits[0], recipe)
    break_off(digits[0], recipe, tmp_path, 12, checkpoint_every=6)
    path = tmp_path / "run.json"
    about = as_older_versions_wrote_it(tmp_path)
    for name in NEW_FIELDS:
        del about["recipe"][name]
    del about["recipe"]["adversary"]["pairing"]
    path.write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"recipe\.average is 0\.0 there, but 0\.9 was requested"):
        train(digits[0], dataclasses.replace(recipe, average=0.9), out=tmp_path)
    again, run = train(digits[0], recipe, out=tmp_path)
    assert same(whole, again) and run.step == 24


def test_a_line_of_metrics_that_lost_its_end_is_removed_on_resuming(digits, tmp_path):
    break_off(digits[0], QUICK, tmp_path, 12, log_every=4, checkpoint_every=4)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rstrip("\n"))
    train(digits[0], out=tmp_path, log_every=4, checkpoint_every=4)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [4, 8, 12, 16, 20, 24]
    metrics.unlink()
    assert train(digits[0], out=tmp_path)[1].step == 24  # the network is there all the same


def test_runs_with_tied_weights_are_resumed(digits, tmp_path):
    def tied():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Flatten(),
            *(torch.nn.Linear(64, 64) for _ in range(2)),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(64, 10),
        )
        net[2].weight = net[1].weight
        return net

    whole = tied()
    fit(whole, digits[0], QUICK, show=False)
    torch.manual_seed(QUICK.seed)
    with torch.random.fork_rng():
        start = tied()
        torch.manual_seed(QUICK.seed)
        break_off(digits[0], QUICK, tmp_path, 14, model=start, checkpoint_every=6)
    again = tied()
    fit(again, digits[0], QUICK, out=tmp_path, show=False)
    assert same(weights(again), weights(whole)) and again[1].weight is again[2].weight


def test_a_run_keeps_to_its_precision(digits, tmp_path):
    break_off(digits[0], QUICK, tmp_path, 12, checkpoint_every=6, amp=True)
    with pytest.raises(ValueError, match="amp is True there, but False was requested"):
        train(digits[0], out=tmp_path, amp=False)
    whole, _ = train(digits[0], amp=True)
    assert same(whole, train(digits[0], out=tmp_path)[0]) and not same(whole, train(digits[0])[0])


@pytest.mark.parametrize("text", ['{"recipe": ', "[1, 2]", "[" * 100_000])
def test_a_damaged_description_is_named(digits, tmp_path, text):
    break_off(digits[0], QUICK, tmp_path, 12, checkpoint_every=6)
    (tmp_path / "run.json").write_text(text)
    for call in (lambda: train(digits[0], out=tmp_path), lambda: mmlda.load(tmp_path)):
        with pytest.raises(ValueError, match=r"run.json must be a JSON object"):
            call()


def test_the_weights_that_examples_were_crafted_on_are_checked(digits, tmp_path):
    recipe = dataclasses.replace(QUICK, adversary=Adversary(attack="fgsm", eps=0.1, steps=1, craft="once"))
    break_off(digits[0], recipe, tmp_path, 12, checkpoint_every=6)
    path = tmp_path / "start.safetensors"
    content = bytearray(path.read_bytes())
    for damaged in (content[:-50], content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"start.safetensors"):
            train(digits[0], recipe, out=tmp_path)
    path.write_bytes(content)
    assert same(train(digits[0], recipe)[0], train(digits[0], recipe, out=tmp_path)[0])


def test_strange_lines_of_metrics_are_left_out(digits, tmp_path):
    break_off(digits[0], QUICK, tmp_path, 12, checkpoint_every=6)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\xfe\n[1]\n7\n" + b"[" * 100_000 + b'\n{"step": 3}\n')
    _, run = train(digits[0], out=tmp_path)
    assert [entry["step"] for entry in run.history] == list(range(1, 25))
