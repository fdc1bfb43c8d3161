"""Moves whole KV blocks as a plan says: on the device, to host memory and back.

Owns the KV bytes of a worker, on the device and swapped. Only kernels look inside them, and only the BlockManager says which block is
whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.backends.base import KvCache
from octavo.step import BlockMove


@dataclass(frozen=True, slots=True)
class HostShape:
    """Of one cache group's blocks in host memory."""

    num_blocks: int
    block_bytes: int


class CacheEngine:
    """`host`: per group, for swapped requests; memory that is never written costs nothing."""

    def __init__(self, kv: KvCache, host: Sequence[HostShape] = ()) -> None:
        self.kv = kv
        self._host = [np.empty((shape.num_blocks, shape.block_bytes), np.uint8) for shape in host]
        """Per group `[blocks, bytes of a block in every layer]`"""

    def apply(self, moves: Sequence[BlockMove]) -> None:
        """In the plan's order, before the step computes."""
        for move in moves:
            if move.kind == "copy":
                self.kv.copy_block(move.group, move.source, move.target)
            elif move.kind == "swap_out":
                self.kv.read_block(move.group, move.source, self._host[move.group][move.target])
            else:
                self.kv.write_block(move.group, move.target, self._host[move.group][move.source])
