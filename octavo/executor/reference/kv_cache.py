"""The reference backend's KV cache: plain arrays of all layers, rounded to the layout's dtype.

Rounds to fp8 and int8 codes, with which kernels are compared (4 bits: `kv_codes.py`).
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.executor.kv import BLOCK_SIZE, STATES_A_BLOCK, BlockRows, HeadRows, KvLayout
from octavo.executor.reference.kv_codes import as_int4
from octavo.executor.reference.step import Floats, GroupArrays, as_is
from octavo.program.program import CacheGroup

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python's mmap module lacks before 3.13. The value is the same on all
supported processors.
"""
KV_TYPES: dict[str, np.dtype] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.float32),
    "k8v4": np.dtype(np.float32),
    "int4": np.dtype(np.float32),
    "fp8": np.dtype(np.float32),
}
"""Array dtype by name in a layout. Codes times scales are exact in fp32, also rotated back, so
caches of codes are stored dequantized."""

E4M3_MAX = np.float32(448)
"""Largest finite e4m3 value."""


def as_int8(numbers: Floats) -> Floats:
    """Rounds to an int8 cache's values: codes times the scale of their token and head.

    scale = absmax / 127 in bf16, code = round(x / scale); in fp32, like the kernels.
    """
    x, scale = _scale(numbers, np.float32(127))
    codes = np.where(scale > 0, np.clip(np.rint(x / scale), -127, 127), 0)
    stored: Floats = (codes * scale).astype(np.float64)
    return stored


def as_fp8(numbers: Floats) -> Floats:
    """Rounds to an fp8 cache's values: e4m3 codes times the scale of their token and head.

    scale = absmax / 448 in bf16, code = x / scale rounded to even.
    """
    x, scale = _scale(numbers, E4M3_MAX)
    codes = np.where(scale > 0, np.clip(x / scale, -E4M3_MAX, E4M3_MAX), 0)
    rounded = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    stored: Floats = (rounded * scale).astype(np.float64)
    return stored


def _scale(
    numbers: Floats, largest_code: np.float32
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the values in fp32 and a scale per row of the last axis; NaN if the row is not
    finite.
    """
    x = numbers.astype(np.float32)
    absmax = abs(x).max(axis=-1, keepdims=True, initial=0)
    scale = np.where(np.isfinite(absmax), absmax / largest_code, np.nan)
    return x, scale.astype(ml_dtypes.bfloat16).astype(np.float32)


AS_STORED = {
    "int8": (as_int8, as_int8),
    "k8v4": (as_int8, as_int4),
    "int4": (as_int4, as_int4),
    "fp8": (as_fp8, as_fp8),
}
"""Rounding of keys and of values by name in a layout."""


def make_kv_layout(group: CacheGroup, dtype: str = "fp64") -> KvLayout:
    """Returns the layout of a group stored as one of `KV_TYPES`; convolution rows and states use
    fp32 or better.
    """
    if group.kind in ("conv", "state") and dtype != "fp64":
        dtype = "fp32"
    if group.kind == "state":
        shapes = _shapes(group, 1)
        size = KV_TYPES[dtype].itemsize
        pieces = (size * math.prod(shapes[0][1:]), size * shapes[1][-1])
        rows = [HeadRows(group.num_layers, piece) for piece in pieces]
        return KvLayout(group, dtype, pieces, tuple(rows))
    size = KV_TYPES[dtype].itemsize
    head_bytes = (size * group.k_width, size * group.v_width)
    num_rows, heads = BLOCK_SIZE * group.num_layers, BLOCK_SIZE * group.num_kv_heads
    k, v = (heads * num_bytes for num_bytes in head_bytes)
    rows = [HeadRows(num_rows, num_bytes) for num_bytes in head_bytes]
    return KvLayout(group, dtype, (k, v), tuple(rows))


def block_rows(layout: KvLayout, blocks: NDArray[np.uint8]) -> BlockRows:
    """Returns the keys and values in `blocks [B, block_bytes]` of one layer, stored as floats."""
    group = layout.group
    assert group.num_layers == 1, "others are not asked for"
    split, shape = layout.pieces[0], (len(blocks), BLOCK_SIZE, group.num_kv_heads)
    k, v = (
        np.ascontiguousarray(part).view(KV_TYPES[layout.dtype]).astype(np.float32)
        for part in (blocks[:, :split], blocks[:, split:])
    )
    return BlockRows(k.reshape(*shape, group.k_width), v.reshape(*shape, group.v_width))


class ReferenceKvCache:
    """KV bytes of all groups. Implements `kv.OnDemandKvCache`."""

    def __init__(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> None:
        self._memory = [
            OnDemandArrays(_shapes(layout.group, count), KV_TYPES[layout.dtype])
            for layout, count in zip(layouts, num_blocks, strict=True)
        ]
        self.groups = [
            GroupArrays(k, v, *AS_STORED.get(layout.dtype, (as_is, as_is)))
            for (k, v), layout in zip(
                (memory.arrays for memory in self._memory), layouts, strict=True
            )
        ]

    def copy_block(self, group: int, source: int, target: int) -> None:
        for array in (self.groups[group].k, self.groups[group].v):
            array[:, target] = array[:, source]

    def read_block(self, group: int, block_id: int, into: NDArray[np.uint8]) -> None:
        k, v = self.groups[group].k[:, block_id], self.groups[group].v[:, block_id]
        into[: k.nbytes] = np.ascontiguousarray(k).reshape(-1).view(np.uint8)
        into[k.nbytes :] = np.ascontiguousarray(v).reshape(-1).view(np.uint8)

    def write_block(self, group: int, block_id: int, data: NDArray[np.uint8]) -> None:
        arrays = self.groups[group]
        k, v = arrays.k[:, block_id], arrays.v[:, block_id]
        k[...] = data[: k.nbytes].view(k.dtype).reshape(k.shape)
        v[...] = data[k.nbytes :].view(v.dtype).reshape(v.shape)

    def give_back(self, group: int, first_block: int, num_blocks: int) -> None:
        self._memory[group].give_back(first_block, num_blocks)

    def spans(self, group: int) -> list[tuple[int, int]]:
        return [(array.ctypes.data, array.nbytes) for array in self._memory[group].arrays]


def _shapes(group: CacheGroup, num_blocks: int) -> list[tuple[int, ...]]:
    if group.kind == "state":
        counts = (group.num_layers, num_blocks, STATES_A_BLOCK)
        return [(*counts, group.num_kv_heads, group.k_width, group.v_width), counts]
    shape = (group.num_layers, num_blocks, BLOCK_SIZE, group.num_kv_heads)
    return [(*shape, group.k_width), (*shape, group.v_width)]


class OnDemandArrays:
    """Zero arrays `[layers, blocks, ...]`, one per shape."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> None:
        """Reserves addresses; raises MemoryError if the system cannot."""
        self._maps = [_map(math.prod(shape) * dtype.itemsize) for shape in shapes]
        self.arrays: list[NDArray[Any]] = [
            np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)
            for memory, shape in zip(self._maps, shapes, strict=True)
        ]

    def give_back(self, first_block: int, num_blocks: int) -> None:
        """Releases the complete pages of these blocks, in every array and layer."""
        for memory, array in zip(self._maps, self.arrays, strict=True):
            for layer in range(len(array)):
                begin = layer * array.strides[0] + first_block * array.strides[1]
                first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (begin + num_blocks * array.strides[1]) // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    memory.madvise(mmap.MADV_DONTNEED, first, end - first)


def _map(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(
            -1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        )
    except OSError as error:
        raise MemoryError(str(error)) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
