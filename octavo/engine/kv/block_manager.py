"""Owner of the KV blocks: ids, reference counts and names, per cache group, and every request's
block tables, on the device and swapped.

Knows no bytes: what is to be copied leaves as BlockMoves. Groups with a window keep only the blocks
that a query can still see, and may have fewer blocks than the others; a prefix hit needs, in every
group, the blocks that the next token reads. Source: PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.engine.kv.block_pool import HOLE, BlockGroup, BlockPool
from octavo.engine.kv.pin import Pin
from octavo.engine.kv.prefix_cache import PrefixCache, extend_keys, root_digest
from octavo.engine.kv.prefix_finder import NO_HIT, Hit, Kept, PrefixFinder
from octavo.engine.kv.swapping import HostBlocks, SwapIn, SwappedTable
from octavo.engine.kv.tier_connector import no_connector
from octavo.ports import Connector
from octavo.step import BlockKey, BlockMove, BlockName

UNBOUNDED = 1 << 48


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request's tables gained: per group the ids appended ([] for none), and the entries
    changed by copy-on-write.
    """

    new_block_ids: list[list[int]] = field(default_factory=list)
    replaced: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, index in the table, new block id)"""
    moves: list[BlockMove] = field(default_factory=list)


NOTHING = Grant()


@dataclass(frozen=True, slots=True)
class Nearer:
    """Whether what is stored of a prompt has to be waited for, and what of it is loaded
    meanwhile."""

    is_waiting: bool
    moves: list[BlockMove] = field(default_factory=list)


HERE = Nearer(is_waiting=False)
COMING = Nearer(is_waiting=True)


@dataclass(frozen=True, slots=True)
class SwappedRow:
    """A row whose blocks are in host memory, as far as they were computed."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Start:
    """How many of a request's tokens are already computed, once the moves are made."""

    num_cached_tokens: int
    moves: list[BlockMove]


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
    ) -> None:
        self.block_size = block_size
        self.pools = [BlockPool(group) for group in groups]
        self.host = HostBlocks(groups)
        self.connector: Connector = connector or no_connector(len(groups))
        self.tables: dict[str, list[list[int]]] = {}
        """Per request and group its block ids, in the order of its tokens."""
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_external_query_tokens = 0
        """Of those looked up, what the device did not have."""
        self.num_external_hit_tokens = 0
        self._max_step_tokens = max_step_tokens
        self.capacity_tokens = self.capacity_of(1)
        """The longest request that fits when it is alone."""
        self.shares_blocks = shares_blocks
        """Whether requests may hold the same block. Prefix caching needs it."""
        self._caching = enable_prefix_caching
        self._finder = PrefixFinder(self.pools, block_size, self.connector)
        self._windowed = [index for index, group in enumerate(groups) if group.window is not None]
        self._keys: dict[str, list[BlockKey]] = {}
        self._num_named: dict[str, int] = {}

    @property
    def num_blocks(self) -> int:
        """Of the group that is fullest."""
        return self._fullest.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Of the group that is fullest."""
        return len(self._fullest.free)

    def capacity_of(self, num_rows: int) -> int:
        """Tokens that the blocks hold of so many rows, what they share counted once."""
        return min(self._capacity(pool, num_rows) for pool in self.pools)

    # -- a request comes and grows -----------------------------------------------------------------

    def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str,
        reserve: int,
        max_cached_tokens: int = UNBOUNDED,
        step_tokens: int = UNBOUNDED,
    ) -> Start | None:
        """Blocks for all of `token_ids`, the longest cached run of them shared; None where they are
        not free beyond `reserve`.

        Cached are at most `max_cached_tokens`, and never the last token, since its logits are
        wanted. Groups with a window get blocks for the next `step_tokens` only.
        """
        limit = min(len(token_ids) - 1, max_cached_tokens)
        reads = self._caching and limit > 0
        hit = self._find_hit(request_id, token_ids[:limit], salt) if reads else NO_HIT
        placed = self._place_hit(request_id, hit, len(token_ids), step_tokens, reserve)
        if placed is None:
            return None
        self._num_named[request_id] = placed.num_blocks
        loads = self._load(request_id, placed)
        if reads:
            self._count(request_id, len(token_ids), placed)
        return Start(placed.num_tokens, loads + self._copies(request_id, placed))

    def read_ahead(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str,
        max_cached_tokens: int,
        reserve: int,
        at_once: bool,
    ) -> Nearer:
        """Before `start`: brings what is stored of the prompt nearer. Where that takes steps,
        `start` is to wait for it.

        Unless `at_once`, a step loads only so much that it does not keep others waiting; loaded
        ahead are blocks that nobody holds.
        """
        limit = min(len(token_ids) - 1, max_cached_tokens)
        if not self.connector.reaches or not self._caching or limit <= 0:
            return HERE
        if self.connector.is_waiting(request_id):
            return COMING
        keys = self._keys_of(request_id, token_ids, limit // self.block_size, salt)
        if not self.connector.has_fetched(request_id):
            stored = self._finder.find_whole(keys).stored()
            if self.connector.fetch(request_id, [(group, keys[index]) for group, index in stored]):
                return COMING
        return HERE if at_once else self._load_ahead(keys, reserve)

    def can_fork(self, parent_id: str, num_tokens: int) -> bool:
        """Whether the parent still has every block that the token after the first `num_tokens`
        reads.
        """
        tables = self.tables.get(parent_id)
        if tables is None:
            return False
        end = self._blocks_for(num_tokens)
        firsts = [pool.first_seen(num_tokens, self.block_size) for pool in self.pools]
        return all(
            HOLE not in table[first:end] for first, table in zip(firsts, tables, strict=True)
        )

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """The child's tables share the parent's blocks that hold its first `num_tokens` tokens."""
        num_blocks = self._blocks_for(num_tokens)
        shared = [table[:num_blocks] for table in self.tables[parent_id]]
        for pool, table in zip(self.pools, shared, strict=True):
            pool.hold_all(table)
        self.tables[child_id] = shared
        num_full = num_tokens // self.block_size
        self._keys[child_id] = self._keys.get(parent_id, [])[:num_full]
        self._num_named[child_id] = min(num_full, self._num_named[parent_id])

    def block_ids(self, request_id: str) -> list[list[int]]:
        """A copy of the request's tables."""
        return [list(table) for table in self.tables[request_id]]

    def grow(self, request_id: str, first_token: int, end: int) -> Grant | None:
        """Room for the tokens from `first_token` up to `end`, to be written: appended blocks, and
        copies of shared ones.

        None, and nothing changed, where not enough blocks are free.
        """
        index, num_blocks = first_token // self.block_size, self._blocks_for(end)
        for pool, table in zip(self.pools, self.tables[request_id], strict=True):
            if len(table) < num_blocks or pool.is_shared(table[index]):
                return self._extend(self.tables[request_id], index, num_blocks)
        return NOTHING

    def reserve(self, ends: Mapping[str, int]) -> dict[str, list[list[int]]] | None:
        """The blocks that tables gain so that they reach to those ends, by request, of the requests
        whose tables do not.

        For requests that have just grown, so that nothing is copied. None, and nothing changed,
        where not enough are free for all.
        """
        missing = {
            request_id: self._missing(self.tables[request_id], self._blocks_for(end))
            for request_id, end in ends.items()
        }
        missing = {request_id: counts for request_id, counts in missing.items() if any(counts)}
        for group, pool in enumerate(self.pools):
            if sum(counts[group] for counts in missing.values()) > len(pool.free):
                return None
        grants = {}
        for request_id, counts in missing.items():
            added = grants[request_id] = [
                [pool.take() for _ in range(count)]
                for pool, count in zip(self.pools, counts, strict=True)
            ]
            for table, block_ids in zip(self.tables[request_id], added, strict=True):
                table += block_ids
        return grants

    def _missing(self, tables: Sequence[Sequence[int]], num_blocks: int) -> list[int]:
        return [max(0, num_blocks - len(table)) for table in tables]

    def _extend(self, tables: list[list[int]], index: int, num_blocks: int) -> Grant | None:
        # Only the first block written can be shared: a fork shares up to its first uncomputed
        # token, hits are full blocks.
        copies = [
            index < len(table) and pool.is_shared(table[index])
            for pool, table in zip(self.pools, tables, strict=True)
        ]
        missing = self._missing(tables, num_blocks)
        if any(
            len(pool.free) < count + copy
            for pool, count, copy in zip(self.pools, missing, copies, strict=True)
        ):
            return None
        grant = Grant()
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            if copies[group]:
                source, target = table[index], pool.take()
                pool.release(source)
                table[index] = target
                grant.moves.append(BlockMove(group, source, target))
                grant.replaced.append((group, index, target))
            added = [pool.take() for _ in range(missing[group])]
            table += added
            grant.new_block_ids.append(added)
        return grant

    def record(
        self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int, *, salt: str
    ) -> None:
        """Names the blocks that are full by now, so that others find them, and lets go of those
        behind a window.
        """
        if self._caching:
            self._name(request_id, token_ids, num_computed_tokens // self.block_size, salt)
        for group in self._windowed:
            self.pools[group].pass_window(
                self.tables[request_id][group], num_computed_tokens, self.block_size
            )

    def _name(self, request_id: str, token_ids: Sequence[int], num_full: int, salt: str) -> None:
        num_named = self._num_named[request_id]
        if num_full <= num_named:
            return
        keys = self._keys.setdefault(request_id, [])
        extend_keys(keys, token_ids, num_full, block_size=self.block_size, salt=salt)
        for group, (pool, table) in enumerate(
            zip(self.pools, self.tables[request_id], strict=True)
        ):
            for index in range(num_named, num_full):
                if table[index] != HOLE:
                    pool.cache.add(table[index], keys[index])
                    self.connector.offer(group, keys[index])
        self._num_named[request_id] = num_full

    # -- a request leaves, for good or for a while -------------------------------------------------

    def forget(self, request_id: str) -> None:
        """What its blocks hold is not found again: a failed request's KV."""
        keys = self._keys.get(request_id, [])[: self._num_named.get(request_id, 0)]
        for group, pool in enumerate(self.pools):
            pool.cache.forget_keys(keys)
            self.connector.forget(group, keys)

    def free(self, request_id: str) -> None:
        """Releases all of a request's blocks, if it has any."""
        self._keys.pop(request_id, None)
        self._num_named.pop(request_id, None)
        self.connector.release(request_id)
        self._release(request_id)
        self.host.drop(request_id)

    def swap_out(self, num_tokens: Mapping[str, int]) -> list[BlockMove] | None:
        """The blocks of each row's first tokens to the host, all others free; None, and nothing
        changed, where it has no room for all.
        """
        tables = {
            row_id: [table[: self._blocks_for(count)] for table in self.tables[row_id]]
            for row_id, count in num_tokens.items()
        }
        moves = self.host.put(tables)
        if moves is not None:
            for row_id in num_tokens:
                self._release(row_id)
        return moves

    def swap_in(
        self, rows: Sequence[SwappedRow], *, reserve: int, step_tokens: int = UNBOUNDED
    ) -> list[BlockMove] | None:
        """Back to the device with blocks for all their tokens, as `start` has it; None, and nothing
        changed, where they are not free.

        What others have kept under the same name is shared again, not copied, and so is what the
        rows shared.
        """
        groups = [
            SwapIn(pool, [self._returning(row, group, step_tokens) for row in rows], group=group)
            for group, pool in enumerate(self.pools)
        ]
        if not all(group.has_room(reserve) for group in groups):
            return None
        for row in rows:
            self.tables[row.request_id] = []
        for group in groups:
            for row, table in zip(rows, group.fill(), strict=True):
                self.tables[row.request_id].append(table)
        for row in rows:
            self.host.drop(row.request_id)
        return [move for group in groups for move in group.moves]

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forgets every name, with `reset_connector` off the device too. False, and nothing done,
        while requests hold blocks.
        """
        if self.tables or self.host.tables:
            return False
        for pool in self.pools:
            pool.cache = PrefixCache()
        if reset_connector:
            self.connector.reset()
        return True

    def pin_prefix(self, pin: Pin) -> int:
        """Returns how many of its tokens are kept: in whole blocks. InvalidRequest where they are
        too many.
        """
        keys: list[BlockKey] = []
        extend_keys(
            keys,
            pin.token_ids,
            len(pin.token_ids) // self.block_size,
            block_size=self.block_size,
            salt=pin.salt,
        )
        for group, pool in enumerate(self.pools):
            for key in keys:
                if pool.cache.find(key) is not None and not self.connector.knows(
                    BlockName(group, key.digest)
                ):
                    self.connector.offer(group, key)
        num_blocks = len(keys)
        while not all(map(self.connector.knows, names := self._needed(keys[:num_blocks]))):
            num_blocks -= 1
        self.connector.pin(names, until=pin.until, now=pin.now)
        return num_blocks * self.block_size

    def begin_step(self) -> list[BlockMove]:
        """Moves that come before all others of the step."""
        return self.connector.begin_step(lambda group, key: self.pools[group].cache.find(key))

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _fullest(self) -> BlockPool:
        return min(self.pools, key=lambda pool: len(pool.free) / pool.num_blocks)

    def _capacity(self, pool: BlockPool, num_rows: int) -> int:
        """Without a bound where the blocks of each row's window and of a whole step fit."""
        if pool.window is not None:
            others = (num_rows - 1) * (self._blocks_for(pool.window) + 1)
            if pool.num_blocks > others + self._blocks_for(pool.window + self._max_step_tokens):
                return UNBOUNDED
        return pool.num_blocks * self.block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _find_hit(self, request_id: str, token_ids: Sequence[int], salt: str) -> Hit:
        keys = self._keys_of(request_id, token_ids, len(token_ids) // self.block_size, salt)
        return self._finder.find(keys, token_ids, root=root_digest(salt))

    def _keys_of(
        self, request_id: str, token_ids: Sequence[int], num_blocks: int, salt: str
    ) -> list[BlockKey]:
        keys = self._keys.setdefault(request_id, [])
        extend_keys(keys, token_ids, num_blocks, block_size=self.block_size, salt=salt)
        return keys[:num_blocks]

    def _needed(self, keys: Sequence[BlockKey]) -> list[BlockName]:
        """The blocks that the token after them reads."""
        firsts = [
            pool.first_seen(len(keys) * self.block_size, self.block_size) for pool in self.pools
        ]
        return [
            BlockName(group, key.digest)
            for group, first in enumerate(firsts)
            for key in keys[first:]
        ]

    def _load_ahead(self, keys: Sequence[BlockKey], reserve: int) -> Nearer:
        """Where a hit has more to load than a step may: some of it now, into free blocks, found by
        name at the next step.
        """
        stored = self._finder.find(keys, (), root=b"").stored()
        if self.connector.may_load(stored) or any(
            len(pool.free) - reserve < len(keys) for pool in self.pools
        ):
            return HERE
        moves: list[BlockMove] = []
        for group, index in stored:
            pool = self.pools[group]
            if not self.connector.may_load([(group, index)]):
                break
            moves.append(self._load_block(group, keys[index], pool.take()))
            pool.release(moves[-1].target)
        return Nearer(is_waiting=bool(moves), moves=moves)

    def _load(self, request_id: str, hit: Hit) -> list[BlockMove]:
        """The request has blocks for them; they bear their names from now on."""
        tables, keys = self.tables[request_id], self._keys.get(request_id, [])
        self.connector.release(request_id)
        return [
            self._load_block(group, keys[index], tables[group][index])
            for group, index in hit.stored()
        ]

    def _load_block(self, group: int, key: BlockKey, block_id: int) -> BlockMove:
        self.pools[group].cache.add(block_id, key)
        return self.connector.load(group, key, block_id)

    def _count(self, request_id: str, num_tokens: int, hit: Hit) -> None:
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += hit.num_tokens
        if self.connector.reaches:
            num_loaded = sum(group == 0 for group, _ in hit.stored()) * self.block_size
            self.num_external_query_tokens += num_tokens - hit.num_tokens + num_loaded
            self.num_external_hit_tokens += num_loaded
        for group in range(len(self.pools)):
            self.connector.touch(group, self._keys[request_id][: hit.num_blocks])

    def _place_hit(
        self, request_id: str, hit: Hit, num_tokens: int, step_tokens: int, reserve: int
    ) -> Hit | None:
        """The request's tables, and the hit as far as there is room for it; None, and nothing
        changed, where there is not.
        """
        kept = hit.kept or [[] for _ in self.pools]
        if hit.sources and self._place(
            request_id, kept, num_tokens, hit.num_tokens + step_tokens, reserve, spared=hit.sources
        ):
            return hit
        whole = hit.of_whole_blocks(self.block_size)
        return (
            whole
            if self._place(request_id, kept, num_tokens, whole.num_tokens + step_tokens, reserve)
            else None
        )

    def _copies(self, request_id: str, hit: Hit) -> list[BlockMove]:
        """Of the block that has part of what is wanted, to the first one that the request will
        write.
        """
        tables = self.tables[request_id]
        return [
            BlockMove(group, source, tables[group][hit.num_blocks])
            for group, source in enumerate(hit.sources)
        ]

    def _place(
        self,
        request_id: str,
        kept: Kept,
        num_tokens: int,
        step_end: int,
        reserve: int,
        *,
        spared: Sequence[int] = (),
    ) -> bool:
        """Makes the request's tables out of what is kept and new blocks; False, and nothing
        changed, where these are not free.

        `spared`: per group a block that is not to be taken for it.
        """
        wanted = [
            self._blocks_for(num_tokens if pool.window is None else min(num_tokens, step_end))
            for pool in self.pools
        ]
        entries = list(zip(self.pools, kept, wanted, strict=True))
        if not all(
            pool.has_room(table, num_blocks, reserve + bool(spared))
            for pool, table, num_blocks in entries
        ):
            return False
        for pool, block_id in zip(self.pools, spared, strict=False):
            pool.hold(block_id)
        self.tables[request_id] = [
            pool.fill(table, num_blocks) for pool, table, num_blocks in entries
        ]
        for pool, block_id in zip(self.pools, spared, strict=False):
            pool.release(block_id)
        return True

    def _release(self, request_id: str) -> None:
        for pool, table in zip(self.pools, self.tables.pop(request_id, []), strict=False):
            pool.release_all(table)

    def _returning(self, row: SwappedRow, group: int, step_tokens: int) -> SwappedTable:
        step_end = (
            UNBOUNDED if self.pools[group].window is None else row.num_computed_tokens + step_tokens
        )
        keys = self._keys.get(row.request_id, [])[: self._num_named[row.request_id]]
        host = self.host.tables[row.request_id][group]
        num_full = row.num_computed_tokens // self.block_size
        return SwappedTable(
            host, keys, num_full, max(len(host), self._blocks_for(min(row.num_tokens, step_end)))
        )
