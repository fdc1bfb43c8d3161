"""Who may start: limits by name, what a request waits for, and the order of the policies."""

import pytest

from octavo.api.errors import ConfigError
from octavo.config.derive import derive
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.prompt_limits import OK, AllocStatus, PromptLimits
from tests.support.engine_fakes import (
    FakeExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)

LIMITS = PromptLimits(
    max_prompt_len=90, max_model_len=80, kv_capacity_tokens=60, max_whole_prompt=40
)


@pytest.mark.parametrize(
    ("num_tokens", "message"),
    [
        (100, "The prompt limit is 90 tokens, the prompt has 100; expected at most 90"),
        (
            80,
            (
                "This model's maximum context length is 80 tokens, the prompt has 80; expected"
                " at most 79"
            ),
        ),
        (60, "The KV cache holds 60 tokens, the prompt has 60; expected at most 59"),
        (
            41,
            (
                "The batch limit is 40 tokens a step, without chunked prefill, the prompt has"
                " 41; expected at most 40"
            ),
        ),
    ],
)
def test_never_names_the_limit(num_tokens, message):
    answer = LIMITS.judge(num_tokens)
    assert (answer.status, answer.reason) == (AllocStatus.NEVER, message)
    assert LIMITS.judge(40) is OK


def test_the_same_limits_stand_in_the_core():
    core = make_core(max_prompt_len=20, budget=16, enable_chunked_prefill=False)
    for length in (21, 17, 16):
        core.add(make_request(str(length), list(range(length))))
    found = run_all(core)
    assert (
        "The prompt limit is 20" in found["21"][0].error
        and "The batch limit is 16" in found["17"][0].error
    )
    assert tokens_of(found["16"]) == expected_tokens(list(range(16)), 8)


def test_later_says_what_is_waited_for():
    core = make_core(num_blocks=8, max_num_seqs=2, budget=64)
    for name, length in (("a", 40), ("b", 70), ("c", 1)):
        core.add(make_request(name, list(range(length)), max_tokens=20))
    core.add(make_request("b#1", list(range(70)), max_tokens=2, sample_index=1, fork_of="b"))
    core.step()
    assert (len(core.scheduler.waiting), core.scheduler.waits_for) == (3, "KV full")
    core = make_core(max_num_seqs=1, budget=16)
    core.add(make_request("a", list(range(40))))
    core.add(make_request("b", [1]))
    core.step()
    assert core.scheduler.waits_for == "batch full"


def test_the_watermark_stays_free_beside_others_only():
    core = make_core(num_blocks=10, watermark=0.5)
    reserve = core.scheduler.kv_allocator.reserve
    assert [reserve(num_running) for num_running in (0, 1, 5, 7)] == [0, 5, 5, 7]
    for name in "ab":
        core.add(make_request(name, [ord(name)] * 40, max_tokens=2))
    core.step()
    assert (len(core.scheduler.waiting), core.scheduler.waits_for) == (1, "KV full")
    assert len(run_all(core)) == 2


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_prompts_that_are_not_chunked_wait_for_a_step_that_holds_them(policy):
    executor = FakeExecutor()
    core = make_core(
        budget=32, enable_chunked_prefill=False, executor=executor, scheduling_policy=policy
    )
    for index in range(6):
        prompt = [(index * 50 + i) % 300 for i in range(20 + index)]
        core.add(make_request(str(index), prompt, max_tokens=5, tenant=str(index % 2)))
    found = run_all(core)
    first = [row for plan in executor.plans for row in plan.rows if row.start == 0]
    assert sorted(row.num_tokens for row in first) == [20, 21, 22, 23, 24, 25]
    assert all(len(tokens_of(found[str(index)])) == 5 for index in range(6))


def start_order(executor):
    return list(dict.fromkeys(new.request_id for plan in executor.plans for new in plan.new_rows))


def test_priority_lower_first_and_arrival_breaks_ties():
    executor = FakeExecutor()
    core = make_core(max_num_seqs=1, scheduling_policy="priority", executor=executor)
    for name, priority in (("a", 1), ("b", -2), ("c", 1), ("d", -2), ("e", 0)):
        core.add(make_request(name, [1, 2], max_tokens=2, priority=priority))
    run_all(core)
    assert start_order(executor) == ["b", "d", "e", "a", "c"]


def test_priority_the_highest_value_gives_way():
    core = make_core(num_blocks=5, max_num_seqs=3, scheduling_policy="priority", watermark=0.0)
    for name, priority in (("low", 5), ("high", 0)):
        core.add(make_request(name, [priority] * 16, max_tokens=50, priority=priority))
    found = run_all(core)
    assert (found["low"][-1].num_preemptions > 0, found["high"][-1].num_preemptions) == (True, 0)
    assert tokens_of(found["low"]) == expected_tokens([5] * 16, 50)


def test_fair_takes_turns_by_tokens_served_and_caps_the_running():
    executor = FakeExecutor()
    core = make_core(
        max_num_seqs=1, scheduling_policy="fair", tenant_weight=("b=2",), executor=executor
    )
    for index in range(4):
        core.add(make_request(f"a{index}", [1] * 10, max_tokens=2, tenant="a"))
    for index in range(4):
        core.add(make_request(f"b{index}", [2] * 10, max_tokens=2, tenant="b"))
    run_all(core)
    assert start_order(executor) == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3"]
    executor = FakeExecutor()
    core = make_core(scheduling_policy="fair", max_num_seqs_per_tenant=2, executor=executor)
    for index in range(5):
        core.add(make_request(f"a{index}", [index] * 10, tenant="a"))
    core.add(make_request("b", [7] * 10, tenant="b"))
    core.step()
    assert start_order(executor) == ["a0", "b", "a1"]
    run_all(core)
    assert max(len(plan.rows) for plan in executor.plans) == 3


def test_fair_forgets_tenants_that_are_gone():
    core = make_core(scheduling_policy="fair")
    for index in range(3000):
        core.add(make_request(str(index), [1], max_tokens=1, tenant=str(index)))
        if index % 7 == 0:
            run_all(core)
    run_all(core)
    assert core.scheduler.queues.waiting.num_tenants <= 1000


def test_static_batches_end_before_the_next_begins():
    executor = FakeExecutor()
    core = make_core(
        max_num_seqs=3, batching="static", executor=executor, num_blocks=9, num_host_blocks=9
    )
    for index in range(7):
        core.add(make_request(str(index), [index] * 20, max_tokens=4 + 9 * (index % 3)))
    found = run_all(core)
    for index in range(7):
        assert tokens_of(found[str(index)]) == expected_tokens([index] * 20, 4 + 9 * (index % 3))
    batches = [frozenset(row.request_id for row in plan.rows) for plan in executor.plans]
    for batch in batches:
        assert len({int(name) // 3 for name in batch}) == 1, "one batch at a time"


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_samples_of_a_prompt_are_of_its_batch(kind):
    """The samples of a prompt belong to its batch though they start a step later, once the prompt
    is computed; one that finds no place waits for the batch's end.
    """
    executor = FakeExecutor()
    core = make_core(max_num_seqs=4, batching=kind, batch_window_ms=0, executor=executor)
    for index in range(5):
        core.add(
            make_request(
                f"a#{index}" if index else "a",
                [5] * 20,
                sample_index=index,
                fork_of="a" if index else None,
            )
        )
    found = run_all(core)
    assert all(
        tokens_of(found[f"a#{index}"]) == expected_tokens([5] * 20, 8, index)
        for index in range(1, 5)
    )
    batches = [{row.request_id for row in plan.rows} for plan in executor.plans if plan.rows]
    assert batches[:2] == [{"a"}, {"a", "a#1", "a#2", "a#3"}] and batches[-1] == {"a#4"}
    assert len(batches) == 8 + 1 + 8 and not any({"a#1", "a#4"} <= batch for batch in batches)


def test_samples_without_batching_run_one_at_a_time():
    executor = FakeExecutor()
    core = make_core(batching="none", executor=executor)
    for index in range(3):
        core.add(
            make_request(
                f"a#{index}" if index else "a",
                [5] * 20,
                sample_index=index,
                fork_of="a" if index else None,
            )
        )
    assert len(run_all(core)) == 3
    assert max(len(plan.rows) for plan in executor.plans) == 1


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_window_is_over_for_all_when_it_is_over_for_one(policy):
    """Requests that go before the one that has waited longest do not keep it waiting for another
    window.
    """
    now = [100.0]
    core = make_core(
        batching="dynamic",
        batch_window_ms=500,
        clock=lambda: now[0],
        max_num_seqs=8,
        scheduling_policy=policy,
    )
    core.add(make_request("late", [1], max_tokens=1, arrival_time=100.0, priority=9, tenant="a"))
    core.step()
    for index in range(4):
        now[0] += 0.2
        core.add(
            make_request(
                str(index),
                [2],
                max_tokens=1,
                arrival_time=now[0],
                priority=-index,
                tenant=str(index),
            )
        )
        outputs = core.step().outputs if not core.pause_s() else []
        if outputs:
            break
    assert now[0] == pytest.approx(100.6) and {output.request_id for output in outputs} == {
        "late",
        "0",
        "1",
        "2",
    }


def test_no_batching_runs_one_at_a_time():
    executor = FakeExecutor()
    core = make_core(batching="none", executor=executor)
    for index in range(4):
        core.add(make_request(str(index), [index] * 20))
    assert len(run_all(core)) == 4
    assert max(len(plan.rows) for plan in executor.plans) == 1


def test_a_batch_that_waits_to_fill_lets_the_engine_sleep():
    now = [100.0]
    core = make_core(batching="dynamic", batch_window_ms=500, clock=lambda: now[0], max_num_seqs=2)
    assert core.pause_s() is None, "an engine without work waits for a request"
    core.add(make_request("a", [1], max_tokens=1, arrival_time=99.9))
    assert core.pause_s() == pytest.approx(0.4)
    assert not core.step().outputs
    core.add(make_request("b", [2], max_tokens=1, arrival_time=100.0))
    assert core.pause_s() == 0.0
    assert len(core.step().outputs) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheduler_delay_factor": 1},
            "scheduler_delay_factor: got 1, expected 0 with chunked prefill",
        ),
        (
            {"tenant_weight": ["a=0"], "scheduling_policy": "fair"},
            "tenant_weight: got 'a=0', expected NAME=WEIGHT",
        ),
        (
            {"tenant_weight": ["a"], "scheduling_policy": "fair"},
            "tenant_weight: got 'a', expected NAME=WEIGHT",
        ),
        (
            {"tenant_weight": ["a=2"]},
            "scheduling_policy: got 'fcfs', but tenant_weight and max_num_seqs_per_tenant require"
            " fair",
        ),
        ({"watermark": "1.5"}, "watermark: got 1.5, expected a fraction below 1"),
        ({"watermark": "much"}, "watermark: got 'much', expected a number of at least 0"),
        (
            {"long_prefill_token_threshold": 5, "enable_chunked_prefill": False},
            "long_prefill_token_threshold: requires chunked",
        ),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError) as error:
        derive(EngineConfig.from_options(**options), model_context_tokens=512, num_threads=1)
    assert message in str(error.value)
