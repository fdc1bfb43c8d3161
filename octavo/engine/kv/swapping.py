"""Host blocks of swapped requests: their ids by cache group, and the device blocks that they
replace.

Works on block ids; the CacheEngine owns the bytes and executes the BlockMoves. Either all blocks of
a request are swapped or none; blocks that its rows share on the device are shared in host memory.
The host never has more blocks of a group than the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from octavo.engine.kv.block_pool import HOLE, BlockGroup, BlockPool
from octavo.engine.protocol.kv_messages import BlockKey, BlockMove


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """One row's blocks of one group, in host memory."""

    host: Sequence[int]
    """Host block ids, and holes."""
    keys: Sequence[BlockKey]
    """Keys of its first blocks, up to the first block that is not hashed."""
    num_final: int
    """Number of its first blocks that no later token writes; rows may share these."""
    num_blocks: int
    """Length of its block table on the device."""


class SwapIn:
    """Swaps in the rows of a request, in one cache group."""

    def __init__(self, pool: BlockPool, rows: Sequence[SwappedTable], *, group: int) -> None:
        self.moves: list[BlockMove] = []
        """Copies from the host; set by `fill`."""
        self._pool = pool
        self._rows = rows
        self._group = group
        self._kept = [self._still_there(row) for row in rows]

    def has_room(self, reserve: int) -> bool:
        """Returns whether `reserve` blocks stay free when all rows are filled."""
        needed: list[int | None] = []
        shared: set[int] = set()
        for row, reused in zip(self._rows, self._kept, strict=True):
            for index, (host_id, block_id) in enumerate(zip(row.host, reused, strict=True)):
                if block_id is None and (index >= row.num_final or host_id not in shared):
                    needed.append(None)
                    shared.add(host_id)
        num_appended = sum(row.num_blocks - len(row.host) for row in self._rows)
        needed += self._present()
        spare = reserve if self._pool.spec.grows else 0
        return self._pool.has_room(needed, len(needed) + num_appended, spare)

    def fill(self) -> list[list[int]]:
        """Allocates the blocks; returns the rows' tables."""
        held = self._present()
        # Hold the blocks that are still on the device, so that they are not allocated for others.
        self._pool.hold_all(held)
        homes: dict[int, int] = {}
        tables = [
            self._fill_row(row, reused, homes)
            for row, reused in zip(self._rows, self._kept, strict=True)
        ]
        self._pool.release_all(held)
        return tables

    def _still_there(self, row: SwappedTable) -> list[int | None]:
        """Returns the device blocks that still have the row's hashes; holes stay holes, other
        entries are None.
        """
        find = self._pool.cache.find
        named = [
            HOLE if host_id == HOLE else find(key)
            for host_id, key in zip(row.host, row.keys, strict=False)
        ]
        return [*named, *(HOLE if host_id == HOLE else None for host_id in row.host[len(named) :])]

    def _present(self) -> list[int]:
        return list(
            dict.fromkeys(
                block_id
                for reused in self._kept
                for block_id in reused
                if block_id is not None and block_id != HOLE
            )
        )

    def _fill_row(
        self, row: SwappedTable, reused: Sequence[int | None], device_blocks: dict[int, int]
    ) -> list[int]:
        """Builds one row's table; `device_blocks` maps the full host blocks copied so far to device
        blocks.
        """
        blocks = [
            device_blocks.get(host_id) if block_id is None else block_id
            for host_id, block_id in zip(row.host, reused, strict=True)
        ]
        table = self._pool.fill(blocks, row.num_blocks)
        for index, host_id in enumerate(row.host):
            if blocks[index] is None:
                self.moves.append(BlockMove(self._group, host_id, table[index], "swap_in"))
                if index < row.num_final:
                    device_blocks[host_id] = table[index]
                if index < len(row.keys):
                    self._pool.cache.add(table[index], row.keys[index])
        return table


class HostBlocks:
    """Host blocks by group. A hole in a device table stays a hole."""

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        self.num_blocks = [min(group.num_host_blocks, group.num_blocks) for group in groups]
        """Blocks in host memory, by group."""
        self.tables: dict[str, list[list[int]]] = {}
        """Host block ids, by request and group."""
        self.free = [list(range(count - 1, -1, -1)) for count in self.num_blocks]
        """Free host blocks, by group."""
        self.ref_counts: list[Counter[int]] = [Counter() for _ in groups]
        """Reference counts of the held blocks, by group."""

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that requests hold, over all groups."""
        return sum(self.num_blocks) - sum(map(len, self.free))

    def num_blocks_of(self, request_ids: Iterable[str]) -> int:
        """Returns the total number of blocks of the requests in all groups; a shared block counts
        for each of them.
        """
        return sum(len(_blocks(table)) for name in request_ids for table in self.tables[name])

    def put(self, tables: Mapping[str, Sequence[Sequence[int]]]) -> list[BlockMove] | None:
        """Allocates host blocks for requests' device tables; returns the moves out of the device.
        Returns None and changes nothing if host memory has no room for all of them.
        """
        moved = [
            dict.fromkeys(block_id for rows in tables.values() for block_id in _blocks(rows[group]))
            for group in range(len(self.free))
        ]
        if any(len(free) < len(blocks) for free, blocks in zip(self.free, moved, strict=True)):
            return None
        host_maps = [
            {block_id: free.pop() for block_id in blocks}
            for free, blocks in zip(self.free, moved, strict=True)
        ]
        for request_id, rows in tables.items():
            self.tables[request_id] = [
                [HOLE if block_id == HOLE else host_map[block_id] for block_id in table]
                for host_map, table in zip(host_maps, rows, strict=True)
            ]
            for counts, table in zip(self.ref_counts, self.tables[request_id], strict=True):
                counts.update(_blocks(table))
        return [
            BlockMove(group, source, target, "swap_out")
            for group, host_map in enumerate(host_maps)
            for source, target in host_map.items()
        ]

    def drop(self, request_id: str) -> None:
        for free, counts, table in zip(
            self.free, self.ref_counts, self.tables.pop(request_id, []), strict=False
        ):
            for block_id in _blocks(table):
                counts[block_id] -= 1
                if not counts[block_id]:
                    del counts[block_id]
                    free.append(block_id)


def _blocks(table: Sequence[int]) -> list[int]:
    return [block_id for block_id in table if block_id != HOLE]
