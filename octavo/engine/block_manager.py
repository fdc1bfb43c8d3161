"""Owner of the KV blocks: their ids, reference counts, free queue and names, per cache group, and of every request's block tables.

Knows no bytes: what is to be copied leaves as BlockMoves. A block is free where nobody refers to it; free blocks without a name
go first, then the least recently used named ones. All groups have the same number of blocks, and a prefix hit needs every group.
Source: PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.engine.prefix_cache import BlockKey, PrefixCache, extend_keys
from octavo.step import BlockMove


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request's tables gained: per group the ids appended ([] for none), and the entries changed by copy-on-write."""

    new_block_ids: list[list[int]] = field(default_factory=list)
    replaced: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, index in the table, new block id)"""
    moves: list[BlockMove] = field(default_factory=list)


NOTHING = Grant()


class BlockPool:
    """The blocks of one cache group."""

    def __init__(self, num_blocks: int) -> None:
        self.ref_counts = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cache = PrefixCache()

    def take(self) -> int:
        """A block for writing; its name, if any, is forgotten."""
        block_id, _ = self.free.popitem(last=False)
        self.cache.forget(block_id)
        self.ref_counts[block_id] = 1
        return block_id

    def hold(self, block_id: int) -> None:
        if self.ref_counts[block_id] == 0:
            del self.free[block_id]
        self.ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free[block_id] = None
            if block_id not in self.cache:
                self.free.move_to_end(block_id, last=False)


class BlockManager:
    """Blocks for requests, by request id."""

    def __init__(self, *, num_blocks: int, num_groups: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pools = [BlockPool(num_blocks) for _ in range(num_groups)]
        self.tables: dict[str, list[list[int]]] = {}
        """Per request and group its block ids, in the order of its tokens."""
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._caching = enable_prefix_caching
        self._keys: dict[str, list[BlockKey]] = {}
        self._num_named: dict[str, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return min(len(pool.free) for pool in self.pools)

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def start(self, request_id: str, token_ids: Sequence[int], *, salt: str, read_cache: bool, reserve: int) -> int | None:
        """Blocks for all of `token_ids`, the longest cached run of them shared; None where they are not free beyond `reserve`.

        Returns how many tokens are already computed: never the last one, since its logits are wanted.
        """
        num_blocks = self._blocks_for(len(token_ids))
        hits = self._find_hits(request_id, token_ids, salt) if read_cache and self._caching else [[] for _ in self.pools]
        num_hits = len(hits[0])
        for pool, found in zip(self.pools, hits, strict=True):
            num_idle = sum(pool.ref_counts[block_id] == 0 for block_id in found)
            if len(pool.free) - num_idle < num_blocks - num_hits + reserve:
                return None
        self.tables[request_id] = [self._fill(pool, found, num_blocks - num_hits) for pool, found in zip(self.pools, hits, strict=True)]
        self._num_named[request_id] = num_hits
        num_cached_tokens = num_hits * self.block_size
        if read_cache and self._caching:
            self.num_query_tokens += len(token_ids)
            self.num_hit_tokens += num_cached_tokens
        return num_cached_tokens

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """The child's tables share the parent's blocks that hold its first `num_tokens` tokens."""
        num_blocks = self._blocks_for(num_tokens)
        shared = [table[:num_blocks] for table in self.tables[parent_id]]
        for pool, table in zip(self.pools, shared, strict=True):
            for block_id in table:
                pool.hold(block_id)
        self.tables[child_id] = shared
        num_full = num_tokens // self.block_size
        self._keys[child_id] = self._keys.get(parent_id, [])[:num_full]
        self._num_named[child_id] = min(num_full, self._num_named[parent_id])

    def block_ids(self, request_id: str) -> list[list[int]]:
        """A copy of the request's tables."""
        return [list(table) for table in self.tables[request_id]]

    def grow(self, request_id: str, first_token: int, num_tokens: int) -> Grant | None:
        """Room for `num_tokens` tokens, those from `first_token` on to be written: appended blocks, and copies of shared ones.

        None, and nothing changed, where not enough blocks are free.
        """
        tables = self.tables[request_id]
        index = first_token // self.block_size
        missing = self._blocks_for(num_tokens) - len(tables[0])
        # Only the first block written can be shared: a fork shares up to its first uncomputed token, hits are full blocks.
        copies = [index < len(table) and pool.ref_counts[table[index]] > 1 for pool, table in zip(self.pools, tables, strict=True)]
        if missing <= 0 and True not in copies:
            return NOTHING
        if any(len(pool.free) < missing + copy for pool, copy in zip(self.pools, copies, strict=True)):
            return None
        grant = Grant()
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            if copies[group]:
                source, target = table[index], pool.take()
                pool.release(source)
                table[index] = target
                grant.moves.append(BlockMove(group, source, target))
                grant.replaced.append((group, index, target))
            added = [pool.take() for _ in range(missing)]
            table += added
            grant.new_block_ids.append(added)
        return grant

    def record(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int, *, salt: str) -> None:
        """Names the blocks that are full by now, so that others find them."""
        num_full = num_computed_tokens // self.block_size
        num_named = self._num_named[request_id]
        if num_full <= num_named or not self._caching:
            return
        keys = self._keys.setdefault(request_id, [])
        extend_keys(keys, token_ids, num_full, block_size=self.block_size, salt=salt)
        for pool, table in zip(self.pools, self.tables[request_id], strict=True):
            for index in range(num_named, num_full):
                pool.cache.add(table[index], keys[index])
        self._num_named[request_id] = num_full

    def free(self, request_id: str, *, forget: bool = False) -> None:
        """Releases all of a request's blocks, if it has any. With `forget` what they hold is not found again (a failed request's KV)."""
        self._keys.pop(request_id, None)
        self._num_named.pop(request_id, None)
        for pool, table in zip(self.pools, self.tables.pop(request_id, []), strict=False):
            for block_id in reversed(table):  # the last first, so that a chain is evicted from its end
                if forget:
                    pool.cache.forget(block_id)
                pool.release(block_id)

    def reset_prefix_cache(self) -> bool:
        """Forgets every name. False, and nothing done, while requests hold blocks."""
        if self.tables:
            return False
        for pool in self.pools:
            pool.cache = PrefixCache()
        return True

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _find_hits(self, request_id: str, token_ids: Sequence[int], salt: str) -> list[list[int]]:
        """Per group the blocks of the longest run of full blocks below the last token that every group has."""
        keys = self._keys.setdefault(request_id, [])
        num_full = (len(token_ids) - 1) // self.block_size
        extend_keys(keys, token_ids, num_full, block_size=self.block_size, salt=salt)
        hits: list[list[int]] = [[] for _ in self.pools]
        for key in keys[:num_full]:
            found = [pool.cache.find(key) for pool in self.pools]
            if None in found:
                break
            for table, block_id in zip(hits, found, strict=True):
                assert block_id is not None
                table.append(block_id)
        return hits

    def _fill(self, pool: BlockPool, hits: list[int], num_more: int) -> list[int]:
        for block_id in hits:
            pool.hold(block_id)
        return hits + [pool.take() for _ in range(num_more)]
