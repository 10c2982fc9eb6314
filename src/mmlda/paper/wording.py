"""What was found on the paper's claims, in words. Shares become percents here."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "adam",
    "better_on_sets",
    "distances",
    "latent_fit",
    "lowest_error",
    "priors",
    "semantic",
    "silhouettes",
    "success",
    "table1",
    "worst_case",
]

Interval = tuple[float, float]


def _points(gap: float, interval: Interval, over: str = "") -> tuple[str, str]:
    low, high = interval
    return f"{100 * gap:+.2f} points", f"{over} (95% interval {100 * low:+.2f} to {100 * high:+.2f})"


def _seeds(count: int) -> str:
    return f", over {count} seeds" if count > 1 else ""


def table1(network: str, gap: float, interval: Interval, seeds: int) -> str:
    points, rest = _points(gap, interval, _seeds(seeds))
    return f"{network}'s error is {points} from SR's{rest}"


def adam(gap: float, interval: Interval, seeds: int) -> str:
    points, rest = _points(gap, interval, _seeds(seeds))
    return f"with Adam, SR's error is {points} from that with SGD{rest}"


def worst_case(network: str, kept: Sequence[tuple[float, float, float]], above: int, comparisons: int) -> str:
    """`kept` has the perturbation and the accuracies of MM-LDA and of SR."""
    words = [f"at {eps:g} {network} keeps {100 * ours:.1f}%, SR {100 * base:.1f}%" for eps, ours, base in kept]
    rest = f"{network} is above the others in {above} of {comparisons} comparisons"
    return f"under the worst case {'; '.join(words)}; {rest}"


def distances(network: str, target: str, ratio: float, interval: Interval) -> str:
    low, high = interval
    words = f"C&W ({target}) moves {network}'s images {ratio:.2f} times as far as SR's"
    return f"{words} (95% interval {low:.2f} to {high:.2f})"


def success(rates: Sequence[float]) -> str:
    return f"C&W breaks {100 * min(rates):.1f}% to {100 * max(rates):.1f}% of the images"


def silhouettes(network: str, ours: float, base: float) -> str:
    return f"the classes' silhouette is {base:.3f} for SR, {ours:.3f} for {network}"


def latent_fit(network: str, found: Sequence[tuple[float, float]]) -> str:
    (distance, wanted), (spread, unit), (offset, sampling) = found
    return (
        f"for {network} the mean of ||z - mu_y||^2 is {distance:.1f} where a max-Mahalanobis distribution has "
        f"{wanted:.0f}, the variance within a class {spread:.3f} where it has {unit:g}, and the class means lie "
        f"{offset:.2f} from mu where a sample's lie {sampling:.2f}"
    )


def better_on_sets(other: str, better: int, sets: int, mean: float, p: float) -> str:
    return (
        f"MM-LDA is better than {other} on {better} of {sets} class-biased sets, by {100 * mean:+.2f} points in the "
        f"mean (paired Wilcoxon test: p = {p:.2g})"
    )


def priors(exchanged: float, trained: float) -> str:
    return (
        f"uniform and true priors give the same label for {100 * exchanged:.2f}% of the test images on one network, "
        f"{100 * trained:.2f}% on two trained with either"
    )


def semantic(ways: Sequence[tuple[str, float, float]]) -> str:
    """`ways` has what the limit is set by, and the shares for MM-LDA and SR."""
    words = [f"{way} {100 * ours:.2f}% for MM-LDA and {100 * base:.2f}% for SR" for way, ours, base in ways]
    return f"of the noises, these look like their image: {'; '.join(words)}"


def lowest_error(best: tuple[float, float], two: float | None, interval: Interval) -> str:
    """`best` has log10(C) and the error there, `two` is the error at log10(C) = 2."""
    at, error = best
    words = f"the lowest validation error is {100 * error:.2f}% at log10(C) = {at:g}"
    if two is None:
        return words
    low, high = interval
    return (
        f"{words}; at 2 it is {100 * two:.2f}%, {100 * (two - error):+.2f} points (95% interval over the folds "
        f"{100 * low:+.2f} to {100 * high:+.2f})"
    )
