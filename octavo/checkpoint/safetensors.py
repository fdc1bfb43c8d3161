"""Hugging Face directories: config, tokenizer files, and safetensors (one file or shards) as
memory-mapped tensors, including quantized ones.

Parses the header itself, because the NumPy interface of the safetensors package has no bfloat16.
Source: the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.clip_bounds import CLIP_BOUNDS, read_clip_bounds
from octavo.checkpoint.formats.format import Described, QuantizedFormat, prefix_errors
from octavo.checkpoint.formats.table import quantized_format, with_quantization
from octavo.checkpoint.fused_experts import FusedPart, fused_parts, newer_names
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.json_file import read_json, read_json_if_there
from octavo.checkpoint.nested_config import with_text_config
from octavo.checkpoint.pickled import PICKLE_INDEX, find_pickled_files, no_weights, read_pickled
from octavo.checkpoint.placeholder import refuse_placeholder
from octavo.checkpoint.ports import StoredTensor, TokenizerSource
from octavo.checkpoint.sentence_modules import dense_folders, with_colbert, with_pooling
from octavo.checkpoint.tied_head import OWN_HEAD, has_own_head, other_names
from octavo.quant.fp8 import FP8
from octavo.quant.packed import PackedWeight

logger = logging.getLogger(__name__)

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CONVERTED: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""Types of unquantized tensors that are converted to the model's dtype, as in transformers."""
PART_DTYPES: dict[str, np.dtype] = DTYPES | {
    FP8: np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""Types of the tensors of quantized matrices."""
OTHER_BYTES = {"F64": 8, "BOOL": 1, "I16": 2, "U16": 2, "U32": 4, "U64": 8}
"""Bytes per number of further types."""
INTEGERS = frozenset({"I16", "I32", "I64", "U16", "U32", "U64", "BOOL"})
"""Types of tensors that are buffers, such as position_ids, and are not read."""

INDEX = "model.safetensors.index.json"

ENCODER_PREFIXES = (
    *("albert.", "bert.", "deberta.", "distilbert.", "electra.", "gte.", "mpnet.", "new."),
    *("nomic_bert.", "roberta."),
)
"""Prefixes of encoders. Whether a checkpoint has them may differ from its `architectures`: the
published all-mpnet-base-v2 names a head, but was saved without one."""

BASE_PREFIXES = ("model.", "transformer.", "backbone.", "gpt_neox.", *ENCODER_PREFIXES)
"""Prefixes omitted in checkpoints of base models."""

WRAPPER_PREFIXES = ("language_model.", "model.language_model.", "model.text_model.")
"""Prefixes of the text model in multimodal models."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Location of a tensor: `start` in bytes from the start of its file."""

    file: Path
    buffer: mmap.mmap | bytes | memoryview
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    num_stacked: int = 0
    """Number of experts in the tensor that this is a part of."""
    converted: str | None = None
    """Type to convert to when reading."""

    @property
    def format_name(self) -> str:
        return self.converted or self.dtype

    def array(self, name: str) -> NDArray:
        """Returns the numbers, a view of the file unless they are converted. Conversions go through
        float32, as in PyTorch.
        """
        if self.converted is None:
            return _array(self, name)
        numbers = _array(self, name, CONVERTED).astype(np.float32)
        return numbers.astype(DTYPES[self.converted], copy=False)

    def weight(self, name: str) -> PackedWeight:
        return PackedWeight.plain(self.array(name))

    def part(self, part: FusedPart) -> _Entry | None:
        """Returns the location of an expert's matrix; None if the tensor does not contain it."""
        rows = part.rows(self.shape)
        if rows is None:
            return None
        first, count = rows
        num_bytes = self.num_bytes // (self.shape[0] * self.shape[1])
        return replace(
            self,
            shape=(count, self.shape[2]),
            start=self.start + first * num_bytes,
            num_bytes=count * num_bytes,
            num_stacked=self.shape[0],
        )


class _Quantized:
    """A quantized matrix, stored as several tensors of its module."""

    num_stacked = 0

    def __init__(self, module: str, read: QuantizedFormat, entries: Mapping[str, _Entry]) -> None:
        self._module = module
        self._format = read
        self._entries = entries
        self.file = next(iter(entries.values())).file

    @cached_property
    def described(self) -> Described:
        tensors = self._tensors
        with prefix_errors(self._files):
            return self._format.describe(self._module, tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.described.shape

    @property
    def format_name(self) -> str:
        return self.described.format_name

    def weight(self, name: str) -> PackedWeight:
        tensors = self._tensors
        with prefix_errors(self._files):
            return self._format.weight(self._module, tensors)

    @property
    def _files(self) -> str:
        """Names of the files with the module's tensors, which may be in several shards."""
        return ", ".join(sorted({str(entry.file) for entry in self._entries.values()}))

    @property
    def _tensors(self) -> dict[str, NDArray]:
        joint = self._format.joint
        return {
            rest: _array(entry, f"{self._module}{joint}{rest}", PART_DTYPES)
            for rest, entry in self._entries.items()
        }


class SafetensorsCheckpoint:
    """A directory with config.json and `*.safetensors`. Implements `ports.Checkpoint`."""

    output_major = False
    has_config_file = True

    def __init__(self, path: Path) -> None:
        self.path = path
        config = with_text_config(read_json(path / "config.json"))
        self.config: dict[str, Any] = with_pooling(with_quantization(config, path), path)
        self.generation_config: dict[str, Any] = read_json_if_there(path / "generation_config.json")
        with prefix_errors(path):
            quantized = quantized_format(self.config)
        self.is_quantized = quantized is not None
        """Whether the files hold a quantized format, described by config.json."""
        self.weight_files: Sequence[Path] = _weight_files(path)
        entries: dict[str, _Entry] = {}
        for file in self.weight_files:
            entries |= _read_file(file)
        for place in dense_folders(self.config, path):
            entries |= _read_module(place, place.relative_to(path).as_posix())
        self._buffers = {id(entry.buffer): entry.buffer for entry in entries.values()}
        linear = entries.get("linear.weight")
        self.config = with_colbert(self.config, linear.shape if linear else None)
        self._check_index(entries)
        entries = self._with_conversions(entries)
        with prefix_errors(path):
            self._entries = entries if quantized is None else _by_matrix(entries, quantized)
        if self.config.get("tie_word_embeddings") is not False and has_own_head(self._plain):
            self.config[OWN_HEAD] = True
        if bounds := read_clip_bounds(self._entries, self._plain):
            self.config[CLIP_BOUNDS] = bounds

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def get_format(self, name: str) -> str:
        return self._find(name)[1].format_name

    def tensor(self, name: str) -> PackedWeight:
        """Returns a view of the mapped file, or a copy for codes stored in another order."""
        stored_name, entry = self._find(name)
        if entry.format_name == FP8 and isinstance(entry, _Entry):
            missing = (
                "has no scales" if self.is_quantized else "config.json has no quantization_config"
            )
            raise WeightMismatch(f"{self.path}: {stored_name} is stored as {FP8}, but {missing}")
        return entry.weight(stored_name)

    def stored(self, name: str) -> StoredTensor:
        stored_name, entry = self._find(name)
        is_quantized = isinstance(entry, _Quantized)
        return StoredTensor(stored_name, entry.shape, entry.file, entry.num_stacked, is_quantized)

    def release(self) -> None:
        for buffer in self._buffers.values():
            if isinstance(buffer, mmap.mmap):
                buffer.madvise(mmap.MADV_DONTNEED)

    def tokenizer_source(self) -> TokenizerSource | None:
        return tokenizer_source(self.path, self.config, self.generation_config)

    def _find(self, name: str) -> tuple[str, _Entry | _Quantized]:
        """Returns the stored name and the location of a tensor: under its own name, a newer name,
        or in a fused tensor of experts.
        """
        for each in (name, *newer_names(name)):
            stored_name = self._stored_name(each)
            if stored_name is not None:
                return stored_name, self._entries[stored_name]
        for part in fused_parts(name):
            stored_name = self._stored_name(part.tensor)
            whole = self._entries[stored_name] if stored_name else None
            entry = whole.part(part) if isinstance(whole, _Entry) else None
            if stored_name and entry:
                return stored_name, entry
        if self.config.get("tie_word_embeddings") is not False:
            for each in other_names(name):
                stored_name = self._stored_name(each)
                if stored_name is not None:
                    return stored_name, self._entries[stored_name]
        raise WeightMismatch(
            f"{self.path}: the tensor {name} is missing",
            hint=f"the files hold {len(self._entries)} tensors",
        )

    def _plain(self, name: str) -> NDArray | None:
        """Returns a matrix in fp32, fp16 or bf16; None if there is no such matrix."""
        stored_name = self._stored_name(name)
        entry = self._entries[stored_name] if stored_name else None
        if not stored_name or not isinstance(entry, _Entry) or entry.format_name not in DTYPES:
            return None
        return entry.array(stored_name)

    def _stored_name(self, name: str) -> str | None:
        """Returns a tensor's name in this checkpoint, which may add or omit prefixes; None if it is
        missing.
        """
        bare = next(
            (name.removeprefix(prefix) for prefix in BASE_PREFIXES if name.startswith(prefix)), name
        )
        candidates = [
            name,
            bare,
            *(prefix + part for prefix in WRAPPER_PREFIXES for part in (name, bare)),
            *(prefix + bare for prefix in ENCODER_PREFIXES),
        ]
        candidates += [f"model.{each}" for each in (name, tower_name(name))] + [tower_name(name)]
        return next((candidate for candidate in candidates if candidate in self._entries), None)

    def _with_conversions(self, entries: dict[str, _Entry]) -> dict[str, _Entry]:
        """Sets the type that tensors are converted to, the model's dtype. Integers of a quantized
        model are codes and are not converted.
        """
        named = str(self.config.get("dtype") or self.config.get("torch_dtype") or "")
        kind = {"bfloat16": "BF16", "float16": "F16"}.get(named.removeprefix("torch."), "F32")
        allowed = {"F64"} if self.is_quantized else CONVERTED.keys()
        return {
            name: replace(entry, converted=kind) if entry.dtype in allowed else entry
            for name, entry in entries.items()
        }

    def _check_index(self, entries: Mapping[str, _Entry]) -> None:
        """Warns about tensors in the index that are missing in the shards; reading such a tensor
        later raises an error.
        """
        indices = [self.path / name for name in (INDEX, PICKLE_INDEX)]
        index = next((each for each in indices if each.exists()), None)
        if index is None:
            return
        missing = [name for name in read_json(index)["weight_map"] if name not in entries]
        if missing:
            logger.warning(
                "%s: %d tensors are missing from all shards, the first is %s",
                index,
                len(missing),
                missing[0],
            )


def tower_name(name: str) -> str:
    """Returns a vision tower's tensor name for checkpoints with a nested `vision_model`."""
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def read_tensors(file: Path) -> dict[str, NDArray]:
    """Reads all tensors of a file into memory, independent of later changes to the file."""
    return {name: _array(entry, name) for name, entry in _read_header(file, mapped=False).items()}


def read_mapped(file: Path) -> dict[str, NDArray]:
    """Returns all tensors of a file, as views of the mapped file."""
    return {name: _array(entry, name) for name, entry in _read_header(file).items()}


def read_integers(file: Path, name: str) -> NDArray[np.int64]:
    """Reads a tensor of integers."""
    allowed = {kind: PART_DTYPES[kind] for kind in ("I32", "I64")}
    return _array(_read_header(file, mapped=False)[name], name, allowed).astype(np.int64)


def _by_matrix(
    entries: Mapping[str, _Entry], quantized: QuantizedFormat
) -> dict[str, _Entry | _Quantized]:
    """Replaces the tensors of each quantized module by one matrix, "...weight"."""
    locations: dict[str, _Entry | _Quantized] = dict(entries)
    for module, rests in quantized.parts(entries.keys()).items():
        parts = {rest: entries[f"{module}{quantized.joint}{rest}"] for rest in rests}
        for rest in rests:
            del locations[f"{module}{quantized.joint}{rest}"]
        locations[f"{module}{quantized.matrix}"] = _Quantized(module, quantized, parts)
    return locations


def _array(
    entry: _Entry, name: str, allowed: Mapping[str, np.dtype] = MappingProxyType(DTYPES)
) -> NDArray:
    dtype = allowed.get(entry.dtype)
    if dtype is None:
        raise UnsupportedModel(
            f"{entry.file}: {name} has dtype {entry.dtype}, supported:"
            f" {', '.join(dict.fromkeys([*allowed, *CONVERTED]))}"
        )
    array: NDArray = np.frombuffer(entry.buffer, dtype, math.prod(entry.shape), entry.start)
    return array.reshape(entry.shape)


def _weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files of a directory; raises if one is missing."""
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
                f"{path}: missing shards: {', '.join(missing)} ({len(missing)} of {len(files)})",
                hint="the download may be incomplete; run octavo pull again",
            )
        return files
    single = path / "model.safetensors"
    files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
    files = files or find_pickled_files(path)
    if not files:
        raise no_weights(f"{path}: no *.safetensors file", path)
    return files


def _read_file(file: Path) -> dict[str, _Entry]:
    """Returns the locations of a file's tensors."""
    if file.suffix != ".bin":
        return _read_header(file)
    refuse_placeholder(file)
    return {
        name: _Entry(file, data, dtype, shape, 0, len(data))
        for name, dtype, shape, data in read_pickled(file)
    }


def _read_module(folder: Path, name: str) -> dict[str, _Entry]:
    """Returns the locations of the tensors of a module in a folder of its own, under its name."""
    return {
        f"{name}.{tensor}": entry
        for file in _weight_files(folder)
        for tensor, entry in _read_file(file).items()
    }


def _read_header(path: Path, *, mapped: bool = True) -> dict[str, _Entry]:
    """Reads a header: 8 bytes of length, then JSON of name -> dtype, shape, data_offsets."""
    refuse_placeholder(path)
    size = path.stat().st_size
    if size < 8:
        raise _corrupt(path, f"it has {size} bytes")
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if mapped else file.read()
    size = len(buffer)
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
    if sum(entry.num_bytes for entry in entries.values()) > size - 8 - length:
        raise _corrupt(path, "its tensors overlap")
    return entries


def _entry(
    path: Path, buffer: mmap.mmap | bytes, data_start: int, fields: dict[str, Any]
) -> _Entry:
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
    """Returns a list of non-negative integers as a tuple; raises ValueError for anything else."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} are not integers")
    return tuple(values)


def _check_place(entry: _Entry, name: str, size: int) -> None:
    """Checks that a tensor lies within the file and has as many bytes as its shape needs."""
    num_bytes = entry.num_bytes
    if num_bytes < 0 or entry.start + num_bytes > size:
        raise _corrupt(
            entry.file,
            f"{name} should end at byte {entry.start + num_bytes:,}, the file has {size:,}",
        )
    dtype = PART_DTYPES.get(entry.dtype)
    size_of_one = OTHER_BYTES.get(entry.dtype, 0) if dtype is None else dtype.itemsize
    if size_of_one and num_bytes != math.prod(entry.shape) * size_of_one:
        raise _corrupt(
            entry.file,
            f"{name} has {num_bytes:,} bytes, {entry.dtype} of shape {entry.shape} needs another"
            " number",
        )


def _corrupt(path: Path, what: str) -> WeightMismatch:
    return WeightMismatch(
        f"{path}: not a valid safetensors file: {what}",
        hint="download the file again; it may be truncated",
    )
