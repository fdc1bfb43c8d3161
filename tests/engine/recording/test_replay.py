"""A recording holds all that decides: when its steps are made again, every plan is the same."""

import json
import random

import pytest

from octavo import SamplingParams, __version__
from octavo.api.errors import ConfigError
from octavo.config.cache_options import CacheOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.core import EngineCore
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.protocol.kv_cache_spec import SlidingWindowSpec
from octavo.engine.protocol.requests import ResetPrefixCache
from octavo.engine.recording.recorder import (
    FORMAT,
    Recorder,
    RecordingHeader,
    StepComputed,
    StepPlanned,
    read_log,
)
from octavo.engine.recording.replay import Replay
from octavo.engine.scheduler.build import build_scheduler
from octavo.worker.simulated import SimulatedClock, SimulatedExecutor
from tests.support.engine_fakes import BLOCK, FakeExecutor, LaunchingExecutor, make_request
from tests.support.fake_tiers import Disk, FakeTiers, tiers_of
from tests.support.llm_tools import make_llm, prompts_of
from tests.support.tiers import examples

GROUPS = [BlockGroup(18, num_host_blocks=5), BlockGroup(18, SlidingWindowSpec(40), 5)]


class MovingClock(SimulatedClock):
    """A clock that moves with each look at it, since a fake step takes no time."""

    def __call__(self):
        self.now += 0.01
        return self.now


def recorded_core(path, executor, clock, *, tiers=None, runs_ahead=False, **options):
    scheduler, cache = (
        SchedulerOptions(max_num_batched_tokens=48, max_num_seqs=6, **options),
        CacheOptions(),
    )
    log = Recorder(path)
    log.write(
        RecordingHeader(FORMAT, __version__, {}, scheduler, cache, GROUPS, BLOCK, 256, 0, tiers)
    )
    made = build_scheduler(
        scheduler, cache, GROUPS, block_size=BLOCK, max_model_len=256, tiers=tiers
    )
    return EngineCore(made, executor, clock=clock, log=log, runs_ahead=runs_ahead)


def traffic(core, seed, *, num_requests=60):
    """Sends requests with shared starts, samples, beams, prompt logprobs, aborts and resets, more
    than fit.
    """
    draw = random.Random(seed)
    for index in range(num_requests):
        prompt = [draw.randrange(3)] * draw.randrange(1, 40) + [index] * draw.randrange(1, 30)
        sizes = {
            "max_tokens": draw.randrange(1, 60),
            "tenant": draw.choice("ab"),
            "priority": draw.randrange(3),
        }
        core.add(
            make_request(str(index), prompt, prompt_logprobs=draw.choice([None, None, 1]), **sizes)
        )
        if draw.random() < 0.3:
            core.add(
                make_request(f"{index}#1", prompt, sample_index=1, fork_of=str(index), **sizes)
            )
        if draw.random() < 0.2:
            core.add(
                make_request(f"{index}b", prompt, beam_width=3, n=2, stop_token_ids=[3], **sizes)
            )
        for _ in range(draw.randrange(4)):
            core.step()
        if draw.random() < 0.1:
            core.abort(str(draw.randrange(index + 1)))
        if draw.random() < 0.05:
            core.query(ResetPrefixCache())
    while core.has_work:
        core.step()
    core.close()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("seed", range(examples(1)))
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_every_plan_is_made_again(tmp_path, policy, seed, runs_ahead):
    path = tmp_path / "log"
    executor = LaunchingExecutor(windows=[None, 40])
    executor.raise_on, executor.fail_on = {"7"}, {"9": "bad luck"}
    core = recorded_core(
        path, executor, MovingClock(), scheduling_policy=policy, runs_ahead=runs_ahead
    )
    traffic(core, seed)
    stats = core.scheduler.stats()
    assert stats.num_preemptions >= stats.num_swaps > 0 and stats.prefix_hit_tokens > 0, (
        "the traffic does all that can happen"
    )
    header, events = read_log(path)
    events = list(events)
    found = Replay(header).run(events)
    assert found.differences == [] and found.num_steps == stats.num_steps == len(executor.plans)
    assert [event.plan for event in events if isinstance(event, StepPlanned)] == executor.plans
    assert any(row.from_device for plan in executor.plans for row in plan.rows) == runs_ahead
    again = FakeExecutor(windows=[None, 40])
    again.raise_on, again.fail_on = {"7"}, {"9": "bad luck"}
    assert Replay(header, again).run(events).differences == []
    assert again.plans == executor.plans


def test_blocks_that_left_the_device_are_in_the_plans_too(tmp_path):
    disk = Disk()
    for name in ("first", "second"):
        executor = FakeExecutor(windows=[None, 40], tiers=FakeTiers(2, disk))
        core = recorded_core(
            tmp_path / name, executor, MovingClock(), tiers=tiers_of(2, executor.tiers, 20)
        )
        traffic(core, 3)
        header, events = read_log(tmp_path / name)
        assert Replay(header).run(events).differences == []
    stats = core.scheduler.stats().connector
    assert stats.num_fetched > 0 and stats.num_kept > 0


def test_who_was_given_up_is_recorded(tmp_path):
    core = recorded_core(tmp_path / "log", FakeExecutor(windows=[None, 40]), MovingClock())
    for name in "abcdefg":
        core.add(make_request(name, [1] * 30))
    core.step()
    core.fail("g", "no step starts it")
    while core.has_work:
        core.step()
    core.close()
    header, events = read_log(tmp_path / "log")
    found = Replay(header).run(events)
    assert found.differences == [] and (found.num_requests, found.num_tokens) == (7, 6 * 8)


def test_measured_times_are_recorded(tmp_path):
    """A recording holds the measured costs by which `auto` chooses between swap and
    recomputation.
    """
    clock = SimulatedClock()
    traffic(recorded_core(tmp_path / "log", SimulatedExecutor(clock), clock), 5)
    header, events = read_log(tmp_path / "log")
    events = list(events)
    plans = [event for event in events if isinstance(event, StepPlanned)]
    assert plans[-1].costs.swap_blocks_per_s and plans[-1].now > 1
    clock = SimulatedClock()
    assert Replay(header, SimulatedExecutor(clock)).run(events).differences == []


def test_differences_are_named(tmp_path):
    clock = SimulatedClock()
    traffic(recorded_core(tmp_path / "log", SimulatedExecutor(clock), clock), 5, num_requests=5)
    header, events = read_log(tmp_path / "log")
    events = list(events)
    index = next(
        i
        for i, event in enumerate(events)
        if isinstance(event, StepPlanned) and len(event.plan.rows) > 1
    )
    step = events[index].plan.step
    events[index].plan.rows.reverse()
    (text,) = Replay(header).run(events).differences
    assert text.startswith(f"step {step}: rows was [ScheduledRequest(") and ", now it is [" in text
    events[index].plan.rows.reverse()
    result = next(
        event.result
        for event in events[index:]
        if isinstance(event, StepComputed) and event.result.rows[0].token_ids
    )
    result.rows[0].token_ids = [8]
    (text,) = Replay(header, SimulatedExecutor(SimulatedClock())).run(events).differences
    assert f"step {result.step}, request " in text and text.endswith(
        "token_ids was [8], now it is [7]"
    )


def test_a_log_of_an_engine_that_died(tmp_path):
    """The recording of an engine that died ends with the plan it died of; a last line that was cut
    off is left out.
    """
    clock = SimulatedClock()
    traffic(recorded_core(tmp_path / "log", SimulatedExecutor(clock), clock), 5, num_requests=3)
    lines = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    (tmp_path / "log").write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    header, events = read_log(tmp_path / "log")
    found = Replay(header).run(events)
    assert found.differences == [] and found.unfinished_step == found.num_steps
    (tmp_path / "log").write_bytes(b"".join(lines[:2]) + b"{broken}\n" + lines[3])
    _, events = read_log(tmp_path / "log")
    with pytest.raises(ConfigError, match="line 3 is damaged"):
        list(events)


@pytest.mark.parametrize("text", ["", "hello\n", '{"type": "PrefixCacheReset"}\n'])
def test_no_log(tmp_path, text):
    (tmp_path / "log").write_text(text)
    with pytest.raises(ConfigError, match="not a recording"):
        read_log(tmp_path / "log")
    with pytest.raises(ConfigError, match="No such file"):
        read_log(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot write"):
        Recorder(tmp_path / "none" / "log")


def test_a_full_disk_ends_the_log_and_not_the_engine(caplog):
    from pathlib import Path

    core = recorded_core(Path("/dev/full"), FakeExecutor(windows=[None, 40]), MovingClock())
    traffic(core, 1, num_requests=3)
    assert "recording stopped: No space left on device" in caplog.text


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_a_real_model(tmp_path, backend):
    """The plans of a recording yield the same tokens on a real model: seeds of their own and none,
    samples, more than the KV cache holds.
    """
    from octavo.wiring.engine import build_executor

    path = tmp_path / "log"
    options = {
        "backend": backend,
        "kv_cache_memory_bytes": "256KiB",
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
    }
    with make_llm(record=str(path), swap_space="64KiB", **options) as llm:
        params = SamplingParams(
            temperature=0.8, max_tokens=30, ignore_eos=True, n=2, prompt_logprobs=1, logprobs=1
        )
        llm.generate(prompts_of(40, 50, 41, 30), params, use_tqdm=False)
        assert llm.get_metrics().num_preemptions > 0
    header, events = read_log(path)
    executor = build_executor(header, model=None, report=lambda text: None)
    found = Replay(header, executor).run(events)
    executor.close()
    assert found.differences == [] and found.num_requests == 8 and found.num_tokens == 8 * 30
    assert json.loads(path.read_text().splitlines()[1])["request"]["seed"] != 0


def test_a_recording_holds_no_secret_and_can_be_read_again(tmp_path):
    path = tmp_path / "log"
    secret = "known to these engines alone"
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/kv", "secret": secret}
    options = {
        "backend": "native",
        "kv_transfer": "zmq",
        "kv_transfer_secret": secret,
        "kv_events_config": json.dumps(events),
    }
    with make_llm(record=str(path), **options) as llm:
        llm.generate(prompts_of(40), SamplingParams(max_tokens=3), use_tqdm=False)
    assert secret not in path.read_text()
    header, steps = read_log(path)
    assert Replay(header).run(steps).differences == []
