"""The KV blocks of all requests, as the scheduler asks for them: start, grow, fork, swap, find
again, free.

Puts together who owns what: `BlockPool` the blocks of a group, `BlockTables` the requests' tables
on the device, `HostBlocks` those of swapped requests, `HashedBlocks` the names of requests' blocks,
the `Connector` what lies off the device. Knows no bytes: what is to be copied leaves as BlockMoves.
Source: PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.engine.kv.block_choice import BlockChoiceSpec, PromptPart, make_block_choice
from octavo.engine.kv.block_pool import HOLE, BlockGroup, BlockPool
from octavo.engine.kv.block_tables import BlockAllocation, BlockTables, LeafBlocks
from octavo.engine.kv.hashed_blocks import HashedBlocks
from octavo.engine.kv.kv_connector import no_connector
from octavo.engine.kv.prefix_cache import PrefixCache
from octavo.engine.kv.prefix_finder import NO_HIT, Hit, PrefixFinder
from octavo.engine.kv.prefix_loader import NOTHING_TO_FETCH, Prefetch, PrefixLoader
from octavo.engine.kv.swapping import HostBlocks, SwapIn, SwappedTable
from octavo.engine.protocol.block_events import BlockEventLog
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing
from octavo.engine.protocol.kv_cache_spec import UNBOUNDED, Extent
from octavo.engine.protocol.kv_messages import BlockKey, BlockMove, BlockName
from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext
from octavo.engine.protocol.ports import Connector
from octavo.engine.protocol.requests import Pin

PLAIN = BlockHashing()


@dataclass(frozen=True, slots=True)
class SwappedRow:
    """A row whose computed blocks are in host memory."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request that has got its blocks."""

    num_cached_tokens: int
    """Tokens that are computed already, once the moves are made."""
    moves: list[BlockMove]
    """Loads and copies for the cached tokens."""


@dataclass(slots=True)
class PrefixCounts:
    """Tokens of prompts that were looked up, and found, since the start."""

    num_queried: int = 0
    num_hits: int = 0
    num_external_queried: int = 0
    """Looked-up tokens that the device did not have."""
    num_external_hits: int = 0
    """Tokens that were loaded from off the device."""
    num_left_out: int = 0
    """Stored blocks that prompts went without."""


class BlockManager:
    """Blocks for requests, by request id. A step computes at most `max_step_tokens` tokens."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        *,
        block_size: int,
        enable_prefix_caching: bool,
        shares_blocks: bool = True,
        max_step_tokens: int = UNBOUNDED,
        connector: Connector | None = None,
        logs_events: bool = False,
        original: OriginalContext = ONE_CONTEXT,
        choice: BlockChoiceSpec | None = None,
    ) -> None:
        """Takes `logs_events`, whether the names of one group's blocks are logged as they come and
        go; and `choice`, how stored blocks are chosen, None where prompts load all.
        """
        self.original = original
        """Context up to which positions begin at 0; blocks are named by where they do."""
        self.block_size = block_size
        self.pools = [BlockPool(group) for group in groups]
        """The blocks of each cache group."""
        self.host = HostBlocks(groups)
        """Blocks of swapped requests."""
        self.connector: Connector = connector or no_connector(len(groups))
        """Named blocks off the device."""
        self.events = BlockEventLog()
        """Events of named blocks that no step has handed out yet."""
        self._logged = _group_to_log(self.pools) if logs_events else None
        self._forget_names()
        self.prefix_counts = PrefixCounts()
        self.shares_blocks = shares_blocks
        """Whether requests may hold the same block; prefix caching needs it."""
        self._max_step_tokens = max_step_tokens
        self.capacity_tokens = self.capacity_of(1)
        """Tokens of the longest request that fits when it is alone."""
        self.keeps_parts = all(pool.spec.keeps_parts for pool in self.pools)
        """Whether the first of a step's tokens hold where the others do not."""
        self._tables = BlockTables(self.pools, block_size)
        self.names = HashedBlocks(
            self.pools,
            self._tables,
            self.connector,
            block_size=block_size,
            is_used=enable_prefix_caching,
        )
        """Names of the requests' blocks."""
        self._finder = PrefixFinder(self.pools, block_size, self.connector)
        self._loader = PrefixLoader(
            self.pools,
            self._finder,
            self.connector,
            make_block_choice(choice, self._finder, self.connector, num_groups=len(groups)),
        )

    @property
    def tables(self) -> Mapping[str, list[list[int]]]:
        """Block ids on the device, by request and group, in the order of a request's tokens."""
        return self._tables.of

    @property
    def num_blocks(self) -> int:
        """Blocks of the fullest group."""
        return self._fullest.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the fullest group."""
        return len(self._fullest.free)

    def capacity_of(self, num_rows: int) -> int:
        """Counts the tokens that the blocks hold of a request of `num_rows` rows, what the rows
        share counted once.
        """
        return min(
            pool.spec.capacity_tokens(
                pool.num_blocks, num_rows, self._max_step_tokens, self.block_size
            )
            for pool in self.pools
        )

    # -- a request comes and grows -----------------------------------------------------------------

    def prefetch(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        naming: BlockHashing = PLAIN,
        max_cached_tokens: int,
        reserve: int,
        at_once: bool,
        source: str = "",
    ) -> Prefetch:
        """Brings the stored part of a prompt nearer before `start`, which is to wait where that
        takes steps; and the part that the engine at `source` computes.

        Unless `at_once`, a step loads only so much that it does not keep others waiting.
        """
        limit = min(len(token_ids) - 1, max_cached_tokens, naming.num_named_tokens)
        if not (self.connector.reaches and self.names.is_used) or limit <= 0:
            return NOTHING_TO_FETCH
        keys = self.names.keys(request_id, token_ids[:limit], naming)
        # Queries are made of tokens alone, by the plain model.
        is_plain = not (source or naming.media or naming.adapter_digest)
        return self._loader.prefetch(
            request_id,
            keys,
            reserve=reserve,
            at_once=at_once,
            source=source,
            prompt=(
                PromptPart(token_ids, naming.first_position, self.block_size) if is_plain else None
            ),
        )

    def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        naming: BlockHashing = PLAIN,
        reserve: int,
        max_cached_tokens: int = UNBOUNDED,
        step_tokens: int = UNBOUNDED,
        num_fixed_tokens: int = 0,
    ) -> StartedRequest | None:
        """Gives a request blocks for all of `token_ids`, the longest cached run of them shared;
        None where fewer than `reserve` blocks would stay free.

        Cached are at most `max_cached_tokens`, and never the last token, since its logits are
        wanted. Groups that do not keep all tokens get blocks for the next `step_tokens` only, fixed
        groups for `num_fixed_tokens`.
        """
        limit = min(len(token_ids) - 1, max_cached_tokens, naming.num_named_tokens)
        reads = self.names.is_used and limit > 0
        hit = self._find_hit(request_id, token_ids[:limit], naming) if reads else NO_HIT
        whole_extent = Extent(len(token_ids), step_tokens, num_fixed_tokens)
        placed = self._place_hit(request_id, hit, whole_extent, reserve)
        if placed is None:
            return None
        chain = self.names.chain(request_id, naming)
        chain.num_named = placed.num_blocks
        chain.num_named_tokens = naming.num_named_tokens
        left_out = self._loader.left_out(request_id)
        used = [key for key in chain.keys[: placed.num_blocks] if key.digest not in left_out]
        if len(used) < placed.num_blocks:
            # What is computed without some of the keys is never found as if all had been read.
            chain.num_named_tokens = placed.num_blocks * self.block_size
        chain.last_mark = (len(token_ids) - 1) // self.block_size * self.block_size
        self.connector.release(request_id)
        loads = self._loader.load(placed, chain.keys, self.tables[request_id])
        if reads:
            self._count(used, len(token_ids), placed)
        return StartedRequest(placed.num_tokens, loads + self._copies(request_id, placed))

    def can_fork(self, parent_id: str, num_tokens: int) -> bool:
        """Says whether the parent still has every block that the token after its first `num_tokens`
        reads.
        """
        return self._tables.can_fork(parent_id, num_tokens)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Gives the child the parent's blocks that hold its first `num_tokens` tokens."""
        self._tables.fork(parent_id, child_id, num_tokens)
        self.names.fork(parent_id, child_id, num_tokens)

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Returns a copy of the request's tables."""
        return [list(table) for table in self.tables[request_id]]

    def grow(self, request_id: str, first_token: int, end: int) -> BlockAllocation | None:
        """Makes room for writing the tokens from `first_token` up to `end`: appends blocks, and
        copies a shared one.

        None, and nothing changed, where not enough blocks are free.
        """
        return self._tables.grow(request_id, first_token, end)

    def reserve(self, ends: Mapping[str, int]) -> dict[str, list[list[int]]] | None:
        """Appends the blocks that tables lack to reach to their `ends`, for several decode steps in
        one call; returns them for the requests that lack any.

        None, and nothing changed, where that cannot be.
        """
        return self._tables.reserve(ends)

    def cut(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Releases the blocks that `reserve` granted behind a request's first `num_tokens` tokens;
        returns how many blocks each of its tables has left, None where there were none to release.
        """
        return self._tables.cut(request_id, num_tokens)

    @property
    def can_branch(self) -> bool:
        """Whether the paths of a guess can have blocks of their own."""
        return self.shares_blocks and self._tables.can_branch

    def branch(self, request_id: str, start: int, ends: Sequence[int]) -> LeafBlocks | None:
        """Gives paths of a request's guess blocks of their own from the token `start` on, up to
        their `ends`; None, and nothing changed, where not enough are free.
        """
        return self._tables.branch(request_id, start, ends)

    def keep_path(self, request_id: str, path: int) -> None:
        """Keeps the blocks of one path of a request's guess, 0 the first, and releases those of
        the others.
        """
        self._tables.keep_path(request_id, path)

    def record(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        *,
        in_flight: bool = False,
    ) -> None:
        """Names the blocks that are full by now, so that others find them, and releases those that
        nothing reads any more.

        `in_flight`: another step of the request is being computed.
        """
        self.names.give(request_id, token_ids, num_computed_tokens)
        self._tables.release_unread(request_id, num_computed_tokens, in_flight=in_flight)

    # -- a request leaves, for good or for a while -------------------------------------------------

    def free(self, request_id: str) -> None:
        """Releases all of a request's blocks, if it has any."""
        self.names.drop(request_id)
        self._loader.cancel(request_id)
        self.connector.release(request_id)
        self._tables.release(request_id)
        self.host.drop(request_id)

    def swap_out(self, num_tokens: Mapping[str, int]) -> list[BlockMove] | None:
        """Moves the blocks of each row's first tokens to the host and releases all on the device;
        None, and nothing changed, where the host has no room for all.
        """
        moves = self.host.put(
            {row_id: self._tables.kept(row_id, count) for row_id, count in num_tokens.items()}
        )
        if moves is not None:
            for row_id in num_tokens:
                self._tables.release(row_id)
        return moves

    def swap_in(
        self, rows: Sequence[SwappedRow], *, reserve: int, step_tokens: int = UNBOUNDED
    ) -> list[BlockMove] | None:
        """Brings rows back to the device with blocks for all their tokens, as `start` does; None,
        and nothing changed, where not enough are free.

        Blocks that others have kept under the same name are shared again instead of copied, and so
        are those that the rows shared.
        """
        groups = [
            SwapIn(pool, [self._returning(row, group, step_tokens) for row in rows], group=group)
            for group, pool in enumerate(self.pools)
        ]
        if not all(group.has_room(reserve) for group in groups):
            return None
        filled = zip(*(group.fill() for group in groups), strict=True)
        for row, tables in zip(rows, filled, strict=True):
            self._tables.put(row.request_id, list(tables))
            self.host.drop(row.request_id)
        return [move for group in groups for move in group.moves]

    # -- what is found again -----------------------------------------------------------------------

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forgets every name, with `reset_connector` off the device too; False, and nothing done,
        while requests hold blocks.
        """
        if self.tables or self.host.tables:
            return False
        self._forget_names()
        if self._logged is not None:
            self.events.cleared()
        if reset_connector:
            self.connector.reset()
        return True

    def pin_prefix(self, pin: Pin) -> int:
        """Pins the whole blocks of a prompt that are stored; returns how many of its tokens they
        hold. InvalidRequest where they are too many.
        """
        num_blocks = len(pin.token_ids) // self.block_size if self._finder.can_hit else 0
        first = self.original.first_position(len(pin.token_ids))
        naming = BlockHashing(pin.salt, first_position=first)
        keys = BlockChain(naming).extend(pin.token_ids, num_blocks, self.block_size)
        for group, pool in enumerate(self.pools):
            for key in keys:
                if pool.cache.find(key) is not None and not self.connector.knows(
                    BlockName(group, key.digest)
                ):
                    self.connector.offer(group, key)
        names = self._finder.read_after(keys)
        # A chain is of use only from its first block on: it is cut where the first is missing.
        while not all(map(self.connector.knows, names)):
            num_blocks -= 1
            names = self._finder.read_after(keys[:num_blocks])
        self.connector.pin(names, until=pin.until, now=pin.now)
        return num_blocks * self.block_size

    def begin_step(self) -> list[BlockMove]:
        """Returns the moves that come before all others of the step."""
        return self.connector.begin_step(lambda group, key: self.pools[group].cache.find(key))

    # -- inside ------------------------------------------------------------------------------------

    def _forget_names(self) -> None:
        """Gives every pool a cache without names."""
        for group, pool in enumerate(self.pools):
            pool.cache = PrefixCache(self.events if group == self._logged else None)

    @property
    def _fullest(self) -> BlockPool:
        return min(self.pools, key=lambda pool: len(pool.free) / pool.num_blocks)

    def _find_hit(self, request_id: str, token_ids: Sequence[int], naming: BlockHashing) -> Hit:
        keys = self.names.keys(request_id, token_ids, naming)
        rest = tuple(token_ids[len(keys) * self.block_size :])
        if naming.media.get(len(keys)):
            rest = ()  # its tokens alone do not say what it holds
        left_out = self._loader.left_out(request_id)
        return self._finder.find(keys, rest, root=naming.root(), left_out=left_out)

    def _place_hit(self, request_id: str, hit: Hit, extent: Extent, reserve: int) -> Hit | None:
        """Makes the request's tables; returns the hit as far as there is room for it, None where
        there is no room at all.

        `extent.step_end` counts from the end of the hit.
        """
        kept = [
            found[-1:] if pool.spec.is_rewritten else found
            for pool, found in zip(self.pools, hit.kept or [[] for _ in self.pools], strict=True)
        ]
        whole = hit.without_partial_block(self.block_size)
        for found in (hit, whole) if hit.sources else (whole,):
            behind = extent._replace(step_end=found.num_tokens + extent.step_end)
            if self._tables.place(request_id, kept, behind, reserve, spared=found.sources):
                return found
        return None

    def _copies(self, request_id: str, hit: Hit) -> list[BlockMove]:
        """Returns the copies of a hit's partial block to the first one that the request writes."""
        tables = self.tables[request_id]
        return [
            BlockMove(group, source, tables[group][hit.num_blocks])
            for group, source in enumerate(hit.sources)
            if source != HOLE
        ]

    def _count(self, used: Sequence[BlockKey], num_tokens: int, hit: Hit) -> None:
        counts = self.prefix_counts
        counts.num_queried += num_tokens
        counts.num_hits += hit.num_tokens
        if self.connector.reaches:
            num_loaded = sum(group == 0 for group, _ in hit.stored()) * self.block_size
            counts.num_external_queried += num_tokens - hit.num_tokens + num_loaded
            counts.num_external_hits += num_loaded
        counts.num_left_out += hit.num_blocks - len(used)
        for group in range(len(self.pools)):
            self.connector.touch(group, used)

    def _returning(self, row: SwappedRow, group: int, step_tokens: int) -> SwappedTable:
        spec, host = self.pools[group].spec, self.host.tables[row.request_id][group]
        extent = Extent(row.num_tokens, row.num_computed_tokens + step_tokens)
        has_keys = spec.is_named and not spec.is_rewritten
        return SwappedTable(
            host=host,
            keys=self.names.given(row.request_id) if has_keys else (),
            num_final=spec.blocks_final(row.num_computed_tokens, len(host), self.block_size),
            num_blocks=max(len(host), spec.blocks_at_start(extent, self.block_size)),
        )


def _group_to_log(pools: Sequence[BlockPool]) -> int | None:
    """Returns the group whose blocks say what is cached: the first that keeps every token, else
    the first with names; None where none has names.
    """
    named = [group for group, pool in enumerate(pools) if pool.spec.is_named]
    return min(named, key=lambda group: not pools[group].spec.keeps_every_token, default=None)
