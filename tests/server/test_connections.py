"""Limits on connections and requests: how many, how long, how slow a reader, how much at once."""

import json
import socket
import time
from contextlib import suppress

import httpx
import pytest

from octavo.api.errors import InvalidRequest
from octavo.api.sampling_params import SamplingParams
from octavo.server.http.request_limits import RequestLimits
from octavo.server.settings import ServerSettings
from tests.support.live_server import LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text

LONG = {"prompt": [[5]] * 12, "max_tokens": 500, "n": 32, "ignore_eos": True, "logprobs": 10}

BYTES_PER_TOKEN = 3072
"""Bytes of memory that a token of these requests may take, with the logprobs of ten others."""


@pytest.fixture(scope="module")
def strict():
    """A server with tight limits."""
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        "--slow-client-timeout-s=1",
        "--max-connections=8",
    )
    yield server
    assert server.stop() == 0


def rss_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def connect(server):
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    return connection


def test_a_client_that_never_reads_is_bounded_and_then_dropped(strict):
    """The stream stops growing, the connection ends, and its blocks are free again.

    Tokens that are generated until then are kept with their logprobs: the faster the engine, the
    more of them.
    """
    body = json.dumps(LONG | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    before = rss_bytes(strict.process.pid)
    connection = connect(strict)
    connection.sendall(head + body)
    assert until(lambda: strict.metric("kv_blocks_held") > 0, 10)
    assert until(lambda: strict.metric("kv_blocks_held") == 0, 20)
    grown = rss_bytes(strict.process.pid) - before
    num_tokens = strict.metric("generation_tokens_total")
    print(f"{num_tokens:.0f} tokens took {grown / 2**20:.0f} MiB")
    assert grown < (32 << 20) + BYTES_PER_TOKEN * num_tokens
    connection.settimeout(10)
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            received += part
    assert 0 < len(received) < 16 << 20 and b"[DONE]" not in received


def test_connections_beyond_the_limit_are_refused_and_come_again(strict):
    held = [connect(strict) for _ in range(8)]
    assert until(lambda: status(strict) == 503, 5)
    for connection in held:
        connection.close()
    assert until(lambda: status(strict) == 200, 5)


def status(server):
    return httpx.get(f"{server.url}/health").status_code


def test_a_request_that_takes_too_long_ends_and_gives_its_blocks_back():
    """A whole answer becomes a 504, a stream ends with an error of its own."""
    server = LiveServer(
        str(tiny_model_with_text()), "--max-request-s=1", "--max-num-seqs=1", "--max-model-len=2048"
    )
    slow = {"prompt": [5] * 4, "max_tokens": 2000, "n": 64, "ignore_eos": True}
    with server.http() as http:
        begun = time.monotonic()
        whole = http.post("/v1/completions", json=slow)
        assert whole.status_code == 504 and time.monotonic() - begun < 20
        assert "took longer than 1 seconds" in whole.json()["error"]["message"]
        with http.stream("POST", "/v1/completions", json=slow | {"stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == 504
        assert until(lambda: server.metric("num_requests_running") == 0, 5)
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("num_prompts", "fields", "message"),
    [
        (2049, {}, "prompt: got 2049 prompts, expected at most 2048"),
        (1, {"n": 1025}, "n: got 1025 samples, expected at most 1024"),
        (1, {"stop": ["a"] * 65}, "stop: got 65 texts, expected at most 64"),
        (1, {"stop": "a" * 1025}, "stop: got 1025 characters, expected at most 1024"),
        (1, {"bad_words": ["a" * 1025]}, "bad_words: got 1025 characters"),
    ],
)
def test_what_one_request_may_ask_for_is_bounded(num_prompts, fields, message):
    limits = RequestLimits.of(ServerSettings())
    limits.check(2048, SamplingParams(n=1024, temperature=1, stop=["a" * 1024] * 64))
    with pytest.raises(InvalidRequest) as caught:
        limits.check(num_prompts, SamplingParams(**fields))
    assert caught.value.message.startswith(message) and "--max-" in caught.value.hint
