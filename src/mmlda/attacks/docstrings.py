"""The parameters section of an attack's docstring: every setting with its default, inherited ones included."""

from __future__ import annotations

import inspect
import re
from dataclasses import Field
from textwrap import fill, indent
from typing import Any


def document(cls: Any) -> None:
    """Complete the parameters in the docstring of a settings class.

    A class describes only the settings that it adds or changes; the others come from its bases. Runs before
    `@dataclass`, on annotations and class attributes.
    """
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    text, _, examples = text.partition("\nExamples\n--------\n")
    head, _, own = text.partition("\nParameters\n----------\n")
    described = {name: " ".join(words.split()) for name, words in re.findall(r"^(\w+)\n((?: {4}.*\n?)+)", own, re.M)}
    cls._described = getattr(cls, "_described", {}) | described
    hints: dict[str, str] = {}
    for base in cls.__mro__:  # the most specific settings first, those common to all attacks last
        added = {name: str(hint) for name, hint in inspect.get_annotations(base).items()}
        hints |= {name: hint for name, hint in added.items() if name not in hints and not hint.startswith("ClassVar")}
    lines = []
    for name in sorted(hints, key=lambda name: hasattr(cls, name)):  # the required ones first
        default = getattr(cls, name, None)
        if name in cls._described and not (isinstance(default, Field) and not default.init):
            given = f", default {default!r}" if hasattr(cls, name) else ""
            lines += [f"{name} : {hints[name]}{given}", indent(fill(cls._described[name], 110), "    ")]
    parts = [head.strip(), "Parameters\n----------\n" + "\n".join(lines)]
    cls.__doc__ = "\n\n".join([*parts, *(["Examples\n--------\n" + examples.rstrip()] if examples else [])]) + "\n"
