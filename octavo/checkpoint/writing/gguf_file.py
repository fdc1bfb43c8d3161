"""Writes a GGUF file from another one, with the same metadata and tensors of partly different
types.

The directory is written and disk space reserved before any tensor, as in `safetensors_file.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.gguf.gguf_file import DEFAULT_ALIGNMENT, MAGIC, GgufFile
from octavo.checkpoint.writing.gguf_keys import metadata_bytes
from octavo.checkpoint.writing.safetensors_file import reserve, write_at
from octavo.quant.gguf import BLOCK_TYPES, BlockType

TYPE_NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
FILE_TYPE_KEY = b"general.file_type"
PARTS_KEY = b"split.count"
U16, U32 = 2, 4
"""Numbers of value types in the metadata."""
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
}
"""llama.cpp's file type numbers, by the most common matrix type."""


class GgufWriter:
    """A copy of `source` at `path`, in which the tensors named in `kinds` have other types and the
    keys of `added` that the source lacks are added.
    """

    def __init__(
        self,
        path: Path,
        source: GgufFile,
        kinds: Mapping[str, BlockType],
        *,
        keeps: bool,
        added: Mapping[str, float] | None = None,
    ) -> None:
        self._path = path
        new = {key: n for key, n in (added or {}).items() if key not in source.metadata}
        alignment = source.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        entries = []
        self._starts: dict[str, int] = {}
        end = 0
        for name, entry in source.tensors.items():
            kind = kinds.get(name, entry.kind)
            self._starts[name] = end
            entries.append(tensor_entry(name, entry.shape, TYPE_NUMBERS[kind.name], end))
            end += -(-kind.num_bytes(entry.shape) // alignment) * alignment
        most = _commonest([kind.name for kind in kinds.values()])
        keys = bytes(source.metadata_bytes)
        if most in FILE_TYPES:
            keys = _with_number(keys, FILE_TYPE_KEY, struct.pack("<II", U32, FILE_TYPES[most]))
        keys = _with_number(keys, PARTS_KEY, struct.pack("<IH", U16, 1)) + metadata_bytes(new)
        counts = struct.pack("<IQQ", 3, len(entries), len(source.metadata) + len(new))
        header = MAGIC + counts + keys + b"".join(entries)
        self._data = -(-len(header) // alignment) * alignment
        if not keeps:
            reserve(path, self._data + end)
            write_at(path, 0, np.frombuffer(header, np.uint8))

    def write(self, name: str, data: NDArray, *, matrix: int = 0) -> None:
        """Writes the bytes of a tensor, or of one of the matrices stacked in it, at its offset."""
        write_at(self._path, self._data + self._starts[name] + matrix * data.nbytes, data)


def tensor_entry(name: str, shape: tuple[int, ...], number: int, start: int) -> bytes:
    """Returns a tensor's entry in the directory; `number` is the number of its type."""
    text = name.encode()
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return struct.pack("<Q", len(text)) + text + sizes + struct.pack("<IQ", number, start)


def _commonest(names: list[str]) -> str:
    return max(sorted(set(names)), key=names.count, default="")


def _with_number(keys: bytes, key: bytes, number: bytes) -> bytes:
    """Replaces the number of a key in the metadata, if it exists with the same type; `number`
    starts with the type.
    """
    name = struct.pack("<Q", len(key)) + key
    offset = keys.find(name + number[:4])
    if offset < 0:
        return keys
    value = offset + len(name)
    return keys[:value] + number + keys[value + len(number) :]
