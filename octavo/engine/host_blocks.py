"""Host blocks of swapped requests: their ids, per cache group, and which device block each is to hold.

Knows no bytes: the CacheEngine owns them and moves them as the BlockMoves say. A request's blocks are here all together or not at
all. The host never has more blocks of a group than the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.block_pool import HOLE, BlockGroup
from octavo.step import BlockMove


class HostBlocks:
    """By request id. A hole in a device table stays a hole."""

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        self.num_blocks = [min(group.num_host_blocks, group.num_blocks) for group in groups]
        self.tables: dict[str, list[list[int]]] = {}
        self._free = [list(range(count - 1, -1, -1)) for count in self.num_blocks]

    @property
    def num_used_blocks(self) -> int:
        """Of all groups together."""
        return sum(self.num_blocks) - sum(map(len, self._free))

    def put(self, request_id: str, tables: Sequence[Sequence[int]]) -> list[BlockMove] | None:
        """Moves out of the device; None, and nothing changed, where the host has no room for all of them."""
        needed = [len(table) - table.count(HOLE) for table in tables]
        if any(len(free) < count for free, count in zip(self._free, needed, strict=True)):
            return None
        moves: list[BlockMove] = []
        for group, (free, table) in enumerate(zip(self._free, tables, strict=True)):
            moves += [BlockMove(group, block_id, free[-1 - i], "swap_out") for i, block_id in enumerate(_blocks(table))]
        self.tables[request_id] = [
            [HOLE if block_id == HOLE else free.pop() for block_id in table] for free, table in zip(self._free, tables, strict=True)
        ]
        return moves

    def take(self, request_id: str, tables: Sequence[Sequence[int]], missing: Sequence[Sequence[int]]) -> list[BlockMove]:
        """Moves into the `missing` entries of the device's tables; the host's blocks are free again."""
        moves = [
            BlockMove(group, self.tables[request_id][group][index], tables[group][index], "swap_in")
            for group, indices in enumerate(missing)
            for index in indices
        ]
        self.drop(request_id)
        return moves

    def drop(self, request_id: str) -> None:
        for free, table in zip(self._free, self.tables.pop(request_id, []), strict=False):
            free.extend(_blocks(table))


def _blocks(table: Sequence[int]) -> list[int]:
    return [block_id for block_id in table if block_id != HOLE]
