"""BlockManager and Scheduler together under a hypothesis state machine, with a pseudo-model whose tokens depend on every KV entry.

Requests of a small alphabet (so that prefixes meet) come, fork, are stepped, preempted, swapped, aborted and failed by the device, in a
cache that is far too small for them, under every policy; a group with a window stands beside one without.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.engine.block_pool import HOLE
from tests.engine.fakes import FakeExecutor, expected_tokens, make_core, make_request

NUM_BLOCKS = 9
WINDOW = 21
MAX_NUM_SEQS = 5


class ControlPlaneMachine(RuleBasedStateMachine):
    """`given` has every request's prompt, length and sample; `tokens` what came back."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        mode=st.sampled_from(["auto", "swap", "recompute"]),
        caching=st.booleans(),
        windows=st.sampled_from([[None], [None, WINDOW], [WINDOW]]),
        budget=st.sampled_from([3, 20, 64]),
        num_host_blocks=st.sampled_from([0, 4, 100]),
    )
    def begin(self, policy, mode, caching, windows, budget, num_host_blocks):
        self.executor = FakeExecutor(windows=windows)
        self.core = make_core(
            num_blocks=NUM_BLOCKS,
            windows=windows,
            num_host_blocks=num_host_blocks,
            budget=budget,
            max_num_seqs=MAX_NUM_SEQS,
            caching=caching,
            executor=self.executor,
            scheduling_policy=policy,
            preemption_mode=mode,
        )
        self.given, self.tokens, self.finals, self.count = {}, {}, {}, 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=90),
        max_tokens=st.integers(1, 60),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("ab"),
        salt=st.sampled_from(["", "x"]),
        n=st.integers(1, 3),
    )
    def add(self, prompt, max_tokens, priority, tenant, salt, n):
        first = str(self.count)
        self.count += 1
        for index in range(n):
            request_id = first if index == 0 else f"{first}#{index}"
            fork_of = None if index == 0 else first
            fields = {"priority": priority, "tenant": tenant, "cache_salt": salt}
            self.core.add(make_request(request_id, prompt, max_tokens=max_tokens, sample_index=index, fork_of=fork_of, **fields))
            self.given[request_id] = (prompt, max_tokens, index)

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            if self.core.has_work:
                self.take(self.core.step())

    @rule(data=st.data())
    def abort(self, data):
        alive = sorted(set(self.given) - set(self.finals))
        if alive:
            self.core.abort(data.draw(st.sampled_from(alive)))

    @rule(data=st.data(), row_only=st.booleans())
    def fail(self, data, row_only):
        """A request whose next step raises, or yields NaN."""
        alive = sorted(set(self.given) - set(self.finals))
        if not alive:
            return
        request_id = data.draw(st.sampled_from(alive))
        if row_only:
            self.executor.fail_on = {request_id: "NaN"}
        else:
            self.executor.raise_on = {request_id}

    @rule()
    def reset(self):
        holds = bool(self.core.scheduler.blocks.tables or self.core.scheduler.swapped)
        assert self.core.reset_prefix_cache() != holds

    def take(self, step):
        for output in step.outputs:
            assert output.request_id not in self.finals, "nothing comes after the final output"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finals[output.request_id] = output.finish_reason

    @invariant()
    def reference_counts_add_up_and_free_and_used_are_all(self):
        blocks = self.core.scheduler.blocks
        for group, pool in enumerate(blocks.pools):
            held = Counter(block_id for tables in blocks.tables.values() for block_id in tables[group] if block_id != HOLE)
            assert pool.ref_counts == [held[block_id] for block_id in range(NUM_BLOCKS)]
            assert set(pool.free) == {block_id for block_id in range(NUM_BLOCKS) if not held[block_id]}

    @invariant()
    def the_host_holds_the_swapped_and_never_more_than_the_device(self):
        scheduler = self.core.scheduler
        host = scheduler.blocks.host
        assert set(host.tables) == {request.request_id for request in scheduler.swapped}
        assert set(host.tables).isdisjoint(scheduler.blocks.tables)
        for group, count in enumerate(host.num_blocks):
            held = [block_id for tables in host.tables.values() for block_id in tables[group] if block_id != HOLE]
            assert count <= NUM_BLOCKS and len(held) == len(set(held)) and set(held).isdisjoint(host._free[group])
            assert len(held) + len(host._free[group]) == count

    @invariant()
    def requests_stand_in_one_queue(self):
        scheduler = self.core.scheduler
        queues = [scheduler.waiting, scheduler.running, scheduler.swapped]
        found = [request.request_id for queue in queues for request in queue]
        assert sorted(found) == sorted(scheduler._requests) and len(scheduler.running) <= MAX_NUM_SEQS
        assert set(scheduler.blocks.tables) == {request.request_id for request in scheduler.running}

    def teardown(self):
        if not hasattr(self, "core"):
            return
        self.executor.fail_on, self.executor.raise_on = {}, set()
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.take(self.core.step())
        assert set(self.finals) == set(self.given), "every request ends"
        for request_id, reason in self.finals.items():
            prompt, max_tokens, index = self.given[request_id]
            expected = expected_tokens(prompt, max_tokens, index)
            tokens = self.tokens[request_id]
            assert tokens == expected[: len(tokens)]
            if reason == "length":
                assert len(tokens) == min(max_tokens, self.core.scheduler._admission.limits.max_num_tokens - len(prompt))
        blocks = self.core.scheduler.blocks
        assert not blocks.tables and blocks.host.num_used_blocks == 0
        assert all(len(pool.free) == NUM_BLOCKS for pool in blocks.pools)


TestControlPlane = ControlPlaneMachine.TestCase
TestControlPlane.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
