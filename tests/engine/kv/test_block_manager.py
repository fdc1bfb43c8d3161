"""The block manager under a hypothesis state machine, and its rules one by one."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from octavo.engine.kv.block_manager import BlockManager, SwappedRow
from octavo.engine.kv.block_pool import HOLE, BlockGroup, PrefixCache
from octavo.engine.kv.block_tables import NO_ALLOCATION
from octavo.engine.protocol.kv_cache_spec import SlidingWindowSpec
from octavo.engine.protocol.kv_messages import BlockKey
from tests.support.tiers import examples

BLOCK = 4
NUM_BLOCKS = 12
WINDOW = 6


class BlockManagerMachine(RuleBasedStateMachine):
    """Requests of a small alphabet (so that prefixes meet) start, grow, fork anywhere, are swapped,
    end and are found again.

    `contents` is the truth beside the manager: what the worker would have written into each block;
    `host` is the same of the host's blocks. The second group has a window.
    """

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(
            [
                BlockGroup(NUM_BLOCKS, num_host_blocks=6),
                BlockGroup(NUM_BLOCKS, SlidingWindowSpec(WINDOW), num_host_blocks=6),
            ],
            block_size=BLOCK,
            enable_prefix_caching=True,
        )
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.contents: list[dict[tuple[int, int], int]] = [{}, {}]
        self.host: list[dict[tuple[int, int], int]] = [{}, {}]
        self.families: list[list[str]] = []
        self.count = 0

    def compute(self, request_id: str, end: int) -> None:
        """Writes the tokens not yet computed through the tables, as a step does."""
        for position in range(self.computed[request_id], end):
            for contents, table, pool in zip(
                self.contents, self.blocks.tables[request_id], self.blocks.pools, strict=True
            ):
                block_id = table[position // BLOCK]
                assert pool.ref_counts[block_id] == 1, "a shared block is never written"
                assert block_id not in pool.cache.key_of, "a named block is never written"
                contents[block_id, position % BLOCK] = self.tokens[request_id][position]
        self.computed[request_id] = end
        self.blocks.record(request_id, self.tokens[request_id], end)

    def move(self, moves) -> None:
        for move in moves:
            device, host = self.contents[move.group], self.host[move.group]
            source, target = {
                "copy": (device, device),
                "swap_out": (device, host),
                "swap_in": (host, device),
            }[move.kind]
            for offset in range(BLOCK):
                if (move.source, offset) in source:
                    target[move.target, offset] = source[move.source, offset]

    @rule(
        target=requests,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        share=st.floats(0, 1),
        read=st.booleans(),
    )
    def start(self, tokens, share, read):
        request_id = str(self.count)
        self.count += 1
        started = self.blocks.start(
            request_id, tokens, max_cached_tokens=14 if read else 0, reserve=0
        )
        if started is None:
            self.blocks.free(request_id)
            return request_id
        cached = started.num_cached_tokens
        assert cached < len(tokens) and (read or cached == 0)
        self.move(started.moves)
        self.tokens[request_id], self.computed[request_id] = list(tokens), cached
        self.compute(request_id, cached + int((len(tokens) - cached) * share))
        return request_id

    @rule(request_id=requests, token=st.integers(0, 1))
    def append(self, request_id, token):
        if request_id not in self.blocks.tables:
            return
        self.tokens[request_id].append(token)
        grant = self.blocks.grow(
            request_id, self.computed[request_id], len(self.tokens[request_id])
        )
        if grant is None:
            self.tokens[request_id].pop()
            return
        self.move(grant.moves)
        self.compute(request_id, len(self.tokens[request_id]))

    @rule(
        request_id=requests,
        paths=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=2, max_size=4),
        kept=st.integers(0, 3),
        share=st.floats(0, 1),
    )
    def verify(self, request_id, paths, kept, share):
        """Computes the paths of a guess, each through blocks of its own, and keeps what holds of
        one; the others' blocks are free again.
        """
        start = self.computed.get(request_id, -1)
        if request_id not in self.blocks.tables or start < len(self.tokens[request_id]):
            return
        grant = self.blocks.grow(request_id, start, start + 1)
        if grant is None:
            return
        self.move(grant.moves)
        grown = max(map(len, self.blocks.tables[request_id]))
        if self.blocks.reserve({request_id: start + max(map(len, paths))}) is None:
            return
        num_free = [len(pool.free) for pool in self.blocks.pools]
        ends = [start + len(path) for path in paths[1:]]
        leaves = self.blocks.branch(request_id, start, ends)
        if leaves is None:
            assert [len(pool.free) for pool in self.blocks.pools] == num_free, "all or nothing"
            return
        self.move(leaves.moves)
        for path, entries in zip(paths, [[], *leaves.entries], strict=True):
            tables = self.blocks.block_ids(request_id)
            for group, index, block_id in entries:
                tables[group][index] = block_id
            for table, contents, pool in zip(tables, self.contents, self.blocks.pools, strict=True):
                for position, token in enumerate(path, start):
                    block_id = table[position // BLOCK]
                    assert pool.ref_counts[block_id] == 1 and block_id not in pool.cache.key_of
                    contents[block_id, position % BLOCK] = token
        kept %= len(paths)
        self.blocks.keep_path(request_id, kept)
        assert [len(pool.free) for pool in self.blocks.pools] == num_free
        held = paths[kept][: int(len(paths[kept]) * share)]
        self.tokens[request_id] += held
        self.computed[request_id] += len(held)
        self.blocks.record(request_id, self.tokens[request_id], self.computed[request_id])
        self.give_back(request_id, grown)

    def give_back(self, request_id, grown):
        """Releases what was reserved behind a request's tokens, each block once; `grown` blocks
        were there for the first token that was verified, which may not have held either.
        """
        num_tokens, tables = len(self.tokens[request_id]), self.blocks.tables[request_id]
        before, num_free = list(map(len, tables)), [len(pool.free) for pool in self.blocks.pools]
        left = self.blocks.cut(request_id, num_tokens)
        after = list(map(len, tables))
        assert left == (after if after != before else None)
        assert max(after) <= max(grown, -(-num_tokens // BLOCK))
        assert [len(pool.free) for pool in self.blocks.pools] == [
            free + old - new for free, old, new in zip(num_free, before, after, strict=True)
        ]
        assert self.blocks.cut(request_id, num_tokens) is None

    @rule(target=requests, parent=requests, share=st.floats(0, 1))
    def fork(self, parent, share):
        """Forks a request at any of its tokens; the child writes when it is appended to, whether
        its parent is still there or gone.
        """
        request_id = str(self.count)
        self.count += 1
        shared = int(self.computed.get(parent, 0) * share)
        if not self.blocks.can_fork(parent, shared):
            return request_id
        self.blocks.fork(parent, request_id, shared)
        self.tokens[request_id], self.computed[request_id] = self.tokens[parent][:shared], shared
        return request_id

    @rule(rows=st.lists(requests, min_size=1, max_size=3, unique=True))
    def swap_out(self, rows):
        """Swaps rows out together, as the beams of a search: blocks that they share move once."""
        rows = [row for row in rows if row in self.blocks.tables]
        before = [self.blocks.block_ids(row) for row in rows]
        moves = self.blocks.swap_out({row: self.computed[row] for row in rows})
        if moves is None:
            assert [self.blocks.block_ids(row) for row in rows] == before, "all or nothing"
        elif rows:
            assert len({(move.group, move.source) for move in moves}) == len(moves)
            self.move(moves)
            self.families.append(rows)

    @precondition(lambda self: self.families)
    @rule(which=st.integers(0, 100))
    def swap_in(self, which):
        rows = self.families[which % len(self.families)]
        moves = self.blocks.swap_in(
            [SwappedRow(row, self.computed[row], len(self.tokens[row])) for row in rows], reserve=0
        )
        if moves is None:
            assert set(rows) <= set(self.blocks.host.tables) and set(rows).isdisjoint(
                self.blocks.tables
            ), "all or nothing"
        else:
            self.families.remove(rows)
            self.move(moves)
            for row in rows:
                computed, num_tokens = self.computed[row], len(self.tokens[row])
                assert (
                    computed == num_tokens
                    or self.blocks.grow(row, computed, num_tokens) is NO_ALLOCATION
                ), "no shared block is to be written"

    @rule(request_id=consumes(requests), forget=st.booleans())
    def end(self, request_id, forget):
        self.families = [
            rest
            for family in self.families
            if (rest := [row for row in family if row != request_id])
        ]
        if forget:
            self.blocks.hashes.remove(request_id)
        self.blocks.free(request_id)
        self.tokens.pop(request_id, None)
        self.computed.pop(request_id, None)

    @precondition(lambda self: not self.tokens)
    @rule()
    def reset(self):
        assert self.blocks.reset_prefix_cache()
        assert all(len(pool.cache.key_of) == 0 for pool in self.blocks.pools)

    @invariant()
    def reference_counts_add_up(self):
        for group, pool in enumerate(self.blocks.pools):
            held = Counter(
                block_id
                for tables in self.blocks.tables.values()
                for block_id in tables[group]
                if block_id != HOLE
            )
            assert pool.ref_counts == [held[block_id] for block_id in range(NUM_BLOCKS)]

    @invariant()
    def free_and_used_are_all(self):
        for pool in self.blocks.pools:
            used = {block_id for block_id in range(NUM_BLOCKS) if pool.ref_counts[block_id]}
            assert used.isdisjoint(pool.free) and len(used) + len(pool.free) == NUM_BLOCKS

    @invariant()
    def host_blocks_are_held_or_free(self):
        for group, free in enumerate(self.blocks.host.free):
            held = [
                block_id
                for tables in self.blocks.host.tables.values()
                for block_id in tables[group]
                if block_id != HOLE
            ]
            assert sorted([*set(held), *free]) == list(range(6))
            assert self.blocks.host.ref_counts[group] == Counter(held)
        assert set(self.blocks.host.tables).isdisjoint(self.blocks.tables)

    @invariant()
    def names_point_at_full_blocks_that_hold_their_tokens(self):
        for pool, contents in zip(self.blocks.pools, self.contents, strict=True):
            for block_id, key in pool.cache.key_of.items():
                assert tuple(contents[block_id, offset] for offset in range(BLOCK)) == key.token_ids
                assert pool.cache.find(key) == block_id

    @invariant()
    def tables_hold_the_computed_tokens(self):
        for request_id, tables in self.blocks.tables.items():
            for table, contents, window in zip(
                tables, self.contents, (1 << 30, WINDOW), strict=True
            ):
                computed = self.computed[request_id]
                assert len(table) >= -(-computed // BLOCK)
                for position in range(max(0, computed - window + 1), computed):
                    assert (
                        contents[table[position // BLOCK], position % BLOCK]
                        == self.tokens[request_id][position]
                    )


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(
    max_examples=examples(12), stateful_step_count=40, deadline=None
)


def manager(num_blocks=8, **options):
    return BlockManager(
        [BlockGroup(num_blocks)], block_size=BLOCK, **{"enable_prefix_caching": True, **options}
    )


def start(blocks, request_id, tokens, **limits):
    """Returns how many tokens were found; None where there was no room."""
    started = blocks.start(request_id, tokens, **{"reserve": 0, **limits})
    return None if started is None else started.num_cached_tokens


def run_request(blocks, request_id, tokens, *, free=True):
    cached = start(blocks, request_id, tokens)
    blocks.record(request_id, tokens, len(tokens))
    table = blocks.block_ids(request_id)[0]
    if free:
        blocks.free(request_id)
    return cached, table


def test_the_least_recently_used_name_goes_first_and_from_its_end():
    blocks = manager(num_blocks=6)
    run_request(blocks, "a", list(range(8)))
    run_request(blocks, "b", list(range(50, 58)))
    run_request(blocks, "again", list(range(9)))
    start(blocks, "big", list(range(100, 112)))  # takes the nameless two and one of b's
    held = {key.token_ids for key in blocks.pools[0].cache.key_of.values()}
    assert held == {(0, 1, 2, 3), (4, 5, 6, 7), (50, 51, 52, 53)}


def test_blocks_without_a_name_are_used_before_named_ones():
    blocks = manager(num_blocks=4)
    run_request(blocks, "a", list(range(8)))
    run_request(blocks, "b", [1, 2])
    run_request(blocks, "c", [3, 4])
    assert run_request(blocks, "a2", list(range(9)))[0] == 8


def test_without_caching_nothing_is_named():
    blocks = manager(enable_prefix_caching=False)
    run_request(blocks, "a", list(range(8)))
    assert run_request(blocks, "b", list(range(8)))[0] == 0


def test_start_leaves_the_reserve_free():
    blocks = manager(num_blocks=4)
    assert start(blocks, "a", list(range(8)), reserve=3) is None
    assert start(blocks, "a", list(range(8)), reserve=2) == 0


def test_a_failed_start_changes_nothing():
    blocks = manager(num_blocks=4)
    run_request(blocks, "a", list(range(8)))
    free = list(blocks.pools[0].free)
    assert start(blocks, "b", list(range(40))) is None
    assert list(blocks.pools[0].free) == free


def test_reset_waits_for_the_requests():
    blocks = manager()
    run_request(blocks, "a", list(range(8)), free=False)
    assert not blocks.reset_prefix_cache()
    blocks.free("a")
    assert blocks.reset_prefix_cache()
    assert run_request(blocks, "b", list(range(9)))[0] == 0


def test_part_of_a_block_is_copied_where_a_prompt_diverges_inside_it():
    blocks = manager()
    _, table = run_request(blocks, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    started = blocks.start("b", [1, 2, 3, 4, 5, 6, 9, 9], reserve=0)
    assert started.num_cached_tokens == 6
    (move,) = started.moves
    assert (move.source, move.target) == (table[1], blocks.tables["b"][0][1])
    assert blocks.pools[0].ref_counts[table[1]] == 0, "read once, not held"


def test_of_the_blocks_that_begin_alike_the_longest_is_copied():
    blocks = manager(num_blocks=12)
    for name, tokens in (
        ("a", [5, 1, 1, 1]),
        ("b", [5, 6, 1, 1]),
        ("c", [5, 6, 7, 1]),
        ("d", [5, 9, 7, 1]),
    ):
        run_request(blocks, name, tokens)
    assert start(blocks, "e", [5, 6, 7, 8, 9]) == 3
    assert start(blocks, "f", [5, 6, 9, 9, 9]) == 2
    assert start(blocks, "g", [4, 6, 7, 1, 9]) == 0


def test_without_room_for_both_the_source_of_a_copy_is_given_up():
    blocks = manager(num_blocks=2)
    run_request(blocks, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert start(blocks, "b", [1, 2, 3, 4, 5, 6, 9, 9]) == 4


def test_no_more_is_read_than_allowed():
    blocks = manager()
    run_request(blocks, "a", list(range(8)))
    assert start(blocks, "b", list(range(8)), max_cached_tokens=0) == 0
    assert start(blocks, "c", list(range(8)), max_cached_tokens=5) == 5
    assert start(blocks, "d", list(range(8))) == 7, "never the last one"
    assert start(blocks, "e", [0]) == 0


def test_a_collision_of_digests_is_a_miss():
    cache = PrefixCache()
    cache.add(3, BlockKey(b"same", b"", (1, 2)))
    assert cache.find(BlockKey(b"same", b"", (1, 2))) == 3
    assert cache.find(BlockKey(b"same", b"", (1, 9))) is None


def test_a_fork_inside_a_full_block_copies_it_even_when_its_parent_is_gone():
    blocks = manager()
    run_request(blocks, "parent", list(range(8)), free=False)
    blocks.fork("parent", "child", 6)
    blocks.free("parent")
    source = blocks.block_ids("child")[0][1]
    grant = blocks.grow("child", 6, 7)
    assert [(move.source, move.target) for move in grant.moves] == [
        (source, blocks.block_ids("child")[0][1])
    ]
    assert blocks.block_ids("child")[0][1] != source
    blocks.free("child")
    assert run_request(blocks, "again", list(range(9)))[0] == 8
