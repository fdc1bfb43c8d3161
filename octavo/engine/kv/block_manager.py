"""Allocates KV blocks to requests, shares them through the prefix cache and forks, swaps them to
host memory, and frees them.

Extends `BlockTables` (blocks of running requests) by the prefix cache (`HashedBlocks`,
`PrefixFinder`), the blocks of swapped requests (`HostBlocks`) and the connector to blocks outside
the device. Works on block ids only: copies are returned as BlockMoves. Source: PagedAttention (Kwon
et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.engine.kv.block_choice import PromptPart, make_block_choice
from octavo.engine.kv.block_pool import HOLE, BlockGroup, BlockPool, PrefixCache
from octavo.engine.kv.block_tables import BlockTables
from octavo.engine.kv.hashed_blocks import NO_HIT, HashedBlocks, Hit, PrefixFinder
from octavo.engine.kv.kv_connector import BlockChoiceSpec, KVConnector
from octavo.engine.kv.prefix_loader import NOTHING, NOTHING_TO_FETCH, Prefetch, PrefixLoader
from octavo.engine.kv.swapping import HostBlocks, SwapIn, SwappedTable
from octavo.engine.protocol.block_events import BlockEventLog
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing, get_block_media
from octavo.engine.protocol.kv_cache_spec import UNBOUNDED, Extent
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockKey,
    BlockMove,
    ConnectorReport,
)
from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext
from octavo.engine.protocol.requests import FETCHING, CountStored, Pin, PrefixRef
from octavo.engine.protocol.stats import EngineStats

PLAIN = BlockHashing()


@dataclass(frozen=True, slots=True)
class SwappedRow:
    """A row whose computed blocks are in host memory."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """Outcome of `BlockManager.start`."""

    num_cached_tokens: int
    """Cached tokens, which count as computed once the moves are made."""
    moves: list[BlockMove]
    """Loads and copies of cached blocks, to be made before the step computes."""


@dataclass(slots=True)
class PrefixCounts:
    """Prompt tokens looked up and found in the prefix cache since the start."""

    num_queried: int = 0
    num_hits: int = 0
    num_external_queried: int = 0
    """Tokens that were not found on the device and looked up outside of it."""
    num_external_hits: int = 0
    """Tokens loaded from outside the device."""
    num_left_out: int = 0
    """Stored blocks that prompts skipped."""


class BlockManager(BlockTables):
    """KV blocks of all requests, by request id. A step computes at most `max_step_tokens`
    tokens.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        *,
        block_size: int,
        enable_prefix_caching: bool,
        shares_blocks: bool = True,
        max_step_tokens: int = UNBOUNDED,
        connector: KVConnector | None = None,
        logs_events: bool = False,
        original: OriginalContext = ONE_CONTEXT,
        choice: BlockChoiceSpec | None = None,
    ) -> None:
        """`logs_events`: log the block events of one cache group. `choice`: how a prompt's stored
        blocks are selected; None: prompts load all of them.
        """
        super().__init__([BlockPool(group) for group in groups], block_size)
        self.original = original
        """Context up to which positions begin at 0; it is part of block hashes."""
        self.host = HostBlocks(groups)
        """Blocks of swapped requests."""
        self.connector = connector
        """Scheduler half of the KV connector; None without one."""
        self._logged = _group_to_log(self.pools) if logs_events else None
        self.events = None if self._logged is None else BlockEventLog()
        """Block events since the last step's outputs; None if events are not logged."""
        self._clear_caches()
        self.prefix_counts = PrefixCounts()
        self.shares_blocks = shares_blocks
        """Whether requests may share blocks, which prefix caching requires."""
        self.can_branch = self.can_branch and shares_blocks
        self._max_step_tokens = max_step_tokens
        self.capacity_tokens = self.capacity_of(1)
        """Length of the longest request that fits if it runs alone, in tokens."""
        self.keeps_parts = all(pool.spec.keeps_parts for pool in self.pools)
        """Whether the first tokens of a step can be kept when the later ones are discarded."""
        self.hashes = HashedBlocks(
            self.pools, self.tables, connector, block_size=block_size, is_used=enable_prefix_caching
        )
        self._finder = PrefixFinder(self.pools, block_size, connector)
        self._loader: PrefixLoader | None = None
        if connector is not None:
            chooser = make_block_choice(choice, self._finder, connector, num_groups=len(groups))
            self._loader = PrefixLoader(self.pools, self._finder, connector, chooser)

    @property
    def has_transfers(self) -> bool:
        """Whether the connector needs a step even if no request runs."""
        return self.connector is not None and self.connector.has_work

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the cache group that has the fewest."""
        return len(self._fullest().free)

    def _fullest(self) -> BlockPool:
        if len(self.pools) == 1:
            return self.pools[0]
        return min(self.pools, key=lambda pool: len(pool.free) / pool.num_blocks)

    def set_gauges(self, stats: EngineStats) -> None:
        """Writes the block and prefix cache statistics to `stats`."""
        fullest = self._fullest()
        stats.num_blocks = fullest.num_blocks
        stats.num_used_blocks = fullest.num_blocks - len(fullest.free)
        stats.num_host_blocks = self.host.num_used_blocks if self.host.tables else 0
        stats.groups = groups = []
        for pool in self.pools:
            groups.append(pool.counts())
        counts = self.prefix_counts
        stats.prefix_query_tokens = counts.num_queried
        stats.prefix_hit_tokens = counts.num_hits
        stats.external_query_tokens = counts.num_external_queried
        stats.external_hit_tokens = counts.num_external_hits
        stats.left_out_blocks = counts.num_left_out
        if self.connector is not None:
            stats.connector = self.connector.snapshot()

    def capacity_of(self, num_rows: int) -> int:
        """Returns the maximum length in tokens of a request with `num_rows` rows, counting shared
        blocks once.
        """
        return min(
            pool.spec.capacity_tokens(
                pool.num_blocks, num_rows, self._max_step_tokens, self.block_size
            )
            for pool in self.pools
        )

    # -- a request starts and grows ----------------------------------------------------------------

    def prefetch(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        hashing: BlockHashing = PLAIN,
        max_cached_tokens: int,
        reserve: int,
        at_once: bool,
        source: str = "",
    ) -> Prefetch:
        """Prefetches the stored part of a prompt, and the part that the engine at `source`
        computes. The result says whether the request must wait for it.

        Unless `at_once`, a step loads a limited number of bytes, so that other requests are not
        delayed.
        """
        limit = min(len(token_ids) - 1, max_cached_tokens, hashing.num_hashed_tokens)
        if self._loader is None or not self.hashes.is_used or limit <= 0:
            return NOTHING_TO_FETCH
        keys = self.hashes.keys(request_id, token_ids[:limit], hashing)
        # Block ratings are computed from tokens alone, by the base model.
        is_plain = not (source or hashing.media or hashing.adapter_digest)
        return self._loader.prefetch(
            request_id,
            keys,
            reserve=reserve,
            at_once=at_once,
            source=source,
            prompt=(
                PromptPart(token_ids, hashing.first_position, self.block_size) if is_plain else None
            ),
        )

    def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        hashing: BlockHashing = PLAIN,
        reserve: int,
        max_cached_tokens: int = UNBOUNDED,
        step_tokens: int = UNBOUNDED,
        num_fixed_tokens: int = 0,
    ) -> StartedRequest | None:
        """Allocates a request's blocks for all of `token_ids`, sharing the longest cached prefix;
        returns None if fewer than `reserve` blocks would stay free.

        At most `max_cached_tokens` are taken from the prefix cache, and never the last token, whose
        logits are needed. Groups that do not keep all tokens get blocks for the next `step_tokens`
        only, fixed groups for `num_fixed_tokens`.
        """
        limit = min(len(token_ids) - 1, max_cached_tokens, hashing.num_hashed_tokens)
        reads = self.hashes.is_used and limit > 0
        hit = self._find_hit(request_id, token_ids[:limit], hashing) if reads else NO_HIT
        whole_extent = Extent(len(token_ids), step_tokens, num_fixed_tokens)
        placed = self._place_hit(request_id, hit, whole_extent, reserve)
        if placed is None:
            return None
        chain = self.hashes.chain(request_id, hashing)
        chain.num_registered = placed.num_blocks
        chain.num_hashed_tokens = hashing.num_hashed_tokens
        chain.last_checkpoint = (len(token_ids) - 1) // self.block_size * self.block_size
        moves: list[BlockMove] = []
        if self._loader is not None:
            moves = self._load(request_id, placed, chain)
        if reads:
            self.prefix_counts.num_queried += len(token_ids)
            self.prefix_counts.num_hits += placed.num_tokens
            if self.connector is not None:
                self._count_external(request_id, chain, len(token_ids), placed)
        if placed.sources:
            moves += self._copies(request_id, placed)
        return StartedRequest(placed.num_tokens, moves)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Shares the parent's blocks of the first `num_tokens` tokens with the child."""
        super().fork(parent_id, child_id, num_tokens)
        self.hashes.fork(parent_id, child_id, num_tokens)

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Returns a copy of the request's tables."""
        return [list(table) for table in self.tables[request_id]]

    def record(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        *,
        in_flight: bool = False,
    ) -> None:
        """Adds the blocks that are full to the prefix cache, and releases blocks that are no longer
        read.

        `in_flight`: another step of the request is being computed.
        """
        if self.hashes.is_used:
            self.hashes.add_full(request_id, token_ids, num_computed_tokens)
        if self._releasing:
            self.release_unread(request_id, num_computed_tokens, in_flight=in_flight)

    # -- a request ends or is swapped --------------------------------------------------------------

    def free(self, request_id: str) -> None:
        self.hashes.chains.pop(request_id, None)
        if self._loader is not None and self.connector is not None:
            self._loader.cancel(request_id)
            self.connector.release(request_id)
        self.release(request_id)
        if request_id in self.host.tables:
            self.host.drop(request_id)

    def swap_out(self, num_tokens: Mapping[str, int]) -> list[BlockMove] | None:
        """Moves the blocks of each row's first `num_tokens[row]` tokens to host memory and releases
        all its blocks on the device. Returns None and changes nothing if host memory is too small.
        """
        moves = self.host.put(
            {
                row_id: self.get_reusable_tables(row_id, count)
                for row_id, count in num_tokens.items()
            }
        )
        if moves is not None:
            for row_id in num_tokens:
                self.release(row_id)
        return moves

    def swap_in(
        self, rows: Sequence[SwappedRow], *, reserve: int, step_tokens: int = UNBOUNDED
    ) -> list[BlockMove] | None:
        """Swaps rows in, with blocks for all their tokens as in `start`. Returns None and changes
        nothing if too few blocks are free.

        Blocks that are still in the prefix cache are reused, and blocks that several rows share are
        shared again; only the others are copied.
        """
        groups = [
            SwapIn(pool, [self._returning(row, group, step_tokens) for row in rows], group=group)
            for group, pool in enumerate(self.pools)
        ]
        if not all(group.has_room(reserve) for group in groups):
            return None
        filled = zip(*(group.fill() for group in groups), strict=True)
        for row, tables in zip(rows, filled, strict=True):
            self.tables[row.request_id] = list(tables)
            self.host.drop(row.request_id)
        return [move for group in groups for move in group.moves]

    # -- prefix cache ------------------------------------------------------------------------------

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Clears the prefix cache on the device, with `reset_connector` also outside of it. Returns
        False and changes nothing while requests hold blocks.
        """
        if self.tables or self.host.tables:
            return False
        self._clear_caches()
        if self.events is not None:
            self.events.cleared()
        if reset_connector and self.connector is not None:
            self.connector.reset()
        return True

    def pin_prefix(self, pin: Pin) -> int:
        """Pins the full cached blocks of a prompt; returns the number of their tokens. Raises
        InvalidRequest if the limit on pinned blocks would be exceeded.
        """
        if self.connector is None:
            return 0
        keys = self._prefix_keys(pin.prefix)
        for group, pool in enumerate(self.pools):
            for key in keys:
                if pool.cache.find(key) is not None and not self.connector.knows(
                    BlockHashWithGroupId(group, key.digest)
                ):
                    self.connector.offer(group, key)
        num_blocks, names = self._finder.longest(keys, self.connector.knows)
        self.connector.pin(names, until=pin.until, now=pin.now)
        return num_blocks * self.block_size

    def count_stored(self, query: CountStored) -> int:
        """Counts a prefix's tokens, or bytes, whose blocks are in the connector's store."""
        if self.connector is None:
            return 0
        keys = self._prefix_keys(query.prefix)
        num_blocks, names = self._finder.longest(keys, self.connector.is_stored)
        if query.in_bytes:
            return sum(self.connector.block_bytes[name.group] for name in names)
        return num_blocks * self.block_size

    def fetch_prefix(self, prefix: PrefixRef) -> int:
        """Fetches a prefix's blocks from the store into slots, as many as fit. Returns FETCHING
        while they are on their way, then the number of tokens that can be loaded.

        Blocks that another engine may have stored since the store was listed are tried, too.
        """
        keys = self._prefix_keys(prefix)
        if self.connector is None or not keys:
            return 0
        name = f"prefix {keys[-1].digest.hex()}"
        if self.connector.is_waiting(name):
            return FETCHING
        if name in self.connector.held:
            self.connector.release(name)
        else:
            self.connector.process_report(ConnectorReport(found=self._finder.read_after(keys)))
            stored = self._finder.find_whole(keys, self.connector.can_fetch).stored()
            if self.connector.fetch(name, [(group, keys[index]) for group, index in stored]):
                return FETCHING
        return self._finder.find_whole(keys, self.connector.has).num_tokens

    def begin_step(self) -> list[BlockMove]:
        """Returns the connector's moves; the worker makes them before all other moves of the
        step.
        """
        if self.connector is None:
            return []
        return self.connector.begin_step(lambda group, key: self.pools[group].cache.find(key))

    # -- private -----------------------------------------------------------------------------------

    def _prefix_keys(self, prefix: PrefixRef) -> list[BlockKey]:
        """Returns the keys of a prefix's full blocks; [] if prefixes are not reused."""
        if not self._finder.can_hit:
            return []
        hashing = BlockHashing(
            prefix.salt,
            prefix.adapter_digest,
            media=get_block_media(prefix.media, self.block_size),
            first_position=self.original.first_position(len(prefix.token_ids)),
        )
        num_blocks = len(prefix.token_ids) // self.block_size
        return BlockChain(hashing).extend(prefix.token_ids, num_blocks, self.block_size)

    def _clear_caches(self) -> None:
        for group, pool in enumerate(self.pools):
            pool.cache = PrefixCache(self.events if group == self._logged else None)

    def _find_hit(self, request_id: str, token_ids: Sequence[int], hashing: BlockHashing) -> Hit:
        keys = self.hashes.keys(request_id, token_ids, hashing)
        rest = tuple(token_ids[len(keys) * self.block_size :])
        if hashing.media.get(len(keys)):
            rest = ()  # its tokens do not identify its content
        left_out = NOTHING if self._loader is None else self._loader.left_out(request_id)
        return self._finder.find(keys, rest, root=hashing.root(), left_out=left_out)

    def _place_hit(self, request_id: str, hit: Hit, extent: Extent, reserve: int) -> Hit | None:
        """Creates the request's tables. Returns the part of the hit that fits into the free blocks,
        None if the request does not fit at all.

        `extent.step_end` counts from the end of the hit.
        """
        kept = hit.kept or [[] for _ in self.pools]
        if self._rewritten:
            kept = [
                found[-1:] if pool.spec.is_rewritten else found
                for pool, found in zip(self.pools, kept, strict=True)
            ]
        if hit.sources:
            after = extent._replace(step_end=hit.num_tokens + extent.step_end)
            if self.create_tables(request_id, kept, after, reserve, excluded=hit.sources):
                return hit
            hit = Hit(hit.kept, hit.num_blocks, hit.num_blocks * self.block_size)
        after = extent._replace(step_end=hit.num_tokens + extent.step_end)
        return hit if self.create_tables(request_id, kept, after, reserve) else None

    def _load(self, request_id: str, hit: Hit, chain: BlockChain) -> list[BlockMove]:
        """Returns the loads of a hit's blocks that are outside the device."""
        assert self._loader is not None and self.connector is not None
        left_out = self._loader.left_out(request_id)
        if any(key.digest in left_out for key in chain.keys[: hit.num_blocks]):
            # Tokens computed without some of the keys must not be found in the prefix cache.
            chain.num_hashed_tokens = hit.num_blocks * self.block_size
        self.connector.release(request_id)
        return self._loader.load(hit, chain.keys, self.tables[request_id])

    def _copies(self, request_id: str, hit: Hit) -> list[BlockMove]:
        """Returns the copy of a hit's partial block to the first block that the request writes."""
        tables = self.tables[request_id]
        moves = []
        for group, source in enumerate(hit.sources):
            if source != HOLE:
                moves.append(BlockMove(group, source, tables[group][hit.num_blocks]))
        return moves

    def _count_external(
        self, request_id: str, chain: BlockChain, num_tokens: int, hit: Hit
    ) -> None:
        """Counts the tokens looked up outside the device, and marks the hit's blocks as used."""
        assert self._loader is not None and self.connector is not None
        left_out = self._loader.left_out(request_id)
        used = [key for key in chain.keys[: hit.num_blocks] if key.digest not in left_out]
        num_loaded = sum(group == 0 for group, _ in hit.stored()) * self.block_size
        counts = self.prefix_counts
        counts.num_external_queried += num_tokens - hit.num_tokens + num_loaded
        counts.num_external_hits += num_loaded
        counts.num_left_out += hit.num_blocks - len(used)
        for group in range(len(self.pools)):
            self.connector.touch(group, used)

    def _returning(self, row: SwappedRow, group: int, step_tokens: int) -> SwappedTable:
        spec, host = self.pools[group].spec, self.host.tables[row.request_id][group]
        extent = Extent(row.num_tokens, row.num_computed_tokens + step_tokens)
        has_keys = spec.is_hashed and not spec.is_rewritten
        return SwappedTable(
            host=host,
            keys=self.hashes.hashed(row.request_id) if has_keys else (),
            num_final=spec.blocks_final(row.num_computed_tokens, len(host), self.block_size),
            num_blocks=max(len(host), spec.blocks_at_start(extent, self.block_size)),
        )


def _group_to_log(pools: Sequence[BlockPool]) -> int | None:
    """Returns the group whose block events are logged: the first one that keeps every token, else
    the first one that is hashed. Returns None if no group is hashed.
    """
    named = [group for group, pool in enumerate(pools) if pool.spec.is_hashed]
    return min(named, key=lambda group: not pools[group].spec.keeps_every_token, default=None)
