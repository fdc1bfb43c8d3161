"""Moves whole KV blocks as a plan says.

Owns the KV bytes of a worker. Only kernels look inside them, and only the BlockManager says which block is whose.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.backends.base import KvCache
from octavo.step import BlockMove


class CacheEngine:
    def __init__(self, kv: KvCache) -> None:
        self.kv = kv

    def apply(self, moves: Sequence[BlockMove]) -> None:
        """In the plan's order, before the step computes."""
        for move in moves:
            self.kv.copy_block(move.group, move.source, move.target)
