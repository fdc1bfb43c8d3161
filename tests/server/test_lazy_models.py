"""A server of --lazy-load and --idle-unload: loads at requests of every kind, unloads, stops."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.live_hub import HubRepository, live_hub
from tests.support.live_server import LASTING, PACE_FLAGS, LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text

SOURCE = tiny_model_with_text()
ASK = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def lazy(tmp_path_factory):
    """A server of a model that is unloaded after half a second, and of one that is pinned."""
    flags = ("--lazy-load", "--idle-unload=500ms", "--pin=kept", *PACE_FLAGS)
    state = f"--state-dir={tmp_path_factory.mktemp('state')}"
    server = LiveServer(f"tiny={SOURCE}", f"kept={SOURCE}", *flags, state)
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.lines), server.lines


@pytest.fixture
def http(lazy):
    with lazy.http() as client:
        assert until(lambda: state(client) == "unloaded")
        yield client


def state(http, model="tiny"):
    return http.get(f"/v1/models/{model}").json()["state"]


def test_a_start_loads_nothing_and_is_healthy(lazy, http):
    assert http.get("/health").status_code == http.get("/health/ready").status_code == 200
    assert http.get("/v1/models").status_code == 200
    assert any(line.startswith("serving tiny, kept on ") for line in lazy.lines)


def test_first_requests_wait_for_one_load(lazy, http):
    num_loads = sum(line == "tiny is ready" for line in lazy.lines)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(http.post, "/v1/completions", json=ASK | {"model": "tiny"})]
        asked += [
            pool.submit(http.post, "/v1/messages", json={"model": "tiny", "max_tokens": 4} | talk())
            for _ in range(2)
        ]
        asked += [
            pool.submit(http.post, "/v1/chat/completions", json={"model": "tiny"} | talk())
            for _ in range(3)
        ]
        assert [one.result().status_code for one in asked] == [200] * 6
    assert until(lambda: sum(line == "tiny is ready" for line in lazy.lines) == num_loads + 1)


def talk():
    return {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "Hello"}),
        ("/v1/messages/count_tokens", talk()),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
        ("/generate", {"prompt": "Hello", "max_tokens": 4}),
        ("/api/chat", talk() | {"stream": False, "options": {"num_predict": 4}}),
    ],
)
def test_requests_of_every_kind_load_the_model(http, path, body):
    answer = http.post(path, json={"model": "tiny", **body})
    assert answer.status_code < 300, answer.text


def test_background_work_loads_the_model(http):
    body = {"model": "tiny", "input": "Hi", "background": True, "max_output_tokens": 4}
    made = http.post("/v1/responses", json=body).json()
    path = f"/v1/responses/{made['id']}"
    ends = ("completed", "incomplete")
    assert until(lambda: http.get(path).json()["status"] in ends), http.get(path).text
    assert until(lambda: state(http) == "unloaded")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ASK}
    line["body"] = ASK | {"model": "tiny"}
    file = ("x.jsonl", json.dumps(line).encode())
    kept = http.post("/v1/files", files={"file": file}, data={"purpose": "batch"}).json()
    batch = {"input_file_id": kept["id"], "endpoint": "/v1/completions"}
    made = http.post("/v1/batches", json=batch | {"completion_window": "24h"}).json()
    path = f"/v1/batches/{made['id']}"
    assert until(lambda: http.get(path).json()["status"] == "completed"), http.get(path).text
    assert http.get(path).json()["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


@pytest.mark.skipif(not PACE_FLAGS, reason="needs a request that lasts")
def test_a_stream_outlasts_the_idle_time(http):
    body = LASTING | {"model": "tiny", "max_tokens": 100, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        text = [line for line in stream.iter_lines() if line]
    assert text[-1] == "data: [DONE]" and '"finish_reason":"length"' in text[-2]
    assert state(http) == "ready", "its time begins at the end of the stream"
    assert until(lambda: state(http) == "unloaded")


def test_a_pinned_model_stays(http):
    assert http.post("/v1/completions", json=ASK | {"model": "kept"}).status_code == 200
    assert http.post("/v1/completions", json=ASK | {"model": "tiny"}).status_code == 200
    assert until(lambda: state(http) == "unloaded")
    assert state(http, "kept") == "ready"
    running = http.get("/api/ps").json()["models"]
    assert [(one["name"], one["expires_at"][:4]) for one in running] == [("kept:latest", "9999")]
    refused = http.post("/api/generate", json={"model": "kept", "keep_alive": 0})
    assert refused.status_code == 409 and state(http, "kept") == "ready"


def test_the_operator_loads_an_unloaded_model_by_its_name(http):
    assert http.post("/v1/models/load", json={"model": "tiny"}).status_code == 202
    assert until(lambda: state(http) == "ready")
    assert until(lambda: state(http) == "unloaded")


def test_a_load_that_fails_says_why_and_the_next_request_tries_again(start, tmp_path):
    broken = shutil.copytree(SOURCE, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:1000])
    server = start("--lazy-load", model=broken)
    with server.http() as http:
        for _ in range(2):
            failed = http.post("/v1/completions", json=ASK)
            assert failed.status_code == 500, failed.text
            assert "`tiny` failed to load: " in failed.json()["error"]["message"]
        assert state(http) == "unloaded"
        (broken / "model.safetensors").write_bytes(weights)
        assert http.post("/v1/completions", json=ASK).status_code == 200
    assert any("tiny failed to load: " in line for line in server.lines)


def test_a_model_that_does_not_fit_is_refused_for_now(start):
    server = start("--lazy-load", "--memory-budget=1MiB")
    with server.http() as http:
        refused = http.post("/v1/completions", json=ASK)
        assert refused.status_code == 503
        assert "cannot be loaded now: tiny does not fit" in refused.json()["error"]["message"]


def test_a_load_outlives_its_clients_but_not_the_server(start, tmp_path, monkeypatch):
    small = {path.name: path.read_bytes() for path in SOURCE.iterdir() if path.suffix == ".json"}
    large = {"model.safetensors": (SOURCE / "model.safetensors").read_bytes()}
    hub = HubRepository("maker/slow", small, large | {"fill.safetensors": bytes(8 << 20)})
    hub.pace_s = 0.2
    with live_hub(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        server = start("--lazy-load", model="maker/slow")
        with server.http() as http, server.http() as second:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=ASK, timeout=0.5)
            assert state(http) == "loading"
            assert second.post("/v1/completions", json=ASK).status_code == 200
            second.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
        shutil.rmtree(tmp_path / "hub")
        with server.http() as http, ThreadPoolExecutor(1) as pool:
            assert until(lambda: state(http) == "unloaded")
            asked = pool.submit(http.post, "/v1/completions", json=ASK)
            with server.http() as other:
                assert until(lambda: state(other) == "loading")
            assert server.stop() == 0
            assert asked.result().status_code == 503
            assert "the server is stopping" in asked.result().text
