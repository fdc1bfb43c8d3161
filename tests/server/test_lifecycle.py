"""A server's start, keys, health, idleness and end."""

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.free_ports import free_port
from tests.support.live_server import (
    LASTING,
    LONG,
    PACE_FLAGS,
    LiveServer,
    children_of,
    events_of,
    runs,
    until,
)
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import tiny_model_with_text

GOOD = {"prompt": "Hello", "max_tokens": 2}


def cpu_s(pid):
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_routes_that_only_tell(server, http, client):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json().keys() == {"version"}
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.object == "model" and card.max_model_len == 512
    assert client.models.retrieve("tiny").id == "tiny"


def test_it_says_what_it_does_and_a_line_to_try(server):
    assert server.lines[0].startswith("loading ") and server.lines[1].startswith(
        "KV cache 64.0 MiB: "
    )
    assert server.lines[3].startswith(f"try: curl {server.url}/v1/chat/completions ")


def family_of(pid):
    """Returns a process and all of its descendants."""
    children = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    return [pid, *(member for child in children for member in family_of(child))]


@pytest.mark.parametrize("seconds", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_an_idle_server_uses_no_processor(server, http, seconds):
    """Front and core are idle after work, even with a connection open."""
    http.post("/v1/completions", json=GOOD)
    time.sleep(0.3)
    pids = family_of(server.process.pid)
    assert len(pids) == 2
    before = sum(map(cpu_s, pids))
    time.sleep(seconds)
    assert sum(map(cpu_s, pids)) - before <= 0.01 * seconds


def test_each_request_is_logged_if_wanted_and_none_else(start, capfd):
    for flags in ([], ["--access-log"]):
        server = start(*flags)
        with server.http() as http:
            assert http.get("/health").status_code == 200
            assert http.post("/v1/completions", json={}).status_code == 400
        assert server.stop() == 0
        logged = capfd.readouterr().out.splitlines()
        expected = [
            r'127\.0\.0\.1:\d+ - "GET /health HTTP/1.1" 200 OK [\d.]+ ms \w{32}',
            r'127\.0\.0\.1:\d+ - "POST /v1/completions HTTP/1.1" 400 Bad Request [\d.]+ ms \w{32}',
        ]
        assert len(logged) == (len(expected) if flags else 0)
        assert all(re.fullmatch(*pair) for pair in zip(expected, logged, strict=False)), logged


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with a key, and whose chat template always fails."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{{ raise_exception('roles must take turns') }}")
    flags = ["--served-model-name=tiny", f"--chat-template={template}"]
    server = LiveServer(str(tiny_model_with_text()), *flags, key="secret")
    yield server
    assert server.stop() == 0


def test_keys_guard_everything_but_health(guarded):
    with httpx.Client(base_url=guarded.url) as stranger:
        for method, path in [
            ("GET", "/metrics"),
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/generate"),
            ("GET", "/none"),
        ]:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic secret"},
            ):
                response = stranger.request(method, path, headers=headers)
                assert (
                    response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
                )
                assert response.json()["error"]["type"] == "AuthenticationError"
        assert stranger.get("/health").status_code == 200
    assert (
        guarded.openai()
        .completions.create(model="tiny", prompt="Hello", max_tokens=2)
        .usage.prompt_tokens
        == 5
    )
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong").models.list()
    assert "secret" not in "\n".join(guarded.lines)


def test_unknown_fields_are_named_and_logged_once(guarded):
    with guarded.http() as http:
        response = http.post("/v1/completions", json=GOOD | {"unheard": 1})
        assert response.status_code == 200 and response.headers["x-octavo-ignored"] == "unheard"
        assert "x-octavo-ignored" not in http.post("/v1/completions", json=GOOD).headers
        http.post("/v1/completions", json=GOOD | {"unheard": 2})
    said = [line for line in guarded.lines if "unheard" in line]
    assert said == ["WARNING: /v1/completions: the request field unheard is ignored"]


def test_a_template_that_fails(guarded):
    with guarded.http() as http:
        response = http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]}
        )
        assert response.status_code == 400
        assert (
            response.json()["error"]["message"]
            == "messages: the chat template failed: roles must take turns (hint: check the order"
            " and roles of the messages; --chat-template sets another template)"
        )
        assert http.post("/v1/completions", json=GOOD).status_code == 200


def test_a_full_queue_asks_for_patience(start):
    crawls = "--logits-processors=crawls=tests.support.processors:crawls"
    server = start(
        "--max-num-queued-reqs=64", "--max-num-seqs=1", *([crawls] if PACE_FLAGS else [])
    )
    # The first runs for more than a minute, so that the queue stays full however slow the machine.
    running = LASTING | ({"logits_processors": ["crawls"]} if PACE_FLAGS else {})
    running |= {"stream": True}
    waiting = LONG | {"n": 64, "stream": True}
    with server.http() as first, server.http() as second, server.http() as third:
        with first.stream("POST", "/v1/completions", json=running) as stream:
            lines = stream.iter_lines()  # dropping it would close the connection
            next(lines)
            with second.stream("POST", "/v1/completions", json=waiting):
                assert until(lambda: server.metric("num_requests_waiting") == 64)
                refused = third.post("/v1/completions", json=GOOD)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 10
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert "64 requests are waiting, expected at most 64" in refused.json()["error"]["message"]
        assert until(lambda: third.post("/v1/completions", json=GOOD).status_code == 200)


@pytest.mark.slow
def test_ranks_end_with_their_server(start):
    server = start("--backend=torch", "--device=cpu", "--tensor-parallel-size=2")
    (rank,) = children_of(server.core_pid)
    with server.http() as http:
        assert http.post("/v1/completions", json=GOOD).status_code == 200
    assert server.stop() == 0
    assert until(lambda: not runs(rank))


def test_an_interrupt_ends_it(start):
    check_ends(start(), signal.SIGINT)


def check_ends(server, sign):
    """Checks that a signal ends the server, and its engine with it."""
    core = server.core_pid
    assert server.stop(sign) == 0
    assert until(lambda: not Path(f"/proc/{core}").exists())


def test_a_signal_while_the_model_loads_ends_it(start):
    server = start(wait=False)
    assert until(lambda: len(server.children) == 1)
    core = server.core_pid
    assert server.stop() == 0
    assert until(lambda: not Path(f"/proc/{core}").exists())
    assert not any("Traceback" in line for line in server.lines)


def test_streams_that_outlast_the_grace_get_an_error_as_their_end(start):
    server = start("--shutdown-timeout-s=0", *PACE_FLAGS)
    with (
        server.http() as http,
        http.stream("POST", "/v1/completions", json=LASTING | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        last = events_of(lines)[-1]
    assert last["error"]["message"] == "the engine was closed"
    assert server.process.wait(60) == 0


def test_streams_may_end_in_the_grace(start):
    server = start("--shutdown-timeout-s=20")
    with (
        server.http() as http,
        http.stream("POST", "/v1/completions", json=LONG | {"n": 4, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        last = events_of(lines)[-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0


def test_half_a_request_does_not_keep_it_from_ending(start):
    """Its client would have a minute to send the rest."""
    server = start("--shutdown-timeout-s=0")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection, server.http() as http:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
        connection.sendall(head + b"{")
        assert http.get("/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


def test_a_port_that_is_taken(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(f"--port={port}", wait=False)
        assert server.process.wait(60) == 2
    assert until(lambda: len(server.lines) == 2)
    assert server.lines[0] == f"octavo: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert server.lines[1].startswith("hint: ")


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("family", "unheard_of"),
        ("truncated", "model.safetensors"),
        ("memory", "kv_cache_memory_bytes: got 10.0 KiB"),
    ],
)
def test_what_keeps_it_from_starting_is_said_in_a_line(start, tmp_path, fault, message):
    model = shutil.copytree(tiny_model_with_text(), tmp_path / "model")
    if fault == "family":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    if fault == "truncated":
        os.truncate(model / "model.safetensors", 100_000)
    server = start(
        *(["--kv-cache-memory-bytes=10KiB"] if fault == "memory" else []), model=model, wait=False
    )
    assert server.process.wait(60) == 2
    assert until(lambda: any(message in line for line in server.lines)), server.lines
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--prefix-cache-dir=/proc/nowhere",
            "prefix_cache_dir: cannot write to /proc/nowhere",
        ),
        ("--prefix-cache-size=1", "prefix_cache_size: got 1, expected at least one block"),
        ("--kv-offloading-size=1B", "kv_offloading_size: got 1 B, expected at least one block"),
        (
            "--max-num-seqs=2000000000",
            "max_num_seqs: got 2,000,000,000, but the token ids of that many requests",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(start, tmp_path, flag, message):
    """Options that cannot be are refused before the weights are read."""
    server = start(f"--prefix-cache-dir={tmp_path}", flag, wait=False)
    assert server.process.wait(60) == 2
    assert until(lambda: any(line.startswith(f"octavo: {message}") for line in server.lines)), (
        server.lines
    )
    assert not any(line.startswith("loading ") for line in server.lines)
    assert not any("Traceback" in line for line in server.lines)


def test_a_model_without_a_tokenizer_serves_token_ids(start):
    server = start("--skip-tokenizer-init", model=tiny_model("llama").path)
    assert '"prompt": [1, 2, 3]' in server.lines[3]
    with server.http() as http:
        body = {
            "prompt": [5, 6],
            "max_tokens": 3,
            "return_token_ids": True,
            "logprobs": 1,
            "ignore_eos": True,
        }
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert len(choice["token_ids"]) == 3 and choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        for path, refused in [
            ("/v1/completions", GOOD),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ]:
            response = http.post(path, json=refused)
            assert response.status_code == 400 and "requires" in response.json()["error"]["message"]


def test_while_the_model_loads_the_answer_is_503(start):
    """A request while the model loads is answered with 503, unless the tiny model has loaded
    already; the server that has started ends with SIGTERM.
    """
    seen = set()
    port = free_port()
    server = start(f"--port={port}", wait=False)

    def ask():
        while not server.url and server.process.poll() is None:
            try:
                seen.add(httpx.get(f"http://127.0.0.1:{port}/health").status_code)
            except httpx.ConnectError:
                time.sleep(0.005)

    asking = threading.Thread(target=ask)
    asking.start()
    server.wait()
    asking.join()
    assert seen <= {503, 200} and 503 in seen
    check_ends(server, signal.SIGTERM)
