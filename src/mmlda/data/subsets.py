"""Subsets of a dataset: splits, samples, folds, class-biased and long-tailed sets.

Everything random here comes from a bit generator whose stream NumPy has frozen, so a seed selects the same images on
every machine, device and version.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmlda._utils.checks import check_count, check_positive, invalid
from mmlda.data.convert import as_images
from mmlda.data.images import ImageData, gather


def split(data: Any, part: float = 0.2) -> tuple[ImageData, ImageData]:
    """Split a dataset that has no test set: a fixed, stratified split into training and test set.

    Within a class the images are ordered by their SHA-256, and the first ones are the test set. No generator is
    involved, so the split follows from the images alone.

    Parameters
    ----------
    data
        Anything `mmlda.data.as_images` takes.
    part
        Share of the test set, rounded up to whole images and divided among the classes in proportion.

    Returns
    -------
    train, test : ImageData
        The two parts.

    Raises
    ------
    ValueError
        If one of them would be empty.

    Examples
    --------
    >>> data = ImageData(torch.rand(10, 1, 2, 2), torch.arange(10) % 2, ("a", "b"))
    >>> [part.counts.tolist() for part in split(data)]
    [[4, 4], [1, 1]]
    """
    data = as_images(data)
    n = math.ceil(len(data) * part)
    if not 0 < n < len(data):
        raise ValueError(f"data must leave images to train and to test on, got {len(data)} images with part = {part}")
    flat = gather(data.images, data.parts, None).cpu().contiguous().view(len(data), -1).numpy()
    keys = [hashlib.sha256(row.tobytes()).digest() for row in flat]
    order = np.array(sorted(range(len(data)), key=lambda i: (keys[i], i)))
    return _hold(data, order, n)


def holdout(data: Any, n: int, seed: int = 0) -> tuple[ImageData, ImageData]:
    """Hold `n` random images out, stratified: (rest, held). Each keeps the order of the images.

    Parameters
    ----------
    data
        Anything `mmlda.data.as_images` takes.
    n
        How many images to hold out.
    seed
        Selects the images.

    Returns
    -------
    rest, held : ImageData
        The remaining images, and those held out.

    Raises
    ------
    ValueError
        If `n` is not from 1 to the number of images minus 1.

    Examples
    --------
    >>> from mmlda.data import load
    >>> train, _ = load("digits")
    >>> rest, held = holdout(train, 100, seed=0)
    >>> len(rest), len(held), held.counts.tolist()
    (1337, 100, [10, 10, 10, 10, 10, 10, 10, 10, 10, 10])
    """
    data = as_images(data)
    if not 0 < n < len(data):
        raise invalid("n", f"an integer from 1 to {len(data) - 1}", n)
    return _hold(data, np.argsort(_uniform(len(data), seed), kind="stable"), n)


def stratified(data: Any, n: int | None, seed: int = 0) -> ImageData:
    """Take `n` random images with the class shares of the data, in their order. Every `n` argument means this.

    Parameters
    ----------
    data
        Anything `mmlda.data.as_images` takes.
    n
        How many images; all of them if None, or if there are fewer.
    seed
        Selects the images: those that `holdout` holds out.

    Returns
    -------
    ImageData
        The sample.

    Examples
    --------
    >>> from mmlda.data import load
    >>> stratified(load("digits")[1], 20).counts.tolist()
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """
    data = as_images(data)
    if n is None or check_count("n", n, 1) >= len(data):
        return data
    return holdout(data, n, seed)[1]


def _hold(data: ImageData, order: np.ndarray, n: int) -> tuple[ImageData, ImageData]:
    held = _held(data.labels.cpu().numpy(), order, n)
    return data.subset(~held), data.subset(held)


def sample_rows(labels: np.ndarray, n: int) -> np.ndarray:
    """The positions of the images that `stratified` takes of N > n images with these labels [N]."""
    return np.flatnonzero(_held(labels, np.argsort(_uniform(len(labels), 0), kind="stable"), n))


def _held(y: np.ndarray, order: np.ndarray, n: int) -> np.ndarray:
    """Share n over the classes by largest remainder, and take that many of each class, first in `order`: mask [N]."""
    share = n * np.bincount(y) / len(y)  # [L]
    take = np.floor(share).astype(np.int64)
    take[np.argsort(-(share - take), kind="stable")[: n - take.sum()]] += 1
    held = np.zeros(len(y), bool)
    for k in range(len(take)):
        held[order[y[order] == k][: take[k]]] = True
    return held


def folds(data: Any, k: int = 5, seed: int = 0) -> list[tuple[ImageData, ImageData]]:
    """Divide data into k stratified folds, each as (train, validation).

    The validation parts are disjoint and cover the data. Images are dealt out class by class, so the sizes of folds
    differ by at most one, and so do the counts of each class.

    Parameters
    ----------
    data
        Anything `mmlda.data.as_images` takes.
    k
        Number of folds, at least 2.
    seed
        Selects the images.

    Returns
    -------
    list of tuple of ImageData
        (train, validation) per fold.

    Examples
    --------
    >>> data = ImageData(torch.rand(10, 1, 2, 2), torch.arange(10) % 2, ("a", "b"))
    >>> [len(held) for _, held in folds(data, k=3)]
    [4, 3, 3]
    """
    data = as_images(data)
    held = [fold_rows(data, i, k, seed) for i in range(max(k, 1))]
    return [(data.subset(~rows), data.subset(rows)) for rows in held]


def fold_rows(data: Any, i: int, k: int = 5, seed: int = 0) -> Tensor:
    """Which images are the validation part of the i-th of k folds.

    Parameters
    ----------
    data, k, seed
        As in `folds`.
    i
        Number of the fold, from 0.

    Returns
    -------
    Tensor
        Mask [N], bool.

    Raises
    ------
    ValueError
        If `k` is not from 2 to the number of images.
    """
    data = as_images(data)
    if not 2 <= k <= len(data):
        raise invalid("k", f"an integer from 2 to {len(data)}", k)
    dealt = np.lexsort((_uniform(len(data), seed), data.labels.cpu().numpy()))  # by class, random within
    fold = np.empty(len(data), np.int64)
    fold[dealt] = np.arange(len(data)) % k
    return torch.from_numpy(fold == i)


def biased(data: Any, alpha: Tensor | np.ndarray | Sequence[float], seed: int = 0) -> ImageData:
    """Take a class-biased subset (Sec. 4.4): each image (x, y) is kept with probability alpha_y, independently.

    Apply the same alpha to the train and the test set. `priors` of the result are the empirical ones, whose
    expectation is alpha_k / sum(alpha). With one seed, a larger alpha keeps every image that a smaller one keeps.

    Parameters
    ----------
    data
        Anything `mmlda.data.as_images` takes.
    alpha
        One probability per class.
    seed
        Selects the images.

    Returns
    -------
    ImageData
        The subset.

    Raises
    ------
    ValueError
        If alpha is not L probabilities, or keeps no image.

    Examples
    --------
    >>> from mmlda.data import load
    >>> train, test = load("digits")
    >>> biased(train, bp2()[3], seed=0).counts.tolist()
    [26, 31, 31, 146, 30, 31, 23, 26, 32, 30]
    """
    data = as_images(data)
    a = np.asarray(torch.as_tensor(alpha), np.float64)
    if a.shape != (data.num_classes,) or not ((a >= 0) & (a <= 1)).all():
        raise invalid("alpha", f"{data.num_classes} probabilities", a.tolist())
    kept = _uniform(len(data), seed) < a[data.labels.cpu().numpy()]
    if not kept.any():
        raise invalid("alpha", f"large enough to keep one of the {len(data)} images", a.tolist())
    return data.subset(kept)


def long_tailed(data: Any, imbalance: float = 100.0, seed: int = 0) -> ImageData:
    """Take a long-tailed subset: class k keeps at most n / imbalance^(k / (L - 1)) images, rounded down.

    n is the size of the largest class; a class that has fewer images than its share keeps them all. This is the
    exponential profile of Cao et al. (2019): of CIFAR-10 it keeps 12,406 training images at an imbalance of 100, of
    CIFAR-100 10,847. Train with the priors of this set and predict with uniform ones (`Classifier.with_priors`); leave
    the test set balanced.

    Parameters
    ----------
    data
        The training set: anything `mmlda.data.as_images` takes.
    imbalance
        The ratio of what class 0 and the last class keep at most, at least 1.
    seed
        Selects the images.

    Returns
    -------
    ImageData
        The subset.

    Raises
    ------
    ValueError
        If `imbalance` is less than 1, or so large that a class would keep no image.

    Examples
    --------
    >>> from mmlda.data import load
    >>> long_tailed(load("digits")[0], imbalance=10).counts.tolist()
    [142, 113, 87, 67, 52, 40, 31, 24, 18, 14]
    """
    data = as_images(data)
    if check_positive("imbalance", imbalance) < 1:
        raise invalid("imbalance", "a number >= 1", imbalance)
    counts, L = data.counts.cpu().numpy(), data.num_classes
    # A little more, lest rounding takes an image: 49 * (1 / 49) < 1.
    wanted = [int(counts.max() * (1 / imbalance) ** (k / max(L - 1, 1)) + 1e-9) for k in range(L)]
    if wanted[-1] < 1:
        expected = f"small enough to leave an image of each class (the largest has {counts.max()})"
        raise invalid("imbalance", expected, imbalance)
    order, y = np.argsort(_uniform(len(data), seed), kind="stable"), data.labels.cpu().numpy()
    kept = np.zeros(len(y), bool)
    for k, n in enumerate(wanted):
        kept[order[y[order] == k][:n]] = True
    return data.subset(kept)


def digit_strings(data: Any, length: int = 3, n: int | None = None, seed: int = 0) -> ImageData:
    """Put images side by side, with one class per string: 1,000 classes from MNIST's digits at length 3.

    The strings refer to the images of `data` and are assembled on its device when they are used, so they need hardly
    any memory. Each class has the same number of strings, give or take one, made of random images of its digits. Fewer
    strings than classes are of random classes; with the same seed, fewer strings have some of the classes of more.

    Two strings may share an image. Make the test strings from the test set, and hold images out (`holdout`) before you
    make strings of them, not strings of all images.

    Parameters
    ----------
    data
        Images to put side by side, of L classes that all have images: anything `mmlda.data.as_images` takes.
    length
        Images per string; there are L^length classes, at most 1,000,000.
    n
        How many strings (default: as many as `data` has images, at least one per class).
    seed
        Selects the images, and the classes where `n` is too small for all.

    Returns
    -------
    ImageData
        `n` strings `[C, H, length * W]`.

    Raises
    ------
    ValueError
        If `data` is a table or lacks a class, or there would be too many classes.

    Examples
    --------
    >>> from mmlda.data import load
    >>> strings = digit_strings(load("digits")[0], length=2)
    >>> strings, strings.classes[int(strings.labels[5])], strings.pixels([5]).shape
    (ImageData('digits-strings-2', 1437 images of 1 x 8 x 16, 100 classes), '05', torch.Size([1, 1, 8, 16]))
    """
    data = as_images(data)
    if data.is_table or data.parts is not None:
        raise ValueError(f"data must be images, got {data!r}")
    L, length = data.num_classes, check_count("length", length, 1)
    if L**length > 10**6:
        raise invalid("length", f"such that {L}^length is at most 1,000,000", length)
    if not bool((data.counts > 0).all()):
        raise ValueError("data must have an image of each class, got a class without one")
    count = L**length
    n = max(len(data), count) if n is None else check_count("n", n, 1)
    label = np.arange(n) % count
    draws = _uniform(n * length + count * (n < count), seed)
    if n < count:  # some of the classes
        label, draws = np.argsort(draws[:count], kind="stable")[:n], draws[count:]
    order, counts = np.argsort(data.labels.cpu().numpy(), kind="stable"), data.counts.cpu().numpy()
    start = np.cumsum(counts) - counts
    digits = label[:, None] // L ** np.arange(length)[::-1] % L  # [n, length]
    within = (draws.reshape(n, length) * counts[digits]).astype(np.int64)
    names = tuple("".join(letters) for letters in itertools.product(data.classes, repeat=length))
    return replace(
        data,
        labels=torch.from_numpy(label).to(data.device),
        classes=names,
        name=f"{data.name}-strings-{length}",
        parts=torch.from_numpy(order[start[digits] + within]).to(data.device),
    )


def bp1(seed: int = 0) -> Tensor:
    """Bias Probability 1 (Sec. 4.4): ten random permutations of (0.1, 0.2, ..., 1.0).

    Parameters
    ----------
    seed
        Selects the permutations.

    Returns
    -------
    Tensor
        One permutation per row, [10, 10] float64.
    """
    rows = np.argsort(_uniform(100, seed).reshape(10, 10), axis=1, kind="stable")
    return torch.from_numpy((rows + 1) / 10)


def bp2() -> Tensor:
    """Bias Probability 2 (Sec. 4.4): row i has probability 1.0 for class i and 0.2 for the others.

    Returns
    -------
    Tensor
        One set of probabilities per row, [10, 10] float64.
    """
    return torch.full((10, 10), 0.2, dtype=torch.float64).fill_diagonal_(1.0)


def _uniform(n: int, seed: int) -> np.ndarray:
    """n doubles in [0, 1), from raw bits: NumPy guarantees those, but not its distributions, across versions."""
    return (np.random.PCG64(seed).random_raw(n) >> np.uint64(11)) * 2.0**-53
