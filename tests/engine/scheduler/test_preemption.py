"""Requests that give up their blocks, to host memory or to be computed again: the same tokens, and
nothing left behind.
"""

import pytest

from octavo.engine.protocol.step_costs import CostPoint, StepCosts
from octavo.engine.requests.request import RequestStatus
from tests.support.engine_fakes import (
    FakeExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)

PROMPTS = {str(i): [(7 * i + j) % 900 for j in range(20 + i)] for i in range(4)}


def swapping_core(**options):
    return make_core(
        **{"num_blocks": 9, "num_host_blocks": 9, "max_num_seqs": 4, "preemption_mode": "swap"}
        | options
    )


def add_all(core, **fields):
    for name, prompt in PROMPTS.items():
        core.add(make_request(name, prompt, max_tokens=60, **fields))


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_host_blocks", [9, 3, 0])
def test_preempted_requests_yield_the_same_tokens(mode, caching, num_host_blocks):
    core = swapping_core(preemption_mode=mode, caching=caching, num_host_blocks=num_host_blocks)
    add_all(core)
    found = run_all(core)
    for name, prompt in PROMPTS.items():
        assert tokens_of(found[name]) == expected_tokens(prompt, 60)
    stats = core.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.num_swapped == stats.num_host_blocks == 0
    assert (stats.num_swaps > 0) == (mode != "recompute" and num_host_blocks > 0)
    assert sum(outputs[-1].num_swaps for outputs in found.values()) == stats.num_swaps


def test_swapped_requests_compute_nothing_twice():
    executor = FakeExecutor()
    core = swapping_core(executor=executor)
    add_all(core)
    run_all(core)
    computed = [
        (row.request_id, row.start + i)
        for plan in executor.plans
        for row in plan.rows
        for i in range(row.num_tokens)
    ]
    assert core.scheduler.stats().num_swaps > 0
    assert len(computed) == len(set(computed))


def test_swapped_requests_return_before_waiting_ones_start():
    core = swapping_core()
    add_all(core)
    while not core.scheduler.queues.swapped:
        core.step()
    core.add(make_request("late", [5], max_tokens=1))
    while core.scheduler.queues.swapped:
        assert [request.request_id for request in core.scheduler.waiting][-1] == "late"
        core.step()
    run_all(core)


def test_a_swapped_request_can_be_aborted():
    core = swapping_core()
    add_all(core)
    while not core.scheduler.queues.swapped:
        core.step()
    name = core.scheduler.queues.swapped[0].request_id
    assert core.scheduler.stats().num_host_blocks > 0
    core.abort(name)
    assert core.scheduler.stats().num_host_blocks == 0
    found = run_all(core)
    assert found[name][-1].finish_reason == "abort"


def test_a_fork_of_a_swapped_request_waits_for_it():
    """A sample waits for its parent, which is swapped out before the samples have shared its
    prompt.
    """
    core = swapping_core(max_num_seqs=2, caching=False)
    core.add(make_request("old", list(range(300, 330)), max_tokens=80))
    core.add(make_request("p", list(range(60)), max_tokens=60))
    for index in (1, 2):
        core.add(
            make_request(
                f"p#{index}", list(range(60)), max_tokens=20, sample_index=index, fork_of="p"
            )
        )
    met, tokens = False, {}
    while core.has_work:
        states = {
            request.request_id: request.status for request in core.scheduler.queues.by_id.values()
        }
        if states.get("p") is RequestStatus.SWAPPED and states.get("p#1") is RequestStatus.WAITING:
            met = True
            assert states["p#2"] is RequestStatus.WAITING
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert met
    for index in (1, 2):
        assert tokens[f"p#{index}"] == expected_tokens(list(range(60)), 20, index)


def test_what_a_failed_step_may_not_have_swapped_out_is_computed_again():
    executor = FakeExecutor()
    core = swapping_core(executor=executor)
    add_all(core)
    execute, failed = executor.execute, []

    def execute_or_fail(plan):
        if not failed and any(move.kind == "swap_out" for move in plan.moves):
            failed.extend(row.request_id for row in plan.rows)
            raise RuntimeError("the device is gone for a moment")
        return execute(plan)

    executor.execute = execute_or_fail
    found = run_all(core)
    assert failed
    for name, prompt in PROMPTS.items():
        assert found[name][-1].finish_reason == ("error" if name in failed else "length")
        if name not in failed:
            assert tokens_of(found[name]) == expected_tokens(prompt, 60)
    assert (
        core.scheduler.stats().num_host_blocks == 0 and core.scheduler.blocks.num_free_blocks == 9
    )


def test_without_a_kv_cache_every_step_computes_all_tokens_again():
    executor = FakeExecutor()
    core = make_core(executor=executor, kv_cache=False, budget=256)
    for name, prompt in PROMPTS.items():
        core.add(make_request(name, prompt, max_tokens=6))
        core.add(make_request(name + "#1", prompt, max_tokens=6, sample_index=1, fork_of=name))
    found = run_all(core)
    for name, prompt in PROMPTS.items():
        for index, request_id in enumerate((name, name + "#1")):
            assert tokens_of(found[request_id]) == expected_tokens(prompt, 6, index)
            rows = [
                row for plan in executor.plans for row in plan.rows if row.request_id == request_id
            ]
            assert [(row.start, row.num_tokens) for row in rows] == [
                (0, len(prompt) + i) for i in range(6)
            ]


@pytest.mark.parametrize(("swap_blocks_per_s", "swaps"), [(None, True), (10.0, False), (1e4, True)])
def test_auto_takes_the_cheaper_of_swap_and_recomputation(swap_blocks_per_s, swaps):
    """Blocks out and in again are compared with a prefill in the engine's chunks."""
    costs = StepCosts((CostPoint(64, 0, 0.05),), swap_blocks_per_s=swap_blocks_per_s)
    core = swapping_core(preemption_mode="auto", costs=costs)
    add_all(core)
    run_all(core)
    stats = core.scheduler.stats()
    assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == swaps
