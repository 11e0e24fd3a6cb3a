"""Plain values out of a Python 2 pickle, without unpickling.

A pickle is a program. ``read_pickle`` follows its instructions one by one with ``pickletools``, which only
decodes them, and accepts only those that build dicts, lists, tuples, strings and numbers, and one kind of
object: a numpy array of bytes. The name of a class or function stays a name: nothing is imported or called.
"""

from __future__ import annotations

import math
import pickletools
from typing import Any

import numpy as np

from selfconv.data.dataset import DataError


class _Refused(Exception):
    """An instruction that plain data does not need."""


class _Name(str):
    """A placeholder for a class, a function, or the result of a call."""


_RECONSTRUCT = _Name("numpy.core.multiarray _reconstruct")
_NDARRAY = _Name("numpy ndarray")
_DTYPE = _Name("numpy dtype")
_NAMES = {str(name): name for name in (_RECONSTRUCT, _NDARRAY, _DTYPE)}
_NEW_ARRAY = _Name("an array that is to be filled")
_UINT8 = _Name("uint8")

_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE"}
_LITERALS = _STRINGS | {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(data: bytes, source: str) -> Any:
    """The value of a pickle. Byte strings come as str (latin-1), arrays of bytes as numpy uint8.

    Raises:
        DataError: the pickle needs anything else, or is damaged; ``source`` says where it came from.
    """
    try:
        return _run(data)
    except _Refused as error:
        raise DataError(f"{source}: refused: it contains more than plain data: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{source}: damaged pickle ({' '.join(str(error).split())[:100]})") from error


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def since(start: int) -> list[Any]:
        values = stack[start:]
        del stack[start:]
        return values

    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(since(marks.pop())))
        elif name in _TUPLES:
            stack.append(tuple(since(len(stack) - _TUPLES[name])))
        elif name in ("LIST", "EMPTY_LIST"):
            stack.append(since(marks.pop()) if name == "LIST" else [])
        elif name in ("APPEND", "APPENDS"):
            values = since(marks.pop() if name == "APPENDS" else len(stack) - 1)
            _top(stack, list).extend(values)
        elif name in ("DICT", "EMPTY_DICT"):
            stack.append(_pairs(since(marks.pop())) if name == "DICT" else {})
        elif name in ("SETITEM", "SETITEMS"):
            values = since(marks.pop() if name == "SETITEMS" else len(stack) - 2)
            _top(stack, dict).update(_pairs(values))
        elif name == "GLOBAL":
            if argument not in _NAMES:
                raise _Refused(f"the name {str(argument)[:60]!r}")
            stack.append(_NAMES[argument])
        elif name == "REDUCE":
            stack.append(_call(*since(len(stack) - 2)))
        elif name == "BUILD":
            value, state = since(len(stack) - 2)
            stack.append(_fill(value, state))
        elif name == "STOP":
            return stack.pop()
        elif name != "PROTO":
            raise _Refused(f"the instruction {name}")
    raise ValueError("no STOP instruction")


def _top(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise ValueError(f"expected a {kind.__name__} on the stack")
    return stack[-1]


def _pairs(values: list[Any]) -> dict[str, Any]:
    keys = values[::2]
    if any(type(key) is not str for key in keys):
        raise ValueError("expected strings as keys")
    return dict(zip(keys, values[1::2], strict=True))


def _call(function: Any, arguments: Any) -> _Name:
    """What numpy's own pickles call: to make an empty array, and to make the type uint8."""
    if function is _RECONSTRUCT and arguments[0] is _NDARRAY:
        return _NEW_ARRAY
    if function is _DTYPE and arguments[0] == "u1":
        return _UINT8
    raise _Refused("a call")


def _fill(value: Any, state: Any) -> Any:
    if value is _UINT8:
        return value  # its state is byte order and alignment, which bytes do not have
    if value is not _NEW_ARRAY:
        raise _Refused("an object with state")
    _, shape, dtype, column_major, data = state
    if dtype is not _UINT8:
        raise _Refused("an array that is not of bytes")
    if len(data) != math.prod(shape):
        raise ValueError(f"expected {math.prod(shape)} bytes in an array; got {len(data)}")
    array = np.frombuffer(data.encode("latin-1"), np.uint8)
    return array.reshape(shape, order="F" if column_major else "C")
