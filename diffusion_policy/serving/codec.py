"""Messages of the openpi protocol: msgpack, with arrays as maps of dtype, shape and bytes.

Plain data only. Nothing of a message is executed or imported, unlike a pickle, and its size is bounded before its
content is built.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgpack
import numpy as np

MAX_CONTAINERS = 256  # maps and lists in a message
MAX_ITEMS = 8192  # of a map or list
MAX_TEXT = 65536
MAX_DIMENSIONS = 8
#: Real numbers and booleans of a fixed size. Objects, records, complex numbers, texts and times do not match.
DTYPE = re.compile(r"[<>=|]?[biuf][1248]")


class MessageError(ValueError):
    """A message that is refused; its text is for the client."""


def encode(value: Any) -> bytes:
    """Pack plain data and numpy arrays."""
    return msgpack.packb(value, default=_pack)


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic) and DTYPE.fullmatch(value.dtype.str):
        if isinstance(value, np.generic):
            return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def decode(data: bytes) -> Any:
    """Unpack a message; arrays are views of `data` that cannot be written to.

    Raises:
        MessageError: not msgpack, too many parts, or an array that is not what it says.
    """
    left = MAX_CONTAINERS

    def counted(value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MessageError(f"the message has more than {MAX_CONTAINERS} maps and lists")
        return _unpack(value) if isinstance(value, dict) else value

    try:
        return msgpack.unpackb(
            data,
            object_hook=counted,
            list_hook=counted,
            ext_hook=_no_extension,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_str_len=MAX_TEXT,
            max_ext_len=0,  # no timestamps either
        )
    except MessageError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"the message is not msgpack that can be read: {type(error).__name__}") from error


def _no_extension(code: int, data: bytes) -> Any:
    raise MessageError("the message has a msgpack extension, which the protocol does not use")


def _unpack(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return _array(value.get(b"data"), _dtype(value), value.get(b"shape"))
    if b"__npgeneric__" in value:
        number = value.get(b"data")
        if not isinstance(number, bool | int | float):
            raise MessageError("a number of the message is malformed")
        return np.array(number).astype(_dtype(value))[()]
    return value


def _dtype(value: dict[Any, Any]) -> np.dtype:
    name = value.get(b"dtype")
    if not isinstance(name, str) or not DTYPE.fullmatch(name):
        raise MessageError(
            "an array of the message has a dtype that is not allowed: only real numbers and booleans are"
        )
    try:
        return np.dtype(name)
    except TypeError as error:  # such as b2
        raise MessageError(f"an array of the message has the unknown dtype {name}") from error


def _array(data: Any, dtype: np.dtype, shape: Any) -> np.ndarray:
    if not isinstance(data, bytes) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise MessageError("an array of the message lacks its bytes or its shape")
    if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise MessageError("an array of the message has an invalid shape")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise MessageError(f"an array of the message has {len(data)} bytes, which do not fit its shape and dtype")
    return np.frombuffer(data, dtype).reshape(shape)
