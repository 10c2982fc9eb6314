"""Accuracy, and attacks on many images: their summary, and that finished work is not repeated."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn

import mmlda
from mmlda.attacks import BIM, ILCM, PGD, CarliniWagner
from mmlda.calibration import calibration_error, fit_temperature
from mmlda.data import ImageData
from mmlda.evaluation import accuracy, attack_images, describe_attack, predictions
from mmlda.models import build
from mmlda.results import Result, load_all, wilson


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
    numbers = summary.numbers
    assert 5 < summary.value < 95
    # a chunk's noise belongs to its images, so chunks and the whole agree but for rounding
    assert summary.value == pytest.approx(100 * float((whole.prediction == y).double().mean()), abs=2)
    right = model(x).argmax(1) == y
    assert numbers["clean_accuracy"] == pytest.approx(float(right.double().mean()))
    broken = right & whole.success
    assert numbers["mean_l2"] == pytest.approx(float(whole.l2[broken].double().mean()), rel=0.02)
    assert numbers["success_rate"] == pytest.approx(1 - summary.value / 100 / numbers["clean_accuracy"])
    assert summary.interval[0] < summary.value < summary.interval[1]
    assert Result.load(tmp_path / "result.json") == summary
    assert summary.attack["settings"]["eps"] == 0.06 and summary.attack["name"] == "PGD" and summary.versions["torch"]
    kept = load(summary.read_outcomes(tmp_path))
    assert 100 * float(((kept["clean"] == y) & ~kept["success"]).double().mean()) == pytest.approx(summary.value)
    torch.testing.assert_close(kept["l2"].float(), whole.l2, rtol=0.02, atol=0.01)
    assert (tmp_path / "examples.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_image_that_missed_its_target_is_not_counted_as_held(model, digits, tmp_path):
    """ILCM pushes towards the least likely class; on the way most images end in another wrong one."""
    found = attack_images(model, digits[1], ILCM(eps=0.2), out=tmp_path, n=80, show=False)
    x, y = digits[1].pixels(slice(80)), digits[1].labels[:80]
    result = ILCM(eps=0.2)(model, x, y)
    held = (result.prediction == y) & (model(x).argmax(1) == y)
    missed = (result.prediction != y) & ~result.success
    assert missed.any() and found.value == pytest.approx(100 * float(held.double().mean()))


def test_finished_chunks_are_not_attacked_again(model, digits, tmp_path):
    attack, counting = BIM(eps=0.1), Counting(model).eval()
    first = attack_images(counting, digits[1], attack, out=tmp_path, n=60, chunk=20, show=False)
    one_chunk = counting.images // 3
    (tmp_path / "images-000020.safetensors").unlink()
    counting.images = 0
    again = attack_images(counting, digits[1], attack, out=tmp_path, n=60, chunk=20, show=False)
    assert counting.images == one_chunk > 0
    assert replace(first, seconds=0) == replace(again, seconds=0)
    counting.images = 0
    attack_images(counting, digits[1], attack, out=tmp_path, n=60, chunk=20, show=False)
    assert counting.images == 0


def test_another_attack_network_or_data_in_the_same_folder_is_refused(model, digits, tmp_path):
    attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=20, show=False)
    with pytest.raises(ValueError, match="other attack"):
        attack_images(model, digits[1], BIM(eps=0.2), out=tmp_path, n=20, show=False)
    other = build(model.config, seed=1)
    with pytest.raises(ValueError, match="other network"):
        attack_images(other, digits[1], BIM(eps=0.1), out=tmp_path, n=20, show=False)
    with pytest.raises(ValueError, match="n = 361"):
        attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path / "x", n=361, show=False)


def test_a_failed_minimum_norm_attack_is_infinite_in_the_file_and_left_out_of_the_mean(digits, tmp_path):
    """A network that always says 3 and hears nothing can't be broken: infinite distances, no mean, valid JSON."""
    deaf = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    nn.init.zeros_(deaf[1].weight)
    deaf[1].bias.data = 100.0 * nn.functional.one_hot(torch.tensor(3), 10).float()
    attack = CarliniWagner(search_steps=2, steps=20)
    summary = attack_images(deaf, digits[1], attack, out=tmp_path, n=30, chunk=30, show=False)
    saved = load_file(tmp_path / "images-000000.safetensors")
    threes = digits[1].labels[:30] == 3
    assert threes.any() and saved["l2"][threes].isinf().all()
    assert summary.numbers["success_rate"] == 0 and summary.numbers["mean_l2"] is None
    assert summary.value == pytest.approx(100 * float(threes.double().mean()))


def test_evaluate_says_how_good_and_how_robust(model, digits, tmp_path):
    test = digits[1]
    weak, strong = BIM(eps=0.03), BIM(eps=0.15)
    found = mmlda.evaluate(model, test, [weak, strong], n=120, chunk=50, out=tmp_path, temperature=test, name="SR",
                           show=False)  # fmt: skip
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


def test_a_loss_is_known_by_what_it_does_not_by_its_name(model, digits, tmp_path):
    def made(sign):
        def loss(net, x, y):
            return sign * nn.functional.cross_entropy(net(x), y, reduction="none")

        return loss

    up, down = (BIM(eps=0.2, loss=made(sign)) for sign in (1, -1))
    values = [mmlda.evaluate(model, digits[1], a, n=40, out=tmp_path, show=False).attacks[0].value for a in (up, down)]
    assert values[0] < values[1]
    same = mmlda.evaluate(model, digits[1], BIM(eps=0.2, loss=made(1)), n=40, out=tmp_path, show=False).attacks[0]
    assert same.value == values[0] and same.attack["settings"]["loss"].split("#")[0].endswith("made.<locals>.loss")
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("bim") and path.is_dir()]) == 2

    class Odd:
        def __call__(self, net, x, y):
            return net(x).sum(1)

    names = {describe_attack(BIM(eps=0.2, loss=Odd()))["settings"]["loss"] for _ in range(2)}
    assert len(names) == 2  # what can't be told apart is never taken for the same


def test_a_chunk_cut_short_is_done_again(model, digits, tmp_path):
    first = attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=40, chunk=20, show=False)
    path = tmp_path / "images-000020.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="done again"):
        again = attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=40, chunk=20, show=False)
    assert again.value == first.value


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
