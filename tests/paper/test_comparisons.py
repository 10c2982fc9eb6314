"""Differences and ratios of networks, with intervals."""

import numpy as np
import pytest

from mmlda.paper.comparisons import difference, paired_errors, ratio_interval, wilcoxon_test
from mmlda.results import Result, difference_interval

IMAGES = 360


def wrong(*seeds):
    """Wrong answers [seeds, images] from the images that each seed gets wrong."""
    table = np.zeros((len(seeds), IMAGES))
    for row, images in zip(table, seeds):
        row[list(images)] = 1
    return table


def test_errors_are_compared_image_by_image_and_seeds_that_differ_widen_the_interval():
    same, apart = range(20), range(100, 120)
    one = 1 / IMAGES
    gap, (low, high) = paired_errors(wrong([*same, 50]), wrong(same))  # wrong on one image more
    assert gap == pytest.approx(one) and (high - low) / 2 == pytest.approx(1.96 * one, rel=1e-2)
    assert paired_errors(wrong(same), wrong(same)) == (0.0, (0.0, 0.0))
    gap, (low, high) = paired_errors(wrong(apart), wrong(same))  # as many, but others
    assert gap == pytest.approx(0) and high == pytest.approx(1.96 * one * 40**0.5, rel=1e-2)
    assert paired_errors(wrong(apart, apart), wrong(same, same))[1] == pytest.approx((low, high))
    _, (low, high) = paired_errors(wrong(range(0), range(10)), wrong(same, same))
    welch = 12.706 * one * np.std([0, 10], ddof=1) / 2**0.5  # t with one degree of freedom
    assert (high - low) / 2 > welch


def test_differences_have_intervals_over_all_seeds():
    def result(share):
        return Result(name="x", kind="worst", what="", value=share, n=100)

    low, high = difference([result(0.55)], [result(0.5)])
    assert low < 0 < 0.05 < high and (low, high) == pytest.approx(difference_interval(55, 100, 50, 100))
    low, high = difference([result(0.55)] * 40, [result(0.5)] * 40)
    assert 0.02 < low < 0.05 < high < 0.08  # 4,000 images each decide what 100 do not


def test_the_ratios_interval_covers_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(100):
        a, b = generator.exponential(3.0, 80), generator.exponential(2.0, 80)
        low, high = ratio_interval(a, b, draws=400, seed=seed)
        hits += low <= 1.5 <= high
    assert 86 <= hits <= 100
    a = 1.1 * b * generator.uniform(0.9, 1.1, 80)  # the same images: what they share is no reason to doubt
    low, high = ratio_interval(a, b)
    loose = ratio_interval(generator.permutation(a), b)
    assert 1.0 < low < high < 1.2 and high - low < (loose[1] - loose[0]) / 5


def test_sets_are_compared_in_pairs():
    assert wilcoxon_test([0.0, 0.0]) == (0, 0.0, 1.0)
    better, mean, p = wilcoxon_test([0.01 * k for k in range(1, 11)])
    assert better == 10 and mean == pytest.approx(0.055) and p == pytest.approx(2 / 2**10)
