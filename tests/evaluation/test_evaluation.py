"""`evaluate`: the table of clean and robust accuracy; a killed evaluation resumes."""

import subprocess
import sys
import time

import pytest
import torch
from attack_models import classifier
from torch import nn

import mmlda
from mmlda.attacks import BIM
from mmlda.evaluation import accuracy
from mmlda.results import load_all, wilson


@pytest.fixture(scope="module")
def digits():
    return mmlda.data.load("digits")


@pytest.fixture(scope="module")
def model():
    return classifier()


def test_evaluate_says_how_good_and_how_robust(model, digits, tmp_path):
    test = digits[1]
    weak, strong = BIM(eps=0.03), BIM(eps=0.15)
    found = mmlda.evaluate(
        model, test, [weak, strong], n=120, chunk=50, out=tmp_path, temperature=test, name="SR", show=False
    )
    x, y = test.pixels(slice(120)), test.labels[:120]
    z = model(x).detach()
    assert found.clean.value == pytest.approx(100 * float((z.argmax(1) == y).double().mean()))
    assert found.clean.numbers["nll"] == pytest.approx(float(nn.functional.cross_entropy(z, y)), rel=1e-5)
    assert found.clean.series["per_class"] == pytest.approx(accuracy(model, test.subset(slice(120))).per_class)
    assert found.attacks[1].value < found.attacks[0].value < found.clean.value
    for result, attack in zip(found.attacks, (weak, strong)):
        held = int((attack(model, x, y).prediction == y).sum())
        assert result.value == pytest.approx(100 * held / 120, abs=1)
        assert result.interval == pytest.approx([100 * v for v in wilson(round(result.value * 1.2), 120)])
        assert result.cell == {"data": "digits", "model": "SR", "attack": "BIM", "eps": attack.eps}
    assert {r.name: r for r in load_all(tmp_path)}["clean"] == found.clean
    assert f"BIM 0.15                 {found.attacks[1].value:12.2f}" in str(found) and "at temperature" in str(found)
    again = mmlda.evaluate(model, test, [weak, strong], n=120, chunk=50, out=tmp_path, show=False)
    assert [r.value for r in again.results] == [r.value for r in found.results]
    with pytest.raises(ValueError, match="attacks must differ from each other"):
        mmlda.evaluate(model, test, [weak, weak], n=120, show=False)
    with pytest.raises(ValueError, match="n must be an integer >= 1, got 0"):
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


@pytest.mark.parametrize(
    "net, what",
    [
        (lambda x: torch.full((len(x), 10), float("nan")), "NaN for 20 of 20"),
        (lambda x: x.flatten(1)[:, :3], r"logits \[20, 10\], got \[20, 3\]"),
        (lambda x: x.sum((1, 2, 3)), "must return logits"),
    ],
)
def test_what_is_no_classifier_of_the_data_is_refused(digits, net, what):
    class Network(nn.Module):
        def forward(self, x):
            return net(x)

    with pytest.raises(ValueError, match=what):
        mmlda.evaluate(Network().eval(), digits[1], n=20, show=False)


def test_more_images_than_there_are_means_all_of_them(model, digits):
    few = digits[1].subset(slice(30))
    found = mmlda.evaluate(model, few, BIM(eps=0.1), n=31, show=False)
    assert found.clean.n == found.attacks[0].n == accuracy(model, few, n=1000).n == 30


def test_evaluate_takes_any_function_and_any_data(model, digits):
    x, y = digits[1].pixels(slice(40)), digits[1].labels[:40]
    plain = mmlda.evaluate(model, digits[1], BIM(eps=0.1), n=40, show=False)
    other = mmlda.evaluate(lambda x: model(x), (x, y), BIM(eps=0.1), temperature=digits[1], show=False)
    assert [r.value for r in other.results] == [r.value for r in plain.results]
    assert other.clean.network == {"name": "", "sha256": None} and other.clean.numbers["temperature"] > 0
