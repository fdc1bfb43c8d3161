"""A client that leaves ends its request in the engine, in every dialect, streamed or whole.

The engine is stopped while the client leaves, so that nothing but its leaving can end the request.
"""

import os
import signal
from contextlib import contextmanager

import httpx
import pytest

from tests.server.test_charges import STREAMS
from tests.support.live_server import until

pytestmark = pytest.mark.sampled(one_in=3)

LENGTH = 400


def long_body(path):
    """Returns a body that asks for a long answer."""
    lengths = {
        name: LENGTH for name in ("max_tokens", "max_output_tokens") if name in STREAMS[path]
    }
    if "options" in STREAMS[path]:
        lengths["options"] = {"num_predict": LENGTH}
    return STREAMS[path] | lengths


@contextmanager
def stopped(server):
    """Stops the engine's process; it goes on at the end."""
    os.kill(server.core_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.core_pid, signal.SIGCONT)


def load_of(http):
    return http.get("/load").json()["server_load"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_leaves_ends_its_request(server, http, path, stream):
    """The front forgets it at once, and the engine gives back its place and its blocks."""
    generated = server.metric("generation_tokens_total")
    body = long_body(path) | {"stream": stream}
    with stopped(server):
        if stream:
            with server.http() as leaving, leaving.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                assert load_of(http) == 1
        else:
            with server.http() as leaving, pytest.raises(httpx.ReadTimeout):
                leaving.post(path, json=body, timeout=0.3)
        assert until(lambda: load_of(http) == 0, 5), "the engine stands, and cannot have ended it"
    assert until(lambda: server.metric("num_requests_running") == 0, 5)
    assert until(lambda: server.metric("kv_blocks_held") == 0, 5)
    assert server.metric("num_requests_waiting") == 0 == server.metric("kv_block_references")
    assert server.metric("generation_tokens_total") - generated < LENGTH // 2
