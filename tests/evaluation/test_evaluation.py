"""Accuracy by class, what attacks leave of it, calibration; and that a killed evaluation goes on."""

import subprocess
import sys
import time

import pytest
import torch
from attack_models import classifier
from torch import nn

import mmlda
from mmlda.attacks import BIM
from mmlda.data import ImageData
from mmlda.evaluation import accuracy
from mmlda.evaluation.calibration import calibration_error, fit_temperature
from mmlda.models import build
from mmlda.results import load_all, wilson


@pytest.fixture(scope="module")
def digits():
    return mmlda.data.load("digits")


@pytest.fixture(scope="module")
def model():
    return classifier()


def test_accuracy_by_class_on_a_biased_set(model, digits):
    biased = mmlda.data.biased(digits[1], [1.0] + [0.2] * 9, seed=0)
    result = accuracy(model, biased, batch_size=7)
    guess = torch.cat([model(biased.pixels([i])).argmax(1) for i in range(len(biased))])
    right = guess == biased.labels
    assert result.n == len(biased) and result.accuracy == pytest.approx(float(right.double().mean()))
    expected = [float(right[biased.labels == k].double().mean()) for k in range(10)]
    assert result.per_class == pytest.approx(expected)
    assert result.balanced == pytest.approx(sum(expected) / 10)
    assert result.error == pytest.approx(1 - result.accuracy)


def test_a_class_without_images_is_not_a_class_that_is_wrong(digits):
    data = ImageData(digits[1].images[:5], torch.tensor([0, 0, 2, 2, 2]), ("a", "b", "c"))
    result = accuracy(build({"backbone": "conv_net", "head": "softmax", "num_classes": 3}, seed=0), data)
    assert result.per_class[1] != result.per_class[1] and result.balanced == result.balanced  # NaN, and a number


def test_evaluate_says_how_good_and_how_robust(model, digits, tmp_path):
    test = digits[1]
    weak, strong = BIM(eps=0.03), BIM(eps=0.15)
    found = mmlda.evaluate(model, test, [weak, strong], n=120, chunk=50, out=tmp_path, temperature=test, name="SR",
                           show=False)  # fmt: skip
    x, y = test.pixels(slice(120)), test.labels[:120]
    z = model(x).detach()
    assert found.clean.value == pytest.approx(float((z.argmax(1) == y).double().mean()))
    assert found.clean.numbers["nll"] == pytest.approx(float(nn.functional.cross_entropy(z, y)), rel=1e-5)
    assert found.clean.series["per_class"] == pytest.approx(accuracy(model, test.subset(slice(120))).per_class)
    assert found.attacks[1].value < found.attacks[0].value < found.clean.value
    for result, attack in zip(found.attacks, (weak, strong)):
        held = int((attack(model, x, y).prediction == y).sum())
        assert result.value == pytest.approx(held / 120, abs=0.01)
        assert result.interval == pytest.approx(wilson(round(result.value * 120), 120))
        assert (result.dataset, result.network, result.attack, result.eps) == ("digits", "SR", "BIM", attack.eps)
    assert {r.name: r for r in load_all(tmp_path)}["clean"] == found.clean
    assert f"BIM 0.15                 {100 * found.attacks[1].value:12.2f}" in str(found)
    assert "at temperature" in str(found)
    again = mmlda.evaluate(model, test, [weak, strong], n=120, chunk=50, out=tmp_path, show=False)
    assert [r.value for r in again.results] == [r.value for r in found.results]
    with pytest.raises(ValueError, match="twice"):
        mmlda.evaluate(model, test, [weak, weak], n=120, show=False)
    with pytest.raises(ValueError, match="n = 0"):
        mmlda.evaluate(model, test, n=0)


KILLED = """
import os, sys
import torch
import mmlda
from mmlda.models import build

class Counting(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        with open(sys.argv[2], "a") as file:  # survives the kill
            file.write(f"{len(x)}\\n")
        return self.inner(x)

model = Counting(build({"backbone": "conv_net", "width": 4, "head": "softmax"}, seed=0).eval()).eval()
test = mmlda.data.load("digits")[1]
bim = mmlda.attacks.BIM(eps=0.1, steps=200)
found = mmlda.evaluate(model, test, [bim], n=200, chunk=20, out=sys.argv[1], show=False)
print(found.attacks[0].value, found.clean.value)
"""


def test_after_a_sigkill_finished_work_is_not_repeated(tmp_path):
    """The images that went through, counted in a file: a killed and resumed evaluation costs at most a chunk more."""

    def start(out):
        command = [sys.executable, "-c", KILLED, str(tmp_path / out), str(tmp_path / f"{out}.count")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def images(out):
        return sum(map(int, (tmp_path / f"{out}.count").read_text().split()))

    whole, errors = start("whole").communicate(timeout=120)
    assert whole, errors
    kills = 0
    for chunks in (11, 13, 15):  # ten are of the clean images
        with start("killed") as process:
            while process.poll() is None and len(list((tmp_path / "killed").rglob("images-*.safetensors"))) < chunks:
                time.sleep(0.002)
            kills += process.poll() is None
            process.kill()
    assert kills == 3
    resumed, errors = start("killed").communicate(timeout=120)
    assert resumed == whole, errors
    one_chunk = images("whole") / 10
    assert images("whole") <= images("killed") <= images("whole") + 3 * one_chunk


def test_calibration_error_is_a_plain_loop_over_bins():
    generator = torch.Generator().manual_seed(0)
    p = (torch.randn(500, 4, generator=generator, dtype=torch.float64) * 2).softmax(1)
    labels = torch.randint(4, (500,), generator=generator)
    confidence, guess = p.max(1)
    expected = 0.0
    for i in range(10):
        inside = (confidence > i / 10) & (confidence <= (i + 1) / 10)
        if inside.any():
            gap = (guess == labels)[inside].double().mean() - confidence[inside].mean()
            expected += float(gap.abs() * inside.double().mean())
    assert calibration_error(p, labels, bins=10) == pytest.approx(expected, abs=1e-12)


def test_no_temperature_where_there_is_none():
    z, y = 3 * torch.eye(4).repeat(5, 1), torch.arange(4).repeat(5)
    with pytest.raises(ValueError, match="the images are right"):
        fit_temperature(z, y)
    with pytest.raises(ValueError, match="no better than chance"):
        fit_temperature(-z, y)


@pytest.mark.parametrize(
    "net, what",
    [(lambda x: torch.full((len(x), 10), float("nan")), "NaN for 20 of 20"),
     (lambda x: x.flatten(1)[:, :3], r"expected logits \[20, 10\]"), (lambda x: x.sum((1, 2, 3)), "expected logits")],
)  # fmt: skip
def test_what_is_no_classifier_of_the_data_is_refused(digits, net, what):
    class Network(nn.Module):
        def forward(self, x):
            return net(x)

    with pytest.raises(ValueError, match=what):
        mmlda.evaluate(Network().eval(), digits[1], n=20, show=False)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 40.0])
def test_the_temperature_is_found(temperature):
    """Labels drawn from softmax(z / T) are best explained by T, and no other temperature is better."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(20_000, 5, generator=generator, dtype=torch.float64) * 2
    labels = torch.multinomial(z.softmax(1), 1, generator=generator).squeeze(1)
    found = fit_temperature(z * temperature, labels)
    assert found == pytest.approx(temperature, rel=0.03)
    tried = (found, 0.98 * found, 1.02 * found)
    loss = [float(nn.functional.cross_entropy(z * temperature / t, labels)) for t in tried]
    assert loss[0] < min(loss[1:])
