"""A core that dies is replaced as one that hangs: its requests go on where they were, and one that
kills it again and again fails alone.
"""

import os
import signal
import subprocess
import threading
import time

import pytest

from octavo.api.errors import InvalidRequest
from octavo.engine.clients.supervised import MAX_FAILED_STARTS
from tests.support.core_builders import BAD
from tests.support.engine_fakes import make_request
from tests.support.supervised_cores import (
    PROMPTS,
    collect,
    collect_good,
    requests,
    take_steps,
)

pytestmark = pytest.mark.sampled(one_in=2)

KILLED = "the engine process has exited (killed by signal 9)"
SOON_S = 5.0


def build_until(*failing):
    """Names the builder of each core: those of the given numbers end while they load."""
    return lambda num_before: "end" if num_before in failing else "build"


def test_the_requests_of_a_killed_core_go_on_where_they_were(start):
    client = start("slow")
    client.add(requests())
    tokens = take_steps(client, 10)
    before = client.pid
    os.kill(before, signal.SIGKILL)
    collect_good(client, PROMPTS, [], tokens)
    assert client.pid != before and client.starts == [0, 1]
    assert client.said == [
        f"{KILLED}: restarting the engine",
        "the engine is ready again",
    ]
    assert client.trouble == "" and client.stats.num_restarts == 1
    assert client.stats.num_added == len(PROMPTS)


def test_a_request_that_ran_alone_in_a_killed_core_goes_on(start):
    client = start("slow")
    prompts = {"a": PROMPTS["a"]}
    client.add(requests(prompts))
    tokens = take_steps(client, 5)
    os.kill(client.pid, signal.SIGKILL)
    collect_good(client, prompts, [], tokens)


def test_an_idle_core_that_was_killed_is_replaced_soon(start):
    client = start()
    os.kill(client.pid, signal.SIGKILL)
    began = time.monotonic()
    while not client.starts[1:] or client.trouble:
        client.receive(timeout_s=0.1)
        assert time.monotonic() - began < SOON_S
    assert client.said[0] == f"{KILLED}: restarting the engine"
    client.add(requests())
    collect_good(client, PROMPTS, [])


def test_a_request_that_kills_its_core_fails_and_the_others_go_on(start):
    client = start("crash")
    client.add(requests())
    tokens = take_steps(client, 5)
    client.add([make_request("bad", [5, BAD, 6])])
    ends = collect_good(client, PROMPTS, ["bad"], tokens)
    assert ends["bad"].error == (f"{KILLED}; this request is aborted; the engine was restarted")
    assert client.starts == [0, 1, 2], "it killed a step of several, then its trial"
    assert client.said[2] == f"{KILLED}: restarting the engine in 0.5 s"


def test_a_core_without_a_watchdog_is_replaced_too(start):
    client = start("slow", stall_timeout_s=0)
    client.add(requests())
    tokens = take_steps(client, 3)
    os.kill(client.pid, signal.SIGKILL)
    collect_good(client, PROMPTS, [], tokens)


def test_requests_outlast_starts_that_fail(start):
    client = start("slow", build_of=build_until(1, 2))
    client.add(requests())
    tokens = take_steps(client, 3)
    os.kill(client.pid, signal.SIGKILL)
    collect_good(client, PROMPTS, [], tokens)
    assert client.starts == [0, 1, 2, 3] and client.trouble == ""
    assert client.said[1] == (
        "the engine process has exited (exit code 3): restarting the engine in 0.5 s"
    )


def test_no_request_waits_forever_for_a_core_that_never_starts(start):
    client = start("slow", build_of=build_until(*range(1, 100)))
    client.add(requests())
    take_steps(client, 3)
    os.kill(client.pid, signal.SIGKILL)
    ends = collect(client, 3)[1]
    assert {end.finish_reason for end in ends.values()} == {"error"}
    assert all("exit code 3" in end.error for end in ends.values())
    assert len(client.starts) == 1 + MAX_FAILED_STARTS
    assert client.trouble.startswith("the engine process has exited (exit code 3)")


def test_a_request_is_aborted_while_there_is_no_core(start):
    client = start("slow", build_of=build_until(*range(1, 100)))
    client.add(requests({"a": [1], "b": [2]}))
    take_steps(client, 1)
    os.kill(client.pid, signal.SIGKILL)
    while "in 1 s" not in client.trouble:
        client.receive(timeout_s=0.1)
    num_starts = len(client.starts)
    client.abort(["b"])
    ends = collect(client, 1)[1]
    assert ends["b"].finish_reason == "abort"
    assert len(client.starts) == num_starts, "it did not wait for another core"


def test_a_process_that_cannot_be_made_is_tried_again(start, monkeypatch):
    client = start("slow")
    client.add(requests())
    tokens = take_steps(client, 3)
    failures = [OSError("out of processes")]
    whole = subprocess.Popen

    def start_process(*arguments, **options):
        if failures:
            raise failures.pop()
        return whole(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start_process)
    os.kill(client.pid, signal.SIGKILL)
    collect_good(client, PROMPTS, [], tokens)
    assert client.said[1].startswith(
        "no process can be started: out of processes: restarting the engine"
    )


def test_a_client_is_closed_while_there_is_no_core(start):
    client = start(build_of=build_until(*range(1, 100)))
    os.kill(client.pid, signal.SIGKILL)
    while "in 1 s" not in client.trouble:
        client.receive(timeout_s=0.1)
    num_starts = len(client.starts)
    threading.Timer(0.1, client.close).start()
    assert client.receive() is None
    assert len(client.starts) == num_starts, "it did not wait for another core"


def test_what_cannot_be_sent_is_the_senders_error_and_touches_no_other_request(start):
    """It is not sent to the next core either, nor waited for."""
    client = start("slow")
    client.add(requests())
    tokens = take_steps(client, 3)
    for fields in ({"priority": 10**30}, {"tenant": 5}, {"cache_salt": "\ud800"}):
        bad = make_request("bad", [1, 2], **fields)
        with pytest.raises(InvalidRequest, match="the request cannot be sent to the engine: "):
            client.add([*requests({"d": [4]}), bad])
    os.kill(client.pid, signal.SIGKILL)
    collect_good(client, PROMPTS, [], tokens)
    assert client.starts == [0, 1] and client.receive(timeout_s=0.1) is None
