"""Whether the paper's claims hold: pure functions from numbers to a verdict, each with its rule in words.

Differences are of shares (0.01 is a percentage point). The verdict is None where the numbers do not decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Judged",
    "adam_is_worse",
    "distortion_is_larger",
    "error_is_kept",
    "features_are_normal",
    "features_are_regular",
    "lowest_at_100",
    "more_robust",
    "nearly_always_broken",
    "noise_is_semantic",
    "paired_test",
    "priors_do_not_matter",
    "undecided",
]

Interval = tuple[float, float]
MUCH = 1.2  # times as far: what "much larger" is taken to mean
ROOM = 0.8  # the accuracy of SR from which MM-LDA has little room to be better
ADVANTAGE = 0.1  # of MM-LDA over SR, which the paper's table has many times over


@dataclass(frozen=True)
class Judged:
    """Whether a claim holds (None: not decided), and the rule it was judged by."""

    holds: bool | None
    rule: str


def _by_interval(interval: Interval, limit: float) -> bool | None:
    """True above the limit, False below it, None where the interval contains it."""
    low, high = interval
    return True if low > limit else False if high < limit else None


def error_is_kept(difference: Interval) -> Judged:
    """Table 1: MM-LDA's test error minus SR's."""
    low, high = difference
    return Judged(
        True if high <= 0.01 else False if low > 0.01 else None,
        "holds if the 95% interval of the difference lies below 1 point, does not if it lies above: the paper's own "
        "gap on CIFAR-10 is 0.91",
    )


def adam_is_worse(difference: Interval) -> Judged:
    """The footnote of Table 1: SR's test error with Adam minus that with SGD."""
    rule = "holds if the 95% interval of the difference lies above 0, does not if it lies below"
    return Judged(_by_interval(difference, 0.0), rule)


def more_robust(comparisons: Sequence[Interval], against_sr: Sequence[tuple[float, Interval]]) -> Judged:
    """Table 2, by the worst case.

    Args:
        comparisons: intervals of MM-LDA's accuracy minus that of SR and of each fine-tuned network.
        against_sr: for each perturbation SR's accuracy, and the interval of MM-LDA's minus it.
    """
    excluded = [high < ADVANTAGE for accuracy, (_, high) in against_sr if accuracy < ROOM]
    return Judged(
        True if all(low > 0 for low, _ in comparisons) else False if any(excluded) else None,
        "holds if the 95% interval of the difference lies above 0 against SR and each fine-tuned SR network at each of "
        "Table 2's three perturbations; does not hold if at one where SR keeps less than 80% it excludes an advantage "
        "of 10 points over SR",
    )


def distortion_is_larger(ratio: Interval) -> Judged:
    """Table 3: MM-LDA's mean distortion over SR's."""
    return Judged(
        _by_interval(ratio, MUCH),
        "holds if the interval of the ratio of the means (bootstrap over the images that both get right and C&W breaks "
        "for both) lies above 1.2, does not if it lies below: much larger is a fifth or more",
    )


def nearly_always_broken(rates: Sequence[float]) -> Judged:
    """The success rates of C&W."""
    return Judged(min(rates) >= 0.99, "holds if at least 99% for every network and target")


def features_are_regular(difference: Interval) -> Judged:
    """Figure 2: MM-LDA's silhouette minus SR's."""
    return Judged(
        _by_interval(difference, 0.0),
        "holds if the silhouette of the classes in the latent space is larger for MM-LDA, does not if it is smaller, "
        "by the 95% interval over the images",
    )


def features_are_normal(found: Sequence[tuple[float, float]]) -> Judged:
    """Sec. 4.3: statistics of the latent features, each with that of a max-Mahalanobis distribution."""
    return Judged(
        all(abs(ours / expected - 1) <= 0.1 for ours, expected in found),
        "holds if the features' mean squared distance from mu, their variance within a class and the class means' "
        "distance from mu are within 10% of what a sample of the distribution has",
    )


def paired_test(mean: float, p: float) -> Judged:
    """Figure 3: the mean difference over the class-biased sets, and the p-value of a paired test."""
    rule = "decided where p < 0.05 over the sets; the sets share images and a seed, so p is optimistic"
    return Judged((mean > 0) if p < 0.05 else None, rule)


def priors_do_not_matter(agreement: float) -> Judged:
    """Sec. 4.4: the share of images with the same label by uniform and by true priors."""
    return Judged(agreement >= 0.99, "holds if at least 99% on one network whose priors are exchanged")


def noise_is_semantic(shares: Sequence[tuple[float, float]], n: int) -> Judged:
    """Figure 4: the shares of semantic noises for MM-LDA and SR, once for each way to set the limit."""
    verdicts = [ours >= 0.01 and base < ours / 5 for ours, base in shares]
    same = all(verdicts) or not any(verdicts)
    return Judged(
        verdicts[0] if same and n >= 500 else None,
        "holds if at least 1% for MM-LDA and under a fifth of that for SR, on 500 noises or more, by each of the "
        "limits; does not if by none",
    )


def lowest_at_100(is_lowest: bool | None, above_lowest: Interval) -> Judged:
    """Figure 5: whether the error is lowest at C = 100 (None: not measured), and by how much it is above the lowest."""
    return Judged(
        None if is_lowest is None else True if is_lowest else False if above_lowest[0] > 0 else None,
        "holds if the error is lowest at log10(C) = 2, does not if the 95% interval of its difference from the lowest, "
        "fold by fold, lies above 0",
    )


def undecided(rule: str) -> Judged:
    """A question of ours, which the paper does not decide."""
    return Judged(None, rule)
