"""Beam searches in the control plane: they share, leave and return together, and find what they
would have found alone.
"""

from __future__ import annotations

import itertools

import pytest

from octavo.config.cache_options import CacheOptions
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.core import EngineCore
from octavo.engine.kv.block_pool import BlockGroup
from octavo.engine.protocol.kv_cache_spec import StateSpec
from octavo.engine.protocol.prompt_limits import AllocStatus
from octavo.engine.scheduler.build import build_scheduler
from tests.support.engine_fakes import (
    FakeExecutor,
    expected_tokens,
    make_core,
    make_request,
    pseudo_logprobs,
    run_all,
    tokens_of,
)

EOS = (7,)


def search(request_id, prompt, width, *, max_tokens=40, eos=EOS, **fields):
    given = {"n": width, "beam_width": width, "stop_token_ids": [3]} | fields
    return make_request(request_id, prompt, max_tokens=max_tokens, eos=eos, **given)


def alone(prompt, width, **fields):
    core = make_core(num_blocks=500, budget=500)
    core.add(search("alone", prompt, width, **fields))
    (output,) = run_all(core)["alone"]
    return output.beams


def prompt_of(length, first=0):
    return [first + i % 3 for i in range(length)]


CROWD = {
    str(i): (prompt_of(length, i), width)
    for i, (length, width) in enumerate([(40, 3), (16, 4), (33, 2), (5, 3), (48, 4), (20, 1)])
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize(
    ("windows", "num_blocks"), [([None], 14), ([None, 21], 14), ([21], 9)], ids=str
)
@pytest.mark.parametrize(("caching", "budget"), [(True, 64), (False, 12)])
def test_searches_that_crowd_each_other_out(mode, windows, num_blocks, caching, budget):
    """Searches that preempt each other find the same; nothing is lost of what beams share when they
    leave and return.
    """
    options = {
        "windows": windows,
        "num_host_blocks": 100,
        "caching": caching,
        "budget": budget,
        "preemption_mode": mode,
    }
    core = make_core(num_blocks=num_blocks, max_num_seqs=20, **options)
    wanted = {
        "max_tokens": 60,
        "stop_token_ids": [],
        "early_stopping": "never",
        "length_penalty": 3.0,
    }
    for name, (prompt, width) in CROWD.items():
        core.add(search(name, prompt, width, **wanted))
        core.add(make_request(f"plain {name}", prompt, max_tokens=60))
    outputs = run_all(core)
    for name, (prompt, width) in CROWD.items():
        assert tokens_of(outputs[f"plain {name}"]) == expected_tokens(prompt, 60)
        longest = core.scheduler.admission.get_limits(
            core.scheduler.blocks.capacity_of(width)
        ).max_num_tokens(len(prompt), width)
        max_tokens = min(60, longest - len(prompt))
        assert [output.beams for output in outputs[name]] == [
            alone(prompt, width, **wanted | {"max_tokens": max_tokens})
        ]
    stats = core.scheduler.stats()
    assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (mode == "swap")
    assert not core.scheduler.blocks.tables and stats.num_host_blocks == 0


def test_beams_hold_the_prompt_together():
    """The beams of a search refer to each full block of the prompt, and the device holds it
    once.
    """
    core = make_core()
    core.add(
        search("a", prompt_of(48), 4, max_tokens=10, length_penalty=2.0, early_stopping="never")
    )
    for _ in range(4):
        core.step()
    (group,) = core.scheduler.stats().groups
    assert group.num_shared >= 3 and group.num_references == 4 * 4 and group.num_held <= 3 + 4
    run_all(core)
    (group,) = core.scheduler.stats().groups
    assert (group.num_held, group.num_shared, group.num_references) == (0, 0, 0)


def test_a_beam_that_fails_fails_its_search_and_no_other():
    executor = FakeExecutor()
    core = make_core(executor=executor)
    core.add(search("a", prompt_of(20), 3))
    core.add(search("b", prompt_of(20), 3))
    for _ in range(3):
        core.step()
    beams = [row.request_id for row in core.scheduler.queues.running[0].rows]
    assert len(beams) == 3
    executor.fail_on = {beams[1]: "NaN"}
    outputs = run_all(core)
    assert [(output.finish_reason, output.error, output.beams) for output in outputs["a"]] == [
        ("error", "NaN", None)
    ]
    assert outputs["b"][0].beams == alone(prompt_of(20), 3)
    assert not core.scheduler.blocks.tables and not executor.rows.keys() - set(
        core.scheduler.kv_allocator.freed_rows
    )


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_an_aborted_search_leaves_nothing_behind(steps):
    core = make_core(budget=16)
    core.add(search("a", prompt_of(30), 4))
    core.add(search("b", prompt_of(30), 4))
    for _ in range(steps):
        core.step()
    core.abort("a")
    outputs = run_all(core)
    assert [output.finish_reason for output in outputs["a"]] == ["abort"]
    assert outputs["b"][0].beams == alone(prompt_of(30), 4)
    assert not core.scheduler.blocks.tables


def test_a_step_that_raises_fails_the_search_once():
    executor = FakeExecutor()
    core = make_core(executor=executor)
    core.add(search("a", prompt_of(20), 3))
    for _ in range(3):
        core.step()
    executor.raise_on = {row.request_id for row in core.scheduler.queues.running[0].rows}
    (output,) = run_all(core)["a"]
    assert output.finish_reason == "error" and not core.scheduler.blocks.tables


def test_places_are_kept_for_all_beams():
    """A search of four beams beside room for three waits; alone it starts, however many run at a
    time otherwise.
    """
    core = make_core(max_num_seqs=6)
    for name in "abc":
        core.add(make_request(name, prompt_of(5), max_tokens=5))
    core.add(search("s", prompt_of(5), 4))
    core.step()
    assert [request.request_id for request in core.scheduler.queues.running] == [
        "a",
        "b",
        "c",
    ] and core.scheduler.waits_for == "batch full"
    outputs = run_all(core)
    assert outputs["s"][0].beams == alone(prompt_of(5), 4)
    assert max(len(plan.rows) for plan in core.executor.plans) <= 6
    one = make_core(batching="none")
    one.add(search("s", prompt_of(5), 4))
    assert run_all(one)["s"][0].beams == alone(prompt_of(5), 4)


@pytest.mark.parametrize(
    ("options", "width", "length", "message"),
    [
        (
            {"max_num_seqs": 4},
            5,
            5,
            "beam_width: got 5, expected at most 4 sequences at once (max_num_seqs)",
        ),
        (
            {"num_blocks": 6},
            4,
            60,
            (
                "beam_width: got 4, but the KV cache holds 96 tokens: too few for these beams"
                " after a prompt of 60"
            ),
        ),
        (
            {"kv_layout": "virtual"},
            2,
            5,
            "beam_width: got 2, but beam search requires shared KV blocks, which this engine"
            " disables",
        ),
        (
            {"kv_cache": False},
            2,
            5,
            "beam_width: got 2, but beam search requires shared KV blocks, which this engine"
            " disables",
        ),
    ],
)
def test_what_can_never_run_is_refused_by_name(options, width, length, message):
    core = make_core(**options)
    core.add(search("a", prompt_of(length), width))
    (output,) = run_all(core)["a"]
    assert (output.finish_reason, output.error) == ("error", message)


def test_beams_without_states_are_refused_by_their_number():
    """Where a model keeps fewer recurrent states than there are beams, the message names the beams:
    no prompt would be short enough.
    """
    groups = [BlockGroup(64), BlockGroup(3, StateSpec())]
    scheduler = build_scheduler(
        SchedulerOptions(max_num_seqs=8), CacheOptions(), groups, block_size=16, max_model_len=512
    )
    core = EngineCore(scheduler, FakeExecutor())
    core.add(search("a", prompt_of(20), 4))
    (output,) = run_all(core)["a"]
    wanted = "beam_width: got 4, but the KV cache has no room for 4 sequences at once"
    assert (output.finish_reason, output.error) == ("error", wanted)
    three = scheduler.admission.get_limits(scheduler.blocks.capacity_of(3))
    assert three.judge(20, 3).status is AllocStatus.OK


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("num_blocks", [5, 7, 12])
def test_a_search_alone_always_finds_its_blocks(length, num_blocks):
    """A search alone is cut to the length that fits where its beams share only full blocks of the
    prompt.
    """
    core = make_core(num_blocks=num_blocks, max_num_seqs=3)
    core.add(
        search(
            "a",
            prompt_of(length),
            3,
            max_tokens=None,
            eos=(),
            stop_token_ids=[],
            length_penalty=5.0,
            early_stopping="never",
            ignore_eos=True,
        )
    )
    (output,) = run_all(core)["a"]
    shared = length // 16
    longest = (shared + (num_blocks - shared) // 3) * 16 - length
    assert output.finish_reason == "length" and {len(beam.token_ids) for beam in output.beams} == {
        longest
    }
    assert output.num_preemptions == 0


def test_a_search_that_can_go_nowhere_fails_by_name():
    """A search all of whose tokens are banned fails with a message that says so."""
    core = make_core()
    core.add(search("a", prompt_of(5), 2, stop_token_ids=list(range(10)), min_tokens=5))
    (output,) = run_all(core)["a"]
    assert (output.finish_reason, output.error) == (
        "error",
        "the beam search found no token that could follow",
    )


def test_every_step_keeps_the_best_of_all_continuations():
    """Each step keeps the best of all continuations, as beam search is defined over whole
    sequences.
    """
    prompt, width, depth = prompt_of(4), 3, 5
    beams = [([], 0.0)]
    for _ in range(depth):
        entries = [(tokens, total, pseudo_logprobs(prompt + tokens)) for tokens, total in beams]
        grown = [
            ([*tokens, token], total + logprob)
            for tokens, total, entry in entries
            for token, logprob in itertools.islice(
                zip(entry.token_ids, entry.logprobs, strict=True), 1, None
            )
            if token not in (3, 7)
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    found = alone(prompt, width, max_tokens=depth, min_tokens=depth, length_penalty=0.0)
    assert [beam.token_ids for beam in found] == [tokens for tokens, _ in beams]
    assert [beam.cumulative_logprob for beam in found] == pytest.approx(
        [total for _, total in beams]
    )
