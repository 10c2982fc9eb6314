"""Means in an order that suits the classes: the same means, similar classes on similar ones, faster learning."""

import numpy as np
import pytest
import torch

import mmlda
from mmlda.theory import match_means, separated_means


def cosines(rows):
    units = rows / rows.norm(dim=1, keepdim=True)
    return (units @ units.T).flatten()


def test_similar_classes_get_similar_means():
    means = separated_means(60, 8, C=25.0, seconds=1)
    vectors = torch.randn(60, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matched = match_means(means, vectors)
    assert torch.equal(matched.sort(0)[0].sum(1), means.sort(0)[0].sum(1)) and matched.dtype == means.dtype
    rows = [tuple(row) for row in matched.tolist()]
    assert sorted(rows) == sorted(tuple(row) for row in means.tolist())  # each mean once
    centred = vectors - vectors.mean(0)
    before, after = (np.corrcoef(cosines(centred), cosines(one))[0, 1] for one in (means, matched))
    assert after > before + 0.15
    again = match_means(means.numpy(), (3 * vectors + 7).tolist())
    assert isinstance(again, np.ndarray) and np.array_equal(again, matched.numpy())  # scale and shift do not matter


def test_more_means_than_classes_match_better():
    means, vectors = separated_means(288, 16), torch.randn(60, 20, generator=torch.Generator().manual_seed(0))
    some, chosen = match_means(means[:60], vectors), match_means(means, vectors)
    rows = {tuple(row) for row in means.tolist()}
    assert chosen.shape == (60, 16) and len({tuple(row) for row in chosen.tolist()} & rows) == 60
    centred = vectors - vectors.mean(0)
    alike = [np.corrcoef(cosines(centred), cosines(one))[0, 1] for one in (some, chosen)]
    assert alike[1] > alike[0] + 0.05


def pairs_of_digits():
    """Two digits side by side: 100 classes, which share digits; training and test."""
    return [mmlda.data.digit_strings(data, 2, n) for data, n in zip(mmlda.data.load("digits"), (20_000, 2_000))]


def test_a_network_learns_faster_with_matched_means():
    train, test = pairs_of_digits()
    (x, y), (x_test, y_test) = ((data.pixels().flatten(1), data.labels) for data in (train, test))
    means, right = separated_means(100, 12, seconds=1), {}
    for name, mu in (("in any order", means), ("matched", match_means(means, train.class_means()))):
        torch.manual_seed(0)
        head = mmlda.MaxMahalanobisHead(num_classes=100, dim=12, C=4.0, means=mu)
        net = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 12))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
        for part in torch.arange(len(x)).split(200):
            optimizer.zero_grad()
            head.loss(net(x[part]), y[part]).backward()
            optimizer.step()
        right[name] = (head.predict(net(x_test)) == y_test).float().mean().item()
    assert right["matched"] > right["in any order"] + 0.2


@pytest.mark.parametrize(
    "change, words",
    [
        ({"vectors": torch.randn(11, 3)}, r"vectors must be \[L, ...\], one row per class, for at most 10 means, got"),
        ({"vectors": torch.randn(10, 0)}, r"vectors must be \[L, ...\], one row per class, for .*, got \[10, 0\]"),
        ({"vectors": torch.full((10, 2), torch.nan)}, "vectors must be finite, got "),
        ({"means": torch.eye(10_001, 2)}, "means must be at most 9,999 for 10,001 classes, got 10,001"),
        ({"rounds": 0}, "rounds must be an integer >= 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    given = {"means": torch.eye(10), "vectors": torch.randn(10, 3)} | change
    if len(given["means"]) != len(given["vectors"]) and "means" in change:
        given["vectors"] = torch.randn(len(given["means"]), 2)
    with pytest.raises(ValueError, match=words):
        match_means(given.pop("means"), given.pop("vectors"), **given)
