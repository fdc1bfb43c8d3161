"""The KV blocks of one cache group: reference counts, the free queue, and the names under which
full blocks are found.

A block is free where nobody refers to it; free blocks without a name go first, then the least
recently used named ones. Knows no request: whose a block is, is the BlockManager's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.engine.kv.prefix_cache import PrefixCache
from octavo.engine.stats import GroupBlocks

HOLE = -1
"""In a table, the place of a block that the group's window has passed: nobody reads it any more."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """How many blocks a cache group has, on the device and (for swapped requests) in host
    memory."""

    num_blocks: int
    window: int | None = None
    """Keys that a query sees, itself included; None: all before it."""
    num_host_blocks: int = 0


class BlockPool:
    """The blocks of one group."""

    def __init__(self, group: BlockGroup) -> None:
        self.window = group.window
        self.num_blocks = group.num_blocks
        self.ref_counts = [0] * group.num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(group.num_blocks))
        self.cache = PrefixCache()
        self._num_references = 0
        self._num_shared = 0

    def counts(self) -> GroupBlocks:
        num_held = self.num_blocks - len(self.free)
        return GroupBlocks(
            self.window,
            self.num_blocks,
            num_held,
            self._num_shared,
            self._num_references,
            len(self.cache),
        )

    def take(self) -> int:
        """A block for writing; its name, if any, is forgotten."""
        block_id, _ = self.free.popitem(last=False)
        self.cache.forget(block_id)
        self.ref_counts[block_id] = 1
        self._num_references += 1
        return block_id

    def is_shared(self, block_id: int) -> bool:
        """Others hold it, or may find it by its name: it is not to be written."""
        return self.ref_counts[block_id] > 1 or block_id in self.cache

    def hold(self, block_id: int) -> None:
        if self.ref_counts[block_id] == 0:
            del self.free[block_id]
        self.ref_counts[block_id] += 1
        self._num_references += 1
        self._num_shared += self.ref_counts[block_id] == 2

    def release(self, block_id: int) -> None:
        self.ref_counts[block_id] -= 1
        self._num_references -= 1
        self._num_shared -= self.ref_counts[block_id] == 1
        if self.ref_counts[block_id] == 0:
            self.free[block_id] = None
            if block_id not in self.cache:
                self.free.move_to_end(block_id, last=False)

    def release_all(self, table: Sequence[int]) -> None:
        """The last first, so that a chain is evicted from its end."""
        for block_id in reversed(table):
            if block_id != HOLE:
                self.release(block_id)

    def has_room(self, kept: Sequence[int | None], num_blocks: int, reserve: int) -> bool:
        """Whether `fill` can be done with `reserve` blocks left free."""
        num_idle = num_new = 0
        for block_id in kept:
            if block_id is None:
                num_new += 1
            elif block_id != HOLE and self.ref_counts[block_id] == 0:
                num_idle += 1
        return len(self.free) - num_idle >= num_new + max(0, num_blocks - len(kept)) + reserve

    def fill(self, kept: Sequence[int | None], num_blocks: int) -> list[int]:
        """A table of `num_blocks`: the kept blocks held, None among them and what comes after them
        taken.
        """
        for block_id in kept:
            if block_id is not None and block_id != HOLE:
                self.hold(block_id)
        table = [self.take() if block_id is None else block_id for block_id in kept]
        return table + [self.take() for _ in range(num_blocks - len(kept))]

    def hold_all(self, table: Iterable[int]) -> None:
        for block_id in table:
            if block_id != HOLE:
                self.hold(block_id)

    def first_seen(self, position: int, block_size: int) -> int:
        """Index of the first block that a query at `position` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def pass_window(self, table: list[int], position: int, block_size: int) -> None:
        """Releases what no query from `position` on reads any more; holes take its place."""
        index = min(self.first_seen(position, block_size), len(table)) - 1
        while index >= 0 and table[index] != HOLE:
            self.release(table[index])
            table[index] = HOLE
            index -= 1
