"""A core that hangs is replaced: the request that hung it fails, all others get the tokens that
they would have got.
"""

import os
import signal
import threading
import time

import pytest

from tests.support.core_builders import BAD, SICK
from tests.support.engine_fakes import expected_tokens, make_core, make_request, run_all
from tests.support.supervised_cores import PROMPTS, STALL_S, collect, collect_good, requests

pytestmark = pytest.mark.alone


def test_a_request_that_hangs_alone_fails_at_once(start):
    client = start()
    client.add([make_request("bad", [1, BAD])])
    began = time.monotonic()
    (end,) = collect(client, 1)[1].values()
    assert STALL_S <= time.monotonic() - began < 4 * STALL_S
    assert end.error == (
        "a step made no progress for 1 s (stall_timeout); this request is aborted; the engine was"
        " restarted"
    )
    assert (
        client.said == ["a step made no progress for 1 s (stall_timeout): restarting the engine"]
        and client.trouble
    )
    client.add(requests())
    collect_good(client, PROMPTS, [])
    assert (
        client.trouble == ""
        and client.said[1:] == ["the engine is ready again"]
        and client.starts == [0, 1]
    )


def test_the_others_of_its_step_go_on_where_they_were(start):
    """A request hangs while others are in the midst of their answers; another core continues those
    token for token.
    """
    client = start()
    client.add(requests())
    for _ in range(10):
        assert client.receive(timeout_s=10) is not None
    client.add([make_request("bad", [5, BAD, 6])])
    before = client.receive(timeout_s=10).stats
    tokens = {}
    prompts = {**PROMPTS, "late": [9, 9]}
    client.add([make_request("late", [9, 9], max_tokens=40)])
    ends = {}
    while len(ends) < 5:
        step = client.receive(timeout_s=20)
        for output in step.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                ends[output.request_id] = output
    assert ends["bad"].finish_reason == "error"
    for name, prompt in prompts.items():
        expected = expected_tokens(prompt, 40)
        assert (
            ends[name].finish_reason == "length"
            and expected[len(expected) - len(tokens[name]) :] == tokens[name]
        )
    assert client.starts == [0, 1, 2], "first it hung a step of several, then it was tried alone"
    assert step.stats.num_restarts == 2 and step.stats.num_steps > before.num_steps
    assert (
        step.stats.num_added == 5
        and step.stats.num_added_tokens == sum(map(len, prompts.values())) + 3
    )
    assert step.stats.generation_tokens == 4 * 40


def test_requests_that_hang_only_together_fail_the_third_time(start):
    """Each alone is sound."""
    client = start()
    client.add(requests({"x": [SICK], "y": [2, SICK]}))
    ends = collect(client, 2)[1]
    assert [end.finish_reason for end in ends.values()] == ["error"] * 2
    client.add(requests())
    collect_good(client, PROMPTS, [])
    assert client.starts == [0, 1, 2, 3]


def test_a_stopped_process_is_one_that_hangs(start):
    """Even the core's other threads stand still; its requests are tried, and none is to blame."""
    client = start("slow")
    client.add(requests())
    client.receive(timeout_s=10)
    os.kill(client.pid, signal.SIGSTOP)
    tokens, ends = collect(client, 3)
    for name, prompt in PROMPTS.items():
        assert (
            ends[name].finish_reason == "length"
            and tokens[name] == expected_tokens(prompt, 40)[-len(tokens[name]) :]
        )


def test_a_request_that_comes_to_a_stopped_process_is_not_to_blame(start):
    """It has never been computed."""
    client = start("slow")
    os.kill(client.pid, signal.SIGSTOP)
    client.add(requests({"a": [1, 2]}))
    collect_good(client, {"a": [1, 2]}, [])
    assert client.starts == [0, 1] and client.said[0].startswith("the engine made no progress")


def test_a_long_step_that_makes_progress_is_no_hang(start):
    client = start("long")
    client.add([make_request("a", [1], max_tokens=2)])
    assert collect(client, 1)[0] == {"a": expected_tokens([1], 2)} and client.starts == [0]


def test_requests_aborted_while_the_core_hangs_end_and_are_not_computed_again(start):
    """The request that hung the core ends like any other."""
    client = start()
    client.add([make_request("bad", [BAD, 1]), *requests()])
    threading.Timer(0.3, lambda: client.abort(["a", "b", "bad"])).start()
    ends = collect(client, 4)[1]
    assert {name: end.finish_reason for name, end in ends.items()} == {
        "a": "abort",
        "b": "abort",
        "bad": "abort",
        "c": "length",
    }


def test_a_request_that_is_held_back_can_be_aborted(start):
    client = start()
    client.add([make_request("bad", [BAD, 1]), *requests()])
    while not client.trouble:
        client.receive(timeout_s=0.1)
    client.abort(["c"])
    ends = collect(client, 4)[1]
    assert {name: end.finish_reason for name, end in ends.items()} == {
        "a": "length",
        "bad": "error",
        "b": "length",
        "c": "abort",
    }


def test_a_client_can_be_closed_while_its_core_hangs(start):
    client = start()
    client.add([make_request("bad", [BAD])])
    threading.Timer(0.2, client.close).start()
    began = time.monotonic()
    assert client.receive() is None and time.monotonic() - began < 10


def test_a_search_begins_again_in_the_next_core(start):
    """A beam search finds the same though the core that it began in hung."""
    client = start()
    fields = {
        "n": 3,
        "beam_width": 3,
        "stop_token_ids": [3],
        "early_stopping": "never",
        "length_penalty": 2.0,
    }
    client.add([make_request("search", [1] * 20, max_tokens=40, **fields)])
    for _ in range(4):
        assert client.receive(timeout_s=10) is not None
    client.add([make_request("bad", [5, BAD, 6])])
    ends = collect(client, 2)[1]
    core = make_core()
    core.add(make_request("search", [1] * 20, max_tokens=40, **fields))
    assert ends["bad"].finish_reason == "error"
    assert ends["search"].beams == run_all(core)["search"][0].beams
