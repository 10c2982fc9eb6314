"""Results: one record per number, its files, and its provenance."""

from mmlda.results.intervals import difference_interval, wilson
from mmlda.results.labels import HEADS, attack_labels, differing, label, network_label, plain_head
from mmlda.results.packing import pack
from mmlda.results.provenance import code_version, device_name, head_of, measured_on, traced, versions, weights_digest
from mmlda.results.record import Result
from mmlda.results.search import find_result, find_results, load_all
from mmlda.results.upgrade import SCHEMA

__all__ = [
    "HEADS",
    "SCHEMA",
    "Result",
    "attack_labels",
    "code_version",
    "device_name",
    "difference_interval",
    "differing",
    "find_result",
    "find_results",
    "head_of",
    "label",
    "load_all",
    "measured_on",
    "network_label",
    "pack",
    "plain_head",
    "traced",
    "versions",
    "weights_digest",
    "wilson",
]
