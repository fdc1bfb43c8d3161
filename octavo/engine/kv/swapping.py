"""Host blocks of swapped requests: their ids, per cache group, and which device block each is to
hold.

Knows no bytes: the CacheEngine owns them and moves them as the BlockMoves say. A request's blocks
are here all together or not at all; what its rows share on the device they share here. The host
never has more blocks of a group than the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.engine.kv.block_pool import HOLE, BlockGroup, BlockPool
from octavo.step import BlockKey, BlockMove


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """One row's blocks in the host's memory."""

    host: Sequence[int]
    keys: Sequence[BlockKey]
    """Of its first blocks, those that have a name."""
    num_full: int
    """Blocks that will not be written any more, and may be shared."""
    num_blocks: int
    """That it is to have on the device."""


class SwapIn:
    """Of rows that return together. `moves` are there once it is filled."""

    def __init__(self, pool: BlockPool, rows: Sequence[SwappedTable], *, group: int) -> None:
        self.moves: list[BlockMove] = []
        self._pool = pool
        self._rows = rows
        self._group = group
        self._kept = [self._still_there(row) for row in rows]

    def _still_there(self, row: SwappedTable) -> list[int | None]:
        """Blocks that the device has under the same name, holes, and None."""
        find = self._pool.cache.find
        named = [
            HOLE if host_id == HOLE else find(key)
            for host_id, key in zip(row.host, row.keys, strict=False)
        ]
        return [*named, *(HOLE if host_id == HOLE else None for host_id in row.host[len(named) :])]

    def has_room(self, reserve: int) -> bool:
        """Whether `reserve` blocks stay free when all are filled."""
        needed: list[int | None] = []
        shared: set[int] = set()
        for row, kept in zip(self._rows, self._kept, strict=True):
            for index, (host_id, block_id) in enumerate(zip(row.host, kept, strict=True)):
                if block_id is None and (index >= row.num_full or host_id not in shared):
                    needed.append(None)
                    shared.add(host_id)
        num_appended = sum(row.num_blocks - len(row.host) for row in self._rows)
        needed += self._present()
        return self._pool.has_room(needed, len(needed) + num_appended, reserve)

    def fill(self) -> list[list[int]]:
        """The rows' tables."""
        held = self._present()
        self._pool.hold_all(held)
        homes: dict[int, int] = {}
        """Of the host's full blocks that are on the device by now."""
        tables = [
            self._fill_row(row, kept, homes)
            for row, kept in zip(self._rows, self._kept, strict=True)
        ]
        self._pool.release_all(held)
        return tables

    def _present(self) -> list[int]:
        return list(
            dict.fromkeys(
                block_id
                for kept in self._kept
                for block_id in kept
                if block_id is not None and block_id != HOLE
            )
        )

    def _fill_row(
        self, row: SwappedTable, kept: Sequence[int | None], homes: dict[int, int]
    ) -> list[int]:
        wanted = [
            homes.get(host_id) if block_id is None else block_id
            for host_id, block_id in zip(row.host, kept, strict=True)
        ]
        table = self._pool.fill(wanted, row.num_blocks)
        for index, host_id in enumerate(row.host):
            if wanted[index] is None:
                self.moves.append(BlockMove(self._group, host_id, table[index], "swap_in"))
                if index < row.num_full:
                    homes[host_id] = table[index]
                if index < len(row.keys):
                    self._pool.cache.add(table[index], row.keys[index])
        return table


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
        """Moves out of the device; None, and nothing changed, where the host has no room for all of
        them.
        """
        moved = [
            dict.fromkeys(block_id for rows in tables.values() for block_id in _blocks(rows[group]))
            for group in range(len(self._free))
        ]
        if any(len(free) < len(blocks) for free, blocks in zip(self._free, moved, strict=True)):
            return None
        places = [
            {block_id: free.pop() for block_id in blocks}
            for free, blocks in zip(self._free, moved, strict=True)
        ]
        for request_id, rows in tables.items():
            self.tables[request_id] = [
                [HOLE if block_id == HOLE else place[block_id] for block_id in table]
                for place, table in zip(places, rows, strict=True)
            ]
            for counts, table in zip(self._ref_counts, self.tables[request_id], strict=True):
                counts.update(_blocks(table))
        return [
            BlockMove(group, *pair, "swap_out")
            for group, place in enumerate(places)
            for pair in place.items()
        ]

    def drop(self, request_id: str) -> None:
        for free, counts, table in zip(
            self._free, self._ref_counts, self.tables.pop(request_id, []), strict=False
        ):
            for block_id in _blocks(table):
                counts[block_id] -= 1
                if not counts[block_id]:
                    del counts[block_id]
                    free.append(block_id)


def _blocks(table: Sequence[int]) -> list[int]:
    return [block_id for block_id in table if block_id != HOLE]
