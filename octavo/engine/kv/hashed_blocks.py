"""Automatic prefix caching: hashes full blocks, and finds the longest cached prefix of a prompt.

Owns a `BlockChain` for each request. A full block is hashed once it is computed; it is then in the
prefix cache of its group, and the connector may store it. If another engine waits for a request's
blocks, the connector is told which blocks follow and when the last one was offered. The group's
spec (`octavo/engine/protocol/kv_cache_spec.py`) determines which blocks a hit needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.engine.kv.block_pool import HOLE, BlockPool
from octavo.engine.kv.block_tables import ReusedBlocks
from octavo.engine.kv.kv_connector import KVConnector
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing
from octavo.engine.protocol.kv_messages import BlockHashWithGroupId, BlockKey, StreamedBlock

ABSENT = -2
"""Entry of a block that is neither in the prefix cache nor stored by the connector."""


class HashedBlocks:
    """Hashes of the blocks of all requests, by request id."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        tables: Mapping[str, list[list[int]]],
        connector: KVConnector | None,
        *,
        block_size: int,
        is_used: bool,
    ) -> None:
        self.is_used = is_used
        """Whether prefix caching is enabled, so that blocks are hashed."""
        self._pools = pools
        self._tables = tables
        self._connector = connector
        self._block_size = block_size
        intervals = [pool.spec.checkpoint_tokens for pool in pools]
        self._checkpoint_tokens = min(filter(None, intervals), default=0)
        self.has_checkpoints = is_used and self._checkpoint_tokens > 0
        """Whether steps must end at checkpoints (`step_end`)."""
        self.chains: dict[str, BlockChain] = {}
        """Hash chains by request id. Removing a chain leaves its blocks in the prefix cache."""

    def chain(self, request_id: str, hashing: BlockHashing) -> BlockChain:
        """Returns a request's hash chain, creating it if needed."""
        chain = self.chains.get(request_id)
        if chain is None:
            chain = self.chains[request_id] = BlockChain(hashing)
        return chain

    def keys(
        self, request_id: str, token_ids: Sequence[int], hashing: BlockHashing
    ) -> list[BlockKey]:
        """Returns the keys of the full blocks of `token_ids`."""
        num_blocks = len(token_ids) // self._block_size
        return self.chain(request_id, hashing).extend(token_ids, num_blocks, self._block_size)

    def hashed(self, request_id: str) -> Sequence[BlockKey]:
        """Returns the keys of the request's blocks in the prefix cache."""
        return self.chains[request_id].registered()

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Copies the parent's hashes of the first `num_tokens` tokens to the child."""
        self.chains[child_id] = self.chains[parent_id].fork(num_tokens // self._block_size)

    def remove(self, request_id: str) -> None:
        """Removes a request's blocks from the prefix cache, for example if the request failed."""
        chain = self.chains.get(request_id)
        if chain is None:
            return
        for group, pool in enumerate(self._pools):
            pool.cache.remove_keys(chain.registered())
            if self._connector is not None:
                self._connector.discard(group, chain.registered())

    # -- computed steps ----------------------------------------------------------------------------

    def step_end(self, request_id: str, start: int, end: int) -> int:
        """Returns where a step that computes the tokens from `start` to at most `end` must end: at
        the next checkpoint if there is one in between.
        """
        if not self.has_checkpoints:
            return end
        interval, mark = self._checkpoint_tokens, self.chains[request_id].last_checkpoint
        end = min(end, (start // interval + 1) * interval)
        return min(end, mark) if mark > start else end

    def add_full(self, request_id: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """Adds the blocks that the request's first `num_tokens` tokens fill to the prefix cache."""
        chain = self.chains[request_id]
        limit = chain.num_hashed_tokens
        num_full = min(num_tokens, limit) // self._block_size
        if num_full <= chain.num_registered:
            return
        chain.extend(token_ids, num_full, self._block_size)
        named = list(chain.register_until(num_full))
        for group, (pool, table) in enumerate(
            zip(self._pools, self._tables[request_id], strict=True)
        ):
            if pool.spec.is_rewritten:
                is_kept = num_tokens <= limit and self._is_checkpoint(chain, num_tokens)
                entries = [(table[0], named[-1][1])] if is_kept else []
            else:
                entries = [(table[index], key) for index, key in named if pool.spec.is_hashed]
            for block_id, key in entries:
                if block_id != HOLE:
                    pool.cache.add(block_id, key)
                    if self._connector is not None:
                        self._connector.offer(group, key)

    def _is_checkpoint(self, chain: BlockChain, num_tokens: int) -> bool:
        """Returns whether the state after `num_tokens` tokens (a multiple of the block size) is
        cached.
        """
        interval = self._checkpoint_tokens
        return interval > 0 and (num_tokens == chain.last_checkpoint or num_tokens % interval == 0)

    # -- blocks for other engines ------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        """Whether blocks are streamed to other engines while they are computed."""
        return self._connector is not None and self._connector.streams and self.is_used

    def offer_cached(self, request_id: str) -> None:
        """Offers the cached blocks of a request that has just started to the connector again, since
        it may have evicted them.
        """
        if self._connector is not None:
            for group, key in self._by_group(self.hashed(request_id)):
                self._connector.offer(group, key)

    def stream(self, request_id: str, token_ids: Sequence[int], start: int, end: int) -> None:
        """Streams the blocks that the next step fills with the tokens from `start` to `end`."""
        if self._connector is None or not self.streams:
            return
        chain = self.chains[request_id]
        num_full = min(end, chain.hashing.num_hashed_tokens) // self._block_size
        keys = chain.extend(token_ids, num_full, self._block_size)
        for group, table in enumerate(self._tables[request_id]):
            spec = self._pools[group].spec
            if spec.is_hashed and not spec.is_rewritten:
                for index in range(start // self._block_size, num_full):
                    if table[index] != HOLE:
                        block = StreamedBlock(request_id, group, table[index], keys[index])
                        self._connector.stream(block)

    def complete(self, request_id: str, token_ids: Sequence[int], hashing: BlockHashing) -> None:
        """Tells the connector that a prompt is finished and that no more of its blocks will be
        offered.
        """
        if self._connector is not None:
            keys = self.keys(request_id, token_ids, hashing)
            self._connector.complete(
                BlockHashWithGroupId(group, key.digest) for group, key in self._by_group(keys)
            )

    def _by_group(self, keys: Sequence[BlockKey]) -> list[tuple[int, BlockKey]]:
        """Pairs the keys with each cache group that is hashed."""
        groups = [index for index, pool in enumerate(self._pools) if pool.spec.is_hashed]
        return [(group, key) for key in keys for group in groups]


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached prefix of a prompt."""

    kept: ReusedBlocks = field(default_factory=list)
    """Table of each group, in the order of the block keys; None for a block that the connector
    has.
    """
    num_blocks: int = 0
    """Number of full blocks found."""
    num_tokens: int = 0
    """Number of tokens found, including those of a partial block."""
    sources: list[int] = field(default_factory=list)
    """The partial block to copy in each group: a hole if the group needs none; [] if the hit ends
    with a full block.
    """

    def stored(self) -> list[tuple[int, int]]:
        """Lists the (group, index) of the blocks that the connector has, in token order."""
        return sorted(
            (
                (group, index)
                for group, table in enumerate(self.kept)
                for index, block_id in enumerate(table)
                if block_id is None
            ),
            key=lambda match: match[1],
        )


NO_HIT = Hit()


class PrefixFinder:
    """Finds cached prefixes of prompts in all groups and in the connector."""

    def __init__(
        self, pools: Sequence[BlockPool], block_size: int, connector: KVConnector | None
    ) -> None:
        specs = [pool.spec for pool in pools]
        self.can_hit = all(spec.allows_hits for spec in specs) and any(
            spec.is_hashed for spec in specs
        )
        """Whether a request may start after tokens that another request has computed: every group
        allows this, and at least one group is hashed.
        """
        self._first_named = next((pool for pool in pools if pool.spec.is_hashed), None)
        self._finds_parts = all(spec.keeps_parts for spec in specs)
        """Whether a hit may end inside a cached block, of which the first tokens are copied."""
        self._pools = pools
        self._connector = connector
        self._block_size = block_size
        self._nothing: ReusedBlocks = [[] for _ in pools]
        self._partly_read = [
            index for index, pool in enumerate(pools) if not pool.spec.keeps_every_token
        ]
        """Groups in which a token does not read all earlier blocks."""

    def find(
        self,
        keys: Sequence[BlockKey],
        rest: tuple[int, ...],
        *,
        root: bytes,
        left_out: Collection[bytes] = (),
    ) -> Hit:
        """Finds the longest cached prefix of a prompt from which every group can continue.

        `keys` belong to the prompt's full blocks; `root` is the parent of the first one. `rest` are
        the tokens after the full blocks. Blocks with digests in `left_out` become holes.
        """
        if not self.can_hit:
            return NO_HIT
        is_stored = None if self._connector is None else self._connector.has
        kept = self._longest(self._get_blocks(keys, is_stored, left_out)) if keys else self._nothing
        num_blocks = len(kept[0])
        num_tokens = num_blocks * self._block_size
        next_ids = rest
        if num_blocks < len(keys):  # tokens do not identify media
            next_ids = () if keys[num_blocks].extra else keys[num_blocks].token_ids
        # A cached block may begin with the tokens that follow the hit.
        parent = keys[num_blocks - 1].digest if num_blocks else root
        sources, num_common = self._partial_block(parent, next_ids)
        return Hit(kept, num_blocks, num_tokens + num_common, sources)

    def find_whole(
        self,
        keys: Sequence[BlockKey],
        is_stored: Callable[[int, BlockKey], bool],
        left_out: Collection[bytes] = (),
    ) -> Hit:
        """Finds full blocks only; `is_stored` returns whether the connector has a block."""
        if not self.can_hit:
            return NO_HIT
        kept = self._longest(self._get_blocks(keys, is_stored, left_out))
        return Hit(kept, len(kept[0]), len(kept[0]) * self._block_size)

    def read_after(self, keys: Sequence[BlockKey]) -> list[BlockHashWithGroupId]:
        """Lists the cached blocks that a token after these blocks reads."""
        names = []
        for group, first in enumerate(self._firsts(len(keys))):
            if self._pools[group].spec.is_hashed:
                names += [BlockHashWithGroupId(group, key.digest) for key in keys[first:]]
        return names

    def longest(
        self, keys: Sequence[BlockKey], has: Callable[[BlockHashWithGroupId], bool]
    ) -> tuple[int, list[BlockHashWithGroupId]]:
        """Returns the number of leading blocks after which a request can continue if only the
        blocks for which `has` is true exist, and the blocks that it then reads.
        """
        most = len(keys)
        for group, pool in enumerate(self._pools):
            if pool.spec.keeps_every_token:
                names = (BlockHashWithGroupId(group, key.digest) for key in keys[:most])
                most = next((index for index, name in enumerate(names) if not has(name)), most)
        for num_blocks in range(most, 0, -1):
            blocks = self.read_after(keys[:num_blocks])
            if all(map(has, blocks)):
                return num_blocks, blocks
        return 0, []

    def _partial_block(self, parent: bytes, next_ids: tuple[int, ...]) -> tuple[list[int], int]:
        """Finds a cached block that begins with some of the tokens `next_ids`: its id in each
        group, and the number of common tokens; ([], 0) if there is none.
        """
        if self._first_named is None or not (next_ids and self._finds_parts):
            return [], 0
        match = self._first_named.cache.find_partial(parent, next_ids)
        if match is None:
            return [], 0
        sources = []
        for pool in self._pools:
            block_id = pool.cache.find(match.key) if pool.spec.is_hashed else HOLE
            if block_id is None:
                return [], 0
            sources.append(block_id)
        return sources, match.num_tokens

    def _get_blocks(
        self,
        keys: Sequence[BlockKey],
        is_stored: Callable[[int, BlockKey], bool] | None,
        left_out: Collection[bytes],
    ) -> ReusedBlocks:
        """Returns the blocks with these keys, up to the first one that is missing in a group that
        needs all blocks. Skipped blocks are holes.
        """
        tables: ReusedBlocks = [[] for _ in self._pools]
        for key in keys:
            if key.digest in left_out:
                for table in tables:
                    table.append(HOLE)
                continue
            blocks: list[int | None] = []
            for group, pool in enumerate(self._pools):
                block_id = pool.cache.find(key)
                if block_id is None and not (
                    pool.spec.is_hashed and is_stored is not None and is_stored(group, key)
                ):
                    if pool.spec.keeps_every_token:
                        return tables
                    block_id = ABSENT
                blocks.append(block_id)
            for table, block_id in zip(tables, blocks, strict=True):
                table.append(block_id)
        return tables

    def _longest(self, tables: ReusedBlocks) -> ReusedBlocks:
        """Returns the longest prefix for which every group has the blocks that the next token
        reads.
        """
        for num_blocks in range(len(tables[0]), 0, -1):
            firsts = self._firsts(num_blocks)
            if all(
                ABSENT not in tables[group][firsts[group] : num_blocks]
                for group in self._partly_read
            ):
                return [
                    [*[HOLE] * first, *table[first:num_blocks]]
                    for first, table in zip(firsts, tables, strict=True)
                ]
        return self._nothing

    def _firsts(self, num_blocks: int) -> list[int]:
        """Returns for each group the index of the first block that a request needs to continue
        after `num_blocks` blocks.
        """
        return [pool.spec.first_found(num_blocks, self._block_size) for pool in self._pools]
