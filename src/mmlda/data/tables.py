"""Tables: rows of numbers, each column scaled to [0, 1] by its bounds."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mmlda._utils.checks import invalid
from mmlda.data.alignment import scaled
from mmlda.data.convert import as_labels, is_sparse
from mmlda.data.images import ImageData


def table(x: Any, y: Any, *, bounds: Any = None, classes: Sequence[str] | None = None, name: str = "") -> ImageData:
    """Rows of numbers as data that `fit`, `evaluate` and the attacks take, with every column scaled to [0, 1].

    An attack's `eps` is then a share of each column's range, and no adversarial row leaves the bounds.

    Parameters
    ----------
    x
        An array [N, D] of finite numbers.
    y
        Integers or strings [N].
    bounds
        (low, high) in the columns' own units, each a number or [D]; by default the smallest and largest value of each
        column. Values outside are clipped, with a warning. Give a test set the `bounds` of its training set;
        `accuracy`, `evaluate` and `audit` rescale a table to those of the network's training set themselves.
    classes, name
        See `as_images`.

    Returns
    -------
    ImageData
        With `bounds` [2, D], and rows [N, D] in [0, 1].

    Raises
    ------
    ValueError
        If x is not a table of finite numbers, or the bounds do not fit it.

    Examples
    --------

    >>> data = table([[4.0, 200.0], [6.0, 100.0]], ["a", "b"])
    >>> data, data.images.tolist(), data.bounds.tolist()
    (ImageData('', 2 rows of 2, 2 classes), [[0.0, 1.0], [1.0, 0.0]], [[4.0, 100.0], [6.0, 200.0]])
    >>> data.in_units(torch.tensor([[0.5, 0.5]])).tolist()
    [[5.0, 150.0]]
    """
    try:
        values = np.array(x.detach().cpu() if isinstance(x, torch.Tensor) else x, dtype=np.float64)
    except (TypeError, ValueError):
        hint = "; use x.toarray()" if is_sparse(x) else ""
        raise ValueError(f"x must be an array [N, D] of numbers, got a {type(x).__name__}{hint}") from None
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"x must be finite numbers [N, D], got shape {list(values.shape)} or NaN or infinity")
    if bounds is None:
        low, high = values.min(0), values.max(0)
        high = np.where(high > low, high, low + 1)  # a constant column
    else:
        try:
            low, high = (np.broadcast_to(np.asarray(end, np.float64), values.shape[1:]) for end in bounds)
        except (TypeError, ValueError):
            raise invalid("bounds", f"(low, high), each a number or [{values.shape[1]}]", bounds) from None
        if not (low < high).all():
            raise invalid("bounds", "(low, high) with low < high in every column", bounds)
    labels, names = as_labels(y, classes)
    ends = torch.from_numpy(np.stack([low, high]))
    rows, clipped = scaled(values, ends)
    if clipped:
        warnings.warn(clipped, stacklevel=2)
    return ImageData(rows, labels, names, name, ends)
