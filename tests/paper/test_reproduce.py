"""Running parts of the paper: which, where, and after an interruption."""

import json
import queue
import signal
import subprocess
import sys
import threading

import pytest
import torch

import mmlda
from mmlda import paper
from mmlda.models import build
from mmlda.paper import Setup
from mmlda.paper.rows import MMLDA, SR
from mmlda.results import load_all
from mmlda.training import sweeps


def test_all_is_every_part_once_and_a_wrong_name_is_refused(tmp_path, monkeypatch):
    setup, parts = Setup(out=tmp_path, show=False), paper.PARTS
    same = {step: lambda setup, step=step: [step] for steps in parts.values() for step in steps}
    monkeypatch.setattr(paper, "PARTS", {name: tuple(map(same.get, steps)) for name, steps in parts.items()})
    assert paper.reproduce("table2", setup) == list(parts["table2"])
    ran = paper.reproduce("all", setup)
    assert len(ran) == len(set(ran)) == 14 and not {paper.suspects, paper.hardened} & set(ran)
    with pytest.raises(ValueError, match="table9"):
        paper.reproduce("table9", setup)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"data": "imagenet"}, "data must be one of .*, got 'imagenet'"),
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"tuning": 0}, "tuning must be an integer >= 1, got 0"),
        ({"seeds": ()}, "seeds must be different"),
        ({"seeds": (1, 1)}, "seeds must be different"),
        ({"shipped": True}, "shipped must be False"),
        ({"data": "mnist", "shipped": True, "steps": 9}, "shipped must be False"),
    ],
)
def test_a_setup_that_makes_no_sense_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Setup(**change)


def test_shipped_networks_are_used_as_they_are(tmp_path, monkeypatch):
    """With a dataset in MNIST's place, since the real one may not be here."""
    x = torch.randint(0, 256, (40, 1, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    fake = mmlda.data.ImageData(x, torch.arange(40) % 10, tuple(map(str, range(10))), "mnist")
    monkeypatch.setattr("mmlda.paper.setup._sets", lambda data, root: (fake, fake))
    setup = Setup(data="mnist", out=tmp_path, shipped=True, n=4, show=False)
    sr, ours = (r for r in paper.table1(setup) if r.kind == "table1")
    assert SR.has(sr) and MMLDA.has(ours)
    assert (sr.paper, sr.network, sr.train_steps) == (0.0038, "mnist-sr", 20_000)
    assert not (tmp_path / "networks").exists()
    assert build(mmlda.zoo.about("mnist-sr")["model"]).config  # what verification builds


SMALL_TABLE2 = """
import os, signal, sys
from pathlib import Path
from mmlda import paper
out, *until = sys.argv[1:]
def die(event, _):  # as it puts a file in place, where as many files as it was told are there
    if until and event == "os.rename" and len(list(Path(out).glob(until[0]))) >= int(until[1]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
setup = paper.Setup(out=out, steps=60, n=16, show=False)
paper.table2(setup, kinds=("FGSM", "BIM"), eps=(0.12,))
"""


@pytest.mark.long
def test_a_killed_reproduction_goes_on_job_by_job(tmp_path):
    """Killed while it trains, while it attacks and while it fine-tunes; the end is that of a run that was not."""

    def run(out, *until):
        return subprocess.run([sys.executable, "-c", SMALL_TABLE2, out, *until], stderr=subprocess.DEVNULL).returncode

    assert run(tmp_path / "whole") == 0
    out = tmp_path / "killed"
    for until in (
        ("networks/runs/*/run.json", "1"),
        ("table2-*.json", "1"),
        ("networks/*sat*/run.json", "1"),
        ("networks/*sat*/run.json", "2"),
    ):
        assert run(out, *until) == -signal.SIGKILL
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("networks/*.safetensors")}
    assert run(out) == 0
    assert stamps and all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())  # not trained again
    whole, killed = ({r.name: r for r in load_all(folder)} for folder in (tmp_path / "whole", out))
    assert whole.keys() == killed.keys() and len(whole) == 8
    for name, result in whole.items():
        assert (result.value, result.numbers) == (killed[name].value, killed[name].numbers), name


@pytest.mark.long
def test_two_processes_in_one_folder_share_the_work(tmp_path):
    command = [sys.executable, "-m", "mmlda", "reproduce", "table1", "--steps", "150", "--out", str(tmp_path), "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    answers = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], [err for _, err in answers]
    values = [{r["name"]: r["value"] for r in json.loads(out)} for out, _ in answers]
    assert values[0] == values[1]


def test_a_job_in_hand_is_waited_for(tmp_path, monkeypatch):
    """And taken as the other process leaves it."""
    said, order = queue.Queue(), []
    monkeypatch.setattr(sweeps, "print", lambda words, **_: said.put(words), raising=False)

    def other():
        lock = sweeps.in_hand(tmp_path, "job")
        order.append("taken")
        lock.release()

    held = sweeps.in_hand(tmp_path, "job")
    thread = threading.Thread(target=other)
    thread.start()
    assert said.get(timeout=60).startswith("job: waiting for another process")
    order.append("left")
    held.release()
    thread.join()
    assert order == ["left", "taken"]
