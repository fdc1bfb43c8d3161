"""Requests that outgrow the original context are computed again at other positions, and no way of
scheduling them changes a token or mixes keys of both kinds (the fake executor checks each).
"""

import random

import pytest

from octavo.engine.protocol.block_hashes import BlockHashing
from octavo.engine.protocol.original_context import OriginalContext
from tests.support.engine_fakes import expected_tokens, make_core, make_request, run_all, tokens_of

ORIGINAL = OriginalContext(40)

WAYS = {
    "chunks": {"budget": 8},
    "planned ahead": {"runs_ahead": True},
    "micro_batches": {"num_micro_batches": 2},
    "several steps": {"num_scheduler_steps": 8},
    "swapped": {"num_blocks": 14, "num_host_blocks": 14, "preemption_mode": "swap"},
    "computed again": {"num_blocks": 14, "preemption_mode": "recompute"},
    "ahead and few blocks": {"num_blocks": 14, "runs_ahead": True},
    "nothing shared": {"caching": False},
    "no KV cache": {"kv_cache": False},
    "ranges": {"kv_layout": "virtual", "caching": False},
}


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_requests_alone(way, policy):
    draw = random.Random(way + policy)
    core = make_core(original=ORIGINAL, scheduling_policy=policy, **WAYS[way])
    wanted = {}
    for index in range(40):
        prompt = [7] * draw.randrange(1, 45) + [index] * draw.randrange(1, 12)
        count = draw.randrange(1, 30)
        wanted[str(index)] = expected_tokens(prompt, count)
        core.add(make_request(str(index), prompt, max_tokens=count, tenant=str(index % 3)))
        if draw.random() < 0.3 and way != "ranges":
            name = f"{index}#1"
            wanted[name] = expected_tokens(prompt, count, 1)
            core.add(
                make_request(
                    name, prompt, max_tokens=count, sample_index=1, fork_of=str(index), tenant="f"
                )
            )
    outputs = run_all(core)
    assert {name: tokens_of(outputs[name]) for name in wanted} == wanted
    starts = [new.first_position for plan in core.executor.plans for new in plan.new_rows]
    assert {0, ORIGINAL.num_tokens} == set(starts)


def test_the_first_token_beyond_starts_a_request_over():
    core = make_core(original=ORIGINAL)
    core.add(make_request("a", list(range(38)), max_tokens=6))
    outputs = run_all(core)
    plans = [(row.start, row.num_tokens) for plan in core.executor.plans for row in plan.rows]
    assert plans == [(0, 38), (38, 1), (39, 1), (0, 41), (41, 1), (42, 1)]
    assert tokens_of(outputs["a"]) == expected_tokens(list(range(38)), 6)
    assert core.scheduler.stats().num_preemptions == 0


def test_a_longer_prompt_has_the_long_angles_from_the_first_chunk_on():
    core = make_core(original=ORIGINAL, budget=16)
    core.add(make_request("a", list(range(41)), max_tokens=2))
    run_all(core)
    new_rows = [new for plan in core.executor.plans for new in plan.new_rows]
    assert [new.first_position for new in new_rows] == [40]


def test_blocks_of_both_kinds_have_names_of_their_own():
    tokens = list(range(32))
    assert (
        len(
            {
                *BlockHashing().digests(tokens, 16),
                *BlockHashing(first_position=40).digests(tokens, 16),
            }
        )
        == 4
    )
    core = make_core(original=ORIGINAL)
    for name, prompt in (("short", tokens), ("long", [*tokens, *tokens])):
        core.add(make_request(name, prompt, max_tokens=2))
        run_all(core)
        found = core.scheduler.stats().prefix_hit_tokens
        assert found == 0
    core.add(make_request("again", [*tokens, 5], max_tokens=2))
    run_all(core)
    assert core.scheduler.stats().prefix_hit_tokens == 32


def test_beams_outgrow_together():
    found = []
    for original in (ORIGINAL, OriginalContext()):
        core = make_core(original=original)
        core.add(make_request("a", list(range(36)), max_tokens=10, n=2, beam_width=3))
        outputs = run_all(core)
        beams = [beam for output in outputs["a"] for beam in output.beams or ()]
        found.append([beam.token_ids for beam in beams])
    assert found[0] == found[1] and len(found[0]) == 2
