"""Many clients at once, clients that leave, and clients that read slowly."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from tests.support.live_server import LASTING, LETTERS, LONG, events_of, until

NUM_STREAMS = 200


def text_of(response):
    return "".join(event["choices"][0]["text"] for event in events_of(response.iter_lines()))


def test_many_streams_at_once_say_what_each_says_alone(server, http):
    bodies = [
        {
            "prompt": f"Stream {index}",
            "max_tokens": 12,
            "seed": index,
            "allowed_token_ids": LETTERS,
            "ignore_eos": True,
            "stream": True,
        }
        for index in range(NUM_STREAMS)
    ]

    async def ask_all():
        async with server.async_http() as client:
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body) for body in bodies)
            )

    together = asyncio.run(ask_all())
    for index in (0, 7, 199):
        assert text_of(together[index]) == text_of(http.post("/v1/completions", json=bodies[index]))
    assert all(len(text_of(response)) == 12 for response in together)


@pytest.mark.alone
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server, stream):
    def ask():
        with (
            server.http() as leaving,
            leaving.stream(
                "POST", "/v1/completions", json=LONG | {"stream": stream}, timeout=patience
            ) as response,
        ):
            next(response.iter_lines())

    patience = 3 if stream else 0.1  # all of it takes 0.3 s on a quiet machine
    before = server.metric("generation_tokens_total")
    if stream:
        ask()
    else:
        with pytest.raises(httpx.ReadTimeout):
            ask()
    assert until(
        lambda: server.metric("num_requests_running") == 0 == server.metric("kv_cache_usage_perc"),
        seconds=1,
    )
    assert server.metric("generation_tokens_total") - before < 32 * 500


@pytest.mark.alone
def test_a_chat_that_is_left_ends(server):
    body = {key: value for key, value in LONG.items() if key != "prompt"} | {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
    }
    with (
        server.http() as leaving,
        leaving.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        next(response.iter_lines())
    assert until(lambda: server.metric("num_requests_running") == 0, seconds=1)


@pytest.mark.alone
def test_a_slow_reader_delays_no_other_and_loses_nothing(server, http):
    """A slow reader gets all its text in fewer, larger events, and delays no other stream."""
    body = LONG | {"n": 4, "stream": True, "seed": 5, "allowed_token_ids": LETTERS}
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        raw = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length:"
            f" {len(raw)}\r\n\r\n"
        )
        slow.sendall(head.encode() + raw)
        started = time.monotonic()
        assert (
            http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4}).status_code
            == 200
        )
        assert time.monotonic() - started < 2
        assert until(lambda: server.metric("num_requests_running") == 0)
        received = b"".join(iter(lambda: slow.recv(65536), b""))
    texts = {}
    for line in received.decode().splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    whole = http.post("/v1/completions", json=body | {"stream": False}).json()["choices"]
    assert texts == {choice["index"]: choice["text"] for choice in whole}


def test_many_prompts_stream_together(http):
    prompts = [f"Prompt {index}" for index in range(20)]
    body = {
        "prompt": prompts,
        "max_tokens": 8,
        "seed": 2,
        "allowed_token_ids": LETTERS,
        "ignore_eos": True,
    }
    whole = [choice["text"] for choice in http.post("/v1/completions", json=body).json()["choices"]]
    texts = [""] * 20
    for event in events_of(http.post("/v1/completions", json=body | {"stream": True}).iter_lines()):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == whole


def test_metrics_answer_while_streams_run(server):
    """The gauges move while streams run, and the metrics do not wait for them."""
    seen = []
    body = LASTING | {"max_tokens": 100, "stream": True}

    def watch():
        with (
            server.http() as watched,
            watched.stream("POST", "/v1/completions", json=body) as response,
        ):
            for _ in response.iter_lines():
                pass

    thread = threading.Thread(target=watch)
    thread.start()
    while thread.is_alive():
        seen.append(server.metric("num_requests_running"))
        time.sleep(0.02)
    assert max(seen) >= 1
