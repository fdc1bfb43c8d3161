"""Timings of a request over HTTP: whole answers, streams, chats and jobs."""

import pytest

from tests.support.backend_choice import chosen_backend
from tests.support.live_server import LiveServer, events_of, until
from tests.support.tiny_tokenizer import tiny_model_with_text

NUM_HELD = 4 if chosen_backend("native") == "torch" else 20
"""Number of requests that fill the cache; fewer on torch, whose steps take many times as long."""
PROMPTS = [[token] * 400 for token in range(40, 40 + NUM_HELD)]
HOLD = {
    "prompt": PROMPTS,
    "max_tokens": 100,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}
"""A request that leaves no room for another, so that several run one after the other."""
WAIT = {"prompt": [6] * 400, "max_tokens": 3, "ignore_eos": True, "timings": True}


@pytest.fixture(scope="module")
def small():
    """A server whose KV cache holds one such request."""
    server = LiveServer(
        str(tiny_model_with_text()), "--served-model-name=tiny", "--kv-cache-memory-bytes=512KiB"
    )
    yield server
    server.stop()


@pytest.fixture
def full(small):
    """Requests that keep the cache full while a test runs."""
    with small.http() as http, http.stream("POST", "/v1/completions", json=HOLD) as response:
        lines = response.iter_lines()
        next(lines)
        yield small
        assert events_of(lines)[-1]["choices"][0]["finish_reason"] == "length"


def check(timings):
    assert timings["waits"]["KV full"] > 0 and ": KV full" in timings["reason"]
    assert timings["queued_s"] == pytest.approx(sum(timings["waits"].values()), abs=1e-3)


def test_a_whole_answer(full):
    with full.http() as http:
        check(http.post("/v1/completions", json=WAIT).json()["timings"])


def test_a_stream(full):
    with full.http() as http:
        *events, last = events_of(
            http.post("/v1/completions", json=WAIT | {"stream": True}).iter_lines()
        )
    check(last["timings"])
    assert last["choices"] == [] and not any("timings" in event for event in events)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(full, stream):
    body = {key: value for key, value in WAIT.items() if key != "prompt"} | {
        "messages": [{"role": "user", "content": "x" * 400}]
    }
    with full.http() as http:
        response = http.post("/v1/chat/completions", json=body | {"stream": stream})
    check((events_of(response.iter_lines())[-1] if stream else response.json())["timings"])


def test_a_job(full):
    with full.http() as http:
        request_id = http.post("/generate", json=WAIT).json()["request_id"]
        assert until(lambda: http.get(f"/result/{request_id}").json()["state"] == "finished")
        check(http.get(f"/result/{request_id}").json()["timings"])
