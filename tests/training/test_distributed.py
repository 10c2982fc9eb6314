"""One network over two real processes (torchrun, gloo) is the same network as one process makes."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import mmlda
from mmlda.training import checkpoints
from mmlda.training.run import train

CHANGES = {"batch_size": 64, "lr": 0.2}
OPTIONS = [
    "--data",
    "digits",
    "--head",
    "softmax",
    "--steps",
    "20",
    "--device",
    "cpu",
    "--set",
    "batch_size=64",
    "--set",
    "lr=0.2",
    "--model",
    "width=8",
    "--model",
    "batch_norm=false",
]


def torchrun(*command):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment)


def alone(steps=20, *, batch_norm=True, **changes):
    """The run and the weights of one process."""
    settings = {"width": 8, "batch_norm": batch_norm}
    run, _ = train(
        "digits", head="softmax", steps=steps, changes={**CHANGES, **changes}, model=settings, device="cpu", show=False
    )
    return run, run.model.state_dict()


def parameters_agree(a, b, tolerance=1e-5):
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    names = [name for name in a if not name.endswith(statistics)]
    return max(float((a[name] - b[name]).abs().max()) for name in names) <= tolerance


def test_without_batch_norm_two_processes_are_one(tmp_path):
    done = torchrun("-m", "mmlda", "train", *OPTIONS, "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result, two = json.loads(done.stdout.strip().splitlines()[-1]), load_file(tmp_path / "model.safetensors")
    run, one = alone(batch_norm=False)
    assert parameters_agree(one, two)
    assert not parameters_agree(alone(1, batch_norm=False)[1], two, 0.01)  # they did move
    assert abs(run.loss - result["loss"]) < 1e-4


SCRIPT = """
    import os, shutil, sys
    from pathlib import Path
    import torch.distributed as dist
    from torch.utils.data import BatchSampler, DataLoader, IterableDataset
    from torch.utils.data.distributed import DistributedSampler
    from training_cases import interrupt_at
    import mmlda
    from mmlda.training.run import train

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([images[n] for n in range(64)])

    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    options = dict(head="softmax", changes=dict(batch_size=64, lr=0.2), device="cpu", show=False)
    network = dict(width=8)
    train("digits", steps=20, out=out / "whole", model=network, **options)

    if rank == 0:  # as it was before the last checkpoint
        shutil.copytree(out / "whole", out / "part")
        sorted((out / "part").glob("step-*.json"))[-1].unlink()
        (out / "part" / "model.safetensors").unlink()
    dist.barrier()
    train("digits", steps=20, out=out / "part", model=network, **options)

    images, recipe = mmlda.data.load("digits")[0].subset(slice(256)), mmlda.Recipe(steps=6)
    model = mmlda.models.build(dict(backbone="conv_net", head="softmax", width=8, batch_norm=False), seed=0)
    shares = DataLoader(images, batch_sampler=BatchSampler(DistributedSampler(images, shuffle=False), 32, False))
    mmlda.fit(model, shares, recipe, out=out / "loader", show=False)
    for name, loader in (("refused", DataLoader(images, batch_size=32)), ("same", DataLoader(Stream(), batch_size=32))):
        try:
            mmlda.fit(model, loader, recipe, show=False)
        except ValueError as error:
            (out / f"{name}-{rank}").write_text(str(error))

    start = mmlda.models.build(dict(backbone="conv_net", channels=1, head="softmax", width=8), seed=0)
    if rank == 1:
        interrupt_at(start, 7)
    try:
        train("digits", steps=1000, out=out / "stopped", start=start, **options)
    except KeyboardInterrupt as error:
        (out / f"stopped-{rank}").write_text(str(error))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort the end of the interpreter
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folders that two processes leave: a whole run, a resumed one, and one with Ctrl-C in the second process."""
    out = tmp_path_factory.mktemp("together")
    script = out / "script.py"
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    script.write_text(f"import sys\nsys.path.append({tests!r})\n" + textwrap.dedent(SCRIPT))
    done = torchrun(str(script), str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stderr


@pytest.mark.long
def test_with_batch_norm_two_processes_are_one_that_accumulates_the_same_halves(together):
    two = load_file(together[0] / "whole" / "model.safetensors")
    assert parameters_agree(alone(accumulate=2)[1], two)
    assert not parameters_agree(alone()[1], two)  # batch statistics of a half are not those of the whole


@pytest.mark.long
def test_two_processes_resume_from_a_checkpoint(together):
    whole, again = (load_file(together[0] / name / "model.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.long
def test_a_distributed_sampler_gives_each_process_its_share_of_the_batch(together):
    two = load_file(together[0] / "loader" / "model.safetensors")
    images, recipe = mmlda.data.load("digits")[0].subset(slice(256)), mmlda.Recipe(steps=6)
    model = mmlda.models.build({"backbone": "conv_net", "head": "softmax", "width": 8, "batch_norm": False}, seed=0)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mmlda.fit(model, DataLoader(images, batch_size=64), recipe, show=False)
    assert parameters_agree(model.state_dict(), two)
    assert not parameters_agree(start, two, 0.01)


@pytest.mark.long
def test_a_loader_that_gives_every_process_the_same_images_is_refused(together):
    assert all("DistributedSampler" in (together[0] / f"refused-{rank}").read_text() for rank in range(2))


@pytest.mark.long
def test_a_stream_that_is_the_same_in_every_process_is_refused(together):
    assert all("yield other images in each process" in (together[0] / f"same-{rank}").read_text() for rank in range(2))


@pytest.mark.long
def test_ctrl_c_in_one_process_stops_both_after_the_same_step_and_saves(together):
    out, errors = together
    first, second = ((out / f"stopped-{rank}").read_text() for rank in range(2))
    assert first == second == "stopped at step 10" and errors.count("and saved") == 1  # they agree at every log line
    assert checkpoints.newest(out / "stopped")[1]["step"] == 10
