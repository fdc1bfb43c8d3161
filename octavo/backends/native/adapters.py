"""Adapters in the native kernels' layout, and the slots of one executor.

Owns the arrays of each slot; which site is which the lowering says. A matrix is laid out by its own
rank, whatever others have (csrc/core/adapters.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import PackedAdapter
from octavo.program.low_rank import LowRank, Site, Updates

TILE = 16
"""Outputs of a tile, and lanes of a vector (csrc/kernels/simd.h)."""
PAIR = 2 * TILE
LINE_BYTES = 64


class NativeAdapters:
    """The adapters that an executor's rows may have, by slot."""

    def __init__(self, executor: Any, sites: Sequence[Site], tables: set[Site]) -> None:
        self._executor = executor
        self._sites = sites
        self._tables = tables
        self._bytes: dict[int, int] = {}

    def pack(self, updates: Updates) -> PackedAdapter:
        """Lays an adapter out for the kernels; may be called in any thread."""
        packed = [
            None if (update := updates.get(site)) is None else self._packed(site, update)
            for site in self._sites
        ]
        arrays = (array for each in packed if each is not None for array in each)
        num_bytes = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        return PackedAdapter(num_bytes, packed)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self._executor.put_adapter(slot, adapter.parts)
        self._bytes[slot] = adapter.num_bytes

    def drop(self, slot: int) -> None:
        self._executor.drop_adapter(slot)
        self._bytes.pop(slot, None)

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def _packed(self, site: Site, update: LowRank) -> tuple[Any, ...]:
        """Returns A, B, scale, gain, bias and rank as `Executor.put_adapter` takes them."""
        a = _bits(update.a) if site in self._tables else _pairs(_padded(update.a, 1, PAIR))
        return (
            a,
            _tiles(_bits(update.b)),
            update.scale,
            None if update.gain is None else _padded(update.gain, 0, TILE),
            None if update.bias is None else _padded(update.bias, 0, TILE),
            update.b.shape[1],
        )


def _tiles(b: NDArray) -> NDArray:
    """Returns B `[out, r]` in tiles of 16 outputs, `[out / 16, r, 16]`, and pairs of these rows."""
    padded = _padded(_padded(b, 0, TILE), 1, 2)
    num_tiles, rank = len(padded) // TILE, padded.shape[1]
    tiles = padded.reshape(num_tiles, TILE, rank).transpose(0, 2, 1)
    return _pairs(tiles.reshape(num_tiles, rank * TILE)).reshape(tiles.shape)


def _pairs(rows: NDArray) -> NDArray:
    """Returns rows of pairs of 16 numbers as the kernels load them, at a cache line: both of
    16 bits in one vector, the first of a pair in the low half of each 32 bits.
    """
    bits = _bits(rows)
    out = _aligned(bits.shape, bits.dtype)
    if bits.itemsize == 2:
        pairs = bits.reshape(len(bits), bits.shape[1] // PAIR, 2, TILE).transpose(0, 1, 3, 2)
        out.reshape(pairs.shape)[:] = pairs
    else:
        out[:] = bits
    return out


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    """Returns an array that starts with a cache line."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


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
