"""The networks that ship do what their files say."""

import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import mmlda
from mmlda import zoo

SHARED = Path(os.environ.get("MMLDA_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def test_what_ships():
    assert zoo.names() == [
        "cifar10-mmlda",
        "cifar10-mmlda-adam",
        "cifar10-mmlda-robust",
        "cifar10-sr",
        "cifar10-sr-robust",
        "mnist-mmlda",
        "mnist-mmlda-robust",
        "mnist-sr",
        "mnist-sr-robust",
    ]
    assert sum(path.stat().st_size for path in zoo.FOLDER.iterdir() if path.is_file()) < 14e6


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
    with pytest.raises(
        ValueError, match=r"source must be a folder with a network, or one of cifar10.*, got 'cifar100-sr'"
    ):
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


def built(head="mmlda", **settings):
    torch.manual_seed(1)
    return mmlda.models.build({"backbone": "conv_net", "width": 4, "head": head, **settings}).eval()


@pytest.mark.parametrize(
    "model",
    [
        built(dim=8, C=50.0, precision=2.0, priors=[0.91] + [0.01] * 9),
        built("softmax"),
        built(dim=8, normalize=True, mean=0.1, std=0.3),
        mmlda.Classifier(
            mmlda.models.conv_net(width=4), mmlda.MaxMahalanobisHead(10, 4, means=torch.randn(10, 4))
        ).eval(),
    ],
    ids=["mmlda", "softmax", "scaled", "own means"],
)
def test_a_saved_network_is_loaded_as_it_was(model, tmp_path):
    path = mmlda.save(model, tmp_path / "new" / "network")
    assert path == tmp_path / "new" / "network" / "model.safetensors" and [*path.parent.iterdir()] == [path]
    again = mmlda.load(path.parent)
    x = torch.rand(5, 1, 8, 8)
    assert isinstance(again, mmlda.Classifier) and not again.training and again.config == model.config
    assert torch.equal(again(x), model(x))


def test_a_network_of_ones_own_is_saved_and_loaded_into_one_like_it(tmp_path):
    def make():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))

    model, other = make(), make()
    mmlda.save(model, tmp_path)
    assert mmlda.load(tmp_path, model=other) is other and torch.equal(other[1].weight, model[1].weight)
    with pytest.raises(ValueError, match=r"model must be a network to put the weights into, .*, got None"):
        mmlda.load(tmp_path)
    with pytest.raises(ValueError, match=r"weights must fit the network, got '.*': Missing key"):
        mmlda.load(tmp_path, model=torch.nn.Linear(4, 3))


def test_saving_is_whole_or_not_at_all(tmp_path, monkeypatch):
    first, second = built(dim=8), built(dim=9)
    mmlda.save(first, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(*paths):
        raise OSError(28, "disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(os, "replace", fail)
        mmlda.save(second, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before and len([*tmp_path.iterdir()]) == 1
    mmlda.save(second, tmp_path)
    assert mmlda.load(tmp_path).config["dim"] == 9
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="folder must be a folder without a training run, got"):
        mmlda.save(first, tmp_path)


def test_damaged_files_are_refused(tmp_path):
    path = mmlda.save(built(dim=8), tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="tensors must be as they were written"):
        mmlda.load(tmp_path)
    path.write_bytes(content[:100])
    with pytest.raises(ValueError, match=r"model.safetensors: "):
        mmlda.load(tmp_path)


def test_an_editor_is_told_what_load_returns():
    plain, given = typing.get_overloads(zoo.load)
    assert plain.__annotations__["return"] == "Classifier"
    assert given.__annotations__["model"] == given.__annotations__["return"] == "Network"


def test_mistakes_are_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"source must be a folder with a network, or one of .*, got 3"):
        mmlda.load(3)
    with pytest.raises(
        ValueError, match=r"folder must be a folder, to which model.safetensors is written, got '.*file'"
    ):
        mmlda.save(mmlda.load("mnist-sr"), tmp_path / "file")
    with pytest.raises(ValueError, match="model must be a network, such as a Classifier, got 'mnist-sr'"):
        mmlda.save("mnist-sr", tmp_path / "new")


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_one_sentence(device, tmp_path):
    mmlda.save(built(), tmp_path / "saved")
    run, digits = tmp_path / "run", mmlda.data.load("digits")[0]
    mmlda.fit(built(), digits, mmlda.Recipe(steps=1, optimizer="adam", lr=1e-3), out=run, show=False)
    for source in ("mnist-mmlda", tmp_path / "saved", run):
        with pytest.raises(ValueError, match=rf"device must be available, got '{device}' \("):
            mmlda.load(source, device=device)
    with pytest.raises(ValueError, match=rf"device must be available, got '{device}' \("):
        zoo.user_network("torch.nn:Identity", device=device)


def test_a_head_without_a_matrix_is_saved_and_loaded(tmp_path):
    config = {"backbone": "mlp", "inputs": 4, "hidden": [8], "head": "mmlda", "num_classes": 20_000, "dim": 256}
    model = mmlda.models.build(config, seed=0).eval()
    assert model.head.means is None
    path = mmlda.save(model, tmp_path)
    assert path.stat().st_size < 2_000_000
    x = torch.rand(3, 4)
    assert torch.equal(mmlda.load(tmp_path).predict(x), model.predict(x))
