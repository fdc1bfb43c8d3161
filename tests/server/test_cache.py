"""The prefix cache over HTTP: a system prompt that is pinned is found by the next server, and what
is found is counted.
"""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.support.live_server import LASTING, PACE_FLAGS, READABLE, LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

SYSTEM = "You are a helpful assistant that answers in one short sentence, and never in two."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(folder):
    server = LiveServer(
        str(tiny_model_with_text()),
        f"--prefix-cache-dir={folder}",
        "--served-model-name=tiny",
        "--max-model-len=2048",
        *PACE_FLAGS,
    )
    yield server
    assert server.stop() == 0


@pytest.fixture
def http(server):
    with server.http() as client:
        yield client


def complete(http: httpx.Client, prompt: str, **fields) -> int:
    """Returns the number of prompt tokens found in the prefix cache."""
    body = {
        "prompt": prompt,
        **{name: value for name, value in READABLE.items() if name != "extra_body"},
        **fields,
    }
    usage = http.post("/v1/completions", json=body).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_pinned_prompt_is_found_after_a_restart(http, folder):
    answer = http.post("/v1/cache/pin", json={"prompt": SYSTEM, "ttl_s": 3600}).json()
    assert answer["pinned_tokens"] == len(SYSTEM) // 16 * 16 and answer["expires_at"] > 1.7e9
    assert complete(http, SYSTEM + " Hello?") >= answer["pinned_tokens"]
    other = LiveServer(str(tiny_model_with_text()), f"--prefix-cache-dir={folder}")
    with other.http() as second:
        assert complete(second, SYSTEM + " Hello?") >= answer["pinned_tokens"]
        found = second.get("/v1/cache").json()
    assert other.stop() == 0
    assert (
        found["hit_tokens_off_device"] >= answer["pinned_tokens"]
        and found["hit_tokens"] >= found["hit_tokens_off_device"]
    )
    assert found["disk"]["pinned_bytes"] > 0 and found["disk"]["damaged_files"] == 0
    assert any("blocks of this model" in line for line in other.lines)


def test_a_conversations_beginning_can_be_pinned(http):
    messages = [{"role": "system", "content": SYSTEM}]
    answer = http.post("/v1/cache/pin", json={"messages": messages}).json()
    assert answer["pinned_tokens"] >= len(SYSTEM) // 16 * 16 and answer["expires_at"] is None
    chat = {"messages": [*messages, {"role": "user", "content": "Hello?"}], "max_tokens": 2}
    usage = http.post("/v1/chat/completions", json=chat).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= answer["pinned_tokens"]


def test_what_is_found_is_counted(http, server):
    before = http.get("/v1/cache").json()
    for _ in range(2):
        complete(http, "A prompt of more than sixteen tokens, twice.")
    after = http.get("/v1/cache").json()
    assert (
        after["hit_tokens"] - before["hit_tokens"] == 43
        and after["queried_tokens"] - before["queried_tokens"] == 88
    )
    assert server.metric("prefix_cache_hits_total") == after["hit_tokens"]
    assert (
        server.metric("external_prefix_cache_queries_total")
        > server.metric("external_prefix_cache_hits_total")
        >= 0
    )


def test_who_shares_blocks_is_told(server, http):
    """Eight samples of one prompt share all of its five blocks but the last; the engine is paused
    while its state is read.
    """
    body = LASTING | {"prompt": "x" * 70, "n": 8, "stream": True}
    with server.http() as other, http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        for _ in range(20):
            next(lines)
        os.kill(server.core_pid, signal.SIGSTOP)
        try:
            (device,) = other.get("/v1/cache").json()["device"]
            text = other.get("/metrics").text
        finally:
            os.kill(server.core_pid, signal.SIGCONT)
    assert device["num_shared"] == 4 and device["window"] is None
    assert device["num_references"] == device["num_held"] + 7 * 4 and device["num_named"] >= 4
    held, shared, references = (
        float(re.findall(rf"^octavo:kv_block{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[0])
        for name in ("s_held", "s_shared", "_references")
    )
    assert shared == 4 and references == held + 7 * 4


def test_two_servers_on_one_directory(tmp_path):
    """Two servers that write and remove all the time, in a directory far too small, answer as one
    alone.
    """
    options = (
        f"--prefix-cache-dir={tmp_path}",
        "--prefix-cache-size=400KiB",
        "--kv-offloading-size=200KiB",
        "--kv-cache-memory-bytes=400KiB",
    )
    servers = [LiveServer(str(tiny_model_with_text()), *options) for _ in range(2)]
    prompts = [f"{index % 13}: {SYSTEM} {index}" for index in range(26)]
    with ThreadPoolExecutor(16) as pool, servers[0].http() as one, servers[1].http() as other:
        first = [list(pool.map(partial(text_of, http), prompts)) for http in (one, other)]
        again = pool.map(
            text_of,
            [one, other] * len(prompts),
            [prompt for prompt in prompts[::-1] for _ in range(2)],
        )
        assert (
            list(again) == [text for text in first[0][::-1] for _ in range(2)]
            and first[0] == first[1]
        )
        disks = [http.get("/v1/cache").json()["disk"] for http in (one, other)]
    assert [server.stop() for server in servers] == [0, 0]
    assert sum(disk["blocks_read"] for disk in disks) > 0
    assert all(disk["damaged_files"] == disk["write_errors"] == 0 for disk in disks)


def text_of(http: httpx.Client, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_resetting(http):
    prompt = "Another prompt of more than sixteen tokens."
    assert complete(http, prompt) < 16 < complete(http, prompt)
    assert http.post("/v1/cache/reset", json={}).json() == {"reset": True}
    assert complete(http, prompt) > 16, "it was on disk"
    assert http.post("/v1/cache/reset", json={"reset_connector": True}).json() == {"reset": True}
    assert complete(http, prompt) == 0
    assert http.get("/v1/cache").json()["disk"]["blocks_not_found"] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt: expected exactly one of prompt and messages"),
        ({"prompt": "a", "messages": []}, "prompt: expected exactly one of prompt and messages"),
        (
            {"prompt": "a", "ttl_s": -3},
            "ttl_s: got -3.0, expected None (for good) or seconds from 0",
        ),
        ({"prompt": "a", "ttl": 3}, "ttl: no such field (hint: did you mean ttl_s?)"),
        (
            {"prompt": "a", "ttl_s": "1h"},
            "ttl_s: got '1h', expected seconds to keep the prompt pinned; null: forever, 0: unpin",
        ),
        ({"prompt": ""}, "prompt: got no token"),
        ({"messages": []}, "messages: "),
        ({"prompt": [5, -1]}, "-1"),
        (
            {"prompt": "a", "chat_template_kwargs": {}},
            "chat_template_kwargs: requires messages",
        ),
    ],
)
def test_bad_pins_are_named(http, body, message):
    response = http.post("/v1/cache/pin", json=body)
    error = response.json()["error"]
    assert (
        response.status_code == error["code"] == 400
        and error["type"] == "BadRequestError"
        and message in error["message"]
    )


def test_a_pin_beyond_the_context_is_refused(http):
    response = http.post("/v1/cache/pin", json={"prompt": [5] * 5000})
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"


def test_bad_resets_and_models_are_named(http):
    response = http.post("/v1/cache/reset", json={"connector": True})
    assert (
        response.status_code == 400
        and "connector: no such field" in response.json()["error"]["message"]
    )
    response = http.post("/v1/cache/pin", json={"prompt": "a", "model": "other"})
    assert response.status_code == 404 and response.json()["error"]["type"] == "NotFoundError"
    assert http.get("/v1/cache/pin").status_code == 405


def test_while_requests_run_nothing_is_forgotten(http, server):
    with http.stream("POST", "/v1/completions", json=LASTING | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        with server.http() as other:
            assert other.post("/v1/cache/reset", json={}).json() == {"reset": False}


def test_without_a_directory_there_is_nothing_to_pin_in():
    server = LiveServer(str(tiny_model_with_text()))
    with server.http() as http:
        response = http.post("/v1/cache/pin", json={"prompt": SYSTEM})
        assert http.get("/v1/cache").json()["disk"] is None
    assert server.stop() == 0
    assert response.status_code == 400
    assert "pinning requires prefix_cache_dir" in response.json()["error"]["message"]
