"""Steps that are planned while another is in flight: the same tokens and ends as one after the
other, and what they wait for.
"""

import random
from collections import Counter

import pytest

from octavo.engine.clients.heartbeat import PAGE_BYTES, HeartbeatPage, MonitoredExecutor
from octavo.engine.core import EngineCore
from octavo.engine.protocol.requests import ResetPrefixCache
from octavo.engine.scheduler.in_flight_steps import ALL_MAY_END, SHORT, SWAPPING
from tests.support.engine_fakes import (
    LaunchingExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)

pytestmark = pytest.mark.sampled(one_in=2)


def from_device(core: EngineCore) -> int:
    """Returns the number of tokens that steps took before they were known to the scheduler."""
    return sum(row.from_device for plan in core.executor.plans for row in plan.rows)


def seen(core, seed, **fields):
    """Returns tokens and ends of requests that come, fork and end by stop tokens; some are
    aborted.
    """
    draw, found, ends = random.Random(seed), {}, {}

    def step():
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in ends
                ends[output.request_id] = (output.finish_reason, output.stop_reason)

    for index in range(60):
        prompt = [draw.randrange(3)] * draw.randrange(1, 40) + [index] * draw.randrange(1, 30)
        sizes = {
            "max_tokens": draw.randrange(1, 60),
            "eos": tuple(range(15)),
            "stop_token_ids": [20, 21],
            "min_tokens": draw.choice([0, 1]),
        }
        core.add(make_request(str(index), prompt, **sizes, **fields))
        if draw.random() < 0.3:
            core.add(
                make_request(
                    f"{index}#1", prompt, sample_index=1, fork_of=str(index), **sizes, **fields
                )
            )
        aborted = draw.randrange(index + 1) if draw.random() < 0.1 else None
        for _ in range(draw.randrange(6)):
            step()
        if aborted is not None and str(aborted) not in ends:
            core.abort(str(aborted))
    for _ in range(5000):
        if not core.has_work:
            return found, ends
        step()
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_ends_are_those_of_one_step_after_the_other(policy, mode, seed):
    options = {
        "num_blocks": 14,
        "windows": [None, 40],
        "num_host_blocks": 8,
        "budget": 48,
        "max_model_len": 200,
    }
    options |= {"scheduling_policy": policy, "preemption_mode": mode}
    in_turn, ahead = make_core(**options), make_core(runs_ahead=True, **options)
    (tokens, ends), (tokens_ahead, ends_ahead) = seen(in_turn, seed), seen(ahead, seed)
    aborted = {name for name, (reason, _) in (ends | ends_ahead).items() if reason == "abort"}
    assert {name: end for name, end in ends.items() if name not in aborted} == {
        name: end for name, end in ends_ahead.items() if name not in aborted
    }
    for name, found in tokens.items():
        shorter, longer = sorted((found, tokens_ahead.get(name, [])), key=len)
        assert longer[: len(shorter)] == shorter and (name in aborted or longer == shorter)
    stats = ahead.scheduler.stats()
    assert (
        stats.num_preemptions > 0
        and stats.prefix_hit_tokens > 0
        and Counter(reason for reason, _ in ends.values())["stop"] > 10
    )
    assert from_device(ahead) > sum(map(len, tokens_ahead.values())) / 4, "most steps run ahead"
    assert stats.num_used_blocks == 0 and from_device(in_turn) == 0


def test_every_step_but_the_first_runs_ahead():
    core = make_core(runs_ahead=True)
    core.add(make_request("a", [1, 2, 3], max_tokens=20))
    found = [len(tokens_of(core.step().outputs)) for _ in range(21)]
    assert found == [0] + [1] * 20 and not core.has_work, (
        "max_tokens is known ahead: no step is computed in vain"
    )
    assert from_device(core) == 19 and len(core.executor.plans) == 20


def test_what_ends_with_a_stop_token_holds_its_blocks_until_the_step_in_flight_is_back():
    prompt = list(range(30, 60))
    stop = expected_tokens(prompt, 5)[4]
    core = make_core(runs_ahead=True, num_blocks=4)
    core.add(make_request("a", prompt, max_tokens=30, eos=(stop,)))
    output = next(
        output for _ in range(20) for output in core.step().outputs if output.finish_reason
    )
    assert output.finish_reason == "stop" and core.has_work
    assert set(core.scheduler.blocks.tables) == {"a"} and not core.scheduler.queues.running
    core.add(make_request("b", prompt, max_tokens=3))
    outputs = run_all(core)
    assert set(outputs) == {"b"}, "nothing comes after the final output"
    assert tokens_of(outputs["b"]) == expected_tokens(prompt, 3)
    assert not core.scheduler.blocks.tables


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1}, ""),
        ({"dry_multiplier": 1.0, "bad_words_token_ids": [[4, 5], [1, 2, 3]]}, ""),
        (
            {"dry_multiplier": 1.0, "dry_allowed_length": 1},
            "DRY from the first token on: any token may be a repetition",
        ),
        (
            {"dry_multiplier": 1.0, "logit_bias": {5: 1.0}},
            "DRY and logit_bias: a penalty and a bias are added up before they are rounded",
        ),
        ({"mirostat_mode": 1}, "mirostat: its bound depends on the token before"),
        (
            {"beam_width": 2, "n": 2},
            "a beam search: which beams go on is decided by what they yield",
        ),
        (
            {
                "bad_words_token_ids": [[4]],
                "min_tokens": 3,
                "logit_bias": {5: 1.0},
                "logprobs": 2,
                "prompt_logprobs": 1,
                "seed": 4,
            },
            "",
        ),
    ],
)
def test_what_needs_a_requests_last_token_waits_for_it(fields, reason):
    core = make_core(runs_ahead=True)
    core.add(make_request("a", [1, 2, 3] * 30, max_tokens=6, **fields))
    core.step()
    assert core.scheduler.waits_for_results == "", "the prompt's second chunk is known"
    core.step()
    assert core.scheduler.waits_for_results == reason
    run_all(core)
    assert (from_device(core) > 0) == (reason == "")


@pytest.mark.parametrize(
    "fields", [{"mirostat_mode": 2}, {"beam_width": 2, "n": 2}], ids=["mirostat", "beams"]
)
def test_a_row_that_waits_for_its_token_holds_up_no_other(fields):
    """Other requests run ahead in every step; a row that waits for its token takes part in every
    second one.
    """
    core = make_core(runs_ahead=True)
    core.add(make_request("a", [1, 2, 3], max_tokens=40))
    core.add(make_request("b", [4, 5], max_tokens=9, **fields))
    outputs = run_all(core)
    assert tokens_of(outputs["a"]) == expected_tokens([1, 2, 3], 40)
    assert outputs["b"][-1].finish_reason == "length"
    plans = [plan for plan in core.executor.plans if plan.rows]
    assert len(plans) == 40, "each step computes a token of a"
    rows_of_a = [row for plan in plans for row in plan.rows if row.request_id == "a"]
    assert [row.from_device for row in rows_of_a] == [False] + [True] * 39
    with_b = [i for i, plan in enumerate(plans) if any(row.owner == "b" for row in plan.rows)]
    assert with_b == list(range(0, 18, 2))
    assert not any(row.from_device for plan in plans for row in plan.rows if row.owner == "b")


def test_a_row_that_waits_gets_the_tokens_of_one_step_after_the_other():
    """Requests with penalties, bad words and beams beside plain ones yield the same in a cache too
    small for them all.
    """
    kinds = [
        {},
        {"frequency_penalty": 0.5},
        {"beam_width": 3, "n": 3},
        {"bad_words_token_ids": [[4, 5]]},
    ]
    found = []
    for runs_ahead in (False, True):
        core = make_core(runs_ahead=runs_ahead, num_blocks=12, num_host_blocks=6, budget=40)
        for index in range(12):
            prompt = [index] * (5 + 3 * index)
            core.add(make_request(str(index), prompt, max_tokens=40 + index, **kinds[index % 4]))
        outputs = run_all(core)
        found.append(
            {
                name: (tokens_of(steps), steps[-1].beams, steps[-1].finish_reason)
                for name, steps in outputs.items()
            }
        )
        assert core.scheduler.stats().num_preemptions > 0
        assert (from_device(core) > 0) == runs_ahead
        assert core.scheduler.stats().num_used_blocks == 0
    assert found[0] == found[1]


def test_nobody_is_preempted_while_a_step_is_in_flight():
    core = make_core(
        runs_ahead=True, num_blocks=5, num_host_blocks=5, caching=False, preemption_mode="swap"
    )
    for name, prompt in (("a", list(range(30))), ("b", list(range(40, 65)))):
        core.add(make_request(name, prompt, max_tokens=30))
    reasons, outputs = set(), {}
    while core.has_work:
        if core.plans_in_flight:
            reasons.add(core.scheduler.waits_for_results)
        preemptions = core.scheduler.stats().num_preemptions
        was_in_flight = bool(core.plans_in_flight)
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        assert core.scheduler.stats().num_preemptions == preemptions or not was_in_flight
    assert {"", SHORT, SWAPPING, ALL_MAY_END} == reasons and core.scheduler.stats().num_swaps > 0
    assert tokens_of(outputs["a"]) == expected_tokens(list(range(30)), 30)
    assert tokens_of(outputs["b"]) == expected_tokens(list(range(40, 65)), 30)


def test_a_step_that_fails_fails_what_was_planned_on_it_and_no_more():
    core = make_core(runs_ahead=True)
    core.add(make_request("a", [1, 2, 3]))
    core.step()
    core.step()
    core.executor.raise_on = {"a"}
    outputs = core.step().outputs
    core.executor.raise_on = set()
    assert outputs[-1].finish_reason == "error" and "no luck with ['a']" in outputs[-1].error
    core.add(make_request("b", [1, 2, 3]))
    assert [output.finish_reason for output in run_all(core)["b"]][-1] == "length"
    assert not core.scheduler.blocks.tables and set(core.executor.rows) <= {"b"}


def test_a_step_that_cannot_be_launched_fails_alone():
    class Refusing(LaunchingExecutor):
        def launch(self, plan):
            if len(plan.rows) == 2:
                raise MemoryError("no room for two")
            return super().launch(plan)

    core = make_core(runs_ahead=True, executor=Refusing())
    core.add(make_request("a", [1, 2, 3], max_tokens=20))
    found = [output for _ in range(4) for output in core.step().outputs]
    core.add(make_request("b", [4, 5]))
    outputs = run_all(core)
    assert (
        len(tokens_of(found)) == 3
        and tokens_of(outputs["a"]) == expected_tokens([1, 2, 3], 20)[3:4]
    )
    for name in "ab":
        assert outputs[name][-1].error == "the step failed: MemoryError: no room for two"
    core.add(make_request("c", [4, 5]))
    assert tokens_of(run_all(core)["c"]) == expected_tokens([4, 5], 8)


def test_the_cache_is_reset_once_nothing_is_in_flight():
    prompt = list(range(30, 60))
    core = make_core(runs_ahead=True)
    core.add(make_request("a", prompt, max_tokens=30, eos=(expected_tokens(prompt, 2)[1],)))
    while not any(output.finish_reason for output in core.step().outputs):
        pass
    assert core.plans_in_flight and core.query(ResetPrefixCache()) and not core.plans_in_flight
    core.add(make_request("b", prompt))
    assert tokens_of(core.step().outputs) == [] and not core.query(ResetPrefixCache()), "b runs"
    assert tokens_of(run_all(core)["b"]) == expected_tokens(prompt, 8), (
        "what was taken in meanwhile comes with the next step"
    )


def test_the_heartbeat_page_names_the_step_that_computes(tmp_path):
    with (tmp_path / "page").open("w+b") as file:
        file.write(bytes(PAGE_BYTES))
        file.flush()
        page = HeartbeatPage(file.fileno())
        core = make_core(runs_ahead=True)
        core.executor = MonitoredExecutor(core.executor, page)
        core.add(make_request("a", [1, 2, 3], max_tokens=2))
        core.step()
        core.add(make_request("b", [4, 5], max_tokens=3))
        assert page.step_requests() == ["a"]
        core.step()
        assert page.step_requests() == ["a", "b"], "the first step came back"
        core.settle()
        assert page.step_requests() == []
