"""Results: one record per number, its files, and where it comes from."""

from mmlda.results.provenance import code_version, versions
from mmlda.results.record import SCHEMA, Result, difference_interval, load_all, result_files, wilson

__all__ = [
    "SCHEMA",
    "Result",
    "code_version",
    "difference_interval",
    "load_all",
    "result_files",
    "versions",
    "wilson",
]
