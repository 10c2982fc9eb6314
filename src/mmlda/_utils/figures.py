"""Figures as files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from mmlda._utils.checks import invalid
from mmlda._utils.files import write_whole


def save_figure(path: str | Path, figure: Any) -> Path:
    """Write a matplotlib figure as .png, .svg or .pdf, whole or not at all."""
    kind = Path(path).suffix[1:].lower()
    if kind not in ("png", "svg", "pdf"):
        raise invalid("path", "a .png, .svg or .pdf file", str(path))
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=120)
    return write_whole(path, buffer.getvalue())
