"""Stratified samples, validation, priors and resuming on the command line."""

import json

import pytest
import torch
from command_line import mmlda
from dataset_files import save

import mmlda as package
from mmlda.audit import replay
from mmlda.data import load, long_tailed
from mmlda.results import Result


@pytest.fixture(scope="module")
def unbalanced(tmp_path_factory):
    """A network saved with priors, whose dataset is not known."""
    config = {"backbone": "conv_net", "width": 4, "head": "softmax", "priors": [0.55, *[0.05] * 9]}
    folder = tmp_path_factory.mktemp("unbalanced")
    package.zoo.save(package.models.build(config, seed=0).eval(), folder)
    return folder


@pytest.fixture(scope="module")
def tail(tmp_path_factory):
    """The digits as a folder of images by class, long-tailed in training."""
    folder = tmp_path_factory.mktemp("tail")
    train, test = load("digits")
    for part, data in (("train", long_tailed(train, 20)), ("test", test)):
        for n, (image, label) in enumerate(zip(data.images[:, 0].numpy(), data.labels.tolist())):
            save(folder / part / str(label) / f"{n:04d}.png", image)
    return folder


def test_train_on_a_sample_with_validation_resumes_from_the_folder_alone(tmp_path):
    words = "train --data digits --n 300 --validation 60 --keep-best --patience 50 --steps 20 --model width=4 --json"
    first = json.loads(mmlda(*words.split(), "--out", tmp_path).stdout)
    assert first["steps"] == 20 and first["validation"]["images"] == 60
    again = mmlda("train", "--out", tmp_path)
    assert f"test error {100 - 100 * first['accuracy']:.2f}% on 360 images" in again.stdout
    assert f"best validation accuracy {100 * first['validation']['accuracy']:.2f}%" in again.stdout
    longer = json.loads(mmlda("train", "--out", tmp_path, "--steps", 30, "--json").stdout)
    assert longer["steps"] == 30
    shorter = mmlda("train", "--out", tmp_path, "--steps", 10, code=2)
    assert "steps must be at least 30" in shorter.stderr


def test_priors_of_training_and_of_prediction(tail, tmp_path):
    words = "--head softmax --priors empirical --recipe digits-mmlda --steps 60 --model depth=8 --model width=4"
    mmlda("train", "--data", tail, *words.split(), "--out", tmp_path)
    config = json.loads((tmp_path / "run.json").read_text())["model"]
    assert config["priors"][0] > 10 * config["priors"][9]
    results = [
        json.loads(mmlda("evaluate", tmp_path, "--data", tail, *more, "--json").stdout)[0]
        for more in ((), ("--priors", "uniform"))
    ]
    assert results[0]["value"] != results[1]["value"]
    wrong = mmlda("evaluate", tmp_path, "--data", tail, "--priors", "flat", code=2)
    assert "priors must be one of uniform, empirical, got 'flat'" in wrong.stderr
    sample = mmlda("evaluate", tmp_path, "--data", tail, "--n", 30).stdout  # the folder is sorted by class
    assert "30 images, 10 classes" in sample
    attack = mmlda(
        "attack", tmp_path, "--data", tail, "--n", 30, "--attack", "fgsm:0.1", "--out", tmp_path / "a"
    ).stdout
    assert ", 10 classes" in attack


def test_the_report_separates_priors(unbalanced, tmp_path):
    for priors in ("uniform", "empirical"):
        mmlda("evaluate", unbalanced, "--data", "digits", "--priors", priors, "--out", tmp_path / priors)
    again = mmlda("evaluate", unbalanced, "--data", "digits", "--out", tmp_path / "uniform", code=2)
    assert "(other priors)" in again.stderr and "network" not in again.stderr.partition("(")[2]
    mmlda("report", tmp_path, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "2 runs" not in page and ", uniform priors" in page and ", empirical priors" in page


@pytest.mark.parametrize("priors", ["uniform", "empirical"])
def test_a_network_is_exported_with_other_priors(unbalanced, priors, tmp_path):
    file = tmp_path / "model.pt2"
    mmlda("export", unbalanced, file, "--data", "digits", "--priors", priors)
    test = load("digits")[1]
    network = package.load(unbalanced).with_priors(*(("empirical", test.labels) if priors == "empirical" else (None,)))
    x = test.pixels(slice(5))
    logits, _ = torch.export.load(file).module()(x)
    torch.testing.assert_close(logits, network(x).detach(), rtol=1e-4, atol=1e-4)


def test_priors_of_an_export_need_data_only_where_they_are_counted(run, unbalanced, tmp_path):
    file = tmp_path / "model.pt2"
    for priors in ("uniform", "empirical"):
        mmlda("export", run[0], file, "--priors", priors)  # compared on its own dataset
    error = mmlda("export", unbalanced, file, "--priors", "empirical", code=2).stderr
    assert error == "mmlda: data must be given, as the network's dataset is not known, got none\n"
    empty = ("--root", tmp_path)  # without MNIST
    mmlda("export", "mnist-sr", file, "--priors", "uniform", *empty)
    error = mmlda("export", "mnist-sr", file, "--priors", "empirical", *empty, code=1).stderr
    assert error.startswith(f"mmlda: mnist is not below {tmp_path}")


def test_an_audit_with_other_priors_says_so(unbalanced, tmp_path):
    words = ("audit", unbalanced, "--data", "digits", "--eps", 0.1, "--n", 15)
    text = mmlda(*words, "--priors", "uniform", "--out", tmp_path / "uniform").stdout
    assert text.startswith(f"{unbalanced} on 15 of 360 test images of digits, 10 classes, uniform priors\n")
    mmlda(*words, "--out", tmp_path / "own")
    uniform, own = (Result.load(tmp_path / name / "audit.json") for name in ("uniform", "own"))
    assert (uniform.priors, own.priors) == ("uniform", None)
    assert uniform.network_sha256 != own.network_sha256
    assert replay(uniform).to_result().priors == "uniform"
