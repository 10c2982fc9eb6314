"""Rewrite result files of an older schema in the current one: `python tools/migrate_results.py results`.

Loads and saves every file; the outcomes beside them are not touched. Checks that each value is the old one, in
percent or as it was, and that the outcomes are those that the file names.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from mmlda.results import SCHEMA, Result, result_files


def migrate(path: Path) -> bool:
    """Rewrite one file; whether it had an older schema."""
    old: dict[str, Any] = json.loads(path.read_text())
    if old["schema"] == SCHEMA:
        return False
    new = Result.load(path)
    scale = 100.0 if old.get("unit") in ("%", "points") else 1.0
    for before, after in ((old["value"], new.value), (old.get("paper"), new.paper)):
        same = math.isclose(before, scale * after) if isinstance(after, float) else before == after
        assert same, (path, before, after)
    for before, after in zip(old.get("interval") or (), new.interval or (), strict=True):
        assert math.isclose(before, scale * after, abs_tol=1e-12), (path, before, after)
    if new.outcomes is not None:
        new.read_outcomes(path.parent)
    assert new.outcomes == old.get("outcomes")
    new.save(path.parent)
    return True


if __name__ == "__main__":
    paths = result_files(sys.argv[1])
    print(f"{sum(map(migrate, paths))} of {len(paths)} files rewritten")
