"""Which network a command measures, and on which images."""

import json
import shutil

import pytest
import torch
from command_line import mmlda
from dataset_files import images_and_labels, write_idx
from safetensors.torch import load_file, save_file

import mmlda as package


@pytest.fixture
def root(tmp_path):
    """A folder with a stand-in for MNIST."""
    write_idx(tmp_path / "root" / "mnist", images_and_labels(40, (28, 28)), images_and_labels(30, (28, 28)))
    return tmp_path / "root"


def test_the_dataset_is_that_of_a_network_that_ships(root, tmp_path):
    words = ("evaluate", "mnist-mmlda", "--root", root, "--n", 20)
    assert mmlda(*words).stdout.startswith("mnist-mmlda on 20 of 30 test images of mnist, 10 classes\n")
    assert json.loads(mmlda(*words, "--json").stdout)[0]["dataset"] == "mnist"
    attacked = ("attack", "mnist-mmlda", "--attack", "fgsm:0.1", "--root", root, "--n", 2, "--out", tmp_path / "a")
    assert json.loads(mmlda(*attacked, "--json").stdout)["dataset"] == "mnist"


def test_the_dataset_is_that_of_a_run(run, tmp_path):
    folder, clean = run
    text = mmlda("evaluate", folder).stdout
    assert text.startswith(f"{folder} on 360 test images of digits, 10 classes\n")
    assert f"{100 * clean['accuracy']:.2f}" in text
    about = json.loads((folder / "run.json").read_text())
    del about["sha256"]
    shutil.copytree(folder, tmp_path / "run")
    network = tmp_path / "run" / "model.safetensors"
    save_file(load_file(network), network)  # as older versions wrote it, without the digest of its run
    for data, message in (
        ({"name": "pets"}, "data must be given, as the network was trained on 'pets', got none"),
        ({"name": ""}, "data must be given, as the network's dataset is not known, got none"),
        ({"sha256": "0"}, "data must be given, as the network was trained on other images called 'digits', got none"),
        ({"images": 10**6}, "data must be given, as the network was trained on other images called 'digits'"),
    ):
        (tmp_path / "run" / "run.json").write_text(json.dumps({**about, "data": {**about["data"], **data}}))
        assert message in mmlda("evaluate", tmp_path / "run", code=2).stderr
        assert mmlda("evaluate", tmp_path / "run", "--data", "digits", "--n", 10).stdout


@pytest.mark.parametrize("words", ["evaluate", "audit --eps 0.1", "attack --attack fgsm:0.1 --out OUT"])
def test_another_dataset_is_named(words, tmp_path):
    name, *more = [tmp_path if word == "OUT" else word for word in words.split()]
    text = mmlda(name, "mnist-sr", *more, "--data", "digits", "--n", 15).stdout
    heading = "mnist-sr on 15 of 360 test images of digits, 10 classes (the network was trained on mnist)"
    assert text.startswith(f"{heading}\n")


def test_a_missing_dataset_is_asked_for(tmp_path):
    error = mmlda("evaluate", "mnist-mmlda", "--root", tmp_path, code=1).stderr
    assert error == f"mmlda: mnist is not below {tmp_path}: get it with `mmlda data fetch mnist`\n"


OWN = """
from torch import nn

def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def number():
    return 3

def sized(width):
    return nn.Linear(width, 10)

constant = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a module of the user's, and weights that make the network answer 3."""
    (tmp_path / "some_networks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    weights = {"1.weight": torch.zeros(10, 64), "1.bias": 5.0 * (torch.arange(10) == 3)}
    save_file(weights, tmp_path / "threes.safetensors")
    return tmp_path


def test_a_network_of_the_users_own(own):
    words = ("--model", "some_networks:network", "--weights", "threes.safetensors", "--data", "digits")
    result = json.loads(mmlda("evaluate", *words, "--json").stdout)[0]
    labels = package.data.load("digits")[1].labels
    assert result["value"] == pytest.approx((labels == 3).double().mean().item())
    assert result["network"] == "some_networks:network"
    assert mmlda("audit", *words, "--eps", "8/255", "--n", 20).stdout.startswith("some_networks:network on 20 of 360")
    attacked = mmlda("attack", *words, "--attack", "fgsm:8/255", "--n", 20, "--out", "attacked").stdout
    assert "\nFGSM 8/255: accuracy " in attacked


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "MODEL must be given, or else --model package.module:function, got None"),
        ("my:net", "MODEL must be a name or a folder (for a function of your own, use --model), got 'my:net'"),
        ("mnist-sr --model some_networks:network", "MODEL must be given, or else --model"),
        ("mnist-sr --weights threes.safetensors", "weights must be given with --model only, got 'threes.safetensors'"),
        ("--model some_networks:network", "data must be given, as the network's dataset is not known, got none"),
        ("--model some_networks", "model must be package.module:function, got 'some_networks'"),
        ("--model absent.networks:f", "model must name a module that can be imported, got 'absent.networks:f' (No"),
        ("--model some_networks:absent", "model must be a function of the module some_networks, got 'some_networks:ab"),
        ("--model some_networks:constant", "model must be a function of the module some_networks, got 'some_networks"),
        (
            "--model some_networks:number",
            "a function that returns a torch.nn.Module, got 'some_networks:number', which",
        ),
        ("--model some_networks:network --weights absent", "weights must be a safetensors file, got 'absent'"),
        ("--model some_networks:network --weights some_networks.py", "weights must be a safetensors file, got 'some_"),
        ("--model some_networks:network --weights .", "weights must be a safetensors file, got '.'"),
        ("--model some_networks:sized", "model must be a function without arguments, got 'some_networks:sized' (miss"),
        ("--model some_networks:network --weights other.safetensors", "weights must fit the network, got 'other.saf"),
    ],
)
def test_mistakes_with_networks_are_one_line(own, words, message):
    save_file({"2.weight": torch.zeros(3)}, "other.safetensors")
    error = mmlda("evaluate", *words.split(), code=2).stderr
    assert message in error and error.startswith("mmlda: ") and error.count("\n") == 1


def test_a_saved_network_is_measured(tmp_path):
    torch.manual_seed(0)
    model = package.Classifier(package.models.conv_net(width=4), package.MaxMahalanobisHead(10, 8))
    package.save(model, tmp_path / "saved")
    result = json.loads(mmlda("evaluate", tmp_path / "saved", "--data", "digits", "--json").stdout)[0]
    expected = package.accuracy(model, package.data.load("digits")[1]).accuracy
    assert result["value"] == pytest.approx(expected)
    assert "data must be given" in mmlda("evaluate", tmp_path / "saved", code=2).stderr


def test_perturbations_may_be_fractions(run):
    text = mmlda("evaluate", run[0], "--attack", "bim:8/255,steps=2", "--attack", "fgsm:0.2", "--n", 10).stdout
    assert "\nBIM 8/255 " in text and "\nFGSM 0.2 " in text
    text = mmlda("audit", run[0], "--eps", "8/255", "--n", 10).stdout
    assert " at eps = 8/255: " in text and " 8/255 " in text.split("95% interval")[1] and "0.0313" not in text
    for eps in ("abc", "8/0", "[1]", "true"):
        error = mmlda("audit", run[0], "--eps", eps, code=2).stderr
        assert error == f"mmlda: eps must be a number such as 0.03 or 8/255, got {eps!r}\n"
