"""Whether rounding explains the difference between a record and its recomputation: exact tests and their power.

Machines round differently, so some images near a border change sides, about as many one way as the other. The
rates below bound how many. They were measured by recomputing results of this repository, made on an H200 with TF32
where PyTorch uses it, on a CPU in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

SIZE = 1e-3  # how often a true record fails by chance, at most
TESTS = 4  # two of the clean labels and two of the outcomes under the attack share it
POWER = 0.95

# How many images may differ, as a share. In brackets, how many did: over all recomputed results, most in one result.
CLEAN = 2e-4  # labels without an attack (0 of 24,500)
ATTACKED = 0.02  # BIM (14 of 6,900, 10 of 1,000), the worst case (0 of 110); C&W was not measured
OTHERS = {
    "FGSM": 0.05,  # one step ends near the border (69 of 8,700, 9 of 300)
    "ILCM": 0.08,  # its target is the least likely class, which is often a near tie (93 of 6,600, 48 of 1,000)
    "JSMA": 0.2,  # it chooses a pixel in each step: another one changes all that follow (22 of 240, 4 of 20)
}


def honest_rate(attack: str) -> float:
    """The share of images that may differ by rounding, for an attack's class name; "" without an attack."""
    return OTHERS.get(attack, ATTACKED) if attack else CLEAN


@dataclass(frozen=True)
class Agreement:
    """`n` of `images` images were recomputed.

    Attributes
    ----------
    differ
        How many have another outcome.
    lost, won
        How many of these were right in the record and are wrong now, and the other way round.
    rate
        The share that may differ by rounding.
    """

    n: int
    images: int
    differ: int
    lost: int
    won: int
    rate: float

    @property
    def holds(self) -> bool:
        """Whether rounding explains the difference, by both tests."""
        return min(self.chance(self.differ), two_sided(self.lost, self.won)) >= SIZE / TESTS

    def chance(self, differ: int) -> float:
        """The probability that at least so many images differ by rounding: binomial."""
        from scipy.stats import binom

        return float(binom.sf(differ - 1, self.n, self.rate))

    @property
    def limit(self) -> float:
        """The smallest false change of the share of images that would be noticed with a probability of 95%.

        The images that differ now are attributed to rounding. The change affects images in one direction only, of
        which the draw contains a hypergeometric number. 1.0 if none would be noticed.

        >>> Agreement(n=200, images=10_000, differ=0, lost=0, won=0, rate=CLEAN).limit
        0.031
        """
        from scipy.stats import hypergeom

        few, many = min(self.lost, self.won), self.n + 1
        for needed in range(1, many):
            if min(self.chance(needed + few), two_sided(needed, few)) < SIZE / TESTS:
                break
        else:
            return 1.0
        low, high = needed, self.images  # the least change that is found, by bisection
        if hypergeom.sf(needed - 1, self.images, high, self.n) < POWER:
            return 1.0
        while low < high:
            middle = (low + high) // 2
            found = hypergeom.sf(needed - 1, self.images, middle, self.n) >= POWER
            low, high = (low, middle) if found else (middle + 1, high)
        return low / self.images


def two_sided(lost: int, won: int) -> float:
    """The probability that as few or fewer of the images that change sides go the rarer way (McNemar's test).

    >>> round(two_sided(11, 10), 2), two_sided(13, 0) < SIZE / TESTS
    (1.0, True)
    """
    from scipy.stats import binom

    return min(1.0, 2 * float(binom.cdf(min(lost, won), lost + won, 0.5)))
