"""What counts against a key's limits: streams while they are open, and the tokens of requests that
are aborted, of forks and of batches' lines.
"""

import json
import os
import signal
import time
from contextlib import contextmanager

import pytest

from octavo.api.errors import Overloaded
from octavo.server.http.key_file import KeyLimits
from octavo.server.state.account import Account
from octavo.server.state.request_record import RequestRecord
from tests.server.test_batches import ENDED
from tests.support.live_server import LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text

TOKENS_A_MINUTE = 600
"""Ten come back each second, which is little beside what the tests use."""
SLACK = 100
KEYS = ("one", "cut", "fork", "batch")
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
STREAMS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 9},
    "/v1/chat/completions": CHAT | {"max_tokens": 9},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 9},
    "/v1/messages": CHAT | {"max_tokens": 9, "model": "tiny"},
    "/v2/chat": CHAT | {"max_tokens": 9, "model": "tiny"},
    "/api/chat": CHAT | {"model": "tiny", "options": {"num_predict": 9}},
    "/api/generate": {"prompt": "Hi", "model": "tiny", "options": {"num_predict": 9}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a key for each test; the first may run one request at a time."""
    folder = tmp_path_factory.mktemp("charges")
    limits = {"one": {"max_running": 1}}
    keys = [
        {"name": name, "key": name, **limits.get(name, {"tokens_per_minute": TOKENS_A_MINUTE})}
        for name in KEYS
    ]
    (folder / "keys.json").write_text(json.dumps({"keys": keys}))
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        f"--api-key-file={folder / 'keys.json'}",
        f"--state-dir={folder / 'state'}",
    )
    yield server
    assert server.stop() == 0


@contextmanager
def client_of(server, key):
    with server.http() as http:
        http.headers["Authorization"] = f"Bearer {key}"
        yield http


def left(http):
    """Returns how many tokens the key may use now."""
    return int(http.get("/v1/models").headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("path", STREAMS)
def test_an_open_stream_counts_from_its_first_byte_to_its_last(server, path):
    """The engine is stopped after the stream has begun, so that it cannot have ended before the
    second request comes; once the client has all of it, the next request is taken.
    """
    body = STREAMS[path] | {"stream": True}
    with client_of(server, "one") as http:
        os.kill(server.core_pid, signal.SIGSTOP)
        try:
            with http.stream("POST", path, json=body) as stream:
                seconds = [http.post(path, json=body).status_code for _ in range(3)]
                os.kill(server.core_pid, signal.SIGCONT)
                text = stream.read().decode()
        finally:
            os.kill(server.core_pid, signal.SIGCONT)
        assert stream.status_code == 200 and text
        assert seconds == [429] * 3
        assert http.post(path, json=body | {"stream": False}).status_code == 200


def test_a_stream_that_is_cut_counts_no_longer_and_pays_for_its_tokens(server):
    long = {"prompt": "Hi", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with client_of(server, "one") as http:
        with http.stream("POST", "/v1/completions", json=long) as stream:
            next(stream.iter_lines())
        short = long | {"stream": False, "max_tokens": 1}
        assert until(lambda: http.post("/v1/completions", json=short).status_code == 200, 5)
    with client_of(server, "cut") as http:
        before = left(http)
        with http.stream("POST", "/v1/completions", json=long) as stream:
            for number, _ in enumerate(stream.iter_lines()):
                if number > 500:  # every second line is empty, and an event has a token or more
                    break
        assert until(lambda: left(http) < before - 250 + SLACK, 5)


def test_a_fork_pays_for_its_prompt(server):
    asked = {"prompt": [5] * 200, "max_tokens": 1, "ignore_eos": True}
    with client_of(server, "fork") as http:
        answer = http.post("/v1/completions", json=asked).json()
        before = left(http)
        fork = http.post(f"/v1/requests/{answer['id']}/fork", json={"max_tokens": 1})
        assert fork.status_code == 200, fork.text
        assert left(http) < before - 200 + SLACK


def test_the_lines_of_a_batch_pay_for_their_tokens(server):
    lines = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [5] * 30, "max_tokens": 20, "ignore_eos": True},
        }
        for number in range(8)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with client_of(server, "batch") as http:
        before = left(http)
        form = {"purpose": (None, "batch"), "file": ("in.jsonl", content)}
        file_id = http.post("/v1/files", files=form).json()["id"]
        asked = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch_id = http.post("/v1/batches", json=asked).json()["id"]
        began = time.monotonic()
        assert until(lambda: http.get(f"/v1/batches/{batch_id}").json()["status"] in ENDED, 30)
        refilled = (time.monotonic() - began) * TOKENS_A_MINUTE / 60
        assert left(http) < before - 8 * 50 + refilled + SLACK


def test_work_of_the_server_itself_needs_tokens_and_no_place():
    """A key's batches wait for its tokens, and take none of its places for running requests."""
    account = Account("a", KeyLimits(tokens_per_minute=10, max_running=1), lambda: 0.0)
    background = RequestRecord(account=account, is_background=True)
    for _ in range(3):
        background.start()
    assert account.num_running == 0
    RequestRecord(account=account).start()
    background.charge_prompt(4)
    background.charge(6)
    with pytest.raises(Overloaded):
        background.start()
    background.stop()
    assert account.num_running == 1
