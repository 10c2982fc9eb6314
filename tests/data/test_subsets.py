"""Stratified samples, which every `n` of the package means, and long-tailed sets."""

import pytest
import torch
from dataset_files import made_up
from torch.utils.data import DataLoader, TensorDataset

import mmlda
from mmlda.attacks import FGSM
from mmlda.data import ImageData, biased, digit_strings, folds, holdout, load, long_tailed, split, stratified
from mmlda.evaluation import attack_images


def sorted_by_class():
    test = load("digits")[1]
    return test.subset(test.labels.argsort(stable=True))


def test_a_sample_has_the_class_shares_of_the_data():
    made = made_up((40, 20, 10, 10))
    part = stratified(made, 16)
    assert part.counts.tolist() == [8, 4, 2, 2] and part.digest() == holdout(made, 16)[1].digest()
    assert stratified(made, 16).digest() == part.digest() != stratified(made, 16, seed=1).digest()
    assert stratified(made, None) is made and stratified(made, 80) is made
    with pytest.raises(ValueError, match="n must be an integer >= 1, got 0"):
        stratified(made, 0)


def test_n_is_a_stratified_sample_everywhere():
    data = sorted_by_class()
    model = mmlda.models.build({"backbone": "conv_net", "head": "softmax", "width": 4}, seed=0).eval()
    wanted = stratified(data, 30).digest()
    assert len(data.subset(slice(30)).labels.unique()) == 1
    found = mmlda.evaluate(model, data, [FGSM(eps=0.1)], n=30, show=False)
    assert [result.data["sha256"] for result in found.results] == [wanted, wanted]
    assert "30 images, 10 classes" in str(found)
    assert attack_images(model, data, FGSM(eps=0.1), n=30, show=False).data["sha256"] == wanted
    per_class = mmlda.accuracy(model, data, n=30).per_class
    assert not any(share != share for share in per_class)  # no class is empty
    verdict = mmlda.audit(model, data, n=30, steps=1, queries=1, show=False)
    assert verdict.about["data"]["sha256"] == wanted
    assert "30 of 360 images of digits, of 10 classes." in str(verdict)


@pytest.mark.parametrize("L, each, total", [(10, 5000, 12406), (100, 500, 10847)])
def test_long_tailed_profile(L, each, total):
    """The numbers of images that papers give for CIFAR-10 and CIFAR-100."""
    labels = torch.arange(L).repeat(each)
    made = ImageData(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), labels, tuple(map(str, range(L))))
    part = long_tailed(made, imbalance=100)
    assert len(part) == total and part.counts[0] == each and part.counts[-1] == each // 100
    assert (part.counts.diff() <= 0).all()
    assert len(long_tailed(made, imbalance=1)) == len(made)


def test_long_tailed_images_follow_the_seed():
    train = load("digits")[0]
    a, b, c = long_tailed(train, 10), long_tailed(train, 10), long_tailed(train, 10, seed=1)
    assert a.digest() == b.digest() != c.digest() and a.counts.equal(c.counts)
    with pytest.raises(ValueError, match=r"imbalance must be a number >= 1, got 0\.5"):
        long_tailed(train, 0.5)


def test_a_long_tail_leaves_every_class_an_image_and_small_classes_whole():
    counts = long_tailed(made_up((20, 40, 6)), imbalance=4).counts.tolist()
    assert counts == [20, 20, 6]  # of at most 40, 20 and 10
    for imbalance, message in (
        (1000, r"small enough to leave an image of each class \(the largest has 40\), got 1000"),
        ("100", "a finite number > 0, got '100'"),
        (float("inf"), "a finite number > 0, got inf"),
    ):
        with pytest.raises(ValueError, match=f"imbalance must be {message}"):
            long_tailed(made_up((20, 40, 6)), imbalance)


@pytest.mark.parametrize(
    "take",
    [
        lambda data: split(data)[1],
        lambda data: holdout(data, 20)[1],
        lambda data: stratified(data, 20),
        lambda data: stratified(data, 10_000),
        lambda data: folds(data, 3)[0][1],
        lambda data: biased(data, [0.5] * 10),
        lambda data: long_tailed(data, 10),
        lambda data: digit_strings(data, 2, n=100),
    ],
)
def test_subsets_of_pairs_datasets_and_loaders_are_those_of_the_images(take):
    test = load("digits")[1]
    pair = (test.pixels(), test.labels)
    expected = take(test)
    for source in (pair, TensorDataset(*pair), DataLoader(TensorDataset(*pair), batch_size=100)):
        found = take(source)
        assert found.pixels().equal(expected.pixels()) and found.labels.equal(expected.labels)
