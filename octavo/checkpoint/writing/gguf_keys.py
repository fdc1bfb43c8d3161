"""Encodes the metadata of a GGUF file.

Source: ggml's `docs/gguf.md`, version 3. Numbers have the same types as in llama.cpp's converter:
uint32 for non-negative integers, int32 for negative ones, float32 for others.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
"""Numbers of value types in the file."""
ARRAY_TYPES = {"bool": BOOL, "int32": I32, "float32": F32}

KeyValue = bool | int | float | str | Sequence[str | bytes] | NDArray[Any]


def metadata_bytes(keys: Mapping[str, KeyValue]) -> bytes:
    """Returns the concatenated keys and values."""
    return b"".join(_text(key) + _value(value) for key, value in keys.items())


def _value(value: KeyValue) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<Ii", I32, value) if value < 0 else struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, np.ndarray):
        kind = ARRAY_TYPES[value.dtype.name]
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + value.tobytes()
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data
