"""Block tables: the device blocks of each request, in the order of its tokens, for each cache
group.

Each change is made in all groups or in none. The group's spec
(`octavo/engine/protocol/kv_cache_spec.py`) decides how many blocks a table has and which are freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from octavo.engine.kv.block_pool import HOLE, BlockPool
from octavo.engine.protocol.kv_cache_spec import Extent, blocks_for
from octavo.engine.protocol.kv_messages import BlockMove

FREE = attrgetter("free")
ReusedBlocks = list[list[int | None]]
"""First entries of a table in each group: existing blocks, holes, and None for blocks to allocate.
"""


@dataclass(frozen=True, slots=True)
class BlockAllocation:
    """Changes of a request's tables for its next tokens."""

    new_block_ids: list[list[int]] = field(default_factory=list)
    """Appended block ids by group; [] if there are none."""
    replaced: list[tuple[int, int, int]] = field(default_factory=list)
    """Entries that changed: (group, index in the table, new block id)."""
    moves: list[BlockMove] = field(default_factory=list)
    """Copy-on-write of shared blocks."""


NO_ALLOCATION = BlockAllocation()


@dataclass(frozen=True, slots=True)
class LeafBlocks:
    """Blocks of a draft tree's paths, except the first path."""

    entries: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """Entries of each path that differ from the request's table: (group, index, block id)."""
    moves: list[BlockMove] = field(default_factory=list)
    """Copies of the request's tokens into the first block of each path."""


NO_LEAVES = LeafBlocks()


class BlockTables:
    """The block tables of all requests on the device, by request id."""

    def __init__(self, pools: Sequence[BlockPool], block_size: int) -> None:
        self.pools = pools
        self.block_size = block_size
        self.tables: dict[str, list[list[int]]] = {}
        """Block ids by request and group."""
        self._leaves: dict[str, LeafBlocks] = {}
        """Blocks of the draft trees in flight, by request."""
        self._reserved: set[str] = set()
        """Requests whose tables may be longer than their tokens need."""
        specs = [pool.spec for pool in pools]
        self._growing = [index for index, spec in enumerate(specs) if spec.grows]
        self._rewritten = [index for index, spec in enumerate(specs) if spec.is_rewritten]
        self._releasing = [index for index, spec in enumerate(specs) if not spec.keeps_every_token]
        self._allows_forks = all(spec.allows_forks for spec in specs)
        self.can_branch = not self._rewritten and self._allows_forks
        """Whether drafts may be trees: no group has a single block for all tokens of a request."""
        self._outlive_steps = all(spec.outlives_step or not spec.grows for spec in specs)

    def create_tables(
        self,
        request_id: str,
        reused: ReusedBlocks,
        extent: Extent,
        reserve: int,
        *,
        excluded: Sequence[int] = (),
    ) -> bool:
        """Creates a request's tables from reused and new blocks. Returns False and changes nothing
        if fewer than `reserve` blocks would stay free.

        `excluded`: for each group a block that must not be allocated, or a hole.
        """
        counts = []
        for pool, table in zip(self.pools, reused, strict=True):
            num_blocks = max(len(table), pool.spec.blocks_at_start(extent, self.block_size))
            spare = reserve + bool(excluded) if pool.spec.grows else 0
            if not pool.has_room(table, num_blocks, spare):
                return False
            counts.append(num_blocks)
        # Excluded blocks may be free, and `fill` allocates free blocks.
        for pool, block_id in zip(self.pools, excluded, strict=False):
            pool.hold_all([block_id])
        self.tables[request_id] = tables = []
        for pool, table, num_blocks in zip(self.pools, reused, counts, strict=True):
            tables.append(pool.fill(table, num_blocks))
        for pool, block_id in zip(self.pools, excluded, strict=False):
            pool.release_all([block_id])
        return True

    def get_reusable_tables(self, request_id: str, num_tokens: int) -> list[list[int]]:
        """Returns the part of a request's tables that the token after the first `num_tokens` tokens
        reads; entries that it does not read are holes.
        """
        size = self.block_size
        tables = []
        for pool, table in zip(self.pools, self.tables[request_id], strict=True):
            written = table[: pool.spec.blocks_written(num_tokens, len(table), size)]
            unread = min(pool.spec.first_read(num_tokens, size), len(written))
            tables.append([HOLE] * unread + written[unread:])
        return tables

    def can_fork(self, parent_id: str, num_tokens: int) -> bool:
        """Returns whether another row can share the parent's first `num_tokens` tokens: the parent
        must still have every block that the next token reads.
        """
        if parent_id not in self.tables or not self._allows_forks:
            return False
        return all(
            HOLE not in table[pool.spec.first_read(num_tokens, self.block_size) :]
            for pool, table in zip(
                self.pools, self.get_reusable_tables(parent_id, num_tokens), strict=True
            )
        )

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Shares the parent's blocks of the first `num_tokens` tokens with the child."""
        shared = self.get_reusable_tables(parent_id, num_tokens)
        for pool, table in zip(self.pools, shared, strict=True):
            pool.hold_all(table)
        self.tables[child_id] = shared

    def grow(self, request_id: str, first_token: int, end: int) -> BlockAllocation | None:
        """Allocates blocks for the tokens from `first_token` up to `end`: appends blocks, and
        copies a shared block before it is written. Returns None and changes nothing if too few
        blocks are free.
        """
        tables = self.tables[request_id]
        index, num_blocks = first_token // self.block_size, blocks_for(end, self.block_size)
        for group in self._rewritten:
            if self.pools[group].is_shared(tables[group][0]):
                return self._extend(tables, index, num_blocks)
        for group in self._growing:
            table = tables[group]
            if (
                len(table) < num_blocks
                or HOLE in (table[num_blocks - 1], table[index])
                or self.pools[group].is_shared(table[index])
            ):
                return self._extend(tables, index, num_blocks)
        return NO_ALLOCATION

    def reserve(self, ends: Mapping[str, int]) -> dict[str, list[list[int]]] | None:
        """Extends tables up to `ends`, for several decode steps or for draft tokens of requests
        that have just grown. Returns the appended blocks of the requests that needed any.

        Returns None and changes nothing if too few blocks are free for all requests, or if blocks
        are released at the end of each step.
        """
        if not self._outlive_steps:
            return None
        missing: dict[str, list[int]] = {}
        num_free = list(map(len, map(FREE, self.pools)))
        for request_id, end in ends.items():
            counts = self._missing(self.tables[request_id], blocks_for(end, self.block_size))
            if any(counts):
                missing[request_id] = counts
                for group, count in enumerate(counts):
                    num_free[group] -= count
        if min(num_free) < 0:
            return None
        added = {}
        for request_id, counts in missing.items():
            self._reserved.add(request_id)
            added[request_id] = self._append(self.tables[request_id], counts)
        return added

    def cut(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Releases the reserved blocks after a request's first `num_tokens` tokens. Returns the
        remaining number of blocks of each table, None if no block was released.
        """
        if request_id not in self._reserved:
            return None
        self._reserved.discard(request_id)
        tables, num_blocks = self.tables[request_id], blocks_for(num_tokens, self.block_size)
        is_cut = False
        for group in self._growing:
            table = tables[group]
            if len(table) > num_blocks:
                is_cut = True
                self.pools[group].release_all(table[num_blocks:])
                del table[num_blocks:]
        return list(map(len, tables)) if is_cut else None

    def branch(self, request_id: str, start: int, ends: Sequence[int]) -> LeafBlocks | None:
        """Allocates blocks for the paths of a draft tree, from token `start` (the first one that
        the step writes) up to each path's end in `ends`. The request's own tables extend to the
        largest of `ends`.

        Returns None and changes nothing if too few blocks are free.
        """
        size = self.block_size
        first = start // size
        counts = [blocks_for(end, size) - first for end in ends]
        if any(len(self.pools[group].free) < sum(counts) for group in self._growing):
            return None
        leaves = LeafBlocks([[] for _ in ends])
        tables = self.tables[request_id]
        for entries, count in zip(leaves.entries, counts, strict=True):
            for group in self._growing:
                pool, table = self.pools[group], tables[group]
                entries += [
                    (group, index, pool.allocate()) for index in range(first, first + count)
                ]
                if start % size and table[first] != HOLE:
                    leaves.moves.append(BlockMove(group, table[first], entries[-count][2]))
        self._leaves[request_id] = leaves
        return leaves

    def keep_path(self, request_id: str, path: int) -> None:
        """Puts the blocks of the accepted path of a request's draft tree into its tables and
        releases those of the other paths. Path 0 is already in the tables.
        """
        leaves = self._leaves.pop(request_id, NO_LEAVES)
        tables = self.tables[request_id]
        for at, entries in enumerate(leaves.entries, start=1):
            for group, index, block_id in entries:
                left = block_id
                if at == path:
                    left, tables[group][index] = tables[group][index], block_id
                self.pools[group].release_all([left])

    def release_unread(self, request_id: str, num_computed_tokens: int, *, in_flight: bool) -> None:
        """Releases the blocks that later tokens do not read.

        `in_flight`: another step of the request is being computed.
        """
        for group in self._releasing:
            self.pools[group].release_unread(
                self.tables[request_id][group],
                num_computed_tokens,
                self.block_size,
                in_flight=in_flight,
            )

    def release(self, request_id: str) -> None:
        """Releases all of a request's blocks; does nothing if it has none."""
        if request_id in self._leaves:
            self.keep_path(request_id, 0)
        self._reserved.discard(request_id)
        for pool, table in zip(self.pools, self.tables.pop(request_id, []), strict=False):
            pool.release_all(table)

    def _missing(self, tables: Sequence[Sequence[int]], num_blocks: int) -> list[int]:
        """Returns for each table how many blocks it lacks to have `num_blocks`."""
        counts = [0] * len(tables)
        for group in self._growing:
            counts[group] = max(0, num_blocks - len(tables[group]))
        return counts

    def _append(self, tables: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
        added = []
        for pool, table, count in zip(self.pools, tables, counts, strict=True):
            block_ids: list[int] = []
            for _ in range(count):
                block_ids.append(pool.allocate())
            table += block_ids
            added.append(block_ids)
        return added

    def _extend(
        self, tables: list[list[int]], index: int, num_blocks: int
    ) -> BlockAllocation | None:
        missing = self._missing(tables, num_blocks)
        replaced = [
            self._to_replace(group, table, index, num_blocks) for group, table in enumerate(tables)
        ]
        if any(
            len(pool.free) < count + len(entries)
            for pool, count, entries in zip(self.pools, missing, replaced, strict=True)
        ):
            return None
        allocation = BlockAllocation()
        for group, entries in enumerate(replaced):
            for entry in entries:
                self._replace(group, tables[group], entry, allocation)
        allocation.new_block_ids.extend(self._append(tables, missing))
        return allocation

    def _to_replace(self, group: int, table: list[int], index: int, num_blocks: int) -> list[int]:
        """Returns the entries that need another block before they are written: a shared block, and
        holes.

        Only the first written block can be shared: a fork shares the blocks up to its first
        uncomputed token, and a prefix cache hit consists of full blocks. A recurrent state that
        others hold or that is cached is copied; if no block is free for the copy, the state is
        removed from the prefix cache.
        """
        pool = self.pools[group]
        if pool.spec.is_rewritten:
            is_kept = pool.is_shared(table[0]) and not pool.uncache_to_write(table[0])
            return [0] if is_kept else []
        if not pool.spec.grows:
            return []
        end = min(num_blocks, len(table))
        return [
            entry
            for entry in range(index, end)
            if table[entry] == HOLE or (entry == index and pool.is_shared(table[entry]))
        ]

    def _replace(self, group: int, table: list[int], index: int, grant: BlockAllocation) -> None:
        pool, source = self.pools[group], table[index]
        target = table[index] = pool.allocate()
        if source != HOLE:
            pool.release(source)
            grant.moves.append(BlockMove(group, source, target))
        grant.replaced.append((group, index, target))
