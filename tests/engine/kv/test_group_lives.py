"""Cache groups of every spec in one block manager: counts, release, forks, swaps and hits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.kv.block_manager import BlockManager, SwappedRow
from octavo.engine.kv.block_pool import HOLE, BlockGroup
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing
from octavo.engine.protocol.kv_cache_spec import (
    GROWING,
    UNBOUNDED,
    AnyKVCacheSpec,
    CrossAttentionSpec,
    Extent,
    FullAttentionSpec,
    KvDemand,
    SingleStepSpec,
    SlidingWindowSpec,
    StateSpec,
)

BLOCK = 4
WINDOW = 6
FIXED = 11
"""Rows of the fixed group, of each request."""
NUM_BLOCKS = 40
STATE = StateSpec(8)
LIVES: list[AnyKVCacheSpec] = [
    GROWING,
    SlidingWindowSpec(WINDOW),
    CrossAttentionSpec(FIXED),
    STATE,
    SingleStepSpec(),
]


def held(table: list[int]) -> list[int]:
    return [index for index, block_id in enumerate(table) if block_id != HOLE]


def blocks_between(first: int, end: int) -> list[int]:
    """Lists the blocks that hold the tokens from `first` up to `end`."""
    return list(range(first // BLOCK, -(-end // BLOCK)))


class LivesMachine(RuleBasedStateMachine):
    """Requests start, compute steps of any length, are swapped and end, in groups of any specs."""

    @initialize(
        specs=st.lists(st.sampled_from(LIVES), min_size=1, max_size=4),
        caching=st.booleans(),
    )
    def begin(self, specs, caching):
        self.specs = specs
        self.blocks = BlockManager(
            [BlockGroup(NUM_BLOCKS, spec, NUM_BLOCKS) for spec in specs],
            block_size=BLOCK,
            enable_prefix_caching=caching,
            max_step_tokens=16,
        )
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.stands_for: dict[int, list[int]] = {}
        """Tokens that a named state stands for, by its block."""
        self.swapped: set[str] = set()
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30))
    def start(self, tokens):
        request_id = str(self.count)
        self.count += 1
        started = self.blocks.start(
            request_id, tokens, reserve=0, step_tokens=16, num_fixed_tokens=FIXED
        )
        if started is None:
            self.blocks.free(request_id)
            return
        if CrossAttentionSpec(FIXED) in self.specs:
            assert started.num_cached_tokens == 0
        if STATE in self.specs and started.num_cached_tokens:
            self.check_checkpoint(request_id, tokens[: started.num_cached_tokens])
        self.tokens[request_id], self.computed[request_id] = tokens, started.num_cached_tokens

    def check_checkpoint(self, request_id, tokens):
        """Checks that a request begins with the state after exactly these tokens."""
        key = BlockChain(BlockHashing()).extend(tokens, len(tokens) // BLOCK, BLOCK)[-1]
        assert len(tokens) % BLOCK == 0
        for spec, pool, table in zip(
            self.specs, self.blocks.pools, self.blocks.tables[request_id], strict=True
        ):
            if spec == STATE:
                assert pool.cache.find(key) == table[0] and self.stands_for[table[0]] == tokens

    @precondition(lambda self: self.running())
    @rule(
        which=st.integers(0, 99),
        num_tokens=st.integers(1, 16),
        num_ahead=st.integers(0, 5),
    )
    def compute(self, which, num_tokens, num_ahead):
        """Computes a step, and maybe plans the next one before it is taken in."""
        request_id = self.running()[which % len(self.running())]
        first = self.computed[request_id]
        end = self.blocks.hashes.step_end(request_id, first, first + num_tokens)
        tokens = self.tokens[request_id]
        tokens += [0] * (end + num_ahead - len(tokens))
        if not self.grow(request_id, first, end):
            return
        num_ahead = self.blocks.hashes.step_end(request_id, end, end + num_ahead) - end
        ahead = num_ahead > 0 and self.grow(request_id, end, end + num_ahead)
        self.computed[request_id] = end
        self.blocks.record(request_id, tokens, end, in_flight=ahead)
        self.note_checkpoints(request_id, tokens[:end])
        if ahead:
            self.check_read(request_id, end)
            self.computed[request_id] = end + num_ahead
            self.blocks.record(request_id, tokens, end + num_ahead)
            self.note_checkpoints(request_id, tokens[: end + num_ahead])
        self.check_between_steps(request_id)

    def note_checkpoints(self, request_id, tokens):
        """Notes which tokens a named state stands for; until it is written again it keeps them."""
        for spec, pool, table in zip(
            self.specs, self.blocks.pools, self.blocks.tables[request_id], strict=True
        ):
            if spec == STATE and len(tokens) % BLOCK == 0:
                key = BlockChain(BlockHashing()).extend(tokens, len(tokens) // BLOCK, BLOCK)[-1]
                if pool.cache.find(key) == table[0]:
                    self.stands_for[table[0]] = list(tokens)

    def grow(self, request_id, first, end):
        before = self.blocks.block_ids(request_id)
        if self.blocks.grow(request_id, first, end) is None:
            assert self.blocks.block_ids(request_id) == before, "all or nothing"
            return False
        self.check_written(request_id, first, end)
        return True

    def check_written(self, request_id, first, end):
        """Checks that the blocks which a step writes are its own, and those it reads are there."""
        for spec, pool, table in zip(
            self.specs, self.blocks.pools, self.blocks.tables[request_id], strict=True
        ):
            if spec.is_rewritten:
                assert not pool.is_shared(table[0]), "what others may find is not written"
            if spec.grows:
                written = [table[index] for index in blocks_between(first, end)]
                assert HOLE not in written
                assert all(pool.ref_counts[block_id] == 1 for block_id in written)
                assert not any(block_id in pool.cache.key_of for block_id in written)
        self.check_read(request_id, first)

    def check_read(self, request_id, position):
        """Checks that every block which a query at `position` reads is there."""
        num_read = {GROWING: position, SlidingWindowSpec(WINDOW): min(position, WINDOW - 1)}
        for spec, table in zip(self.specs, self.blocks.tables[request_id], strict=True):
            if read := num_read.get(spec):
                assert set(blocks_between(position - read, position)) <= set(held(table))

    def check_between_steps(self, request_id):
        """Counts what a request holds once its step is recorded."""
        computed = self.computed[request_id]
        for spec, table in zip(self.specs, self.blocks.tables[request_id], strict=True):
            match spec:
                case CrossAttentionSpec():
                    assert held(table) == [0, 1, 2]
                case StateSpec():
                    assert held(table) == [0]
                case SingleStepSpec():
                    assert held(table) == []
                case SlidingWindowSpec():
                    assert min(held(table)) == max(0, computed - WINDOW + 1) // BLOCK
                case FullAttentionSpec():
                    assert held(table) == list(range(len(table)))

    @precondition(lambda self: self.running())
    @rule(which=st.integers(0, 99), share=st.floats(0, 1))
    def fork(self, which, share):
        parent = self.running()[which % len(self.running())]
        num_shared = int(self.computed[parent] * share)
        if STATE in self.specs:
            assert not self.blocks.can_fork(parent, num_shared)
        if not self.blocks.can_fork(parent, num_shared):
            return
        child = str(self.count)
        self.count += 1
        self.blocks.fork(parent, child, num_shared)
        self.tokens[child] = self.tokens[parent][:num_shared]
        self.computed[child] = num_shared
        self.check_read(child, num_shared)
        for spec, own, other in zip(
            self.specs, self.blocks.tables[child], self.blocks.tables[parent], strict=True
        ):
            if isinstance(spec, CrossAttentionSpec):
                assert own == other

    @precondition(lambda self: self.running())
    @rule(which=st.integers(0, 99))
    def swap_out(self, which):
        request_id = self.running()[which % len(self.running())]
        moves = self.blocks.swap_out({request_id: self.computed[request_id]})
        if moves is None:
            return
        self.swapped.add(request_id)
        moved = Counter(move.group for move in moves)
        for group, spec in enumerate(self.specs):
            num_read = len(held(self.blocks.host.tables[request_id][group]))
            assert moved[group] == num_read
            if isinstance(spec, SingleStepSpec):
                assert num_read == 0, "nothing of a step is kept"
            if isinstance(spec, StateSpec):
                assert num_read == 1

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0, 99))
    def swap_in(self, which):
        request_id = sorted(self.swapped)[which % len(self.swapped)]
        computed, tokens = self.computed[request_id], self.tokens[request_id]
        row = SwappedRow(request_id, computed, max(1, len(tokens)))
        if self.blocks.swap_in([row], reserve=0, step_tokens=16) is not None:
            self.swapped.remove(request_id)
            self.check_read(request_id, computed)

    @precondition(lambda self: self.tokens)
    @rule(which=st.integers(0, 99))
    def end(self, which):
        request_id = sorted(self.tokens)[which % len(self.tokens)]
        self.blocks.free(request_id)
        self.swapped.discard(request_id)
        del self.tokens[request_id], self.computed[request_id]

    def running(self):
        return sorted(set(self.tokens) - self.swapped)

    @invariant()
    def references_add_up_and_free_and_used_are_all(self):
        for group, pool in enumerate(self.blocks.pools if hasattr(self, "blocks") else ()):
            references = Counter(
                block_id
                for tables in self.blocks.tables.values()
                for block_id in tables[group]
                if block_id != HOLE
            )
            assert pool.ref_counts == [references[block_id] for block_id in range(NUM_BLOCKS)]
            assert len(references) + len(pool.free) == NUM_BLOCKS
            assert pool.spec.is_hashed or len(pool.cache.key_of) == 0

    def teardown(self):
        for request_id in list(getattr(self, "tokens", ())):
            self.blocks.free(request_id)
        for pool in self.blocks.pools if hasattr(self, "blocks") else ():
            assert len(pool.free) == NUM_BLOCKS


TestLives = LivesMachine.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def manager(*specs: AnyKVCacheSpec, num_blocks: int = NUM_BLOCKS) -> BlockManager:
    return BlockManager(
        [BlockGroup(num_blocks, spec) for spec in specs],
        block_size=BLOCK,
        enable_prefix_caching=True,
        max_step_tokens=16,
    )


def compute(blocks: BlockManager, request_id: str, tokens: list[int], **sizes: int) -> int:
    """Starts a request and computes all of its tokens in one step; returns how many were found."""
    started = blocks.start(request_id, tokens, reserve=0, **sizes)
    assert started is not None
    assert blocks.grow(request_id, started.num_cached_tokens, len(tokens)) is not None
    blocks.record(request_id, tokens, len(tokens))
    return started.num_cached_tokens


def test_a_fixed_group_has_the_blocks_of_its_own_input_from_the_start():
    blocks = manager(GROWING, CrossAttentionSpec(100))
    for name, num_fixed, count in (("a", 1, 1), ("b", 9, 3), ("none", 0, 0)):
        compute(blocks, name, [1, 2, 3], num_fixed_tokens=num_fixed)
        before = blocks.block_ids(name)[1]
        blocks.grow(name, 3, 30)
        assert len(before) == count and blocks.block_ids(name)[1] == before
    assert blocks.start("big", [1], reserve=0, num_fixed_tokens=1000) is None


def test_forks_read_the_same_fixed_blocks_and_the_last_one_frees_them():
    blocks = manager(GROWING, CrossAttentionSpec(8))
    compute(blocks, "parent", [1, 2, 3], num_fixed_tokens=8)
    blocks.fork("parent", "child", 2)
    assert blocks.block_ids("child")[1] == blocks.block_ids("parent")[1]
    blocks.free("parent")
    assert len(blocks.pools[1].free) == NUM_BLOCKS - 2
    blocks.free("child")
    assert len(blocks.pools[1].free) == NUM_BLOCKS


@pytest.mark.parametrize("spec", [CrossAttentionSpec(8), StateSpec()])
def test_beside_a_group_that_tokens_do_not_name_nothing_is_found(spec):
    blocks = manager(GROWING, spec)
    assert compute(blocks, "a", list(range(12)), num_fixed_tokens=8) == 0
    assert compute(blocks, "b", list(range(12)), num_fixed_tokens=8) == 0


@pytest.mark.parametrize("order", [(GROWING, SingleStepSpec()), (SingleStepSpec(), GROWING)])
def test_a_step_group_does_not_keep_a_prefix_from_being_found(order):
    blocks = manager(*order)
    assert compute(blocks, "a", list(range(12))) == 0
    started = blocks.start("b", [*range(10), 99, 98], reserve=0)
    assert started.num_cached_tokens == 10, "two blocks, and the beginning of the third"
    assert len(started.moves) == 1, "of the step group nothing is copied"
    blocks.grow("b", 10, 12)
    blocks.record("b", [*range(10), 99, 98], 12)
    assert held(blocks.block_ids("b")[order.index(SingleStepSpec())]) == []


def test_a_step_group_takes_blocks_for_a_step_and_gives_them_back_at_its_end():
    blocks = manager(SingleStepSpec(), num_blocks=3)
    tokens = list(range(40))
    assert blocks.start("a", tokens, reserve=0, step_tokens=10) is not None
    for first in range(0, 40, 10):
        grant = blocks.grow("a", first, first + 10)
        assert grant is not None and blocks.num_free_blocks == 0, "10 tokens lie in three blocks"
        assert grant.moves == []
        blocks.record("a", tokens, first + 10)
        assert blocks.num_free_blocks == 3


def test_a_step_in_flight_keeps_the_block_that_it_shares_with_the_step_before():
    blocks = manager(SingleStepSpec())
    tokens = list(range(8))
    blocks.start("a", tokens, reserve=0, step_tokens=6)
    blocks.grow("a", 0, 6)
    blocks.grow("a", 6, 8)
    shared = blocks.block_ids("a")[0][1]
    blocks.record("a", tokens, 6, in_flight=True)
    assert blocks.block_ids("a")[0] == [HOLE, shared]
    blocks.record("a", tokens, 8)
    assert held(blocks.block_ids("a")[0]) == []


def test_several_decode_steps_in_one_call_are_refused_where_each_frees_its_blocks():
    assert manager(SingleStepSpec()).reserve({}) is None
    assert manager(GROWING).reserve({}) == {}


def test_a_state_is_one_block_however_long_the_request():
    blocks = manager(StateSpec())
    compute(blocks, "a", list(range(30)))
    assert len(blocks.block_ids("a")[0]) == 1 and not blocks.can_fork("a", 30)
    assert blocks.capacity_tokens == UNBOUNDED
    assert blocks.capacity_of(NUM_BLOCKS + 1) == 0, "each row has a state of its own"


def run(blocks: BlockManager, request_id: str, tokens: list[int]) -> tuple[int, int]:
    """Starts a request and computes all of its tokens, in steps as long as checkpoints allow;
    returns how many were found, and how many states were copied.
    """
    started = blocks.start(request_id, tokens, reserve=0)
    assert started is not None
    first, num_copied = started.num_cached_tokens, 0
    while first < len(tokens):
        end = blocks.hashes.step_end(request_id, first, len(tokens))
        grant = blocks.grow(request_id, first, end)
        assert grant is not None
        num_copied += sum(move.group == 1 for move in grant.moves)
        blocks.record(request_id, tokens, end)
        first = end
    return started.num_cached_tokens, num_copied


def test_a_state_is_found_where_it_was_kept_and_goes_on_in_a_copy():
    blocks = manager(GROWING, StateSpec(8))
    tokens = list(range(30))
    assert run(blocks, "a", tokens) == (0, 4), "after 8, 16, 24 and 28 tokens"
    blocks.free("a")
    assert run(blocks, "b", tokens) == (28, 1)
    assert run(blocks, "c", [*tokens[:19], *range(50, 70)])[0] == 16
    assert run(blocks, "d", [*tokens, *range(50, 53)])[0] == 28
    assert run(blocks, "e", [7, 8, 9, 10, 11])[0] == 0


def test_a_state_is_written_where_it_lies_when_no_block_is_free_for_a_copy():
    blocks = BlockManager(
        [BlockGroup(NUM_BLOCKS), BlockGroup(1, StateSpec(8))],
        block_size=BLOCK,
        enable_prefix_caching=True,
    )
    tokens = list(range(18))
    assert run(blocks, "a", tokens) == (0, 0)
    blocks.free("a")
    assert run(blocks, "b", tokens)[0] == 0, "its state after 16 tokens was written over"


def test_rows_that_share_a_state_write_copies_of_it():
    blocks = manager(GROWING, StateSpec())
    compute(blocks, "parent", list(range(6)))
    blocks.fork("parent", "child", 6)
    (shared,) = blocks.block_ids("child")[1]
    assert blocks.block_ids("parent")[1] == [shared]
    grant = blocks.grow("child", 6, 7)
    assert grant is not None and (1, 0, blocks.block_ids("child")[1][0]) in grant.replaced
    assert blocks.block_ids("child")[1] != [shared]
    assert blocks.grow("parent", 6, 7).moves == []


DEMANDS = st.builds(
    KvDemand,
    max_model_len=st.integers(1, 200),
    max_num_seqs=st.integers(1, 6),
    max_step_tokens=st.integers(1, 40),
)


@given(demand=DEMANDS, spec=st.sampled_from(LIVES), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_least_blocks_are_enough_for_the_longest_request_alone(demand, spec, data):
    """The request computes its tokens in steps of any length that the demand allows."""
    num_blocks = spec.least_blocks(demand, BLOCK)
    assert num_blocks <= spec.most_blocks(demand, BLOCK)
    blocks = BlockManager(
        [BlockGroup(num_blocks, spec)],
        block_size=BLOCK,
        enable_prefix_caching=False,
        max_step_tokens=demand.max_step_tokens,
    )
    tokens = list(range(demand.max_model_len))
    most = data.draw(st.integers(1, demand.max_step_tokens))
    sizes = {"step_tokens": most, "num_fixed_tokens": FIXED}
    assert blocks.start("a", tokens, reserve=0, **sizes) is not None
    first = 0
    while first < len(tokens):
        end = min(len(tokens), first + data.draw(st.integers(1, most)))
        assert blocks.grow("a", first, end) is not None
        blocks.record("a", tokens, end)
        first = end
    assert len(held(blocks.block_ids("a")[0])) <= spec.blocks_held(first, BLOCK)


@given(demand=DEMANDS, spec=st.sampled_from([spec for spec in LIVES if spec != GROWING]))
@settings(max_examples=100, deadline=None)
def test_beyond_the_most_blocks_no_request_waits(demand, spec):
    """All requests run to the longest context, each computing one token a step behind a prefill."""
    num_blocks = spec.most_blocks(demand, BLOCK)
    blocks = BlockManager(
        [BlockGroup(num_blocks, spec)], block_size=BLOCK, enable_prefix_caching=False
    )
    tokens = list(range(demand.max_model_len))
    names = [str(index) for index in range(demand.max_num_seqs)]
    each = max(1, demand.max_step_tokens // len(names))
    for name in names[: demand.max_step_tokens]:
        assert blocks.start(name, tokens, reserve=0, step_tokens=each, num_fixed_tokens=FIXED)
    for first in range(0, len(tokens), each):
        end = min(len(tokens), first + each)
        for name in names[: demand.max_step_tokens]:
            assert blocks.grow(name, first, end) is not None
        for name in names[: demand.max_step_tokens]:
            blocks.record(name, tokens, end)


def test_a_start_counts_each_lifes_blocks():
    extent = Extent(num_tokens=30, step_end=10, num_fixed_tokens=FIXED)
    assert [spec.blocks_at_start(extent, BLOCK) for spec in LIVES] == [8, 3, 3, 1, 3]
    assert [spec.blocks_held(30, BLOCK) for spec in LIVES] == [8, 3, 3, 1, 0]
