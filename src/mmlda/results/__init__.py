"""Results: one record per number, its files, and its provenance."""

from mmlda.results.intervals import difference_interval, wilson
from mmlda.results.labels import HEADS, label
from mmlda.results.provenance import code_version, device_name, head_of, measured_on, traced, versions, weights_digest
from mmlda.results.record import Result, load_all, result_files
from mmlda.results.upgrade import SCHEMA, upgrade

__all__ = [
    "HEADS",
    "SCHEMA",
    "Result",
    "code_version",
    "device_name",
    "difference_interval",
    "head_of",
    "label",
    "load_all",
    "measured_on",
    "result_files",
    "traced",
    "upgrade",
    "versions",
    "weights_digest",
    "wilson",
]
