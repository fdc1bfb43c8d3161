"""KV blocks of one cache group: reference counts, the free queue, and the prefix cache.

A block is free if it has no reference. Free blocks without a hash are allocated first, then the
least recently used hashed ones. A prefix cache hit is verified by token ids, so that a hash
collision is a miss. Source: PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from octavo.engine.protocol.block_events import BlockEventLog
from octavo.engine.protocol.kv_cache_spec import GROWING, AnyKVCacheSpec
from octavo.engine.protocol.kv_messages import BlockKey
from octavo.engine.protocol.stats import GroupBlocks

HOLE = -1
"""Block table entry without a block: the block was freed because it is not read any more, or is not
allocated yet.
"""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Size of one cache group, and the spec that determines how long its blocks are kept."""

    num_blocks: int
    """Blocks on the device."""
    spec: AnyKVCacheSpec = GROWING
    num_host_blocks: int = 0
    """Blocks in host memory, for swapped requests."""


BY_TOKENS = attrgetter("token_ids")


class PartialMatch(NamedTuple):
    """A cached block whose first tokens match the requested ones."""

    key: BlockKey
    num_tokens: int
    """Number of matching tokens."""


class PrefixCache:
    """Map between block hashes and blocks: one block per hash, one hash per block."""

    def __init__(self, log: BlockEventLog | None = None) -> None:
        self._log = log
        self._block_of: dict[bytes, int] = {}
        self.key_of: dict[int, BlockKey] = {}
        """Keys by block."""
        self._after: dict[bytes, list[BlockKey]] = {}
        """Keys by their parent's digest, sorted by token ids, so that the key with the longest
        common prefix is next to the insertion point.
        """

    def find(self, key: BlockKey) -> int | None:
        """Returns the block with that key. Returns None if it is not cached."""
        block_id = self._block_of.get(key.digest)
        return block_id if block_id is not None and self.key_of[block_id] == key else None

    def find_partial(self, parent: bytes, token_ids: tuple[int, ...]) -> PartialMatch | None:
        """Returns the cached block after `parent` that has the longest common prefix with
        `token_ids`, which do not fill a block. Returns None if the first token matches none.

        Blocks that contain media do not match: their tokens do not identify their content.
        """
        siblings = self._after.get(parent)
        if siblings is None:
            return None
        index = bisect_left(siblings, token_ids, key=BY_TOKENS)
        best = None
        for key in siblings[max(0, index - 1) : index + 1]:
            num_common = 0 if key.extra else _num_common(key.token_ids, token_ids)
            if num_common and (best is None or num_common > best.num_tokens):
                best = PartialMatch(key, num_common)
        return best

    def add(self, block_id: int, key: BlockKey) -> None:
        """Adds a full block unless another block has the same key."""
        if key.digest not in self._block_of:
            self._block_of[key.digest] = block_id
            self.key_of[block_id] = key
            siblings = self._after.setdefault(key.parent, [])
            siblings.insert(bisect_left(siblings, key.token_ids, key=BY_TOKENS), key)
            if self._log is not None:
                self._log.stored(key.digest, key.parent, key.token_ids)

    def remove(self, block_id: int) -> None:
        """Removes a block, if it is cached."""
        key = self.key_of.pop(block_id, None)
        if key is None:
            return
        if self._log is not None:
            self._log.removed(key)
        del self._block_of[key.digest]
        siblings = self._after[key.parent]
        index = bisect_left(siblings, key.token_ids, key=BY_TOKENS)
        while siblings[index] != key:  # blocks with other media can have the same tokens
            index += 1
        del siblings[index]
        if not siblings:
            del self._after[key.parent]

    def remove_keys(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            block_id = self.find(key)
            if block_id is not None:
                self.remove(block_id)


class BlockPool:
    """The blocks of one group on the device."""

    def __init__(self, group: BlockGroup) -> None:
        self.spec = group.spec
        self.num_blocks = group.num_blocks
        self.ref_counts = [0] * group.num_blocks
        """References to each block from requests' tables."""
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(group.num_blocks))
        """Free blocks, in the order in which they are allocated."""
        self.cache = PrefixCache()
        """Blocks with a hash, whether or not requests hold them."""
        self._num_references = 0
        self._num_shared = 0

    def counts(self) -> GroupBlocks:
        """Returns the numbers of blocks by use."""
        return GroupBlocks(
            window=self.spec.window_tokens,
            num_blocks=self.num_blocks,
            num_held=self.num_blocks - len(self.free),
            num_shared=self._num_shared,
            num_references=self._num_references,
            num_named=len(self.cache.key_of),
        )

    def allocate(self) -> int:
        """Allocates the next free block and removes it from the prefix cache."""
        block_id, _ = self.free.popitem(last=False)
        if block_id in self.cache.key_of:
            self.cache.remove(block_id)
        self.ref_counts[block_id] = 1
        self._num_references += 1
        return block_id

    def is_shared(self, block_id: int) -> bool:
        """Returns whether a block must be copied before it is written, because it has other
        references or is in the prefix cache.
        """
        return self.ref_counts[block_id] > 1 or block_id in self.cache.key_of

    def uncache_to_write(self, block_id: int) -> bool:
        """If no block is free for a copy, removes a block with a single reference from the prefix
        cache, so that its request can write to it. Returns whether the block was removed.
        """
        if self.free or self.ref_counts[block_id] > 1:
            return False
        self.cache.remove(block_id)
        return True

    def hold(self, block_id: int) -> None:
        if self.ref_counts[block_id] == 0:
            del self.free[block_id]
        self.ref_counts[block_id] += 1
        self._num_references += 1
        self._num_shared += self.ref_counts[block_id] == 2

    def release(self, block_id: int) -> None:
        """Removes a reference to a block; after the last one the block is free."""
        self.ref_counts[block_id] -= 1
        self._num_references -= 1
        self._num_shared -= self.ref_counts[block_id] == 1
        if self.ref_counts[block_id] == 0:
            self.free[block_id] = None
            if block_id not in self.cache.key_of:
                self.free.move_to_end(block_id, last=False)

    def hold_all(self, table: Iterable[int]) -> None:
        for block_id in table:
            if block_id != HOLE:
                self.hold(block_id)

    def release_all(self, table: Sequence[int]) -> None:
        """Removes the references to a table's blocks, last block first, so that it is evicted
        first.
        """
        for block_id in reversed(table):
            if block_id != HOLE:
                self.release(block_id)

    def has_room(self, reused: Sequence[int | None], num_blocks: int, reserve: int) -> bool:
        """Returns whether `reserve` blocks stay free after `fill` with the same arguments."""
        num_idle = num_new = 0
        for block_id in reused:
            if block_id is None:
                num_new += 1
            elif block_id != HOLE and self.ref_counts[block_id] == 0:
                num_idle += 1
        return len(self.free) - num_idle >= num_new + max(0, num_blocks - len(reused)) + reserve

    def fill(self, reused: Sequence[int | None], num_blocks: int) -> list[int]:
        """Returns a table of `num_blocks` entries: the kept blocks, with new blocks in place of
        None and at the end.
        """
        for block_id in reused:  # kept blocks first, so that none of them is allocated
            if block_id is not None and block_id != HOLE:
                self.hold(block_id)
        table = []
        for block_id in reused:
            table.append(self.allocate() if block_id is None else block_id)
        for _ in range(num_blocks - len(reused)):
            table.append(self.allocate())
        return table

    def release_unread(
        self, table: list[int], num_tokens: int, block_size: int, *, in_flight: bool
    ) -> None:
        """Replaces the blocks that are not read after `num_tokens` computed tokens with holes."""
        index = self.spec.num_released(num_tokens, len(table), block_size, in_flight=in_flight) - 1
        while index >= 0:
            if table[index] != HOLE:
                self.release(table[index])
                table[index] = HOLE
            elif self.spec.outlives_step:
                break  # earlier steps have released all blocks before a hole
            index -= 1


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common prefix of two sequences."""
    num_common = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        num_common += 1
    return num_common
