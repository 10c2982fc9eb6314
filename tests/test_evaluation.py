"""Accuracy, and attacks on many images: their summary, and that finished work is not repeated."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mmlda
from mmlda.attacks import BIM, PGD, CarliniWagner
from mmlda.data import ImageData
from mmlda.evaluation import accuracy, attack_images, predictions
from mmlda.models import build


@pytest.fixture(scope="module")
def digits():
    return mmlda.data.load("digits")


@pytest.fixture(scope="module")
def model(digits):
    model = build({"backbone": "conv_net", "width": 8, "head": "softmax"}, seed=0)
    mmlda.fit(model, digits[0], mmlda.Recipe(steps=150, optimizer="adam", lr=5e-3), show=False)
    return model


class Counting(nn.Module):
    """Counts the images that go through."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.images = inner, 0

    def forward(self, x):
        self.images += len(x)
        return self.inner(x)


def test_accuracy_by_class_on_a_biased_set(model, digits):
    biased = mmlda.data.biased(digits[1], [1.0] + [0.2] * 9, seed=0)
    result = accuracy(model, biased, batch_size=7)
    guess = torch.cat([model(biased.pixels([i])).argmax(1) for i in range(len(biased))])
    right = guess == biased.labels
    assert result.n == len(biased) and result.accuracy == pytest.approx(float(right.double().mean()))
    expected = [float(right[biased.labels == k].double().mean()) for k in range(10)]
    assert result.per_class == pytest.approx(expected)
    assert result.balanced == pytest.approx(sum(expected) / 10)
    assert result.error == pytest.approx(100 - 100 * result.accuracy)


def test_a_class_without_images_is_not_a_class_that_is_wrong(digits):
    data = ImageData(digits[1].images[:5], torch.tensor([0, 0, 2, 2, 2]), ("a", "b", "c"))
    result = accuracy(build({"backbone": "conv_net", "head": "softmax", "num_classes": 3}, seed=0), data)
    assert result.per_class[1] != result.per_class[1] and result.balanced == result.balanced  # NaN, and a number


def test_predictions_leave_the_mode_as_it_was(model, digits):
    model.train()
    first = predictions(model, digits[1])
    assert model.training and model.backbone.layers[1].training
    model.eval()
    assert torch.equal(first, predictions(model, digits[1], batch_size=11))


def test_the_summary_is_what_the_attack_did(model, digits, tmp_path):
    attack = PGD(eps=0.06, steps=10)
    summary = attack_images(model, digits[1], attack, out=tmp_path, n=90, chunk=40, show=False)
    x, y = digits[1].pixels(slice(90)), digits[1].labels[:90]
    whole = attack(model, x, y)
    assert 0.05 < summary["robust_accuracy"] < 0.95
    # a chunk's noise belongs to its images, so chunks and the whole agree but for rounding
    assert summary["robust_accuracy"] == pytest.approx(float((whole.prediction == y).double().mean()), abs=0.02)
    right = model(x).argmax(1) == y
    assert summary["clean_accuracy"] == pytest.approx(float(right.double().mean()))
    broken = right & whole.success
    assert summary["mean_l2"] == pytest.approx(float(whole.l2[broken].double().mean()), rel=0.02)
    assert summary["success_rate"] == pytest.approx(1 - summary["robust_accuracy"] / summary["clean_accuracy"])
    assert json.loads((tmp_path / "result.json").read_text()) == summary
    assert summary["settings"]["eps"] == 0.06 and summary["attack"] == "PGD" and summary["versions"]["torch"]
    assert (tmp_path / "examples.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_finished_chunks_are_not_attacked_again(model, digits, tmp_path):
    attack, counting = BIM(eps=0.1), Counting(model).eval()
    first = attack_images(counting, digits[1], attack, out=tmp_path, n=60, chunk=20, show=False)
    one_chunk = counting.images // 3
    (tmp_path / "images-000020.safetensors").unlink()
    counting.images = 0
    again = attack_images(counting, digits[1], attack, out=tmp_path, n=60, chunk=20, show=False)
    assert counting.images == one_chunk > 0
    assert {k: v for k, v in first.items() if k != "seconds"} == {k: v for k, v in again.items() if k != "seconds"}
    counting.images = 0
    attack_images(counting, digits[1], attack, out=tmp_path, n=60, chunk=20, show=False)
    assert counting.images == 0


def test_another_attack_network_or_data_in_the_same_folder_is_refused(model, digits, tmp_path):
    attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=20, show=False)
    with pytest.raises(ValueError, match="other settings"):
        attack_images(model, digits[1], BIM(eps=0.2), out=tmp_path, n=20, show=False)
    other = build(model.config, seed=1)
    with pytest.raises(ValueError, match="other network_sha256"):
        attack_images(other, digits[1], BIM(eps=0.1), out=tmp_path, n=20, show=False)
    with pytest.raises(ValueError, match="n = 361"):
        attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path / "x", n=361, show=False)


def test_a_failed_minimum_norm_attack_is_infinite_in_the_file_and_left_out_of_the_mean(digits, tmp_path):
    """A network that always says 3 and hears nothing can't be broken: infinite distances, no mean, valid JSON."""
    deaf = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.zeros_(deaf[1].weight)
    deaf[1].bias.data = 100.0 * nn.functional.one_hot(torch.tensor(3), 10).float()
    attack = CarliniWagner(search_steps=2, steps=20)
    summary = attack_images(deaf, digits[1], attack, out=tmp_path, n=30, show=False)
    saved = load_file(tmp_path / "images-000000.safetensors")
    threes = digits[1].labels[:30] == 3
    assert threes.any() and saved["l2"][threes].isinf().all()
    assert summary["success_rate"] == 0 and summary["mean_l2"] is None
    assert summary["robust_accuracy"] == pytest.approx(float(threes.double().mean()))
