"""The scheduler's decisions, seen through a core with a pseudo-model whose tokens depend on every
KV entry.
"""

import msgspec
import pytest

from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.core import EngineCore
from octavo.engine.protocol.requests import ResetPrefixCache
from octavo.engine.protocol.step import ResultKind
from tests.support.engine_fakes import (
    FakeExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)
from tests.support.fake_tiers import Disk, FakeTiers

PROMPTS = [
    [(7 * i + j) % 900 for j in range(length)] for i, length in enumerate((1, 5, 16, 17, 40, 100))
]


def run_prompts(core, prompts=PROMPTS, **fields):
    for index, prompt in enumerate(prompts):
        core.add(make_request(str(index), prompt, **fields))
    return run_all(core)


@pytest.mark.parametrize("budget", [1, 7, 16, 255])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_tokens_do_not_depend_on_the_budget(budget, num_groups):
    found = run_prompts(make_core(budget=budget, num_groups=num_groups), max_tokens=20)
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(found[str(index)]) == expected_tokens(prompt, 20)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_yield_the_same_tokens(caching):
    core = make_core(num_blocks=9, budget=64, max_num_seqs=6, caching=caching)
    found = run_prompts(core, max_tokens=30)
    assert core.scheduler.stats().num_preemptions > 0
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(found[str(index)]) == expected_tokens(prompt, 30)
        assert [output.finish_reason for output in found[str(index)]][-1] == "length"
    assert core.scheduler.blocks.num_free_blocks == 9


def test_a_step_mixes_decode_and_prefill_within_the_budget():
    executor = FakeExecutor()
    core = make_core(budget=10, executor=executor)
    core.add(make_request("a", [1, 2, 3]))
    core.step()
    core.add(make_request("b", list(range(30))))
    core.step()
    plan = executor.plans[-1]
    assert [
        (row.request_id, row.num_tokens, row.result_kind == ResultKind.SAMPLE) for row in plan.rows
    ] == [
        ("a", 1, True),
        ("b", 9, False),
    ]
    assert plan.num_tokens == 10


def test_max_num_seqs_bounds_the_running():
    executor = FakeExecutor()
    core = make_core(max_num_seqs=2, executor=executor)
    found = run_prompts(core)
    assert max(len(plan.rows) for plan in executor.plans) == 2
    assert all(found[str(i)][-1].finish_reason == "length" for i in range(len(PROMPTS)))


def test_the_youngest_is_preempted_and_returns_first():
    core = make_core(num_blocks=4, max_num_seqs=3)
    core.add(make_request("old", list(range(16)), max_tokens=40))
    core.add(make_request("young", list(range(100, 116)), max_tokens=40))
    core.add(make_request("later", list(range(200, 216)), max_tokens=1))
    seen = []
    while core.has_work:
        core.step()
        if core.scheduler.stats().num_preemptions and not seen:
            seen = [
                [request.request_id for request in core.scheduler.waiting],
                [request.request_id for request in core.scheduler.queues.running],
            ]
    assert seen[0][0] == "young" and seen[1] == ["old"]


def test_growth_alone_in_the_cache_ends_with_length():
    core = make_core(num_blocks=2)
    core.add(make_request("a", list(range(20)), max_tokens=None))
    outputs = run_all(core)["a"]
    assert outputs[-1].finish_reason == "length"
    assert len(tokens_of(outputs)) == 32 - 20


def test_max_tokens_none_runs_until_the_context_ends():
    core = make_core(max_model_len=50)
    core.add(make_request("a", list(range(20)), max_tokens=None))
    assert len(tokens_of(run_all(core)["a"])) == 30


@pytest.mark.parametrize(("num_blocks", "limit"), [(2, 32), (64, 50)])
def test_a_prompt_that_can_never_fit_fails_with_its_numbers(num_blocks, limit):
    core = make_core(num_blocks=num_blocks, max_model_len=50)
    core.add(make_request("a", list(range(limit))))
    core.add(make_request("b", [1, 2, 3]))
    found = run_all(core)
    assert found["a"][0].finish_reason == "error"
    assert (
        f"is {limit} tokens" in found["a"][0].error
        or f"holds {limit} tokens" in found["a"][0].error
    )
    assert f"the prompt has {limit}; expected at most {limit - 1}" in found["a"][0].error
    assert tokens_of(found["b"]) == expected_tokens([1, 2, 3], 8)


def test_a_cached_prompt_still_computes_its_last_token():
    executor = FakeExecutor()
    core = make_core(executor=executor)
    prompt = list(range(32))
    core.add(make_request("a", prompt))
    run_all(core)
    core.add(make_request("b", prompt))
    found = run_all(core)
    first = next(plan for plan in executor.plans if plan.rows and plan.rows[0].request_id == "b")
    assert (first.rows[0].start, first.rows[0].num_tokens) == (31, 1)
    assert found["b"][0].num_cached_tokens == 31
    assert tokens_of(found["b"]) == expected_tokens(prompt, 8)
    assert core.scheduler.stats().prefix_hit_tokens == 31


def test_other_salts_and_prompt_logprobs_do_not_read_the_cache():
    core = make_core()
    prompt = list(range(40))
    for request_id, fields in (
        ("a", {}),
        ("salted", {"cache_salt": "x"}),
        ("scored", {"prompt_logprobs": 0}),
        ("hit", {}),
    ):
        core.add(make_request(request_id, prompt, **fields))
        found = run_all(core)[request_id]
        assert found[0].num_cached_tokens == (32 if request_id == "hit" else 0)


def test_a_block_that_was_forgotten_while_it_is_kept_is_kept_anew():
    tiers = FakeTiers(1, Disk(), pace=0)
    core = make_core(executor=FakeExecutor(tiers=tiers), num_slots=20)
    prompt = list(range(40))
    for _ in range(2):
        core.add(make_request("a", prompt))
        while core.scheduler.queues.by_id:
            core.step()
        core.step()
        assert core.query(ResetPrefixCache(True))
    core.add(make_request("b", prompt))
    tiers.pace = 1
    run_all(core)
    while tiers.jobs:
        core.step()
    assert {key.token_ids[0] for key, _ in tiers.disk.values()} == {0, 16}


@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.parametrize("start", [0, 1, 2, 17, 30, 47])
def test_prompt_logprobs_read_the_cache_before_their_start(start, budget):
    core = make_core(budget=budget)
    prompt = list(range(100, 148))
    for request_id in ("cold", "warm"):
        core.add(
            make_request(
                request_id, prompt, prompt_logprobs=0, prompt_logprob_start=start, max_tokens=2
            )
        )
        outputs = run_all(core)[request_id]
        assert outputs[0].num_cached_tokens == (0 if request_id == "cold" else max(0, start - 1))
        assert [entry.token_ids[0] for entry in outputs[0].prompt_logprobs] == prompt[
            max(1, start) :
        ]


@pytest.mark.parametrize(("budget", "num_blocks"), [(64, 64), (7, 64), (16, 8)])
def test_prompt_logprobs_come_once_and_whole(budget, num_blocks):
    core = make_core(budget=budget, num_blocks=num_blocks)
    for index, prompt in enumerate(PROMPTS):
        core.add(make_request(str(index), prompt, prompt_logprobs=0, max_tokens=20))
    found = run_all(core)
    for index, prompt in enumerate(PROMPTS):
        given = [
            output.prompt_logprobs
            for output in found[str(index)]
            if output.prompt_logprobs is not None
        ]
        assert [[entry.token_ids[0] for entry in entries] for entries in given] == [prompt[1:]]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_forks_share_the_prompt_and_differ_like_separate_requests(length):
    executor = FakeExecutor(2)
    core = make_core(num_groups=2, executor=executor, caching=False)
    prompt = list(range(50, 50 + length))
    core.add(make_request("p", prompt, max_tokens=20))
    for index in (1, 2):
        core.add(make_request(f"p_{index}", prompt, max_tokens=20, sample_index=index, fork_of="p"))
    found = run_all(core)
    for index, request_id in enumerate(("p", "p_1", "p_2")):
        assert tokens_of(found[request_id]) == expected_tokens(prompt, 20, index)
    computed = sum(
        row.num_tokens for plan in executor.plans for row in plan.rows if row.start < length
    )
    assert computed == length + 2, (
        "the prompt is computed once, its last token once more for each sibling"
    )
    moves = [move for plan in executor.plans for move in plan.moves]
    assert len(moves) == (0 if (length - 1) % 16 == 0 else 4)
    assert core.scheduler.blocks.num_free_blocks == 64


def test_siblings_go_on_alone_where_the_first_is_gone():
    core = make_core()
    prompt = list(range(100))
    core.add(make_request("p", prompt, max_tokens=5))
    core.add(make_request("p_1", prompt, max_tokens=5, sample_index=1, fork_of="p"))
    core.step()
    core.abort("p")
    found = run_all(core)
    assert [output.finish_reason for output in found["p"]] == ["abort"]
    assert tokens_of(found["p_1"]) == expected_tokens(prompt, 5, 1)


def test_forks_under_pressure_yield_the_same_tokens():
    core = make_core(num_blocks=7, caching=False)
    prompt = list(range(30))
    core.add(make_request("p", prompt, max_tokens=40))
    for index in range(1, 6):
        core.add(make_request(f"p_{index}", prompt, max_tokens=40, sample_index=index, fork_of="p"))
    found = run_all(core)
    assert core.scheduler.stats().num_preemptions > 0
    for index in range(6):
        assert tokens_of(found[f"p_{index}" if index else "p"]) == expected_tokens(
            prompt, 40, index
        )


def test_stop_tokens_and_min_tokens():
    prompt = [3, 1, 4]
    tokens = expected_tokens(prompt, 10)
    core = make_core()
    core.add(make_request("eos", prompt, max_tokens=10, eos=(tokens[4],)))
    core.add(make_request("stop", prompt, max_tokens=10, stop_token_ids=[tokens[2]]))
    core.add(
        make_request(
            "late", prompt, max_tokens=10, min_tokens=6, stop_token_ids=[tokens[2], tokens[7]]
        )
    )
    found = run_all(core)
    last = found["eos"][-1]
    assert (last.finish_reason, last.stop_reason, tokens_of(found["eos"])) == (
        "stop",
        None,
        tokens[:5],
    )
    last = found["stop"][-1]
    assert (last.finish_reason, last.stop_reason, tokens_of(found["stop"])) == (
        "stop",
        tokens[2],
        tokens[:3],
    )
    assert tokens_of(found["late"]) == tokens[:8]


def test_abort_frees_at_once_and_ends_in_one_final_output():
    core = make_core()
    for request_id in ("running", "waiting"):
        core.add(make_request(request_id, list(range(64)), max_tokens=50))
    core.step()
    for request_id in ("running", "waiting", "unknown"):
        core.abort(request_id)
    assert core.scheduler.blocks.num_free_blocks == 64
    found = run_all(core)
    assert {
        request_id: [o.finish_reason for o in outputs] for request_id, outputs in found.items()
    } == {
        "running": ["abort"],
        "waiting": ["abort"],
    }


def test_an_exception_in_a_step_fails_its_requests_and_leaves_the_blocks_sound():
    executor = FakeExecutor()
    core = make_core(executor=executor, max_num_seqs=2)
    executor.raise_on = {"bad"}
    prompt = list(range(40))
    core.add(make_request("bad", prompt))
    core.add(make_request("beside", prompt))
    core.add(make_request("after", prompt))
    found = run_all(core)
    assert found["bad"][-1].finish_reason == found["beside"][-1].finish_reason == "error"
    assert "RuntimeError: no luck with ['bad']" in found["bad"][-1].error
    assert tokens_of(found["after"]) == expected_tokens(prompt, 8)
    assert core.scheduler.blocks.num_free_blocks == 64
    core.add(make_request("last", [1]))
    run_all(core)
    assert set(executor.rows) <= {"last"}, "rows of failed requests are freed on the worker"


def test_a_failed_row_fails_alone_and_its_blocks_are_not_found_again():
    executor = FakeExecutor()
    core = make_core(executor=executor, budget=48)
    executor.fail_on = {"bad": "the logits hold NaN"}
    prompt = list(range(40))
    core.add(make_request("good", [9, 9, 9]))
    core.add(make_request("bad", prompt))
    found = run_all(core)
    assert [(o.finish_reason, o.error) for o in found["bad"]] == [("error", "the logits hold NaN")]
    assert tokens_of(found["good"]) == expected_tokens([9, 9, 9], 8)
    core.add(make_request("next", prompt))
    assert run_all(core)["next"][0].num_cached_tokens == 0


def test_every_request_has_exactly_one_final_output():
    core = make_core(num_blocks=8, budget=16)
    core.executor.fail_on = {"1": "NaN"}
    for index, prompt in enumerate(PROMPTS):
        core.add(make_request(str(index), prompt, max_tokens=12))
    for _ in range(3):
        core.step()
    core.abort("2")
    found = {}
    core2 = run_all(core)
    for request_id, outputs in core2.items():
        found[request_id] = sum(output.finish_reason is not None for output in outputs)
    assert all(count == 1 for count in found.values()) and "2" in found


def test_one_that_an_earlier_core_began_goes_on():
    """A request that an earlier core began goes on with the tokens that would have followed; its
    limit counts them all.
    """
    prompt = [3, 1, 4, 1, 5]
    expected = expected_tokens(prompt, 12)
    core = make_core()
    core.add(
        make_request("a", prompt, max_tokens=12, output_token_ids=expected[:5], fork_of="gone")
    )
    (outputs,) = run_all(core).values()
    assert tokens_of(outputs) == expected[5:] and outputs[-1].finish_reason == "length"
    assert outputs[-1].timings.decode_s >= 0 and core.scheduler.stats().prompt_tokens == 0


def test_steps_that_compute_nothing_end_in_a_failure():
    """Where steps compute nothing, the request that stands first fails with what it waited for."""
    now = [0.0]
    core = make_core(num_blocks=8, clock=lambda: now[0])
    core = EngineCore(core.scheduler, core.executor, clock=lambda: now[0], stall_timeout_s=60)
    core.scheduler.blocks.start(
        "other", list(range(100)), max_cached_tokens=0, reserve=0, step_tokens=100
    )
    core.add(make_request("a", [1] * 40))
    core.add(make_request("b", [1] * 3, max_tokens=2))
    core.step()
    now[0] = 59.0
    assert core.step().outputs == []
    now[0] = 60.0
    (output,) = core.step().outputs
    assert (output.request_id, output.finish_reason) == ("a", "error")
    assert output.error == "it could not be scheduled for 60 s (stall_timeout): KV full"
    assert [end.request_id for end in run_all(core)["b"] if end.finish_reason == "length"] == ["b"]
    now[0] = 500.0
    core.add(make_request("c", [1] * 40))
    assert core.step().outputs == [], "time without work does not count"


class CompiledExecutor:
    """An executor whose steps report that grammars are compiled."""

    def __init__(self, executor, digests):
        self.executor, self.digests = executor, digests

    def execute(self, plan):
        return msgspec.structs.replace(self.executor.execute(plan), compiled=self.digests)


def test_a_request_whose_grammar_is_compiling_does_not_fail():
    """A machine that is busy with other work may need minutes to compile a grammar."""
    now = [0.0]
    core = make_core(clock=lambda: now[0])
    core = EngineCore(core.scheduler, core.executor, clock=lambda: now[0], stall_timeout_s=60)
    spec = GrammarSpec("regex", "a+")
    core.add(msgspec.structs.replace(make_request("a", [1] * 4), grammar=spec))
    for second in range(0, 600, 50):
        now[0] = float(second)
        assert core.step().outputs == []
    assert core.scheduler.waits_for == "compiling its grammar"
    core.executor = CompiledExecutor(core.executor, [spec.digest])
    assert [end.finish_reason for end in run_all(core)["a"]][-1] == "length"


def test_tokens_whose_kv_does_not_hold_are_computed_again():
    """A row's computed count advances by what its result keeps, not by what the plan holds."""

    class Forgetful(FakeExecutor):
        """Keeps all but three tokens of the first chunk of a prompt."""

        def execute(self, plan):
            result = super().execute(plan)
            if len(self.plans) == 1:
                result.rows[0].num_kept -= 3
            return result

    prompt = list(range(40))
    core = make_core(executor=Forgetful(), budget=16)
    core.add(make_request("a", prompt))
    outputs = run_all(core)["a"]
    starts = [row.start for plan in core.executor.plans for row in plan.rows]
    assert starts[:4] == [0, 13, 29, 40] and tokens_of(outputs) == expected_tokens(prompt, 8)
