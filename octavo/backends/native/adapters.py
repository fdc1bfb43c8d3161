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
        """Returns A, B, scale, gain and bias as `Executor.put_adapter` takes them."""
        a = update.a if site in self._tables else _padded(update.a, 1)
        return (
            _bits(a),
            _bits(_tiles(update.b)),
            update.scale,
            None if update.gain is None else _padded(update.gain, 0),
            None if update.bias is None else _padded(update.bias, 0),
        )


def _tiles(b: NDArray) -> NDArray:
    """Returns B `[out, r]` as tiles `[out / 16, r, 16]`."""
    padded = _padded(b, 0)
    return padded.reshape(len(padded) // TILE, TILE, -1).transpose(0, 2, 1)


def _padded(array: NDArray, axis: int) -> NDArray:
    """Returns the array with zeros on an axis up to a multiple of 16."""
    missing = -array.shape[axis] % TILE
    if not missing:
        return np.ascontiguousarray(array)
    widths = [(0, missing if at == axis else 0) for at in range(array.ndim)]
    return np.ascontiguousarray(np.pad(array, widths))


def _bits(array: NDArray) -> NDArray:
    """Returns bfloat16, which the exchange of arrays does not know, as uint16."""
    whole = np.ascontiguousarray(array)
    return whole.view(np.uint16) if whole.dtype.itemsize == 2 else whole
