"""Host blocks of swapped requests: their ids, per cache group, and which device block each is to hold.

Knows no bytes: the CacheEngine owns them and moves them as the BlockMoves say. A request's blocks are here all together or not at
all; what its rows share on the device they share here. The host never has more blocks of a group than the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from octavo.engine.block_pool import HOLE, BlockGroup
from octavo.step import BlockMove


class HostBlocks:
    """By request id. A hole in a device table stays a hole."""

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        self.num_blocks = [min(group.num_host_blocks, group.num_blocks) for group in groups]
        self.tables: dict[str, list[list[int]]] = {}
        self._free = [list(range(count - 1, -1, -1)) for count in self.num_blocks]
        self._ref_counts: list[Counter[int]] = [Counter() for _ in groups]

    @property
    def num_used_blocks(self) -> int:
        """Of all groups together."""
        return sum(self.num_blocks) - sum(map(len, self._free))

    def put(self, tables: Mapping[str, Sequence[Sequence[int]]]) -> list[BlockMove] | None:
        """Moves out of the device; None, and nothing changed, where the host has no room for all of them."""
        moved = [
            dict.fromkeys(block_id for rows in tables.values() for block_id in _blocks(rows[group])) for group in range(len(self._free))
        ]
        if any(len(free) < len(blocks) for free, blocks in zip(self._free, moved, strict=True)):
            return None
        places = [{block_id: free.pop() for block_id in blocks} for free, blocks in zip(self._free, moved, strict=True)]
        for request_id, rows in tables.items():
            self.tables[request_id] = [
                [HOLE if block_id == HOLE else place[block_id] for block_id in table] for place, table in zip(places, rows, strict=True)
            ]
            for counts, table in zip(self._ref_counts, self.tables[request_id], strict=True):
                counts.update(_blocks(table))
        return [BlockMove(group, *pair, "swap_out") for group, place in enumerate(places) for pair in place.items()]

    def drop(self, request_id: str) -> None:
        for free, counts, table in zip(self._free, self._ref_counts, self.tables.pop(request_id, []), strict=False):
            for block_id in _blocks(table):
                counts[block_id] -= 1
                if not counts[block_id]:
                    del counts[block_id]
                    free.append(block_id)


def _blocks(table: Sequence[int]) -> list[int]:
    return [block_id for block_id in table if block_id != HOLE]
