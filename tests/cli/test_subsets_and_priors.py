"""Stratified samples, validation, priors and resuming on the command line."""

import json

import pytest
from command_line import mmlda
from dataset_files import save

from mmlda.data import load, long_tailed


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
