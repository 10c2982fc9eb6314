"""One network over two real processes (torchrun, gloo) is the same network as one process makes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmlda import training
from mmlda.training import checkpoints

COMMON = ["--data", "digits", "--head", "softmax", "--recipe", "digits-sr", "--steps", "40", "--device", "cpu",
          "--set", "batch_size=64", "--set", "lr=0.2", "--model", "width=8"]  # fmt: skip


def run(out, *extra, processes=1):
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "-m", "mmlda", "train", *COMMON, "--out", str(out), "--json", *extra],
                          capture_output=True, text=True, timeout=300, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), load_file(out / "model.safetensors")


def parameters_agree(a, b, tolerance=1e-5):
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    names = [name for name in a if not name.endswith(statistics)]
    return max(float((a[name] - b[name]).abs().max()) for name in names) <= tolerance


def test_without_batch_norm_two_processes_are_one(tmp_path):
    result, one = run(tmp_path / "one", "--model", "batch_norm=false")
    again, two = run(tmp_path / "two", "--model", "batch_norm=false", processes=2)
    assert parameters_agree(one, two)
    _, start = run(tmp_path / "start", "--model", "batch_norm=false", "--set", "steps=1")
    assert not parameters_agree(one, start, 0.01)  # they did move
    assert abs(result["loss"] - again["loss"]) < 1e-4


@pytest.mark.parametrize("rank, kept", [(0, False), (1, True)])
def test_only_the_process_that_writes_clears_up_what_a_killed_one_left(tmp_path, monkeypatch, rank, kept):
    stray = tmp_path / ".run.json.abc.tmp"  # or the first process is writing it this very moment
    stray.touch()
    monkeypatch.setattr(training, "share", lambda: (rank, 2))
    training._lock(tmp_path).release()
    assert stray.exists() == kept


@pytest.mark.long
def test_with_batch_norm_two_processes_are_one_that_accumulates_the_same_halves(tmp_path):
    _, one = run(tmp_path / "one", "--set", "accumulate=2")
    _, two = run(tmp_path / "two", processes=2)
    _, whole = run(tmp_path / "whole")
    assert parameters_agree(one, two)
    assert not parameters_agree(whole, two)  # batch statistics of a half are not those of the whole


@pytest.mark.long
def test_two_processes_go_on_from_a_checkpoint(tmp_path):
    _, whole = run(tmp_path / "whole", processes=2)
    _, part = run(tmp_path / "part", processes=2)
    newest = sorted((tmp_path / "part").glob("step-*.json"))
    for path in (newest[-1], tmp_path / "part" / "model.safetensors"):
        path.unlink()
    _, again = run(tmp_path / "part", processes=2)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert all(torch.equal(part[name], again[name]) for name in part)


@pytest.mark.long
def test_ctrl_c_in_one_process_stops_both_after_the_same_step_and_saves(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mmlda",
               "train", "--data", "digits", "--steps", "1000000", "--device", "cpu", "--out", tmp_path]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as torchrun:
        while not (tmp_path / "run.json").is_file():
            time.sleep(0.1)
            assert torchrun.poll() is None
        time.sleep(5)
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGINT)
        try:
            _, words = torchrun.communicate(timeout=60)
        finally:
            torchrun.terminate()  # its workers with it
    assert words.count("and saved") == 1
    assert 0 < checkpoints.newest(tmp_path)[1]["step"] < 1_000_000
