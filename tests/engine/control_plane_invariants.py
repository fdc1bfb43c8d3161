"""What holds between any two steps of an engine, whatever has been asked of it: blocks, queues,
steps in flight, the worker's rows, slots and the disk, each counted from two sides.

`test_control_plane.py` has the rules that act on the engine.
"""

from collections import Counter

from hypothesis.stateful import RuleBasedStateMachine, invariant

from octavo.engine.kv.block_pool import HOLE
from octavo.engine.protocol.stats import GroupBlocks
from tests.support.fake_tiers import MAX_PINNED_BLOCKS

NUM_BLOCKS = 9
MAX_NUM_SEQS = 5


class ControlPlaneInvariants(RuleBasedStateMachine):
    """The invariants of an engine `core` with its `executor` and, where blocks are stored behind
    the slots, a `disk`.
    """

    @invariant()
    def reference_counts_add_up_and_free_and_used_are_all(self):
        blocks = self.core.scheduler.blocks
        for group, pool in enumerate(blocks.pools):
            held = Counter(
                block_id
                for tables in blocks.tables.values()
                for block_id in tables[group]
                if block_id != HOLE
            )
            assert pool.ref_counts == [held[block_id] for block_id in range(NUM_BLOCKS)]
            assert set(pool.free) == {
                block_id for block_id in range(NUM_BLOCKS) if not held[block_id]
            }
            num_shared = sum(count > 1 for count in held.values())
            assert pool.counts() == GroupBlocks(
                pool.spec.window_tokens,
                NUM_BLOCKS,
                len(held),
                num_shared,
                held.total(),
                len(pool.cache.key_of),
            )

    @invariant()
    def the_host_holds_the_swapped_and_never_more_than_the_device(self):
        scheduler = self.core.scheduler
        host = scheduler.blocks.host
        assert set(host.tables) == {
            row.request_id for request in scheduler.queues.swapped for row in request.rows
        }
        assert set(host.tables).isdisjoint(scheduler.blocks.tables)
        for group, count in enumerate(host.num_blocks):
            held = [
                block_id
                for tables in host.tables.values()
                for block_id in tables[group]
                if block_id != HOLE
            ]
            assert count <= NUM_BLOCKS and set(held).isdisjoint(host.free[group])
            assert len(set(held)) + len(host.free[group]) == count

    @invariant()
    def requests_stand_in_one_queue(self):
        scheduler = self.core.scheduler
        queues = [scheduler.waiting, scheduler.queues.running, scheduler.queues.swapped]
        found = [request.request_id for queue in queues for request in queue]
        assert sorted(found) == sorted(scheduler.queues.by_id)
        assert (
            scheduler.queues.num_running_seqs
            == sum(request.num_seqs for request in scheduler.queues.running)
            <= MAX_NUM_SEQS
        )
        holders = [*scheduler.queues.running, *scheduler.leaving]
        assert set(scheduler.blocks.tables) == {
            row.request_id for request in holders for row in request.rows
        }

    @invariant()
    def only_steps_in_flight_run_ahead(self):
        scheduler = self.core.scheduler
        assert len(self.core.plans_in_flight) == len(scheduler.in_flight.steps) <= 1
        connector = scheduler.blocks.connector
        assert connector is None or len(connector.under_way) == len(self.core.plans_in_flight)
        assert all(map(scheduler.in_flight.computes, scheduler.leaving))
        for request in scheduler.queues.by_id.values():
            for row in request.rows:
                in_flight = [
                    share
                    for plan in self.core.plans_in_flight
                    for share in plan.rows
                    if share.request_id == row.request_id
                ]
                assert row.num_tokens_in_flight == sum(share.num_tokens for share in in_flight)
                assert row.num_planned_tokens <= row.num_tokens
        for row in (row for request in scheduler.queues.running for row in request.rows):
            assert (
                len(scheduler.blocks.hashes.hashed(row.request_id)) * 16 <= row.num_computed_tokens
            ), "what has a name has come back"

    @invariant()
    def the_worker_has_the_rows_that_run(self):
        """Checks that the worker has a row for each running request, but for those that the next
        plan frees.
        """
        scheduler = self.core.scheduler
        rows = {
            row.request_id: row
            for request in (*scheduler.queues.running, *scheduler.leaving)
            for row in request.rows
        }
        known = set(self.executor.rows)
        for plan in self.core.plans_in_flight:
            known = known - set(plan.freed_rows) | {new.request_id for new in plan.new_rows}
        known -= set(scheduler.kv_allocator.freed_rows)
        assert known == {name for name, row in rows.items() if row.is_on_worker}
        for name in known & set(self.executor.rows) - {
            new.request_id for plan in self.core.plans_in_flight for new in plan.new_rows
        }:
            assert self.executor.rows[name].tokens[: rows[name].num_tokens] == rows[name].token_ids

    @invariant()
    def no_row_holds_blocks_beyond_its_end(self):
        """Checks that a row of which nothing is in flight has no block for a token that did not
        come, and that the worker knows its tables as they are once the next plan has come.
        """
        scheduler = self.core.scheduler
        if self.core.plans_in_flight:
            return
        ends = {end.request_id: end.num_blocks for end in scheduler.kv_allocator.table_lengths}
        for row in (row for request in scheduler.queues.running for row in request.rows):
            tables = scheduler.blocks.tables[row.request_id]
            assert max(map(len, tables)) <= -(-row.num_tokens // 16)
            if row.is_on_worker:
                known = self.executor.rows[row.request_id].tables
                lengths = ends.get(row.request_id) or list(map(len, known))
                assert lengths == list(map(len, tables))

    @invariant()
    def slots_are_free_idle_or_held(self):
        connector = self.core.scheduler.blocks.connector
        if connector is None:
            return
        held = Counter()
        for under_way in (
            *(step.saving for step in connector.under_way),
            connector.fetching,
            connector.keeping,
        ):
            held.update(under_way.values())
        for request_id, entries in connector.held.items():
            assert request_id in self.core.scheduler.queues.by_id
            held.update(slot for _, slot in entries)
        for slots in connector.slots:
            named = set(slots)
            assert all(slot.num_holds == held[slot] for slot in named) and not any(
                slot.dropped for slot in named
            )
            assert set(slots.idle.values()) == {slot for slot in named if not held[slot]}
        assert sum(len(slots.free) + len(slots) for slots in connector.slots) + sum(
            slot.dropped for slot in held
        ) == sum(slots.num_slots for slots in connector.slots)

    @invariant()
    def what_is_pinned_is_bounded_and_no_more_is_stored_than_may_be(self):
        if self.disk is None:
            return
        assert len(self.disk) <= self.disk.capacity
        connector = self.core.scheduler.blocks.connector
        pins = {} if connector is None else connector.pins
        assert sum(until > self.disk.now for until in pins.values()) <= MAX_PINNED_BLOCKS

    def check_every_invariant(self):
        """Checks all of them at once, for runs that hypothesis does not drive."""
        for name in INVARIANTS:
            getattr(self, name)()


INVARIANTS = [
    name
    for name in vars(ControlPlaneInvariants)
    if hasattr(getattr(ControlPlaneInvariants, name), "hypothesis_stateful_invariant")
]
