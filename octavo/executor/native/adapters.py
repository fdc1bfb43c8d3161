"""LoRA adapters in the native kernels' layout, and the adapter slots of one runner.

The lowering assigns sites. A matrix is laid out by its own rank (csrc/runtime/adapters.h).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.base import PackedAdapter
from octavo.program.low_rank import LowRank, Site, Updates

TILE = 16
"""Outputs per tile; also lanes per vector (csrc/simd/simd.h)."""
PAIR = 2 * TILE
LINE_BYTES = 64
LARGE_PAGE_BYTES = 2 << 20


class NativeAdapters:
    """Adapters of a runner, by slot."""

    def __init__(self, runner: Any, sites: Sequence[Site], tables: set[Site]) -> None:
        self._runner = runner
        self._sites = sites
        self._tables = tables
        self._bytes: dict[int, int] = {}

    def pack(self, updates: Updates) -> PackedAdapter:
        """Converts an adapter to the kernels' layout. Thread-safe."""
        arrays = {
            site: self._arrays(site, updates[site])
            for site in dict.fromkeys(self._sites)
            if site in updates
        }
        present = [array for some in arrays.values() for array in some if array is not None]
        copies = iter(_side_by_side(present))
        packed = {
            site: tuple(None if array is None else next(copies) for array in some)
            for site, some in arrays.items()
        }
        num_bytes = sum(array.nbytes for array in present)
        return PackedAdapter(num_bytes, [packed.get(site) for site in self._sites])

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self._runner.put_adapter(slot, adapter.parts)
        self._bytes[slot] = adapter.num_bytes

    def drop(self, slot: int) -> None:
        self._runner.drop_adapter(slot)
        self._bytes.pop(slot, None)

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def _arrays(self, site: Site, update: LowRank) -> list[NDArray | None]:
        """Returns A, B, scales, gain and bias in the form of `StepRunner.put_adapter`."""
        a = _bits(update.a) if site in self._tables else _pairs(_pad(update.a, 1, PAIR))
        return [
            a,
            _tiles(_bits(update.b)),
            update.scales.astype(np.float32),
            None if update.gain is None else _pad(update.gain, 0, TILE),
            None if update.bias is None else _pad(update.bias, 0, TILE),
        ]


def _tiles(b: NDArray) -> NDArray:
    """Tiles B `[out, r]` into 16 outputs, `[out / 16, r, 16]`, with interleaved row pairs."""
    padded = _pad(_pad(b, 0, TILE), 1, 2)
    num_tiles, rank = len(padded) // TILE, padded.shape[1]
    tiles = padded.reshape(num_tiles, TILE, rank).transpose(0, 2, 1)
    return _pairs(tiles.reshape(num_tiles, rank * TILE)).reshape(tiles.shape)


def _pairs(rows: NDArray) -> NDArray:
    """Interleaves pairs of 16 numbers for 16-bit types.

    The first of a pair goes to the low half of each 32 bits, so that one vector load gets both.
    """
    bits = _bits(rows)
    if bits.itemsize != 2:
        return bits
    pairs = bits.reshape(len(bits), bits.shape[1] // PAIR, 2, TILE).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(pairs).reshape(bits.shape)


def _side_by_side(arrays: Sequence[NDArray]) -> list[NDArray]:
    """Copies arrays into one allocation, cache-line aligned, in the order in which a step reads
    them.

    A step reads adapters completely; with small pages, page table walks would dominate.
    """
    sizes = (-(-item.nbytes // LINE_BYTES) * LINE_BYTES for item in arrays)
    starts = list(accumulate(sizes, initial=0))
    memory = _in_large_pages(starts.pop())
    copies = []
    for array, start in zip(arrays, starts, strict=True):
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[:] = array
        copies.append(copy)
    return copies


def _in_large_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Allocates memory aligned to a large page.

    The remainder after the last full large page uses small pages, so no memory is wasted.
    """
    memory = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % LARGE_PAGE_BYTES
    large_bytes = num_bytes // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if large_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, large_bytes)
    return whole[start : start + num_bytes]


def _pad(array: NDArray, axis: int, size: int) -> NDArray:
    """Pads an axis with zeros to a multiple of `size`."""
    missing = -array.shape[axis] % size
    if not missing:
        return np.ascontiguousarray(array)
    widths = [(0, missing if dim == axis else 0) for dim in range(array.ndim)]
    return np.ascontiguousarray(np.pad(array, widths))


def _bits(array: NDArray) -> NDArray:
    """Views bfloat16 as uint16, because the bindings do not support bfloat16 arrays."""
    whole = np.ascontiguousarray(array)
    return whole.view(np.uint16) if whole.dtype.itemsize == 2 else whole
