"""The real control plane over simulated steps: no request starves, tenants get their share, and
planning is fast enough for a hundred thousand requests.
"""

import random
import time

import pytest

from octavo.worker.simulated import SimulatedCosts
from tests.support.simulation import percentile, request_of, simulation
from tests.support.slowness import slowness

ROOMY = {"num_blocks": 4096, "max_num_seqs": 48, "max_model_len": 2048, "caching": False}


def steady(tenant, count, rate, seed):
    """Returns requests that come one at a time, like those of a small service."""
    draw, now, found = random.Random(seed), 0.0, []
    for index in range(count):
        now += draw.expovariate(rate)
        found.append(
            request_of(
                f"{tenant}{index}",
                now,
                draw.randrange(64, 192),
                draw.randrange(16, 48),
                tenant=tenant,
            )
        )
    return found


def flood(tenant, count, at, seed, prompt=(64, 512), output=(64, 256)):
    draw = random.Random(seed)
    return [
        request_of(
            f"{tenant}{i}", at, draw.randrange(*prompt), draw.randrange(*output), tenant=tenant
        )
        for i in range(count)
    ]


def test_costs_are_lines_between_the_tables_points():
    costs = SimulatedCosts(((1, 1.0), (3, 2.0), (5, 6.0)))
    assert [costs.compute_s(n) for n in (0, 1, 2, 3, 4, 5, 6)] == [
        1.0,
        1.0,
        1.5,
        2.0,
        4.0,
        6.0,
        8.0,
    ]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("policy", "count"),
    [("fcfs", 5000), ("fair", 5000), pytest.param("fcfs", 100_000, marks=pytest.mark.slow)],
)
def test_a_hundred_thousand_requests_in_a_minute(policy, count):
    """All requests end, each with as many tokens as it asked for, within a bound on processor
    time that is scaled by the machine's slowness.
    """
    draw = random.Random(0)
    sizes = [(draw.randrange(1, 128), draw.randrange(1, 64)) for _ in range(count)]
    requests = [request_of(str(i), 0.0, *size, tenant=str(i % 3)) for i, size in enumerate(sizes)]
    sim = simulation(
        num_blocks=3000, budget=2048, max_num_seqs=256, max_model_len=2048, scheduling_policy=policy
    )
    began = time.thread_time()
    sim.run(requests)
    elapsed = time.thread_time() - began
    assert [sim.records[str(i)].num_tokens for i in range(count)] == [output for _, output in sizes]
    assert elapsed < slowness() * (60 * count / 100_000 + 1)


def test_one_that_floods_holds_up_no_other():
    """A tenant's 99th percentile of the time to first token beside 200 requests of another at once
    is at most twice that alone, and one step.
    """
    options = ROOMY | {"budget": 512, "scheduling_policy": "fair", "max_num_seqs_per_tenant": 24}
    for seed in range(3):
        alone = simulation(**options).run(steady("b", 100, 1.0, seed))
        both = simulation(**options).run(
            steady("b", 100, 1.0, seed) + flood("a", 200, 5.0, seed + 50)
        )
        least, most = (
            percentile([met.time_to_first_token for met in sim.of("b")], 99)
            for sim in (alone, both)
        )
        assert most <= 2 * least + both.longest_step_s
    first_come = simulation(**ROOMY, budget=512).run(
        steady("b", 100, 1.0, 0) + flood("a", 200, 5.0, 50)
    )
    assert percentile([met.time_to_first_token for met in first_come.of("b")], 99) > 100 * least


@pytest.mark.parametrize("weight", [1, 3])
def test_tokens_in_ten_seconds_are_as_the_weights(weight):
    options = ROOMY | {
        "budget": 512,
        "max_num_seqs": 16,
        "scheduling_policy": "fair",
        "tenant_weight": (f"a={weight}",),
    }
    sizes = {"prompt": (32, 256), "output": (8, 64)}
    sim = simulation(**options).run(
        flood("a", 3000, 0.0, 1, **sizes) + flood("b", 3000, 0.0, 2, **sizes), until=110
    )
    for window in range(10):
        counts = sim.tokens[window]
        assert counts["a"] / counts["b"] == pytest.approx(weight, rel=0.1)


def test_idle_time_is_not_saved_up():
    """A tenant that comes late shares from then on, and does not get everything until it has caught
    up.
    """
    options = ROOMY | {"budget": 512, "max_num_seqs": 16, "scheduling_policy": "fair"}
    sizes = {"prompt": (32, 256), "output": (8, 64)}
    sim = simulation(**options).run(
        flood("a", 3000, 0.0, 1, **sizes) + flood("b", 3000, 30.0, 2, **sizes), until=70
    )
    for window in (4, 5):
        assert sim.tokens[window]["a"] == pytest.approx(sim.tokens[window]["b"], rel=0.1)


def test_lower_priorities_go_first_and_the_others_end_too():
    requests = [request_of(str(i), 0.0, 100, 30, priority=i % 3) for i in range(90)]
    sim = simulation(**ROOMY | {"max_num_seqs": 8}, budget=256, scheduling_policy="priority").run(
        requests
    )
    last = {
        p: max(sim.records[str(i)].first_token_time for i in range(90) if i % 3 == p)
        for p in range(3)
    }
    first = {
        p: min(sim.records[str(i)].first_token_time for i in range(90) if i % 3 == p)
        for p in range(3)
    }
    assert last[0] < last[1] < last[2] and last[0] <= first[2]


def test_decoding_goes_on_beside_long_prompts():
    """A prompt of 1,500 tokens in chunks lengthens no step beyond the budget's."""
    requests = [request_of("chat", 0.0, 20, 300)] + [
        request_of(f"long{i}", 0.5 * i, 1500, 4) for i in range(20)
    ]
    whole = simulation(**ROOMY, budget=2048, enable_chunked_prefill=False).run(requests)
    chunked = simulation(**ROOMY, budget=128).run(requests)
    assert chunked.longest_step_s < 0.15 < 0.9 < whole.longest_step_s
    assert chunked.records["chat"].end_time < whole.records["chat"].end_time


def test_the_delay_keeps_whole_prompts_from_starving_those_that_decode():
    requests = [request_of("chat", 0.0, 20, 300)] + [
        request_of(f"long{i}", 0.05 * i, 1000, 1) for i in range(100)
    ]
    ends = [
        simulation(
            **ROOMY, budget=1024, enable_chunked_prefill=False, scheduler_delay_factor=factor
        )
        .run(requests)
        .records["chat"]
        .end_time
        for factor in (0.0, 0.5, 2.0)
    ]
    assert ends[0] > ends[1] > ends[2]


def test_kinds_of_batching_against_each_other():
    """Continuous batching is faster than static batching, and that than one request at a time."""
    requests = flood("a", 200, 0.0, 3)
    took = {
        kind: simulation(**ROOMY, budget=512, batching=kind).run(requests).clock.now
        for kind in ("continuous", "static", "none")
    }
    assert took["continuous"] < took["static"] < took["none"]


def test_dynamic_batching_waits_for_its_window_and_no_longer():
    requests = [
        request_of("a", 1.0, 20, 4),
        request_of("b", 1.04, 20, 4),
        request_of("c", 1.2, 20, 4),
    ]
    sim = simulation(**ROOMY, budget=512, batching="dynamic", batch_window_ms=50).run(requests)
    scheduled = {name: record.first_token_time for name, record in sim.records.items()}
    assert 1.05 < scheduled["a"] == scheduled["b"] < 1.1 < 1.25 < scheduled["c"]
    full = simulation(
        **ROOMY | {"max_num_seqs": 2}, budget=512, batching="dynamic", batch_window_ms=10_000
    ).run(requests[:2])
    assert full.records["a"].first_token_time < 1.1, "a full batch does not wait"


def test_swapping_is_chosen_where_copies_are_cheap_and_recomputing_where_they_are_dear():
    requests = [request_of(str(i), 0.0, 200, 200) for i in range(40)]
    options = {
        "num_blocks": 256,
        "num_host_blocks": 256,
        "max_num_seqs": 16,
        "max_model_len": 2048,
        "budget": 256,
    }
    for move_s, swaps_most in ((1e-5, True), (1.0, False)):
        sim = simulation(costs=SimulatedCosts(move_s=move_s), **options).run(requests)
        stats = sim.core.scheduler.stats()
        assert stats.num_preemptions > 10
        assert (stats.num_swaps == stats.num_preemptions) == swaps_most
        assert swaps_most or stats.num_swaps <= 3, "what it takes to measure it"


def milliseconds_a_step(num_requests, num_steps=300):
    """Returns the median milliseconds of `schedule` and `update` over decode steps, of which one in
    16 names every request's block and takes a new one.
    """
    sim = simulation(
        num_blocks=80 * num_requests, budget=1 << 20, max_num_seqs=num_requests, max_model_len=1200
    )
    for index in range(num_requests):
        sim.core.add(request_of(str(index), 0.0, 100, 1000))
    sim.core.step()
    scheduler, executor, times = sim.core.scheduler, sim.core.executor, []
    for _ in range(num_steps):
        began = time.thread_time()
        plan = scheduler.schedule(0.0)
        between = time.thread_time()
        result = executor.execute(plan)
        resumed = time.thread_time()
        scheduler.update(plan, result)
        times.append(between - began + time.thread_time() - resumed)
    assert len(plan.rows) == num_requests
    return sorted(times)[num_steps // 2] * 1e3


@pytest.mark.alone
def test_the_schedulers_share_of_a_step_of_256():
    """The scheduler's share of a step of 256 requests is at most 3 milliseconds; measured are about
    0.6 on 2 cores of a Xeon, and 1.8 to 2.5 on 2 shared ones of an EPYC (2026).
    """
    for _ in range(5):  # a noisy neighbour gets four more chances
        before, taken, after = slowness(), milliseconds_a_step(256), slowness()
        slower = max(before, after)
        if taken < 3.0 * slower:
            return
    raise AssertionError(f"{taken:.2f} milliseconds, on a machine {slower:.1f} times slower")
