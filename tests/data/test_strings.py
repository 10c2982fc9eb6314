"""Strings of digits: images side by side, by index."""

import numpy as np
import pytest
import torch

import mmlda
from mmlda.data import ImageData, digit_strings, holdout, load


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_every_string_is_its_digits_side_by_side(digits):
    train = digits[0]
    strings = digit_strings(train, length=3, n=2500, seed=1)
    assert len(strings) == 2500 and strings.shape == (1, 8, 24) and strings.num_classes == 1000
    x = strings.pixels()
    for i in (0, 7, 1999, 2499):
        rows = strings.parts[i]
        assert torch.equal(x[i], torch.cat([train.pixels(rows)[j] for j in range(3)], 2))
        name = "".join(train.classes[int(train.labels[row])] for row in rows)
        assert strings.classes[int(strings.labels[i])] == name == f"{i % 1000:03d}"
        assert torch.equal(strings[i][0], x[i]) and torch.equal(strings.pixels([i])[0], x[i])


def test_classes_are_balanced_and_images_vary(digits):
    strings = digit_strings(digits[0], length=2, n=1000)
    assert strings.counts.tolist() == [10] * 100
    assert len(strings.parts.unique()) > 900
    assert not torch.equal(strings.parts, digit_strings(digits[0], length=2, n=1000, seed=1).parts)
    assert torch.equal(strings.parts, digit_strings(digits[0], length=2, n=1000).parts)
    assert len(digit_strings(digits[0], length=4)) == 10_000  # at least one per class


def test_fewer_strings_than_classes_begin_with_every_digit(digits):
    few, fewer, other = (digit_strings(digits[0], 4, n, seed) for n, seed in ((2000, 0), (500, 0), (2000, 1)))
    assert few.counts.max() == 1
    assert (torch.bincount(few.labels // 1000, minlength=10) > 150).all()
    assert (torch.bincount(digits[0].labels[few.parts].flatten(), minlength=10) > 600).all()
    assert set(fewer.labels.tolist()) < set(few.labels.tolist()) != set(other.labels.tolist())
    for strings in (few, fewer):
        names = ["".join(map(str, row)) for row in digits[0].labels[strings.parts].tolist()]
        assert names == [strings.classes[label] for label in strings.labels.tolist()]


def test_strings_of_all_classes_are_those_of_committed_results(digits):
    strings = digit_strings(digits[0], 2, n=250, seed=3)
    assert strings.labels.tolist() == [i % 100 for i in range(250)]
    assert strings.parts[:2].tolist() == [[100, 308], [1087, 858]]
    assert strings.digest()[:16] == "9b226d6ecba77f71"


def test_train_and_test_share_no_image(digits):
    train, test = (digit_strings(part, length=2) for part in digits)
    assert train.images is digits[0].images and test.images is digits[1].images  # no copies


def test_subsets_keep_the_images_and_digests_differ(digits):
    strings = digit_strings(digits[0], length=2)
    rest, held = holdout(strings, 100)
    assert len(rest) + len(held) == len(strings) and rest.images is strings.images
    assert held.counts.tolist() == [1] * 100 and held.shape == strings.shape
    assert len({part.digest() for part in (strings, rest, held, digits[0])}) == 4
    assert strings.to("cpu").digest() == strings.digest()


def test_fit_gathers_the_same_pixels(digits):
    strings = digit_strings(digits[0], length=2, n=300)
    whole = ImageData((strings.pixels() * 255).round().to(torch.uint8), strings.labels, strings.classes)
    recipe = mmlda.Recipe(steps=4, batch_size=32, pad=1)
    states = []
    for data in (strings, whole):
        model = mmlda.models.build({"backbone": "conv_net", "width": 4, "num_classes": 100, "dim": 64}, seed=0)
        mmlda.fit(model, data, recipe, show=False)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert mmlda.accuracy(model, strings).accuracy == mmlda.accuracy(model, whole).accuracy


def test_bad_arguments(digits):
    train = digits[0]
    for call, name in [
        (lambda: digit_strings(train, length=0), "length"),
        (lambda: digit_strings(train, length=7), "length"),
        (lambda: digit_strings(train, n=0), "n"),
        (lambda: digit_strings(digit_strings(train)), "data"),
        (lambda: digit_strings(train.subset(np.flatnonzero(train.labels.numpy() != 3))), "data"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name} must"):
            call()
