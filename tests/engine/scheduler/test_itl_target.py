"""A step budget in time: running requests wait no longer for a token than a target, prompts get
ahead all the same, no token changes, and a replay makes the same plans.
"""

import random
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.api.errors import ConfigError
from octavo.config.cache_options import CacheOptions
from octavo.config.derive import derive
from octavo.config.engine_config import EngineConfig
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.core import EngineCore
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.protocol.step import ResultKind
from octavo.engine.protocol.step_costs import CostPoint, StepCosts
from octavo.engine.recording.recorder import FORMAT, Recorder, RecordingHeader, read_log
from octavo.engine.recording.replay import Replay
from octavo.engine.scheduler.build import build_scheduler
from octavo.engine.scheduler.step_time import MIN_CHUNK, StepTime
from octavo.utils.version import __version__
from octavo.worker.simulated import SimulatedClock, SimulatedCosts, SimulatedExecutor
from tests.support.engine_fakes import (
    BLOCK,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)
from tests.support.simulation import percentile
from tests.support.tiers import examples

TARGET_S = 0.1
"""Target of the simulated engine, in which a step of 32 rows takes 39 ms and a prompt of 512 tokens
315 ms.
"""
COSTS = StepCosts(tuple(CostPoint(n, 0.0, 0.005 + n / 1000) for n in (1, 8, 64, 512)))


class WatchedExecutor(SimulatedExecutor):
    """Notes for each step whether it has generating rows, its prompt tokens, and its seconds."""

    def __init__(self, clock):
        super().__init__(clock)
        self.steps = []

    def execute(self, plan):
        result = super().execute(plan)
        num_decode = sum(
            row.result_kind == ResultKind.SAMPLE and row.num_tokens == 1 for row in plan.rows
        )
        if plan.rows:
            self.steps.append((num_decode, plan.num_tokens - num_decode, result.busy_s))
        return result


def simulated(log=None, **options):
    """Returns a core over the simulated executor, in which 64 requests can run."""
    clock = SimulatedClock()
    scheduler = SchedulerOptions(max_num_batched_tokens=2048, max_num_seqs=64, **options)
    groups = [BlockGroup(1600, num_host_blocks=400)]
    if log is not None:
        header = (FORMAT, __version__, {}, scheduler, CacheOptions(), groups, BLOCK, 2048, 0, None)
        log.write(RecordingHeader(*header))
    made = build_scheduler(scheduler, CacheOptions(), groups, block_size=BLOCK, max_model_len=2048)
    return EngineCore(made, WatchedExecutor(clock), clock=clock, log=log)


def serve(core, num_requests=120, seed=1):
    """Runs requests that come while others generate; returns the ids of those that finished."""
    draw, finished = random.Random(seed), []

    def step():
        finished.extend(
            output.request_id for output in core.step().outputs if output.finish_reason == "length"
        )

    for index in range(num_requests):
        prompt = [index % 900] * draw.randrange(16, 1200)
        sizes = {"max_tokens": draw.randrange(8, 80), "arrival_time": core.executor.clock()}
        core.add(make_request(str(index), prompt, **sizes))
        for _ in range(draw.randrange(6)):
            step()
    while core.has_work:
        step()
    return finished


def slow_steps(core, limit_s):
    """Returns the share of the steps with generating rows and prompts that last longer."""
    mixed = [seconds for rows, tokens, seconds in core.executor.steps[60:] if rows and tokens]
    assert len(mixed) > 50
    return sum(seconds > limit_s for seconds in mixed) / len(mixed)


def test_steps_with_generating_rows_keep_to_the_target_and_all_finish():
    core = simulated(itl_target_ms=1000 * TARGET_S)
    assert sorted(serve(core), key=int) == [str(index) for index in range(120)]
    assert slow_steps(core, 1.3 * TARGET_S) <= 0.01
    free = simulated()
    serve(free)
    assert slow_steps(free, 1.3 * TARGET_S) > 0.3, "without a target they are as long as prompts"


def closed_loop(num_clients=64, **options):
    """Serves clients that each send one request after the other; returns the seconds between
    tokens, and tokens a second.
    """
    core, draw = simulated(**options), random.Random(0)
    clock = core.executor.clock
    sizes = [(draw.randint(64, 1024), draw.randint(32, 128)) for _ in range(120)]
    coming, last, gaps = iter(enumerate(sizes)), {}, []

    def send():
        for index, (num_prompt, num_output) in islice(coming, 1):
            core.add(make_request(str(index), [index] * num_prompt, max_tokens=num_output))

    for _ in range(num_clients):
        send()
    while core.has_work:
        for output in core.step().outputs:
            if output.request_id in last and output.token_ids:
                gaps.append(clock() - last[output.request_id])
            last[output.request_id] = clock()
            if output.finish_reason is not None:
                send()
    return gaps, sum(map(sum, sizes)) / clock()


def test_the_p99_between_tokens_keeps_to_the_target_for_little_throughput():
    """With a target of twice the decode step of 64 rows, on simulated steps."""
    decode_s = SimulatedCosts().compute_s(64)
    gaps, rate = closed_loop(itl_target_ms=2000 * decode_s)
    free_gaps, free_rate = closed_loop()
    assert percentile(gaps, 99) <= 1.1 * 2 * decode_s
    assert percentile(free_gaps, 99) > 10 * 2 * decode_s
    assert rate >= 0.95 * free_rate


def test_prompts_alone_are_not_cut():
    core = simulated(itl_target_ms=20)
    core.add(make_request("a", [1] * 2000, max_tokens=2))
    core.step()
    assert core.executor.steps[0][:2] == (0, 2000)


@pytest.mark.parametrize("target_ms", [1, 5])
def test_prompts_get_ahead_where_decoding_alone_takes_all_of_the_time(target_ms):
    """Each step computes a small part of a prompt, whatever it costs."""
    core = simulated(itl_target_ms=target_ms)
    assert len(serve(core, num_requests=30)) == 30
    chunks = [tokens for rows, tokens, _ in core.executor.steps if rows and tokens]
    assert chunks and max(chunks[10:]) <= 2 * MIN_CHUNK


def test_requests_that_return_from_the_host_are_not_forgotten():
    core = make_core(
        num_blocks=24,
        num_host_blocks=24,
        max_num_seqs=8,
        itl_target_ms=1,
        preemption_mode="swap",
        costs=StepCosts(COSTS.points, 0.0, swap_blocks_per_s=10.0),
    )
    prompts = {str(index): [index] * 30 for index in range(6)}
    for name, prompt in prompts.items():
        core.add(make_request(name, prompt, max_tokens=120))
    found = run_all(core)
    assert core.scheduler.stats().num_swaps > 0
    assert {name: tokens_of(outputs) for name, outputs in found.items()} == {
        name: expected_tokens(prompt, 120) for name, prompt in prompts.items()
    }


@settings(max_examples=examples(40), deadline=None)
@given(
    prompts=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    target_ms=st.sampled_from([1, 10, 30, 80, 400]),
    runs_ahead=st.booleans(),
    gaps=st.randoms(use_true_random=False),
)
def test_a_target_changes_no_token_and_starves_no_request(prompts, target_ms, runs_ahead, gaps):
    clock = SimulatedClock()
    core = make_core(
        num_blocks=60,
        budget=64,
        clock=clock,
        itl_target_ms=target_ms,
        runs_ahead=runs_ahead,
        costs=COSTS,
    )
    found = {}

    def take(count):
        for _ in range(count):
            clock.now += 0.01
            for output in core.step().outputs if core.has_work else ():
                found.setdefault(output.request_id, []).append(output)

    texts = {str(index): [index + 1] * length for index, length in enumerate(prompts)}
    for name, prompt in texts.items():
        core.add(make_request(name, prompt, max_tokens=12))
        take(gaps.randrange(4))
    take(600)
    assert {name: tokens_of(outputs) for name, outputs in found.items()} == {
        name: expected_tokens(prompt, 12) for name, prompt in texts.items()
    }


@given(
    start=st.integers(0, 2000),
    wanted=st.integers(1, 2048),
    num_moves=st.integers(0, 50),
    target=st.floats(0.001, 1),
)
def test_the_room_is_the_most_that_the_prediction_allows(start, wanted, num_moves, target):
    costs = StepCosts(COSTS.points, key_s=1e-5, swap_blocks_per_s=1000.0)
    time = StepTime(costs, target, 4, 40, generating={"a"}, has_chunk=True)

    def predicted(count):
        return costs.step_s(4 + count, 40 + start + count) + num_moves / 1000

    room = time.room("b", start, wanted, num_moves)
    assert 0 <= room <= wanted
    assert room == 0 or predicted(room) <= target
    assert room == wanted or predicted(room + 1) > target
    assert time.room("a", start, wanted, num_moves) == wanted, "rows that generate are never cut"
    time.has_chunk = False
    assert time.room("b", start, wanted, num_moves) == max(room, min(wanted, MIN_CHUNK))


def test_nothing_measured_means_small_chunks_beside_running_requests():
    time = StepTime(StepCosts(), 1.0, 1, 10, generating={"a"})
    assert time.room("b", 0, 500, 0) == MIN_CHUNK


def test_a_replay_makes_the_same_plans(tmp_path):
    core = simulated(Recorder(tmp_path / "log"), itl_target_ms=1000 * TARGET_S)
    serve(core, num_requests=60)
    core.close()
    header, events = read_log(tmp_path / "log")
    found = Replay(header).run(events)
    assert found.differences == [] and found.num_requests == 60


def test_prompts_that_stay_whole_have_no_target():
    config = EngineConfig.from_options(itl_target_ms=50, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="itl_target_ms: got 50, requires chunked"):
        derive(config, model_context_tokens=2048, num_threads=1)
    with pytest.raises(ConfigError, match="itl_target_ms: got 0"):
        EngineConfig.from_options(itl_target_ms=0)
