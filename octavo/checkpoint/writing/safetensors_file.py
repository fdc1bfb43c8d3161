"""Writes safetensors files tensor by tensor, in any order, without holding all of them in memory.

Names, types and shapes are known in advance, so the header is written and disk space reserved
first: a full disk is detected before anything is computed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError
from octavo.checkpoint.safetensors import INDEX, PART_DTYPES
from octavo.config.sizes import format_bytes

SHARD_BYTES = 5 << 30
ITEM_BYTES = {name: dtype.itemsize for name, dtype in PART_DTYPES.items()}
NAMES = {dtype: name for name, dtype in PART_DTYPES.items() if name != "F8_E8M0"}


class TensorSpec(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str
    """Type by safetensors' name."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class SafetensorsWriter:
    """Files in a directory that together contain the given tensors."""

    def __init__(self, folder: Path, specs: Sequence[TensorSpec], *, keeps: bool) -> None:
        """Creates the files, or with `keeps` opens the files of an earlier run with the same
        tensors.
        """
        shards = _shards(specs)
        self._locations: dict[str, tuple[Path, int, TensorSpec]] = {}
        for number, shard in enumerate(shards, 1):
            name = (
                "model.safetensors"
                if len(shards) == 1
                else f"model-{number:05}-of-{len(shards):05}.safetensors"
            )
            self._open(folder / name, shard, keeps=keeps)
        if len(shards) > 1:
            weight_map = {name: location[0].name for name, location in self._locations.items()}
            total = sum(spec.num_bytes for spec in specs)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=1))

    def write(self, name: str, array: NDArray) -> None:
        """Writes a tensor at its offset; its type and shape must match the spec."""
        path, start, spec = self._locations[name]
        assert array.shape == spec.shape and NAMES[array.dtype] == spec.dtype, (
            f"{name}: {array.dtype} {array.shape} for {spec}"
        )
        write_at(path, start, array)

    def _open(self, path: Path, specs: Sequence[TensorSpec], *, keeps: bool) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for spec in specs:
            end = start + spec.num_bytes
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        offset = 8 + len(text)
        for spec in specs:
            begin = header[spec.name]["data_offsets"][0]
            self._locations[spec.name] = (path, offset + begin, spec)
        if not keeps:
            reserve(path, offset + start)
            write_at(path, 0, np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))


def reserve(path: Path, num_bytes: int) -> None:
    """Creates a file with `num_bytes` bytes allocated on disk; raises ConfigError if there is no
    room.
    """
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            raise ConfigError(
                f"{path}: no room for {format_bytes(num_bytes)}: {error.strerror}",
                hint="choose a directory on another disk with --output",
            ) from None


def write_at(path: Path, start: int, array: NDArray) -> None:
    """Writes an array's bytes at an offset of a file."""
    with path.open("r+b") as file:
        file.seek(start)
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _shards(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if filled and filled + spec.num_bytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.num_bytes
    return shards
