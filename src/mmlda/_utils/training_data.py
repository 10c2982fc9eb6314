"""What a network keeps of its training set: class names (`classes`), and the bounds of a table (`bounds`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def class_names(model: Any) -> tuple[str, ...] | None:
    """The class names that a network keeps; None if it has none."""
    names = getattr(model, "classes", None)
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names)


def remembered(model: Any) -> dict[str, Any]:
    """The class names and bounds of a network as JSON, as far as it has them.

    >>> model = torch.nn.ReLU()
    >>> recall(model, {"classes": ["cat", "dog"], "data": "pets"})
    >>> model.classes, remembered(model)
    (('cat', 'dog'), {'classes': ['cat', 'dog']})
    """
    names, bounds = class_names(model), getattr(model, "bounds", None)
    about: dict[str, Any] = {} if names is None else {"classes": list(names)}
    return about | ({"bounds": bounds.tolist()} if isinstance(bounds, torch.Tensor) else {})


def recall(model: Any, about: Mapping[str, Any]) -> None:
    """Set what `remembered` returned; older files have none of it."""
    if isinstance(names := about.get("classes"), list):
        model.classes = tuple(map(str, names))
    if isinstance(bounds := about.get("bounds"), list):
        model.bounds = torch.tensor(bounds, dtype=torch.float64)
