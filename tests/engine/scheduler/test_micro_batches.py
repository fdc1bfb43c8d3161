"""Requests are shared out over the steps in flight of a model in stages, and no token changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.worker.simulated import SimulatedClock, SimulatedCosts, SimulatedPipeline
from tests.support.engine_fakes import expected_tokens, make_core, make_request, run_all, tokens_of
from tests.support.simulation import Simulation, request_of
from tests.support.tiers import examples

LINEAR = SimulatedCosts(table=((1, 0.001), (1000, 1.0)), context_token_s=0.0)
"""Costs of a step that is bound by arithmetic: each token takes as long."""


def throughput(num_micro_batches: int, num_requests: int) -> float:
    """Returns the tokens per simulated second of requests on two stages."""
    clock = SimulatedClock()
    core = make_core(
        executor=SimulatedPipeline(clock, 2, LINEAR),
        clock=clock,
        num_micro_batches=num_micro_batches,
        num_blocks=400,
        budget=64,
        max_num_seqs=num_requests,
    )
    requests = [request_of(f"r{index}", 0.0, 40, 200) for index in range(num_requests)]
    run = Simulation(core, clock).run(requests)
    assert all(record.num_tokens == 200 for record in run.records.values())
    return num_requests * 200 / clock.now


@pytest.mark.parametrize("num_requests", [4, 8, 15])
def test_two_lanes_keep_two_equal_stages_busy(num_requests: int) -> None:
    assert throughput(2, num_requests) >= 1.8 * throughput(1, num_requests)


def test_a_single_request_leaves_one_stage_idle() -> None:
    """Its next token is planned once the last one has come back, as with one plan in flight."""
    assert throughput(2, 1) < 1.3 * throughput(1, 1)


def test_each_lane_has_its_share() -> None:
    """The first step computes all prompts; from then on five requests are three and two."""
    core = make_core(num_micro_batches=2)
    for index in range(5):
        core.add(make_request(f"r{index}", [index + 1], max_tokens=6))
    run_all(core)
    rows = [{row.request_id for row in plan.rows} for plan in core.executor.plans if plan.rows]
    assert [len(names) for names in rows] == [5, *[3, 2] * 5]
    assert all(first.isdisjoint(second) for first, second in pairwise(rows[1:]))
    assert not any(row.from_device for plan in core.executor.plans for row in plan.rows)


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=7),
    num_micro_batches=st.integers(1, 4),
    num_blocks=st.integers(14, 60),
    swaps=st.booleans(),
    caching=st.booleans(),
)
def test_lanes_change_no_token(lengths, num_micro_batches, num_blocks, swaps, caching) -> None:
    """Prompts of several chunks, preemption and prefix hits included."""
    core = make_core(
        num_micro_batches=num_micro_batches,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks if swaps else 0,
        caching=caching,
        budget=32,
        max_model_len=160,
    )
    requests = [
        make_request(f"r{index}", [(7 * index + place) % 50 for place in range(length)])
        for index, length in enumerate(lengths)
    ]
    for request in requests:
        core.add(request)
    outputs = run_all(core)
    for request in requests:
        wanted = expected_tokens(request.prompt_token_ids, 8)
        assert tokens_of(outputs[request.request_id]) == wanted
    assert not core.plans_in_flight and core.scheduler.stats().num_used_blocks == 0
