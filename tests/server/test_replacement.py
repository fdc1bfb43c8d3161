"""A server whose engine is killed, hangs or loses a rank: another takes its place, and streams go
on with the tokens that they would have had.
"""

import os
import signal

import pytest

from tests.support.live_server import (
    PACE_FLAGS,
    PACED,
    children_of,
    events_of,
    ids_of,
    runs,
    until,
)
from tests.support.many_streams import all_have, run_streams

GOOD = {"prompt": "Hello", "max_tokens": 2}
STEADY = {
    "prompt": "Hello",
    "max_tokens": 100,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


def kill_while_it_streams(server, kill, **fields):
    """Kills a part of the engine while a stream runs; returns the stream's tokens."""
    body = STEADY | fields | {"stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        first = [next(lines), next(lines)]
        kill()
        events = events_of([*first, *lines])
    return [token for event in events for token in event["choices"][0]["token_ids"]]


def check_replaced(server, reason):
    with server.http() as http:
        assert until(lambda: http.get("/health").status_code == 200)
        assert http.post("/v1/completions", json=GOOD).status_code == 200
        assert server.metric("num_engine_restarts_total") == 1
    assert f"{reason}: restarting the engine" in server.lines
    assert "the engine is ready again" in server.lines
    assert server.stop() == 0


def test_an_engine_that_is_killed_is_replaced(start):
    """A stream goes on in the new engine with the tokens that it would have had."""
    server = start(*PACE_FLAGS)
    with server.http() as http:
        answer = http.post("/v1/completions", json=STEADY).json()
    expected = answer["choices"][0]["token_ids"]
    killed = server.core_pid
    got = kill_while_it_streams(server, lambda: os.kill(killed, signal.SIGKILL), **PACED)
    assert got == expected and server.core_pid != killed
    check_replaced(server, "the engine process has exited (killed by signal 9)")


def test_the_bound_of_mirostat_outlives_an_engine(start):
    """Its texts go on as if nothing had happened, though the bound does not follow from their
    tokens: a text that starts with the same ones, and with a bound of its own, goes on otherwise.
    """
    server = start(*PACE_FLAGS)
    sampled = {"temperature": 1, "seed": 5, "max_tokens": 60, "mirostat_tau": 3.0}
    prompt = ids_of("Hello")
    bodies = [STEADY | sampled | {"mirostat_mode": mode, "prompt": prompt} for mode in (1, 2)]
    expected = [one.token_ids for one in run_streams(server, bodies)]

    async def kill(outcomes):
        await all_have(outcomes, 20)
        assert not any(one.has_ended for one in outcomes)
        os.kill(server.core_pid, signal.SIGKILL)

    got = run_streams(server, [body | PACED for body in bodies], kill)
    assert [(one.error, one.token_ids) for one in got] == [(None, ids) for ids in expected]
    starting_over = [
        body | {"prompt": prompt + ids[:20], "max_tokens": 40}
        for body, ids in zip(bodies, expected, strict=True)
    ]
    for one, ids in zip(run_streams(server, starting_over), expected, strict=True):
        assert one.error is None and one.token_ids != ids[20:]
    check_replaced(server, "the engine process has exited (killed by signal 9)")


@pytest.mark.slow
def test_an_engine_that_has_lost_a_rank_is_replaced(start):
    server = start("--backend=torch", "--device=cpu", "--tensor-parallel-size=2")
    core, (rank,) = server.core_pid, children_of(server.core_pid)
    got = kill_while_it_streams(server, lambda: os.kill(rank, signal.SIGKILL))
    assert len(got) == STEADY["max_tokens"]
    assert until(lambda: not runs(core))
    (after,) = children_of(server.core_pid)
    assert runs(after)
    reason = "rank 1 of 2 has ended (killed by signal 9)"
    check_replaced(server, f"the engine cannot run further steps: {reason}")


def test_an_idle_engine_that_is_killed_is_replaced(start):
    server = start()
    killed = server.core_pid
    os.kill(killed, signal.SIGKILL)
    with server.http() as http:
        assert until(lambda: http.get("/health").status_code == 503)
        assert killed not in server.children or not runs(killed)
    check_replaced(server, "the engine process has exited (killed by signal 9)")


def test_an_engine_that_hangs_is_replaced(start):
    """A core that makes no progress is replaced; /health says so until then, and the answer is the
    same.
    """
    server = start("--stall-timeout=1", *PACE_FLAGS)
    body = {
        "prompt": "Hello",
        "n": 2,
        "max_tokens": 40,
        "temperature": 1,
        "seed": 5,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with server.http() as http, server.http() as streaming:
        expected = http.post("/v1/completions", json=body).json()["choices"]
        hung = server.core_pid
        with streaming.stream(
            "POST", "/v1/completions", json=body | PACED | {"stream": True}
        ) as response:
            lines = response.iter_lines()
            first = [next(lines), next(lines)]
            os.kill(hung, signal.SIGSTOP)
            assert until(lambda: http.get("/health").status_code == 503)
            assert (
                "made no progress for 1 s (stall_timeout)"
                in http.get("/health").json()["error"]["message"]
            )
            assert until(lambda: http.get("/health").status_code == 200)
            choices = [
                choice for event in events_of([*first, *lines]) for choice in event["choices"]
            ]
        got = [
            [
                token
                for choice in choices
                if choice["index"] == index
                for token in choice["token_ids"]
            ]
            for index in range(2)
        ]
        assert got == [choice["token_ids"] for choice in expected]
        assert server.core_pid != hung and server.metric("num_engine_restarts_total") == 1
    assert any("restarting the engine" in line for line in server.lines)
    assert server.stop() == 0
