"""Read the pickles of CIFAR's python version without unpickling: an interpreter of the few opcodes they use.

Nothing in a pickle is called or imported. Names are strings, compared with the four that arrays and bytes are written
with, and an array is its shape and its bytes. Memory is bounded by a multiple of the file: the opcodes that reserve
memory by a number, or repeat existing values, are not supported.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmlda._utils.checks import damaged

OPCODES = 4_000_000  # in one pickle, each an object of up to about 100 bytes: CIFAR-100's have 400,000
VALUES = {  # opcodes that carry their value
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "BINSTRING", "SHORT_BINSTRING", "STRING", "BINBYTES"),
    *("SHORT_BINBYTES", "BINBYTES8", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
}
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
HELD = "containers, numbers, strings and uint8 arrays"
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class _Name:
    """A name such as `numpy.dtype`: inert."""

    text: str


@dataclass
class _Array:
    values: np.ndarray | None = None


class _Dtype:
    """The dtype uint8, in one of its spellings; others are rejected."""


def read_pickle(content: bytes) -> Any:
    """What a pickle of containers, numbers, strings and uint8 arrays holds; a ValueError for any other.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"data": np.arange(3, dtype=np.uint8), "labels": [1, 2]}))
    {'data': array([0, 1, 2], dtype=uint8), 'labels': [1, 2]}
    """
    try:
        value = _interpret(content)
    except (IndexError, KeyError, TypeError, OverflowError) as error:
        raise damaged("pickle", "whole", f"a damaged one ({error})") from None
    if not isinstance(value, dict):
        return value
    return {key: entry.values if isinstance(entry, _Array) else entry for key, entry in value.items()}


def _interpret(content: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    left = len(content)  # bytes that may be made from strings: no more than the file has

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if count > OPCODES:
            raise damaged("pickle", f"at most {OPCODES} opcodes", "more")
        if name in VALUES:
            stack.append(argument)
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]  # type: ignore[index]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])  # type: ignore[index]
        elif name == "MARK":
            marks.append(len(stack))
        elif name in TUPLES:
            items = [stack.pop() for _ in range(TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name in ("TUPLE", "LIST"):
            stack.append(tuple(since_mark()) if name == "TUPLE" else since_mark())
        elif name == "DICT":
            items = since_mark()
            stack.append(_pairs(items))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else since_mark()
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else since_mark()
            _expect(stack[-1], dict).update(_pairs(items))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            words = [stack.pop(), stack.pop()][::-1] if name == "STACK_GLOBAL" else str(argument).split(" ")
            stack.append(_Name(".".join(words)))
            left -= len(stack[-1].text) if name == "STACK_GLOBAL" else 0  # of strings that may be named again
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            made = _made(_expect(function, _Name).text, _expect(arguments, tuple))
            left -= len(made) if isinstance(made, bytes) else 0
            stack.append(made)
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], _Array):
                stack[-1].values = _array(*state)
                left -= len(state[-1]) if isinstance(state[-1], str) else 0
            else:
                _expect(stack[-1], _Dtype)  # its state: byte order and alignment, which bytes do not have
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise damaged("pickle", HELD, f"opcode {name}")
        if left < 0:
            raise damaged("pickle", f"values of at most its {len(content)} bytes", "more")
    if len(stack) != 1 or marks:
        raise damaged("pickle", "one value", len(stack))
    return stack[0]


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise damaged("part of the pickle", f"a {kind.__name__.strip('_')}", f"a {type(value).__name__}")
    return value


def _pairs(items: list[Any]) -> dict[str | bytes, Any]:
    for key in items[::2]:  # the hash of a deeply nested tuple would overflow the stack
        if not isinstance(key, str | bytes):
            raise damaged("key of the pickle", "a string", f"a {type(key).__name__}")
    return dict(zip(items[::2], items[1::2], strict=True))


def _made(function: str, arguments: tuple[Any, ...]) -> Any:
    """What a call is replaced by: an array to be filled, a dtype, or bytes as Python 3 writes them at protocol 2."""
    if function in ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"):
        return _Array()
    if function == "numpy.dtype" and arguments[0] in ("u1", "uint8", "|u1", b"u1"):
        return _Dtype()
    if function == "_codecs.encode" and arguments[1] in ("latin1", "latin-1"):
        return arguments[0].encode("latin-1") if isinstance(arguments[0], str) else _expect(arguments[0], str)
    raise damaged("pickle", HELD, f"a call of {function[:80]}")


def _array(version: Any, shape: Any, dtype: Any, fortran: Any, content: Any) -> np.ndarray:
    """An array from the state that NumPy pickles: its shape, uint8 and its bytes."""
    _expect(dtype, _Dtype)
    content = content.encode("latin-1") if isinstance(content, str) else _expect(content, bytes)
    if type(shape) is not tuple or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 4:
        raise damaged("array of the pickle", "of up to four sizes", "another shape")
    if math.prod(shape) != len(content):
        raise damaged("array of the pickle", f"of shape {shape}", f"{len(content)} bytes")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
