"""Reads GGUF files: metadata, tensor directory, and tensors as memory-mapped packed weights.

gguf-py needs more than a second for a header with a vocabulary of 50,000 tokens; this reader needs
milliseconds. Model families are in `gguf_families.py`, block formats in `quant/gguf.py`. Source:
ggml's `docs/gguf.md`, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch, shown
from octavo.checkpoint.model_file import PART_NAME
from octavo.checkpoint.placeholder import refuse_placeholder
from octavo.quant.blocks import StoredWeight
from octavo.quant.gguf import BLOCK_TYPES, BlockType

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
VERSIONS = (2, 3)
KEYS_START = 24
"""Bytes of the magic, the version and the two counts."""

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype] = {
    number: np.dtype(name)
    for number, name in {
        0: "u1",
        1: "i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in the directory: `shape` with the inputs last, `start` in bytes from the start of
    the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    start: int
    part: int = 0
    """Index of the file that contains it, for split models."""

    @property
    def num_bytes(self) -> int:
        return self.kind.num_bytes(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened file.

    Values in `metadata` are numbers, bools and texts; arrays of numbers are NumPy views, arrays of
    texts are lists of bytes.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    mapped: mmap.mmap
    directory_start: int
    """Offset of the first byte after the metadata."""
    parts: tuple[GgufFile, ...] = ()
    """All files of a split model, this one first; empty for a single file."""

    @property
    def metadata_bytes(self) -> NDArray[np.uint8]:
        """Bytes of the metadata's keys and values, memory-mapped."""
        return self.data[KEYS_START : self.directory_start]

    @property
    def data(self) -> NDArray[np.uint8]:
        """Bytes of the complete file, memory-mapped."""
        return np.frombuffer(self.mapped, np.uint8)

    @property
    def files(self) -> tuple[GgufFile, ...]:
        """All files of the model."""
        return self.parts or (self,)

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Returns a tensor's bytes, memory-mapped."""
        entry = self.tensors[name]
        return self.files[entry.part].data[entry.start : entry.start + entry.num_bytes]

    def tensor(self, name: str, matrix: int | None = None) -> StoredWeight:
        """Returns a tensor, or one of the matrices stacked in it."""
        entry = self.tensors[name]
        shape = entry.shape if matrix is None else entry.shape[1:]
        num_bytes = entry.kind.num_bytes(shape)
        start = (matrix or 0) * num_bytes
        return entry.kind.tensor(self.tensor_bytes(name)[start : start + num_bytes], shape)


def read_gguf(path: Path) -> GgufFile:
    """Reads a header and checks that every tensor lies within the file; reads no weights."""
    size = path.stat().st_size
    if size < 24:
        raise _corrupt(path, f"it has {size} bytes, a GGUF header has at least 24")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _HeaderReader(path, mapped)
    try:
        metadata, tensors, directory_start = reader.header()
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise _corrupt(
            path, f"its header is truncated or damaged near byte {reader.offset:,} of {size:,}"
        ) from error
    return GgufFile(path, metadata, tensors, mapped, directory_start)


def header_bytes(path: Path) -> int:
    """Returns the length of the header, even if the tensors are missing."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _HeaderReader(path, mapped)
    try:
        reader.header()
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise _corrupt(path, "its header is truncated") from error
    return reader.offset


def read_gguf_model(path: Path) -> GgufFile:
    """Reads the header of a single-file or split model; `path` may be any part.

    Raises WeightMismatch if a part is missing or belongs to another model.
    """
    file = read_gguf(path)
    count = file.metadata.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return file
    parts = [read_gguf(part) for part in _part_paths(path, count)]
    tensors: dict[str, TensorEntry] = {}
    for number, part in enumerate(parts):
        own = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if own != (number, count):
            raise WeightMismatch(
                f"{part.path}: is labelled part {own[0]} of {own[1]}, expected {number} of {count}"
            )
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise WeightMismatch(f"{part.path}: {twice[0]} is already in an earlier part")
        tensors |= {name: replace(entry, part=number) for name, entry in part.tensors.items()}
    num_expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if num_expected != len(tensors):
        raise WeightMismatch(
            f"{path}: its {count} parts hold {len(tensors)} tensors, expected {num_expected}"
        )
    return replace(parts[0], tensors=tensors, parts=tuple(parts))


def _part_paths(path: Path, count: int) -> list[Path]:
    """Returns the paths of a split model's parts."""
    named = PART_NAME.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise WeightMismatch(
            f"{path}: the model has {count} parts, expected file names that end in"
            f" -00001-of-{count:05}.gguf and so on",
            hint="restore the original file names",
        )
    names = [f"{named['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    paths = [path.with_name(name) for name in names]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise WeightMismatch(
            f"{path.parent}: missing parts of the model: {', '.join(missing[:4])}"
            f" ({len(missing)} of {count})",
            hint="download all parts into the same directory",
        )
    return paths


def _corrupt(path: Path, what: str) -> WeightMismatch:
    return WeightMismatch(
        f"{path}: not a valid GGUF file: {what}",
        hint="download the file again; it may be truncated",
    )


class _HeaderReader:
    """Sequential reader of a header; reading past the end raises struct.error or IndexError."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.offset = 0

    def header(self) -> tuple[dict[str, Any], dict[str, TensorEntry], int]:
        if self.buffer[:4] != MAGIC:
            refuse_placeholder(self.path)
            raise WeightMismatch(
                f"{self.path}: not a GGUF file: it starts with {self.buffer[:4]!r}, not with"
                f" {MAGIC!r}",
                hint="the file may be incomplete; download it again",
            )
        self.offset = 4
        version = self._u32()
        if version.to_bytes(4, "little") in (each.to_bytes(4, "big") for each in VERSIONS):
            raise UnsupportedModel(
                f"{self.path}: got a big-endian GGUF file, expected a little-endian one",
                hint="convert it with llama.cpp's gguf_convert_endian.py",
            )
        if version not in VERSIONS:
            raise UnsupportedModel(
                f"{self.path}: GGUF version {version}, expected 2 or 3 (little-endian)"
            )
        num_tensors, num_keys = self._u64(), self._u64()
        metadata = {}
        for _ in range(num_keys):
            key = self._text()
            if key in metadata:
                raise _corrupt(self.path, f"the key {shown(key)} occurs twice in its header")
            metadata[key] = self._value(self._u32())
        directory_start = self.offset
        entries = [self._entry() for _ in range(num_tensors)]
        return metadata, self._place_tensors(entries, self._alignment(metadata)), directory_start

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & alignment - 1:
            raise _corrupt(
                self.path,
                f"general.alignment is {alignment!r}, expected a power of two of at least 8",
            )
        return alignment

    def _place_tensors(self, entries: list[TensorEntry], alignment: int) -> dict[str, TensorEntry]:
        """Returns the entries with absolute offsets; raises if one lies outside the file."""
        data_start = -(-self.offset // alignment) * alignment
        size = len(self.buffer)
        placed = {}
        for entry in entries:
            if entry.name in placed:
                raise _corrupt(self.path, f"{shown(entry.name)} occurs twice in its directory")
            start = data_start + entry.start
            if start + entry.num_bytes > size:
                raise WeightMismatch(
                    f"{self.path}: truncated: {entry.name} should be at bytes {start:,} to"
                    f" {start + entry.num_bytes:,}, the file has {size:,}",
                    hint="download the file again",
                )
            placed[entry.name] = TensorEntry(entry.name, entry.shape, entry.kind, start)
        return placed

    def _entry(self) -> TensorEntry:
        """Reads a directory entry; its start is relative to the data section."""
        name = self._text()
        num_dimensions = self._u32()
        if num_dimensions > MAX_DIMENSIONS:
            raise _corrupt(
                self.path,
                f"{name} has {num_dimensions} dimensions, expected up to {MAX_DIMENSIONS}",
            )
        shape = tuple(reversed([self._u64() for _ in range(num_dimensions)])) or (1,)
        number, start = self._u32(), self._u64()
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            known = ", ".join(known.name for known in BLOCK_TYPES.values())
            raise UnsupportedModel(
                f"{self.path}: {name} has tensor type {_type_name(number)}, supported: {known}",
                hint="use a file with another quantization, such as Q4_K_M or Q8_0",
            )
        if shape[-1] % kind.block_size:
            raise _corrupt(
                self.path,
                f"{name} has rows of {shape[-1]}, {kind.name} needs a multiple of"
                f" {kind.block_size}",
            )
        return TensorEntry(name, shape, kind, start)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._u32(), self._u64())
        dtype = self._scalar(kind)
        return _plain(self._numbers(dtype, 1)[0])

    def _array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array(self._u32(), self._u64()) for _ in range(count)]
        return self._numbers(self._scalar(kind), count)

    def _scalar(self, kind: int) -> np.dtype:
        if kind not in _SCALARS:
            raise _corrupt(self.path, f"unknown metadata type {kind} near byte {self.offset:,}")
        return _SCALARS[kind]

    def _numbers(self, dtype: np.dtype, count: int) -> NDArray:
        start = self.offset
        self._skip(count * dtype.itemsize)
        return np.frombuffer(self.buffer, dtype, count, start)

    def _strings(self, count: int) -> list[bytes]:
        """Reads an array of texts as bytes: decoding 100,000 tokens would slow down readers of
        weights.
        """
        buffer, offset, unpack = self.buffer, self.offset, _U64.unpack_from
        texts: list[bytes] = []
        append = texts.append
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(buffer, offset)[0]
            append(buffer[start:offset])
        self.offset = offset
        self._skip(0)
        return texts

    def _text(self) -> str:
        length = self._u64()
        start = self.offset
        self._skip(length)
        return self.buffer[start : self.offset].decode()

    def _skip(self, length: int) -> None:
        if self.offset + length > len(self.buffer):
            raise IndexError
        self.offset += length

    def _u32(self) -> int:
        return self._unpack(_U32)

    def _u64(self) -> int:
        return self._unpack(_U64)

    def _unpack(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self.buffer, self.offset)[0]
        self.offset += form.size
        return value


def _plain(value: Any) -> Any:
    """Returns a Python number; a float32 as its shortest decimal (1e-05, not
    9.999999747378752e-06).
    """
    return float(str(value)) if isinstance(value, np.float32) else value.item()


def _type_name(number: int) -> str:
    return f"{number} ({GGML_TYPE_NAMES[number]})" if number in GGML_TYPE_NAMES else str(number)


GGML_TYPE_NAMES = {
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    41: "Q1_0",
}
"""Names of unsupported types."""
