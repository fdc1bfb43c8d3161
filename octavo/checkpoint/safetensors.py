"""Hugging Face directories: config, tokenizer files, and safetensors (one file or shards) as
mapped, zero-copy tensors; fp8 ones with their scales.

Reads the header itself, because NumPy's side of the safetensors package has no bfloat16. Knows
nothing of model families. Source of the format: the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.json_file import read_json, read_json_if_there
from octavo.checkpoint.sentence_modules import with_pooling
from octavo.errors import UnsupportedModel, WeightMismatch
from octavo.ports import StoredTensor, TokenizerSource
from octavo.quant.fp8 import FP8, SCALE_SUFFIXES, Fp8Scheme, fp8_scheme, fp8_weight
from octavo.quant.packed import PackedWeight

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    FP8: np.dtype(ml_dtypes.float8_e4m3fn),
}

INDEX = "model.safetensors.index.json"

BASE_PREFIXES = ("model.", "transformer.")
"""Prefixes that base models are saved without."""

WRAPPER_PREFIXES = ("language_model.", "model.language_model.")
"""Prefixes under which models of text and images keep their text half."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor's place: `start` in bytes from its file's beginning."""

    file: Path
    buffer: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsCheckpoint:
    """A directory with config.json and `*.safetensors`. Implements `ports.Checkpoint`."""

    output_major = False
    has_config_file = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = with_pooling(read_json(path / "config.json"), path)
        self.generation_config: dict[str, Any] = read_json_if_there(path / "generation_config.json")
        self._fp8: Fp8Scheme | None = fp8_scheme(self.config)
        self._entries: dict[str, _Entry] = {}
        self.weight_files: Sequence[Path] = _weight_files(path)
        for file in self.weight_files:
            self._entries |= _read_header(file)
        self._check_index()

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def format_of(self, name: str) -> str:
        dtype = self._find(name)[1].dtype
        return self._fp8.format_name if dtype == FP8 and self._fp8 is not None else dtype

    def tensor(self, name: str) -> PackedWeight:
        """Returns a view into the mapped file."""
        found, entry = self._find(name)
        array = _array(entry, found)
        return self._fp8_weight(array, found) if entry.dtype == FP8 else PackedWeight.plain(array)

    def stored(self, name: str) -> StoredTensor:
        found, entry = self._find(name)
        return StoredTensor(found, entry.shape, entry.file)

    def release(self) -> None:
        for buffer in {id(entry.buffer): entry.buffer for entry in self._entries.values()}.values():
            buffer.madvise(mmap.MADV_DONTNEED)

    def _fp8_weight(self, codes: NDArray, name: str) -> PackedWeight:
        scales = next(
            (name + suffix for suffix in SCALE_SUFFIXES if name + suffix in self._entries), None
        )
        if self._fp8 is None or scales is None:
            missing = (
                "config.json has no quantization_config"
                if self._fp8 is None
                else "no scales stand beside it"
            )
            raise WeightMismatch(f"{self.path}: {name} is stored as {FP8}, but {missing}")
        return fp8_weight(codes, _array(self._entries[scales], scales), self._fp8, name)

    def tokenizer_source(self) -> TokenizerSource | None:
        return tokenizer_source(self.path, self.config, self.generation_config)

    def _find(self, name: str) -> tuple[str, _Entry]:
        """Finds a tensor by its name, or by its name in a base model or inside a wrapper; returns
        that name and its place.
        """
        bare = next(
            (name.removeprefix(prefix) for prefix in BASE_PREFIXES if name.startswith(prefix)), name
        )
        candidates = [
            name,
            bare,
            *(prefix + part for prefix in WRAPPER_PREFIXES for part in (name, bare)),
        ]
        found = next((candidate for candidate in candidates if candidate in self._entries), None)
        if found is None:
            raise WeightMismatch(
                f"{self.path}: the tensor {name} is missing",
                hint=f"the files hold {len(self._entries)} tensors",
            )
        return found, self._entries[found]

    def _check_index(self) -> None:
        """Checks that each tensor of the index stands in its shard."""
        index = self.path / INDEX
        if not index.exists():
            return
        missing = [name for name in read_json(index)["weight_map"] if name not in self._entries]
        if missing:
            raise WeightMismatch(
                f"{index}: {len(missing)} tensors are in no shard, the first is {missing[0]}"
            )


def _array(entry: _Entry, name: str) -> NDArray:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise UnsupportedModel(
            f"{entry.file}: {name} has dtype {entry.dtype}, supported are {', '.join(DTYPES)}"
        )
    found: NDArray = np.frombuffer(entry.buffer, dtype, math.prod(entry.shape), entry.start)
    return found.reshape(entry.shape)


def _weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files of a directory; raises where one is missing."""
    index = path / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(name, str) for name in weight_map.values())
        ):
            raise WeightMismatch(f"{index}: has no weight_map from tensors to files")
        files = [path / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise WeightMismatch(
                f"{path}: missing shards: {', '.join(missing)} ({len(missing)} of {len(files)})"
            )
        return files
    single = path / "model.safetensors"
    files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightMismatch(
            f"{path}: no *.safetensors file",
            hint="pickled checkpoints (*.bin) must be saved anew as safetensors",
        )
    return files


def _read_header(path: Path) -> dict[str, _Entry]:
    """Reads a header: 8 bytes of length, then JSON of name -> dtype, shape, data_offsets."""
    size = path.stat().st_size
    if size < 8:
        raise _corrupt(path, f"it has {size} bytes")
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    length = int.from_bytes(buffer[:8], "little")
    if length > size - 8:
        raise _corrupt(path, f"its header should have {length:,} bytes, the file has {size:,}")
    try:
        header = json.loads(buffer[8 : 8 + length])
        header.pop("__metadata__", None)
        entries = {
            name: _entry(path, buffer, 8 + length, fields) for name, fields in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(path, "its header is damaged") from error
    for name, entry in entries.items():
        _check_place(entry, name, size)
    return entries


def _entry(path: Path, buffer: mmap.mmap, data_start: int, fields: dict[str, Any]) -> _Entry:
    begin, end = _whole_numbers(fields["data_offsets"])
    return _Entry(
        path,
        buffer,
        str(fields["dtype"]),
        _whole_numbers(fields["shape"]),
        data_start + begin,
        end - begin,
    )


def _whole_numbers(values: Any) -> tuple[int, ...]:
    """Returns a list of whole numbers from 0 up; raises ValueError for anything else."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} are no whole numbers")
    return tuple(values)


def _check_place(entry: _Entry, name: str, size: int) -> None:
    """Checks that a tensor lies inside the file and has the bytes that its shape needs."""
    num_bytes = entry.num_bytes
    if num_bytes < 0 or entry.start + num_bytes > size:
        raise _corrupt(
            entry.file,
            f"{name} should end at byte {entry.start + num_bytes:,}, the file has {size:,}",
        )
    dtype = DTYPES.get(entry.dtype)
    if dtype is not None and num_bytes != math.prod(entry.shape) * dtype.itemsize:
        raise _corrupt(
            entry.file,
            f"{name} has {num_bytes:,} bytes, {entry.dtype} of shape {entry.shape} needs another"
            " number",
        )


def _corrupt(path: Path, what: str) -> WeightMismatch:
    return WeightMismatch(
        f"{path}: not a sound safetensors file: {what}",
        hint="download the file again; it may be truncated",
    )
