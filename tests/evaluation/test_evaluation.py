"""`evaluate`: the table of clean and robust accuracy; a killed evaluation resumes."""

import multiprocessing
import os
import signal

import pytest
import torch
from torch import nn

import mmlda
from mmlda.attacks import BIM
from mmlda.evaluation import accuracy
from mmlda.models import build
from mmlda.results import load_all, wilson


def test_evaluate_says_how_good_and_how_robust(model, digits, tmp_path):
    test = digits[1]
    weak, strong = BIM(eps=0.03), BIM(eps=0.15)
    found = mmlda.evaluate(
        model, test, [weak, strong], n=120, chunk=50, out=tmp_path, temperature=test, name="SR", show=False
    )
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
        assert result.head == "softmax" and result.attack_steps == attack.steps
    assert {r.name: r for r in load_all(tmp_path)}["clean"] == found.clean
    assert f"BIM 0.15                 {100 * found.attacks[1].value:12.2f}" in str(found)
    assert "at temperature" in str(found)
    again = mmlda.evaluate(model, test, [weak, strong], n=120, chunk=50, out=tmp_path, show=False)
    assert [r.value for r in again.results] == [r.value for r in found.results]
    with pytest.raises(ValueError, match="attacks must differ from each other"):
        mmlda.evaluate(model, test, [weak, weak], n=120, show=False)
    with pytest.raises(ValueError, match="n must be an integer >= 1, got 0"):
        mmlda.evaluate(model, test, n=0)


class Counting(nn.Module):
    """Counts the images that go through, in a file; kills its process, hard, when `limit` of them have."""

    def __init__(self, path, limit=10**9):
        super().__init__()
        self.inner, self.path, self.limit, self.seen = build(SMALL, seed=0).eval(), path, limit, 0

    def forward(self, x):
        self.seen += len(x)
        with open(self.path, "a") as file:
            file.write(f"{len(x)}\n")
        if self.seen >= self.limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


SMALL = {"backbone": "conv_net", "width": 4, "head": "softmax"}


def evaluate_counting(folder, limit=10**9):
    """Evaluate in chunks of 20 images: 10 of the clean images, 10 of the attacked ones."""
    attack, test = BIM(eps=0.1, steps=10), mmlda.data.load("digits")[1]
    return mmlda.evaluate(
        Counting(f"{folder}.count", limit).eval(), test, attack, n=200, chunk=20, out=folder, show=False
    )


def test_after_a_sigkill_finished_work_is_not_repeated(tmp_path):
    """Images through the network: a killed and resumed evaluation repeats at most the chunk it was killed in."""

    def images(folder):
        return sum(map(int, (tmp_path / f"{folder}.count").read_text().split()))

    whole = evaluate_counting(tmp_path / "whole")
    one_chunk = (images("whole") - 200) // 10  # of an attack: its steps, and the clean prediction
    for limit in (100, 100 + 3 * one_chunk + 60):  # among the clean images, then among the attacked ones
        process = multiprocessing.get_context("fork").Process(
            target=evaluate_counting, args=(tmp_path / "killed", limit)
        )
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    done = len(list((tmp_path / "killed").rglob("images-*.safetensors")))
    assert 10 < done < 20
    resumed = evaluate_counting(tmp_path / "killed")
    assert [r.value for r in resumed.results] == [r.value for r in whole.results]
    assert images("whole") < images("killed") <= images("whole") + 20 + one_chunk


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
    assert other.clean.network == other.clean.network_sha256 == "" and other.clean.numbers["temperature"] > 0


def test_the_plot_has_one_bar_per_result(model, digits, tmp_path):
    found = mmlda.evaluate(model, digits[1], BIM(eps=0.1), n=40, show=False)
    (axis,) = found.plot(tmp_path / "bars.png").axes
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([100 * r.number for r in found.results])
    assert [label.get_text() for label in axis.get_yticklabels()] == ["clean", "BIM 0.1"]
    assert (tmp_path / "bars.png").read_bytes()[:4] == b"\x89PNG"


def test_an_infinite_likelihood_is_printed(digits):
    """A class of prior 0 that does occur has probability 0."""
    head = mmlda.MaxMahalanobisHead(num_classes=10, dim=32, priors=[0.0] + [1 / 9] * 9)
    net = mmlda.Classifier(mmlda.models.conv_net(), head)
    found = mmlda.evaluate(net, digits[1], n=100, show=False)
    assert found.clean.numbers["nll"] is None and "negative log-likelihood inf" in str(found)
