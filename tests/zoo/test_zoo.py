"""The networks that ship do what their files say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmlda
from mmlda import zoo

SHARED = Path(os.environ.get("MMLDA_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def test_what_ships():
    assert zoo.names() == ["cifar10-mmlda", "cifar10-mmlda-adam", "cifar10-mmlda-pgd", "cifar10-sr", "cifar10-sr-pgd",
                           "mnist-mmlda", "mnist-sr"]  # fmt: skip
    assert sum(path.stat().st_size for path in zoo.FOLDER.iterdir() if path.is_file()) < 12e6


@pytest.mark.parametrize("name", zoo.names())
def test_logits_on_a_seeded_input(name):
    about, model = zoo.about(name), mmlda.load(name)
    probe = about["probe"]
    x = torch.rand(probe["shape"], generator=torch.Generator().manual_seed(probe["seed"]))
    with torch.no_grad():
        z = model(x)
    assert not model.training
    torch.testing.assert_close(z, torch.tensor(probe["logits"]), rtol=1e-3, atol=1e-3)
    assert model.config == about["model"] and about["recipe"]["seed"] == 0


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"source must be the folder of a run, or one of cifar10.*, got 'cifar100-sr'"):
        mmlda.load("cifar100-sr")
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'x'"):
        zoo.about("x")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    if not (SHARED / "unpack.py").is_file():
        pytest.skip("the real data is not here")
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, SHARED / "unpack.py", folder], check=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", zoo.names())
def test_claimed_accuracy_on_the_real_test_set(name, real):
    """All 10,000 images: devices round differently, so up to 5 of them may differ."""
    about = zoo.about(name)
    test = mmlda.data.load(about["data"], real)[1]
    assert about["test_sha256"] == test.digest()
    assert abs(mmlda.accuracy(mmlda.load(name), test).accuracy - about["accuracy"]) <= 0.0005
