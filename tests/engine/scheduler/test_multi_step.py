"""How many decode steps a plan holds, and what becomes of their tokens."""

import pytest

from octavo.api.sampling_params import SamplingParams
from octavo.engine.clients.ledger import UnfinishedRequest
from octavo.engine.kv_meter import KvMeter
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.protocol.step_costs import CostPoint, StepCosts
from tests.support.engine_fakes import (
    FakeExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)

PROMPT = [1, 2, 3]


def stepping_core(*, step_s=0.001, num_scheduler_steps=8, **options):
    """Returns a core whose steps have been measured, and its executor."""
    executor = FakeExecutor(options.get("num_groups", 1))
    executor.step_s = step_s
    costs = StepCosts((CostPoint(1, 0, step_s),))
    core = make_core(
        executor=executor, num_scheduler_steps=num_scheduler_steps, costs=costs, **options
    )
    return core, executor


def num_steps_of(executor):
    return [plan.num_steps for plan in executor.plans if plan.rows]


def test_steps_are_computed_at_once_up_to_the_end():
    core, executor = stepping_core()
    core.add(make_request("a", PROMPT, max_tokens=20))
    found = run_all(core)["a"]
    assert num_steps_of(executor) == [1, 8, 8, 3] and tokens_of(found) == expected_tokens(
        PROMPT, 20
    )
    assert [len(output.token_ids) for output in found] == [1] * 20
    assert found[-1].finish_reason == "length"
    stats = core.scheduler.stats()
    assert (stats.num_steps, stats.generation_tokens) == (20, 20)
    timings = found[-1].timings
    assert (timings.num_steps, timings.mean_batch_size, timings.max_batch_size) == (20, 1, 1)


@pytest.mark.parametrize(
    ("step_s", "num_steps"), [(0.0002, 8), (0.0124, 8), (0.026, 3), (0.051, 1), (2, 1)]
)
def test_a_call_lasts_a_tenth_of_a_second(step_s, num_steps):
    core, executor = stepping_core(step_s=step_s)
    core.add(make_request("a", PROMPT, max_tokens=40))
    run_all(core)
    assert max(num_steps_of(executor)) == num_steps


@pytest.mark.parametrize(
    "params", [{"beam_width": 2, "n": 2}, {"min_tokens": 0, "max_tokens": 2}], ids=str
)
def test_requests_that_somebody_looks_after(params):
    core, executor = stepping_core()
    core.add(make_request("a", PROMPT, **{"max_tokens": 20} | params))
    run_all(core)
    assert set(num_steps_of(executor)) == {1}


def test_listed_logprobs_are_of_whole_calls():
    core, executor = stepping_core()
    core.add(make_request("a", PROMPT, max_tokens=20, logprob_token_ids=[5]))
    run_all(core)
    assert max(num_steps_of(executor)) > 1


def test_an_end_is_banned_for_whole_calls():
    core, executor = stepping_core()
    core.add(make_request("a", PROMPT, max_tokens=20, min_tokens=6))
    run_all(core)
    assert num_steps_of(executor) == [1, 5, 8, 6]


def test_one_that_ends_ends_the_call():
    """A call ends with the step in which a request ends; no token that comes after the end is
    handed out.
    """
    ends = expected_tokens(PROMPT, 5)[-1]
    core, _ = stepping_core()
    core.add(make_request("a", PROMPT, max_tokens=20, eos=(ends,)))
    core.add(make_request("b", [4, 5, 6], max_tokens=20))
    found = run_all(core)
    assert (
        tokens_of(found["a"]) == expected_tokens(PROMPT, 5)
        and found["a"][-1].finish_reason == "stop"
    )
    assert tokens_of(found["b"]) == expected_tokens([4, 5, 6], 20)
    assert [len(output.token_ids) for output in found["b"]] == [1] * 20


def test_nobody_waits_for_a_call():
    core, executor = stepping_core(max_num_seqs=1)
    for name in "ab":
        core.add(make_request(name, PROMPT, max_tokens=12))
    run_all(core)
    assert num_steps_of(executor) == [1] * 12 + [1, 8, 3], (
        "as long as the second waits, the first goes step by step"
    )


def test_blocks_are_taken_for_all_steps_or_for_fewer():
    """Where blocks are short, a call has fewer steps: two requests fill 14 tokens of a block's 16,
    and one block is left.
    """
    core, executor = stepping_core(num_blocks=3)
    for name, number in (("a", 1), ("b", 2)):
        core.add(make_request(name, [number] * 13, max_tokens=30))
    core.step()
    core.step()
    plan = executor.plans[-1]
    assert plan.num_steps == 2 and not any(row.new_block_ids for row in plan.rows)
    found = run_all(core)
    assert (
        tokens_of(found["a"]) == expected_tokens([1] * 13, 30)[2:]
        and tokens_of(found["b"]) == expected_tokens([2] * 13, 30)[2:]
    )


@pytest.mark.parametrize("num_groups", [1, 2])
def test_blocks_filled_within_a_call_are_found_again(num_groups):
    core, executor = stepping_core(num_groups=num_groups)
    core.add(make_request("a", PROMPT, max_tokens=60))
    tokens = tokens_of(run_all(core)["a"])
    core.add(make_request("b", PROMPT + tokens, max_tokens=2))
    (first, *_) = run_all(core)["b"]
    assert first.error is None and first.num_cached_tokens == 48
    assert max(num_steps_of(executor)) == 8


def test_each_step_of_a_call_hands_on_its_tokens():
    core, executor = stepping_core()
    core.add(make_request("a", PROMPT, max_tokens=20, stop=["x"]))
    outputs = [core.step().outputs[0] for _ in range(17)]
    assert num_steps_of(executor) == [1, 8, 8]
    assert [output.timings.num_steps for output in outputs] == list(range(1, 18))
    assert [token for output in outputs for token in output.token_ids] == expected_tokens(
        PROMPT, 17
    )


@pytest.mark.parametrize("num_done", range(1, 9))
@pytest.mark.parametrize("what", ["add", "abort another", "settle"])
def test_a_command_ends_a_call(num_done, what):
    """The call ends behind the step that was taken in, whose tokens are all that was drawn; blocks
    for further steps are given back.
    """
    core, executor = stepping_core()
    core.add(make_request("a", PROMPT, max_tokens=30))
    outputs = [core.step().outputs[0] for _ in range(1 + num_done)]
    if what == "add":
        core.add(make_request("b", [4, 5], max_tokens=2))
    elif what == "abort another":
        core.abort("no one")
    else:
        core.settle()
    num_blocks = len(core.scheduler.blocks.tables["a"][0])
    assert num_blocks == -(-core.scheduler.queues.running[0].num_tokens // 16)
    outputs += run_all(core)["a"]
    assert tokens_of(outputs) == expected_tokens(PROMPT, 30)
    assert len([plan for plan in executor.plans if plan.num_steps > 1]) >= 3


def test_a_failure_within_a_call_is_that_requests():
    core, executor = stepping_core()
    for name, prompt in (("a", PROMPT), ("b", [7, 8])):
        core.add(make_request(name, prompt, max_tokens=30))
    core.step()
    run = executor.run_row

    def run_or_fail(row):
        result = run(row)
        if row.request_id == "a" and row.start == 6:
            result.failure = "NaN"
        return result

    executor.run_row = run_or_fail
    for _ in range(3):
        assert [len(output.token_ids) for output in core.step().outputs] == [1, 1]
    a, b = core.step().outputs
    assert (a.finish_reason, a.error, a.token_ids) == ("error", "NaN", [])
    assert len(b.token_ids) == 1
    assert tokens_of(run_all(core)["b"]) == expected_tokens([7, 8], 30)[5:]


def test_one_on_trial_ends_with_its_token():
    core, executor = stepping_core()
    request = UnfinishedRequest(
        EngineRequest("a", PROMPT, SamplingParams(max_tokens=9), seed=1), [4, 5]
    ).resumed(one_token=True)
    core.add(request)
    (output,) = run_all(core)["a"]
    assert (
        output.finish_reason == "abort"
        and len(output.token_ids) == 1
        and num_steps_of(executor) == [1]
    )


def test_memory_in_use_is_that_of_each_step():
    """The mean of the memory in use over the steps of calls is that over single steps."""
    means = []
    for num_steps in (1, 8):
        meter = KvMeter([320], max_model_len=64)
        core, _ = stepping_core(num_scheduler_steps=num_steps, kv_meter=meter)
        core.add(make_request("a", [5] * 9, max_tokens=40))
        stats = None
        while core.has_work:
            stats = core.step().stats
        means.append((stats.kv_sums.used, stats.kv_sums.whole_contexts, stats.num_steps))
    assert means[0] == pytest.approx(means[1]) and means[1][2] == 40
