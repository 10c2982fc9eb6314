"""Checkpoints: when they are written, and what survives a kill, a full disk and damaged files."""

import dataclasses
import json
import subprocess
import sys
import textwrap

import pytest
import torch
from training_cases import QUICK, SMALL, break_off, same, train, weights

import mmlda
from mmlda.models import build
from mmlda.training import checkpoints, fit


def test_checkpoints_by_default_are_seconds_apart_and_do_not_change_the_metrics(digits, tmp_path, monkeypatch):
    saved, histories = [], []
    monkeypatch.setattr(checkpoints, "save", lambda out, step, *rest: saved.append(step))
    recipe = dataclasses.replace(QUICK, steps=250)  # a line every 2 steps; a twentieth is 12
    for pause, expected in ((0.0, [*range(12, 250, 12), 250]), (1e9, [250])):
        monkeypatch.setattr("mmlda.training.journal.PAUSE", pause)
        model = build({"backbone": "conv_net", "head": "softmax"}, seed=0)
        run = fit(model, digits[0].subset(slice(64)), recipe, out=tmp_path / str(pause), show=False)
        assert saved == expected
        histories.append([(entry["step"], entry["loss"]) for entry in run.history])
        saved.clear()
    assert histories[0] == histories[1] and len(histories[0]) == 125
    fit(build(SMALL, seed=0), digits[0], QUICK, out=tmp_path / "asked", show=False, checkpoint_every=5)
    assert saved == [5, 10, 15, 20, 24]


@pytest.mark.parametrize("damage", ["truncated", "altered", "record", "step", "loss", "no seconds", "missing"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(digits, tmp_path, damage):
    whole, _ = train(digits[0])
    break_off(digits[0], QUICK, tmp_path, 18, checkpoint_every=6)
    newest = tmp_path / "step-00000018.safetensors"
    content = bytearray(newest.read_bytes())
    assert sorted(p.name for p in tmp_path.glob("step-*.json")) == ["step-00000012.json", "step-00000018.json"]
    if damage == "truncated":
        newest.write_bytes(content[:-100])
    elif damage == "altered":
        content[-1] ^= 1
        newest.write_bytes(content)
    elif damage == "record":
        newest.with_suffix(".json").write_text('{"format": 1, "step"')
    elif damage == "step":  # a record that claims the run is over
        record = json.loads(newest.with_suffix(".json").read_text())
        newest.with_suffix(".json").write_text(json.dumps({**record, "step": 24}))
    elif damage in ("loss", "no seconds"):
        record = json.loads(newest.with_suffix(".json").read_text())
        changed = {"loss": 0.5} if damage == "loss" else {"seconds": None}
        newest.with_suffix(".json").write_text(json.dumps({**record, **changed}))
    else:
        newest.unlink()
    with pytest.warns(UserWarning, match="checkpoint refused: .*step-00000018"):
        again, _ = train(digits[0], out=tmp_path)
    assert same(whole, again)


@pytest.mark.parametrize("damage", [lambda b: b[:-50], lambda b: b[:-50] + bytes([b[-50] ^ 1]) + b[-49:]])
def test_a_truncated_or_altered_network_is_refused_and_made_again_from_the_checkpoint(digits, tmp_path, damage):
    whole, _ = train(digits[0], out=tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(damage(content))
    with pytest.warns(UserWarning, match="network refused"):
        assert same(weights(mmlda.load(tmp_path)), whole)
    with pytest.warns(UserWarning, match="network refused"):
        again, _ = train(digits[0], out=tmp_path)
    assert same(again, whole) and path.read_bytes() == content


def test_only_damaged_checkpoints_is_an_error_not_a_fresh_start(tmp_path):
    checkpoints.save(tmp_path, 3, {"a": torch.ones(3)}, {})
    (tmp_path / "step-00000003.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="must be a folder with a whole checkpoint"):
        checkpoints.newest(tmp_path)


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path):
    """A limit on file size stands for the full disk: the write of the new checkpoint fails half-way."""
    checkpoints.save(tmp_path, 1, {"a": torch.arange(1000.0)}, {})
    script = f"""
        import resource, signal, torch
        from mmlda.training import checkpoints
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            checkpoints.save({str(tmp_path)!r}, 2, {{"a": torch.arange(100_000.0)}}, {{}})
        except OSError as error:
            print("failed:", error.errno)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert "failed: 27" in done.stdout, done.stderr
    tensors, record = checkpoints.newest(tmp_path)
    assert record["step"] == 1 and torch.equal(tensors["a"], torch.arange(1000.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001.json", "step-00000001.safetensors"]


KILLED = """
    import json, os, random, signal, sys
    import torch, torch._dynamo
    torch.set_num_threads(1)
    import mmlda

    folder, config = sys.argv[1], json.loads(sys.argv[2])
    recipe = mmlda.Recipe(steps=60, optimizer="adam", lr=1e-3, batch_size=32, pad=1, flip=True, average=0.9)
    data, draw, kills = mmlda.data.load("digits")[0], random.Random(0), 0

    def train(left):
        def count(event, arguments):  # SIGKILL just before the folder is opened, written, renamed or removed from
            nonlocal left
            if event in ("open", "os.rename", "os.remove", "os.chmod") and str(arguments[0]).startswith(folder):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        mmlda.fit(mmlda.models.build(config, seed=0), data, recipe, out=folder, show=False, checkpoint_every=3)

    while not os.path.exists(folder + "/model.safetensors"):
        left = draw.randint(1, 50) if sys.argv[3] == "kill" else -1
        child = os.fork()
        if child == 0:
            train(left)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or status == 0, status
        kills += killed
    print(kills)
"""


@pytest.mark.long
def test_a_run_killed_while_it_writes_its_files_ends_with_the_same_weights(tmp_path):
    """At least 20 SIGKILLs of a real process, at random file operations."""
    kills = {}
    for how in ("kill", "leave"):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / how), json.dumps(SMALL), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        kills[how] = int(done.stdout)
    assert kills["kill"] >= 20 and kills["leave"] == 0
    a, b = ((tmp_path / how / "model.safetensors").read_bytes() for how in kills)
    assert a == b
