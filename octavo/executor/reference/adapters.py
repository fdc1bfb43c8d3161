"""Reference formulas of LoRA updates to matmul rows and table rows, in float64.

Each row is multiplied separately, so that no row's bits depend on another's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from octavo.executor.base import PackedAdapter
from octavo.program.low_rank import LowRank, Site, Updates

Floats = NDArray[np.float64]


class ReferenceAdapters:
    """Adapters of a Program by slot, in float64. Implements `base.AdapterSlots`."""

    def __init__(self) -> None:
        self.by_slot: dict[int, Updates] = {}

    def pack(self, updates: Updates) -> PackedAdapter:
        parts = {
            site: replace(update, a=update.a.astype(np.float64), b=update.b.astype(np.float64))
            for site, update in updates.items()
        }
        return PackedAdapter(sum(array.num_bytes for array in parts.values()), parts)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self.by_slot[slot] = adapter.parts

    def drop(self, slot: int) -> None:
        self.by_slot.pop(slot, None)

    @property
    def num_bytes(self) -> int:
        arrays = (low_rank for updates in self.by_slot.values() for low_rank in updates.values())
        return sum(low_rank.num_bytes for low_rank in arrays)


Shrink = Callable[[LowRank, int], Floats]
"""Computes h `[r]` of an update for a row."""


def updated(
    y: Floats, site: Site, slots: NDArray[np.int32], adapters: Mapping[int, Updates], shrink: Shrink
) -> Floats:
    """Applies to each row of y `[T, out]` the update of the adapter in its slot `[T]`; -1: none."""
    result = y.copy()
    for row in np.flatnonzero(slots >= 0):
        update = adapters[int(slots[row])].get(site)
        if update is not None:
            h = update.scales * shrink(update, int(row))
            result[row] = _finish(y[row] + update.b @ h, update)
    return result


def _finish(y: Floats, update: LowRank) -> Floats:
    if update.gain is not None:
        y = y * update.gain
    return y if update.bias is None else y + update.bias
