"""The KV blocks of one cache group: reference counts, the free queue, and the names under which
full blocks are found.

A block is free when nothing refers to it; free blocks without a name are taken first, then the
least recently used named ones. Knows no request: which table a block stands in is
`block_tables.py`'s business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.engine.kv.prefix_cache import PrefixCache
from octavo.engine.protocol.kv_cache_spec import GROWING, AnyKVCacheSpec
from octavo.engine.protocol.stats import GroupBlocks

HOLE = -1
"""Place of a block in a table that nothing reads any more, or that no step has written."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The size of one cache group, and how long its blocks live."""

    num_blocks: int
    """Blocks on the device."""
    spec: AnyKVCacheSpec = GROWING
    num_host_blocks: int = 0
    """Blocks in host memory, for swapped requests."""


class BlockPool:
    """The blocks of one group on the device."""

    def __init__(self, group: BlockGroup) -> None:
        self.spec = group.spec
        self.num_blocks = group.num_blocks
        self.ref_counts = [0] * group.num_blocks
        """References to each block from requests' tables."""
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(group.num_blocks))
        """Free blocks, the next one to be taken first."""
        self.cache = PrefixCache()
        """Names of the full blocks, held or free."""
        self._num_references = 0
        self._num_shared = 0

    def counts(self) -> GroupBlocks:
        """Returns how the blocks are used now."""
        return GroupBlocks(
            window=self.spec.window_tokens,
            num_blocks=self.num_blocks,
            num_held=self.num_blocks - len(self.free),
            num_shared=self._num_shared,
            num_references=self._num_references,
            num_named=len(self.cache),
        )

    def take(self) -> int:
        """Takes a free block for writing; its name, if it has one, is forgotten."""
        block_id, _ = self.free.popitem(last=False)
        self.cache.forget(block_id)
        self.ref_counts[block_id] = 1
        self._num_references += 1
        return block_id

    def is_shared(self, block_id: int) -> bool:
        """Says whether a block must not be written: others hold it, or may find it by its name."""
        return self.ref_counts[block_id] > 1 or block_id in self.cache

    def give_up_name(self, block_id: int) -> bool:
        """Forgets the name of a block that one table holds, so that it may be written, where no
        block is free for a copy; says whether that was done.
        """
        if self.free or self.ref_counts[block_id] > 1:
            return False
        self.cache.forget(block_id)
        return True

    def hold(self, block_id: int) -> None:
        """Adds a reference to a block."""
        if self.ref_counts[block_id] == 0:
            del self.free[block_id]
        self.ref_counts[block_id] += 1
        self._num_references += 1
        self._num_shared += self.ref_counts[block_id] == 2

    def release(self, block_id: int) -> None:
        """Drops a reference to a block; after the last one the block is free."""
        self.ref_counts[block_id] -= 1
        self._num_references -= 1
        self._num_shared -= self.ref_counts[block_id] == 1
        if self.ref_counts[block_id] == 0:
            self.free[block_id] = None
            if block_id not in self.cache:
                self.free.move_to_end(block_id, last=False)

    def hold_all(self, table: Iterable[int]) -> None:
        """Adds a reference to each block of a table."""
        for block_id in table:
            if block_id != HOLE:
                self.hold(block_id)

    def release_all(self, table: Sequence[int]) -> None:
        """Drops the references of a table, last block first: chains are evicted from their end."""
        for block_id in reversed(table):
            if block_id != HOLE:
                self.release(block_id)

    def has_room(self, kept: Sequence[int | None], num_blocks: int, reserve: int) -> bool:
        """Says whether `fill` can be done with `reserve` blocks left free."""
        num_idle = num_new = 0
        for block_id in kept:
            if block_id is None:
                num_new += 1
            elif block_id != HOLE and self.ref_counts[block_id] == 0:
                num_idle += 1
        return len(self.free) - num_idle >= num_new + max(0, num_blocks - len(kept)) + reserve

    def fill(self, kept: Sequence[int | None], num_blocks: int) -> list[int]:
        """Returns a table of `num_blocks`: the kept blocks held, new ones in place of each None
        among them and behind them.
        """
        for block_id in kept:
            if block_id is not None and block_id != HOLE:
                self.hold(block_id)
        table = [self.take() if block_id is None else block_id for block_id in kept]
        return table + [self.take() for _ in range(num_blocks - len(kept))]

    def release_unread(
        self, table: list[int], num_tokens: int, block_size: int, *, in_flight: bool
    ) -> None:
        """Releases what nothing reads any more once `num_tokens` tokens are computed; holes take
        its place.
        """
        index = self.spec.num_released(num_tokens, len(table), block_size, in_flight=in_flight) - 1
        while index >= 0:
            if table[index] != HOLE:
                self.release(table[index])
                table[index] = HOLE
            elif self.spec.outlives_step:
                break  # everything before a hole has been released by an earlier step
            index -= 1
