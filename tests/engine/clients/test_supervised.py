"""A core that hangs is replaced: who hung it fails, all others get the tokens that they would have
got.
"""

import os
import signal
import threading
import time

import pytest

from octavo.engine.clients.process import ProcessClient
from octavo.engine.clients.supervised import SupervisedClient, Watch
from octavo.engine.clients.suspects import Suspects
from octavo.errors import EngineDead
from tests.support.core_builders import BAD, SICK
from tests.support.engine_fakes import expected_tokens, make_core, make_request, run_all

pytestmark = pytest.mark.alone

STALL_S = 1.0


@pytest.fixture
def start():
    started = []

    def start(kind="hang", stall_timeout_s=STALL_S):
        said, starts = [], []

        def core(num_before):
            starts.append(num_before)
            return ProcessClient("tests.support.core_builders:build", {"kind": kind})

        client = SupervisedClient(core, stall_timeout_s=stall_timeout_s, report=said.append)
        client.wait_until_ready(lambda text: None)
        client.said, client.starts = said, starts
        started.append(client)
        return client

    yield start
    for client in started:
        client.close()


def collect(client, num_finals):
    """Tokens and ends by request."""
    tokens, ends = {}, {}
    while len(ends) < num_finals:
        step = client.receive(timeout_s=20)
        assert step is not None, (tokens, ends)
        for output in step.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in ends, "one final output each"
                ends[output.request_id] = output
    return tokens, ends


def collect_good(client, prompts, bad):
    """All but the bad ones get what they would have got."""
    tokens, ends = collect(client, len(prompts) + len(bad))
    for name, prompt in prompts.items():
        assert (ends[name].finish_reason, tokens[name]) == (
            "length",
            expected_tokens(prompt, 40),
        ), name
    for name in bad:
        assert ends[name].finish_reason == "error", name
    return ends


PROMPTS = {"a": [1, 2, 3], "b": list(range(40)), "c": [7] * 20}


def requests(prompts=PROMPTS, **options):
    return [
        make_request(name, prompt, max_tokens=40, **options) for name, prompt in prompts.items()
    ]


def test_who_hangs_alone_fails_at_once(start):
    client = start()
    client.add([make_request("bad", [1, BAD])])
    began = time.monotonic()
    (end,) = collect(client, 1)[1].values()
    assert STALL_S <= time.monotonic() - began < 4 * STALL_S
    assert (
        end.error
        == "a step made no progress for 1 s (stall_timeout); this request is given up, the engine"
        " was replaced"
    )
    assert (
        client.said
        == ["a step made no progress for 1 s (stall_timeout): another engine is being started"]
        and client.trouble
    )
    client.add(requests())
    collect_good(client, PROMPTS, [])
    assert (
        client.trouble == ""
        and client.said[1:] == ["the engine is there again"]
        and client.starts == [0, 1]
    )


def test_the_others_of_its_step_go_on_where_they_were(start):
    """It hangs while they are in the midst of their answers, which another core continues, token
    for token.
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


def test_what_hangs_only_together(start):
    """Each alone is sound; the third time it comes to an end."""
    client = start()
    client.add(requests({"x": [SICK], "y": [2, SICK]}))
    ends = collect(client, 2)[1]
    assert [end.finish_reason for end in ends.values()] == ["error"] * 2 and client.starts == [
        0,
        1,
        2,
        3,
    ]
    client.add(requests())
    collect_good(client, PROMPTS, [])


def test_a_stopped_process_is_one_that_hangs(start):
    """Even the core's other threads stand still; whoever was computed is tried, and nobody is to
    blame.
    """
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


def test_stopped_without_work(start):
    """Who comes next has never been computed, and is not to blame."""
    client = start("slow")
    os.kill(client.pid, signal.SIGSTOP)
    client.add(requests({"a": [1, 2]}))
    collect_good(client, {"a": [1, 2]}, [])
    assert client.starts == [0, 1] and client.said[0].startswith("the engine made no progress")


def test_a_long_step_that_gets_ahead_is_no_hang(start):
    client = start("long")
    client.add([make_request("a", [1], max_tokens=2)])
    assert collect(client, 1)[0] == {"a": expected_tokens([1], 2)} and client.starts == [0]


def test_aborted_while_it_hangs(start):
    """They end in their own output and are not computed again: neither who hung it nor another."""
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


def test_held_back_and_aborted(start):
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


def test_death_is_death(start):
    client = start("die")
    client.add(requests())
    with pytest.raises(EngineDead, match="exit code 7"):
        client.receive(timeout_s=20)


def test_closed_while_it_hangs(start):
    client = start()
    client.add([make_request("bad", [BAD])])
    threading.Timer(0.2, client.close).start()
    began = time.monotonic()
    assert client.receive() is None and time.monotonic() - began < 10


def test_time_in_which_nobody_looked_does_not_count():
    watch = Watch(8.0)
    assert watch.interval_s == 1.0
    assert not any(watch.look(1, now) for now in (100, 101, 102, 5000, 5001, 5002))
    assert [watch.look(1, 5003 + second) for second in range(3)] == [False, True, True]
    assert not watch.look(2, 5010)
    watch.rest()
    assert not watch.look(2, 6000) and not watch.look(2, 6001)


def test_suspects_are_tried_one_by_one():
    suspects = Suspects()
    assert suspects.hung(["a", "b", "c"]) == [] and suspects.any
    assert suspects.next_on_trial() == "a" and suspects.next_on_trial() is None
    suspects.cleared("a")
    assert suspects.next_on_trial() == "b"
    assert suspects.hung(["b"]) == ["b"]
    assert suspects.next_on_trial() == "c" and suspects.any
    suspects.ended("c")
    assert not suspects.any
    assert suspects.hung(["only"]) == ["only"]
    assert suspects.hung(["sent"], in_step=False) == [] and suspects.next_on_trial() == "sent"
    assert suspects.hung(["sent", "later"], in_step=False) == ["sent"] and not suspects.any


def test_sound_alone_but_not_together():
    """The third time there is an end; a hang that was explained is not held against anybody."""
    suspects = Suspects()

    def try_all(guilty=()):
        while (name := suspects.next_on_trial()) is not None:
            if name in guilty:
                assert suspects.hung([name]) == [name]
            else:
                suspects.cleared(name)

    for _ in range(5):
        assert suspects.hung(["x", "y", "bad"]) == []
        try_all(guilty=["bad"])
    for _ in range(2):
        assert suspects.hung(["x", "y"]) == []
        try_all()
    assert suspects.hung(["x", "y", "new"]) == ["x", "y"] and suspects.next_on_trial() == "new"


def test_a_search_begins_again_in_the_next_core(start):
    """What it would have found is found, though the core that it began in hung."""
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
