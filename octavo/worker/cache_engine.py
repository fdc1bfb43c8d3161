"""Moves whole KV blocks as a plan says: on the device, to host memory and back, to a connector's slots and back.

Owns the KV bytes of a worker, on the device and swapped; those in slots are the connector's. Only kernels look inside them, and only
the BlockManager says which block is whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import KvCache
from octavo.ports import ConnectorWorker
from octavo.step import BlockMove
from octavo.worker.block_places import BlockPlaces, PagedPlaces


@dataclass(frozen=True, slots=True)
class HostShape:
    """Of one cache group's blocks in host memory."""

    num_blocks: int
    block_bytes: int


class CacheEngine:
    """`host`: per group, for swapped requests; memory that is never written costs nothing. `places`: where a block of `kv` lies."""

    def __init__(
        self,
        kv: KvCache,
        host: Sequence[HostShape] = (),
        connector: ConnectorWorker | None = None,
        places: BlockPlaces | None = None,
    ) -> None:
        self.kv = kv
        self.connector = connector
        self.places: BlockPlaces = places or PagedPlaces()
        self._host = [np.empty((shape.num_blocks, shape.block_bytes), np.uint8) for shape in host]
        """Per group `[blocks, bytes of a block in every layer]`"""

    def apply(self, moves: Sequence[BlockMove]) -> None:
        """In the plan's order, before the step computes."""
        find = self.places.find
        for move in moves:
            if move.kind == "copy":
                self.kv.copy_block(move.group, find(move.group, move.source), find(move.group, move.target))
            elif move.kind in ("swap_out", "save"):
                self.kv.read_block(move.group, find(move.group, move.source), self._off_device(move, move.target))
            else:
                self.kv.write_block(move.group, find(move.group, move.target), self._off_device(move, move.source))

    def _off_device(self, move: BlockMove, index: int) -> NDArray[np.uint8]:
        """`[block_bytes]`"""
        if move.kind in ("swap_out", "swap_in"):
            host: NDArray[np.uint8] = self._host[move.group][index]
            return host
        assert self.connector is not None, "without a connector nothing is saved"
        slot: NDArray[np.uint8] = self.connector.slot(move.group, index)
        return slot
