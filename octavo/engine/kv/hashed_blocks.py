"""Block hashes of requests: hashes full blocks and adds them to the prefix cache and the connector.

Owns a `BlockChain` for each request. A full block is hashed once it is computed; then the prefix
cache of its group finds it, and the connector may store it. If another engine waits for a request's
blocks, the connector is told which will come and which will not.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.kv.block_pool import HOLE, BlockPool
from octavo.engine.kv.block_tables import BlockTables
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing
from octavo.engine.protocol.kv_messages import BlockKey, BlockName, StreamedBlock
from octavo.engine.protocol.ports import Connector


class HashedBlocks:
    """Hashes of the blocks of all requests, by request id."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        tables: BlockTables,
        connector: Connector,
        *,
        block_size: int,
        is_used: bool,
    ) -> None:
        self.is_used = is_used
        """Whether blocks are hashed: whether prefix caching is on."""
        self._pools = pools
        self._tables = tables
        self._connector = connector
        self._block_size = block_size
        intervals = [pool.spec.checkpoint_tokens for pool in pools]
        self._checkpoint_tokens = min(filter(None, intervals), default=0)
        self._chains: dict[str, BlockChain] = {}

    def chain(self, request_id: str, naming: BlockHashing) -> BlockChain:
        """Returns a request's hash chain, creating it if needed."""
        chain = self._chains.get(request_id)
        if chain is None:
            chain = self._chains[request_id] = BlockChain(naming)
        return chain

    def keys(
        self, request_id: str, token_ids: Sequence[int], naming: BlockHashing
    ) -> list[BlockKey]:
        """Returns the keys of the full blocks of `token_ids`."""
        num_blocks = len(token_ids) // self._block_size
        return self.chain(request_id, naming).extend(token_ids, num_blocks, self._block_size)

    def given(self, request_id: str) -> Sequence[BlockKey]:
        """Returns the keys of the request's hashed blocks."""
        return self._chains[request_id].named()

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Copies the parent's hashes of the first `num_tokens` tokens to the child."""
        self._chains[child_id] = self._chains[parent_id].fork(num_tokens // self._block_size)

    def drop(self, request_id: str) -> None:
        """Removes a request's chain; its blocks stay in the prefix cache."""
        self._chains.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Removes a request's blocks from the prefix cache, such as those of a failed request."""
        chain = self._chains.get(request_id)
        if chain is None:
            return
        for group, pool in enumerate(self._pools):
            pool.cache.forget_keys(chain.named())
            self._connector.forget(group, chain.named())

    # -- computed steps ----------------------------------------------------------------------------

    def step_end(self, request_id: str, start: int, end: int) -> int:
        """Returns the end of a step from `start` to at most `end`: the next checkpoint if one lies
        between them.
        """
        if not (self.is_used and self._checkpoint_tokens):
            return end
        interval, mark = self._checkpoint_tokens, self._chains[request_id].last_mark
        end = min(end, (start // interval + 1) * interval)
        return min(end, mark) if mark > start else end

    def give(self, request_id: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """Hashes the blocks that the request's first `num_tokens` tokens have filled."""
        if not self.is_used:
            return
        chain = self._chains[request_id]
        limit = chain.num_named_tokens
        num_full = min(num_tokens, limit) // self._block_size
        if num_full <= chain.num_named:
            return
        chain.extend(token_ids, num_full, self._block_size)
        named = list(chain.name_until(num_full))
        for group, (pool, table) in enumerate(
            zip(self._pools, self._tables.of[request_id], strict=True)
        ):
            if pool.spec.is_rewritten:
                is_kept = num_tokens <= limit and self._is_mark(chain, num_tokens)
                entries = [(table[0], named[-1][1])] if is_kept else []
            else:
                entries = [(table[index], key) for index, key in named if pool.spec.is_named]
            for block_id, key in entries:
                if block_id != HOLE:
                    pool.cache.add(block_id, key)
                    self._connector.offer(group, key)

    def _is_mark(self, chain: BlockChain, num_tokens: int) -> bool:
        """Returns whether the state after `num_tokens` tokens (whole blocks) is cached."""
        interval = self._checkpoint_tokens
        return interval > 0 and (num_tokens == chain.last_mark or num_tokens % interval == 0)

    # -- blocks for other engines ------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        """Whether blocks are streamed to other engines while they are computed."""
        return self._connector.streams and self.is_used

    def offer_cached(self, request_id: str) -> None:
        """Offers the cached blocks of a request that has just started to the connector again, which
        may have evicted them since they were computed.
        """
        for group, key in self._by_group(self.given(request_id)):
            self._connector.offer(group, key)

    def stream(self, request_id: str, token_ids: Sequence[int], start: int, end: int) -> None:
        """Streams the blocks that the next step, of the tokens `start` to `end`, fills."""
        if not self.streams:
            return
        chain = self._chains[request_id]
        num_full = min(end, chain.naming.num_named_tokens) // self._block_size
        keys = chain.extend(token_ids, num_full, self._block_size)
        for group, table in enumerate(self._tables.of[request_id]):
            spec = self._pools[group].spec
            if spec.is_named and not spec.is_rewritten:
                for index in range(start // self._block_size, num_full):
                    if table[index] != HOLE:
                        block = StreamedBlock(request_id, group, table[index], keys[index])
                        self._connector.stream(block)

    def complete(self, request_id: str, token_ids: Sequence[int], naming: BlockHashing) -> None:
        """Tells the connector that the prompt is finished: no more blocks of it will come."""
        keys = self.keys(request_id, token_ids, naming)
        self._connector.complete(
            BlockName(group, key.digest) for group, key in self._by_group(keys)
        )

    def _by_group(self, keys: Sequence[BlockKey]) -> list[tuple[int, BlockKey]]:
        """Lists the keys with each cache group that is hashed."""
        groups = [index for index, pool in enumerate(self._pools) if pool.spec.is_named]
        return [(group, key) for key in keys for group in groups]
