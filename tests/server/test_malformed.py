"""Malformed bodies on every POST route, and malformed HTTP: each is refused, and other requests get
what they always get.
"""

import asyncio
import json
import socket

import pytest

from tests.support.live_server import LASTING, LETTERS, PACE_FLAGS, LiveServer, until
from tests.support.malformed_bodies import BodyMutations
from tests.support.malformed_http import BadMessage, HttpMutations, send_raw
from tests.support.tiers import examples, tier
from tests.support.tiny_tokenizer import tiny_model_with_text

NUM_BODIES = examples(100)
NUM_CLIENTS = 8
MAX_ANSWER_BYTES = 4096
CONTROL = {
    "prompt": "Hello",
    "max_tokens": 16,
    "temperature": 1,
    "seed": 3,
    "allowed_token_ids": LETTERS,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that keeps things, so that every route has something to refuse."""
    folder = tmp_path_factory.mktemp("state")
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        f"--state-dir={folder}",
        "--request-timeout-s=2",
        "--strict",
        *PACE_FLAGS,
    )
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.lines), server.lines


class Control:
    """A request that is sent again and again beside others, and must always be answered alike."""

    def __init__(self, client):
        self._client = client
        self.answers = []

    async def run(self, others):
        """Asks while others run, and once more when they have ended."""
        work = asyncio.ensure_future(others)
        while not work.done():
            await self.ask()
            await asyncio.sleep(0.05)
        await self.ask()
        return work.result()

    async def ask(self):
        answer = await self._client.post("/v1/completions", json=CONTROL)
        assert answer.status_code == 200, answer.text
        self.answers.append(answer.json()["choices"][0]["token_ids"])


def test_malformed_bodies_are_refused_and_disturb_no_other(server):
    """Every answer is a short 4xx in JSON, and tokens of a request beside them do not change."""
    with server.http() as http:
        mutations = BodyMutations(http.get("/openapi.json").json(), seed=10)
    bodies = [mutations.draw() for _ in range(NUM_BODIES)]
    assert NUM_BODIES < 1000 or {one.path for one in bodies} == {*mutations.paths}
    wrong = []

    async def send(client, queue):
        while queue:
            bad = queue.pop()
            headers = {"Content-Type": bad.content_type.encode("latin-1")}
            answer = await client.post(bad.path, content=bad.body, headers=headers)
            is_json = answer.headers.get("content-type") == "application/json"
            is_short = len(answer.content) <= MAX_ANSWER_BYTES
            if not (400 <= answer.status_code < 500 and is_json and is_short):
                said = f"{answer.status_code}, {len(answer.content)} bytes: {answer.text[:120]}"
                wrong.append(f"{bad.path} {bad.kind} {bad.body[-200:]!r} -> {said}")

    async def run():
        async with server.async_http() as client:
            control = Control(client)
            queue = bodies[::-1]
            await control.run(asyncio.gather(*(send(client, queue) for _ in range(NUM_CLIENTS))))
            return control.answers

    answers = asyncio.run(run())
    assert not wrong, "\n".join(wrong[:20])
    assert len(answers) > 2 and all(one == answers[0] for one in answers)
    assert server.metric("num_requests_running") == 0 == server.metric("kv_cache_usage_perc")


NUM_MESSAGES = {"sample": 60, "all": 600, "soak": 1000}


def test_malformed_messages_are_refused_and_disturb_no_other(server):
    """Each connection ends with a 4xx or without an answer, and no other notices."""
    mutations = HttpMutations(seed=11)
    messages = [mutations.draw() for _ in range(NUM_MESSAGES[tier()])]
    messages += [kind() for kind in mutations.kinds]
    host, port = server.url.removeprefix("http://").split(":")
    wrong = []

    async def send(queue):
        while queue:
            message = queue.pop()
            ending = await send_raw(host, int(port), message)
            if not ending.is_right(message):
                wrong.append(f"{message.kind} {message.parts[-1][-200:]!r} -> {ending}")

    async def run():
        async with server.async_http() as client:
            control = Control(client)
            queue = messages[::-1]
            await control.run(asyncio.gather(*(send(queue) for _ in range(32))))
            return control.answers

    answers = asyncio.run(run())
    assert not wrong, "\n".join(wrong[:20])
    assert len(answers) > 2 and all(one == answers[0] for one in answers)
    assert until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("kv_cache_usage_perc") == 0


def test_requests_in_one_packet_are_answered_in_their_order(server):
    """Forty requests that are sent at once get forty answers, each the one that it asks for."""
    paths = ("/version", "/nothing", "/health/live", "/v1/models/none") * 10
    requests = [f"GET {path} HTTP/1.1\r\nHost: x\r\n" for path in paths]
    sent = "\r\n".join([*requests, ""])[:-2] + "Connection: close\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    ending = asyncio.run(send_raw(host, int(port), BadMessage("right", [sent.encode()])))
    assert ending.statuses == [200, 404, 200, 404] * 10 and ending.has_closed


def test_a_stream_ends_with_its_connection_though_another_request_waits_there(server):
    """A second request on the connection does not hide from the first that its client left."""
    body = json.dumps(LASTING | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    before = server.metric("generation_tokens_total")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(100)
    assert until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("generation_tokens_total") - before < LASTING["max_tokens"]
