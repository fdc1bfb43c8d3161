"""The names of requests' blocks: which blocks get one, and who learns of it.

Owns a `BlockChain` for each request. A full block gets its name once it is computed; then the
prefix cache of its group finds it and the connector may keep it. Where another engine waits for a
request's blocks, the connector is told which ones come, and which never will. Reads the tables, and
gives or takes no block.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.kv.block_pool import HOLE, BlockPool
from octavo.engine.kv.block_tables import BlockTables
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing
from octavo.engine.protocol.kv_messages import BlockKey, BlockName, StreamedBlock
from octavo.engine.protocol.ports import Connector


class HashedBlocks:
    """The names of the blocks that requests hold, by request id."""

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
        """Whether blocks get names at all: whether prefixes are cached."""
        self._pools = pools
        self._tables = tables
        self._connector = connector
        self._block_size = block_size
        intervals = [pool.spec.checkpoint_tokens for pool in pools]
        self._checkpoint_tokens = min(filter(None, intervals), default=0)
        self._chains: dict[str, BlockChain] = {}

    def chain(self, request_id: str, naming: BlockHashing) -> BlockChain:
        """Returns a request's chain, which begins where it has none."""
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
        """Returns the keys of the request's first blocks that have been named."""
        return self._chains[request_id].named()

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Gives the child the parent's names of the blocks of its first `num_tokens` tokens."""
        self._chains[child_id] = self._chains[parent_id].fork(num_tokens // self._block_size)

    def drop(self, request_id: str) -> None:
        """Drops a request's chain, if it has one; its blocks stay named."""
        self._chains.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Drops the names of a request's blocks: a failed request's KV is not found again."""
        chain = self._chains.get(request_id)
        if chain is None:
            return
        for group, pool in enumerate(self._pools):
            pool.cache.forget_keys(chain.named())
            self._connector.forget(group, chain.named())

    # -- a step computes ---------------------------------------------------------------------------

    def step_end(self, request_id: str, start: int, end: int) -> int:
        """Returns where a step ends that begins at `start` and would end at `end`: where a
        checkpoint lies between them, there.
        """
        if not (self.is_used and self._checkpoint_tokens):
            return end
        interval, mark = self._checkpoint_tokens, self._chains[request_id].last_mark
        end = min(end, (start // interval + 1) * interval)
        return min(end, mark) if mark > start else end

    def give(self, request_id: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """Names the blocks that are full by now, of the request's first `num_tokens` tokens."""
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
        """Says whether the state after `num_tokens` tokens, whole blocks, is to be found again."""
        interval = self._checkpoint_tokens
        return interval > 0 and (num_tokens == chain.last_mark or num_tokens % interval == 0)

    # -- another engine waits ----------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        """Whether blocks are sent to other engines while they are computed."""
        return self._connector.streams and self.is_used

    def offer_cached(self, request_id: str) -> None:
        """Has the connector save the cached blocks of a request that has just started, which were
        offered when they were computed and may be gone from there.
        """
        for group, key in self._by_group(self.given(request_id)):
            self._connector.offer(group, key)

    def stream(self, request_id: str, token_ids: Sequence[int], start: int, end: int) -> None:
        """Has the connector send the blocks that the coming step fills, which computes the tokens
        from `start` up to `end`, while it computes.
        """
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
        """Tells the connector that no more blocks of a prompt will be computed for another
        engine.
        """
        keys = self.keys(request_id, token_ids, naming)
        self._connector.complete(
            BlockName(group, key.digest) for group, key in self._by_group(keys)
        )

    def _by_group(self, keys: Sequence[BlockKey]) -> list[tuple[int, BlockKey]]:
        """Lists the keys with each group that has names."""
        groups = [index for index, pool in enumerate(self._pools) if pool.spec.is_named]
        return [(group, key) for key in keys for group in groups]
