"""Adapters in the native kernels' layout, and the slots of one runner.

Owns the arrays of each slot; which site is which the lowering says. A matrix is laid out by its own
rank, whatever others have (csrc/runtime/adapters.h).
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
"""Outputs of a tile, and lanes of a vector (csrc/simd/simd.h)."""
PAIR = 2 * TILE
LINE_BYTES = 64
LARGE_PAGE_BYTES = 2 << 20


class NativeAdapters:
    """The adapters that a runner's rows may have, by slot."""

    def __init__(self, runner: Any, sites: Sequence[Site], tables: set[Site]) -> None:
        self._runner = runner
        self._sites = sites
        self._tables = tables
        self._bytes: dict[int, int] = {}

    def pack(self, updates: Updates) -> PackedAdapter:
        """Lays an adapter out for the kernels; may be called in any thread."""
        arrays = {
            site: self._arrays(site, updates[site])
            for site in dict.fromkeys(self._sites)
            if site in updates
        }
        given = [each for some in arrays.values() for each in some if each is not None]
        copies = iter(_side_by_side(given))
        packed = {
            site: tuple(None if each is None else next(copies) for each in some)
            for site, some in arrays.items()
        }
        num_bytes = sum(each.nbytes for each in given)
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
        """Returns A, B, scales, gain and bias as `StepRunner.put_adapter` takes them."""
        a = _bits(update.a) if site in self._tables else _pairs(_padded(update.a, 1, PAIR))
        return [
            a,
            _tiles(_bits(update.b)),
            update.scales.astype(np.float32),
            None if update.gain is None else _padded(update.gain, 0, TILE),
            None if update.bias is None else _padded(update.bias, 0, TILE),
        ]


def _tiles(b: NDArray) -> NDArray:
    """Returns B `[out, r]` in tiles of 16 outputs, `[out / 16, r, 16]`, and pairs of these rows."""
    padded = _padded(_padded(b, 0, TILE), 1, 2)
    num_tiles, rank = len(padded) // TILE, padded.shape[1]
    tiles = padded.reshape(num_tiles, TILE, rank).transpose(0, 2, 1)
    return _pairs(tiles.reshape(num_tiles, rank * TILE)).reshape(tiles.shape)


def _pairs(rows: NDArray) -> NDArray:
    """Returns rows of pairs of 16 numbers as the kernels load them: both of 16 bits in one vector,
    the first of a pair in the low half of each 32 bits.
    """
    bits = _bits(rows)
    if bits.itemsize != 2:
        return bits
    pairs = bits.reshape(len(bits), bits.shape[1] // PAIR, 2, TILE).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(pairs).reshape(bits.shape)


def _side_by_side(arrays: Sequence[NDArray]) -> list[NDArray]:
    """Copies arrays into one piece of memory, each at a cache line, in the order in which a step
    reads them. A step reads adapters whole, and a core waits for the table of pages where they lie
    in small ones.
    """
    sizes = (-(-each.nbytes // LINE_BYTES) * LINE_BYTES for each in arrays)
    starts = list(accumulate(sizes, initial=0))
    memory = _in_large_pages(starts.pop())
    found = []
    for array, start in zip(arrays, starts, strict=True):
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[:] = array
        found.append(copy)
    return found


def _in_large_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Returns memory that starts with a large page. What would not fill the last one lies in small
    pages, so that it takes no more memory than it has bytes.
    """
    memory = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % LARGE_PAGE_BYTES
    large_bytes = num_bytes // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if large_bytes and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, large_bytes)
    return whole[start : start + num_bytes]


def _padded(array: NDArray, axis: int, size: int) -> NDArray:
    """Returns the array with zeros on an axis up to a multiple of `size`."""
    missing = -array.shape[axis] % size
    if not missing:
        return np.ascontiguousarray(array)
    widths = [(0, missing if at == axis else 0) for at in range(array.ndim)]
    return np.ascontiguousarray(np.pad(array, widths))


def _bits(array: NDArray) -> NDArray:
    """Returns bfloat16, which the exchange of arrays does not know, as uint16."""
    whole = np.ascontiguousarray(array)
    return whole.view(np.uint16) if whole.dtype.itemsize == 2 else whole
