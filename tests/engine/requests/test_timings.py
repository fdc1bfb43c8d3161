"""Where a request's time went, on a simulated clock where each step's cost is known."""

import msgspec
import pytest

from octavo.api.outputs import Timings
from octavo.engine.protocol.requests import ON_ITS_WAY
from octavo.engine.requests.timings import ENGINE_REPLACED, STEP_RUNNING, Stopwatch, Timekeeper
from octavo.worker.simulated import SimulatedCosts
from tests.support.simulation import request_of, simulation

SECOND_A_STEP = SimulatedCosts(((1, 1.0), (2, 1.0)), context_token_s=0.0, move_s=0.0)


def run(requests, **options):
    """Returns the timings by request."""
    sim = simulation(costs=SECOND_A_STEP, budget=64, caching=False, max_model_len=512, **options)
    found = {}
    step = sim.core.step

    def watched():
        outputs = step()
        found.update(
            {
                output.request_id: output.timings
                for output in outputs.outputs
                if output.finish_reason
            }
        )
        return outputs

    sim.core.step = watched
    sim.run(requests)
    return found


def test_alone():
    """A request alone takes two steps of 64 tokens for a prompt of 100, then 4 more."""
    timings = run([request_of("a", 2.0, 100, 5)])["a"]
    assert (timings.queued_s, timings.prefill_s, timings.decode_s, timings.preempted_s) == (
        0,
        2,
        4,
        0,
    )
    assert (timings.num_steps, timings.mean_batch_size, timings.max_batch_size) == (6, 1, 1)
    assert timings.waits == {} and timings.reason == ""


def test_batch_sizes_are_those_of_the_steps_it_ran_in():
    found = run(
        [request_of("a", 0.0, 10, 10), request_of("b", 0.0, 10, 4), request_of("c", 5.0, 10, 2)]
    )
    assert [(found[name].num_steps, found[name].max_batch_size) for name in "abc"] == [
        (10, 2),
        (4, 2),
        (2, 2),
    ]
    assert found["a"].mean_batch_size == pytest.approx((4 * 2 + 1 + 2 * 2 + 3) / 10)
    assert found["b"].mean_batch_size == 2


def test_what_was_waited_for():
    """Request b waits for a step, then for the only place until a ends."""
    found = run([request_of("a", 0.0, 10, 10), request_of("b", 2.5, 10, 1)], max_num_seqs=1)
    assert found["b"].waits == {STEP_RUNNING: 0.5, "batch full": 7.0}
    assert found["b"].queued_s == 7.5
    assert (
        found["b"].reason
        == "waited 7.0 s: batch full; waited 0.500 s: waiting for the running step"
    )
    found = run([request_of("a", 0.0, 80, 10), request_of("b", 0.0, 60, 1)], num_blocks=8)
    assert found["b"].waits == {"step full": 1.0, "KV full": pytest.approx(found["b"].queued_s - 1)}


@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_preempted(num_host_blocks):
    """Two requests grow until one is preempted, which counts its time without blocks."""
    requests = [request_of("a", 0.0, 40, 60), request_of("b", 0.0, 20, 60)]
    found = run(requests, num_blocks=8, num_host_blocks=num_host_blocks, preemption_mode="swap")
    timings = found["b"]
    assert timings.num_preemptions > 0 and timings.num_swaps == (
        timings.num_preemptions if num_host_blocks else 0
    )
    assert timings.preempted_s > 0
    assert timings.prefill_s + timings.decode_s == timings.num_steps + timings.preempted_s
    assert found["a"].preempted_s == 0
    how = (
        f"{timings.num_swaps} of {timings.num_preemptions} by swap"
        if num_host_blocks
        else "computed again"
    )
    assert f"preempted for {timings.preempted_s:.1f} s ({how}): KV full" in timings.reason


def test_one_that_never_started():
    sim = simulation(costs=SECOND_A_STEP, max_num_seqs=1)
    sim.core.add(request_of("a", 0.0, 10, 10))
    sim.core.add(request_of("b", 0.0, 10, 10))
    sim.core.step()
    sim.core.step()
    sim.core.abort("b")
    (timings,) = [output.timings for output in sim.core.step().outputs if output.request_id == "b"]
    assert (timings.queued_s, timings.prefill_s, timings.num_steps, timings.waits) == (
        2,
        0,
        0,
        {"batch full": 1},
    )


def test_who_comes_to_an_idle_engine_waits_for_no_step():
    """A request that comes to an idle engine has waited for no step."""
    sim = simulation(costs=SECOND_A_STEP)
    sim.run([request_of("a", 0.0, 10, 2)])
    assert sim.clock.now == 2
    for name, arrival, now, waits in [
        ("b", 2.0, 2.25, {ON_ITS_WAY: 0.25}),
        ("c", 4.0, 5.0, {ON_ITS_WAY: 1.0}),
        ("d", 5.5, 6.5, {STEP_RUNNING: 0.5, ON_ITS_WAY: 0.5}),
    ]:
        sim.clock.now = now
        sim.core.add(request_of(name, arrival, 10, 1))
        (output,) = sim.core.step().outputs
        assert output.timings.waits == waits and output.timings.queued_s == now - arrival


def test_one_that_another_core_knew():
    sim = simulation(costs=SECOND_A_STEP)
    sim.clock.now = 60.0
    sim.core.add(
        msgspec.structs.replace(request_of("a", 1.0, 10, 3), output_token_ids=[7], resumed=True)
    )
    sim.core.step()
    (output,) = sim.core.step().outputs
    assert (
        output.timings.waits == {ENGINE_REPLACED: 59}
        and output.timings.reason == "waited 59.0 s: the engine was restarted"
    )
    assert (output.timings.prefill_s, output.timings.decode_s) == (1, 1)


def test_the_largest_batch_since_any_step():
    keeper = Timekeeper()
    watches, sizes = [], [3, 9, 2, 7, 7, 1, 4]
    for size in sizes:
        keeper.begin_step(0.0)
        watches.append(Stopwatch(0.0))
        keeper.arrived(watches[-1])
        keeper.begin_step(0.0)
        keeper.runs(watches[-1])
        keeper.planned(size, "")
        keeper.computed(0.0)
    assert [keeper.get_timings(watch).max_batch_size for watch in watches] == [
        max(sizes[i:]) for i in range(len(sizes))
    ]


def test_samples_together():
    one = Timings(1.0, 2.0, 3.0, 0.5, 10, 2.0, 3, {"KV full": 1.0}, 16, 1, 0)
    two = Timings(0.5, 4.0, 1.0, 0.0, 30, 4.0, 5, {"KV full": 0.25, "batch full": 0.25}, 0, 0, 0)
    merged = Timings.merged([one, two])
    assert merged == Timings(
        1.0, 4.0, 3.0, 0.5, 40, 3.5, 5, {"KV full": 1.0, "batch full": 0.25}, 16, 1, 0
    )
