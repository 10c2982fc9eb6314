"""Safetensors files by column, as bytes: packs outcomes into one file and reads some of them back.

A file is the length of the header in 8 bytes, the header in JSON, then the columns one after another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from mmlda._utils.checks import damaged
from mmlda._utils.files import open_regular, parse_json

# In the order of safetensors' own writer: the widest first, to keep columns aligned.
DTYPES = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL")


class Column(NamedTuple):
    dtype: str
    shape: list[int]
    content: bytes


def join_columns(columns: dict[str, Column]) -> bytes:
    """A safetensors file of these columns, byte for byte what safetensors itself writes."""
    header, end = {}, 0
    names = sorted(columns, key=lambda name: (DTYPES.index(columns[name].dtype), name))
    for name in names:
        dtype, shape, content = columns[name]
        begin, end = end, end + len(content)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(columns[name].content for name in names)])


def read_columns(path: Path, prefix: str = "") -> dict[str, Column]:
    """Read the columns whose names begin with a prefix, keyed by the rest of the name."""
    columns = {}
    try:
        with open_regular(path) as file:
            size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(length, size)))
            for name, about in header.items():
                if not name.startswith(prefix) or name == "__metadata__":
                    continue
                begin, end = about["data_offsets"]
                if not 0 <= begin <= end <= size:
                    raise ValueError(name)
                file.seek(8 + length + begin)
                column = Column(about["dtype"], about["shape"], file.read(end - begin))
                if column.dtype not in DTYPES or len(column.content) != end - begin:
                    raise ValueError(name)
                columns[name.removeprefix(prefix)] = column
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise damaged(path, "a whole safetensors file", "another file") from None
    return columns
