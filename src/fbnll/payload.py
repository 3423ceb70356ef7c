"""Messages to bytes and back: a JSON header, then raw little-endian arrays in C order. Nothing in it can run code."""

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

MAGIC = b"fbn1"
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")}
ARRAY = "@"  # the key that stands for an array in the header
ALIGN = 8  # arrays start at multiples of this, so that views of them are aligned

Payload = dict[str, Any]


def letters(dtype: np.dtype[Any]) -> str:
    """The two letters of a dtype, as in `f4`; ValueError for one that does not travel."""
    name = f"{dtype.kind}{dtype.itemsize}"
    if name not in DTYPES:
        raise ValueError(f"an array in a message must be of booleans, integers or floats, but it is {dtype}")
    return name


def pack(value: Payload) -> bytes:
    """The bytes of a message of nested dicts and lists, finite numbers, strings, booleans, None and arrays.

    >>> unpack(pack({"V": np.eye(2, dtype="f4"), "q": 2}))["V"].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    arrays: list[np.ndarray] = []
    header = _header(value, arrays)
    parts = [MAGIC, struct.pack("<I", len(header)), header]
    for array in arrays:
        raw = np.ascontiguousarray(array, DTYPES[letters(array.dtype)]).tobytes()
        parts += [raw, bytes(-len(raw) % ALIGN)]
    return b"".join(parts)


def size(value: Payload) -> int:
    """The length of `pack(value)`, without copying the arrays."""
    arrays: list[np.ndarray] = []
    header = _header(value, arrays)
    return len(MAGIC) + 4 + len(header) + sum(_padded(array.nbytes) for array in arrays)


def unpack(data: bytes) -> Payload:
    """The message in `data`, its arrays read-only views; sizes are compared with the bytes that came before any is used."""
    start = len(MAGIC) + 4
    if len(data) < start or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"a message must begin with {MAGIC!r} and the length of its header, but it begins with {bytes(data[:start])!r}")
    (length,) = struct.unpack_from("<I", data, len(MAGIC))
    if length > len(data) - start:
        raise ValueError(f"a header of {length} bytes must fit in the message, but {len(data) - start} bytes follow")
    try:
        header = json.loads(data[start : start + length].decode(), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header of a message must be JSON, but it is not: {type(error).__name__}") from None
    position = start + length

    def read(entry: Any) -> np.ndarray:
        nonlocal position
        dtype, shape = _described(entry)
        count = math.prod(shape)
        if count * dtype.itemsize > len(data) - position:
            raise ValueError(f"an array {shape} of {dtype} must fit in the message, but {len(data) - position} bytes are left")
        array = np.frombuffer(data, dtype, count, position).reshape(shape)
        if dtype.kind == "b" and array.view("u1").max(initial=0) > 1:
            raise ValueError("booleans must be bytes of 0 and 1, but others came")
        position += _padded(array.nbytes)
        return array

    try:
        value = _with_arrays(header, read)
    except RecursionError:
        raise ValueError("the header of a message must not be nested so deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"a message must be a dictionary, but it is a {type(value).__name__}")
    if position != len(data):
        raise ValueError(f"a message must end with its last array at byte {position}, but it has {len(data)} bytes")
    return value


def read_only(value: Any) -> Any:
    """The same message with read-only views of its arrays, as `unpack` would give it, without the copy."""
    if isinstance(value, Mapping):
        return {key: read_only(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [read_only(item) for item in value]
    if isinstance(value, np.ndarray):
        view = np.ascontiguousarray(value).reshape(value.shape).view()
        view.flags.writeable = False
        return view
    return value.item() if isinstance(value, np.generic) else value


def copied(value: Any) -> Any:
    """The same message with its own writeable arrays."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return np.array(value, order="C") if isinstance(value, np.ndarray) else value


def _header(value: Payload, arrays: list[np.ndarray]) -> bytes:
    text = json.dumps(_described_tree(value, arrays), separators=(",", ":"), allow_nan=False)
    # Spaces up to a multiple of ALIGN, so that the arrays behind the header are aligned.
    return (text + " " * (-(len(MAGIC) + 4 + len(text)) % ALIGN)).encode()


def _described_tree(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {ARRAY: [letters(value.dtype), *value.shape]}
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) or key == ARRAY for key in value):
            raise ValueError(f"keys of a message must be strings other than {ARRAY!r}, but they are {list(value)}")
        return {key: _described_tree(item, arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_described_tree(item, arrays) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"a message must hold numbers, strings, None, lists, dictionaries and arrays, but it holds a {type(value).__name__}")


def _with_arrays(value: Any, read: Callable[[Any], np.ndarray]) -> Any:
    if isinstance(value, dict):
        return read(value[ARRAY]) if ARRAY in value else {key: _with_arrays(item, read) for key, item in value.items()}
    return [_with_arrays(item, read) for item in value] if isinstance(value, list) else value


def _described(entry: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if not isinstance(entry, list) or not entry or len(entry) > 33 or not isinstance(entry[0], str) or entry[0] not in DTYPES:
        raise ValueError(f"an array must be described by its dtype and shape, but it is described by {str(entry)[:80]}")
    shape = tuple(entry[1:])
    if any(type(length) is not int or length < 0 for length in shape) or math.prod(max(length, 1) for length in shape) >= 2**40:
        raise ValueError(f"lengths of an array must be integers from 0 on that memory could hold, but they are {str(shape)[:80]}")
    return DTYPES[entry[0]], shape


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGN


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite, but one is {text[:20]}")
    return number
