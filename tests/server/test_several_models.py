"""Several models behind one port: names, cards, health, metrics, loading and unloading."""

import asyncio
import json
import os
import re
import shutil
import signal

import httpx
import pytest

from octavo.api.errors import ConfigError, InvalidRequest
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.model_spec import ModelSpec
from octavo.server.state.slot import EngineSlot
from tests.support.live_server import LASTING, PACE_FLAGS, LiveServer, events_of, runs, until
from tests.support.tiny_tokenizer import tiny_model_with_text

pytestmark = pytest.mark.sampled(one_in=2)

LLAMA, GEMMA = str(tiny_model_with_text()), str(tiny_model_with_text("gemma3_text"))
GREEDY = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def pair():
    """A server of two models, which every test leaves as it found it."""
    server = LiveServer(f"one={LLAMA}", f"two={GEMMA}", *PACE_FLAGS)
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.lines)


@pytest.fixture
def http(pair):
    with pair.http() as client:
        yield client


def tokens_of(http, **fields):
    answer = http.post("/v1/completions", json=GREEDY | IDS | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def card(http, name):
    return http.get(f"/v1/models/{name}").json()


def load(http, model, **fields):
    return http.post("/v1/models/load", json={"model": model, **fields})


def unload(http, name, **fields):
    """Unloads a model and waits until it is gone."""
    answer = http.post("/v1/models/unload", json={"model": name, **fields})
    assert answer.status_code == 202 and answer.json()["state"] in ("draining", "failed")
    assert until(lambda: http.get(f"/v1/models/{name}").status_code == 404)


def is_ready(http, name):
    return lambda: card(http, name)["state"] == "ready"


def test_each_name_has_an_engine_of_its_own(pair, http):
    assert len(pair.children) == 2
    one, two = tokens_of(http, model="one"), tokens_of(http, model="two")
    assert one != two
    assert (tokens_of(http, model=LLAMA), tokens_of(http, model=GEMMA)) == (one, two)


def test_a_request_has_to_name_one_of_several_models(http):
    unnamed = http.post("/v1/completions", json=GREEDY)
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "model"
    assert "this server has several models: `one`, `two`" in unnamed.json()["error"]["message"]
    unknown = http.post("/v1/chat/completions", json={"model": "three", "messages": []})
    assert unknown.status_code == 404
    assert "this server has `one`, `two`" in unknown.json()["error"]["message"]
    assert http.get("/v1/cache").status_code == 400
    assert http.get("/v1/cache", params={"model": "two"}).status_code == 200
    assert http.post("/v1/cache/reset", json={"model": "two"}).json() == {"reset": True}


def test_cards_say_what_a_model_is_and_can_do(http):
    cards = http.get("/v1/models").json()["data"]
    assert [each["id"] for each in cards] == ["one", "two"]
    for each in cards:
        assert each["max_model_len"] == 512 and each["state"] == "ready"
        assert each["capabilities"] == ["completions", "chat"] and each["reason"] is None
        assert card(http, each["id"]) == each


def test_the_greeting_names_all_models(pair):
    assert f"serving one, two on {pair.url}" in pair.lines
    assert any(line.startswith("memory ") and "; two: weights " in line for line in pair.lines)


def test_health_of_all_and_of_each(http):
    for path in ("/health", "/health/ready", "/health/live", "/ping", "/health?model=two"):
        assert http.get(path).json() == {"status": "ok"}
    assert http.get("/health", params={"model": "three"}).status_code == 404
    assert http.get("/load").json() == {"server_load": 0, "models": {"one": 0, "two": 0}}


def test_metrics_are_counted_by_model(http):
    def generated():
        text = http.get("/metrics").text
        found = re.findall(
            r'^octavo:generation_tokens_total\{.*model_name="(\w+)"\} (\S+)$', text, re.MULTILINE
        )
        return {name: float(value) for name, value in found}

    before = generated()
    tokens_of(http, model="two")
    after = generated()
    assert after["two"] - before["two"] == 8 and after["one"] == before["one"]
    text = http.get("/metrics").text
    assert 'octavo:model_ready{engine="0",model_name="one"} 1.0' in text
    assert 'request_success_total{engine="0",finished_reason="length",model_name="two"}' in text


def test_a_model_is_loaded_used_and_unloaded(pair, http):
    """Unloading ends the engine's process; running requests may end before."""
    expected = tokens_of(http, model="one")
    answer = load(http, LLAMA, name="three", options={"max_model_len": 128, "threads": 1})
    assert answer.status_code == 202 and answer.json()["state"] == "loading"
    early = http.post("/v1/completions", json=GREEDY | {"model": "three"})
    assert (
        early.status_code == 503 and "`three` is not ready yet" in early.json()["error"]["message"]
    )
    assert load(http, LLAMA, name="three").status_code == 409
    assert until(is_ready(http, "three"))
    assert card(http, "three")["max_model_len"] == 128
    assert tokens_of(http, model="three") == expected
    assert load(http, LLAMA, name="three").status_code == 409
    (pid,) = set(pair.children) - set(sorted(pair.children)[:2])
    body = LASTING | {"max_tokens": 100, "model": "three", "stream": True}
    with pair.http() as other, other.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert http.post("/v1/models/unload", json={"model": "three"}).status_code == 202
        refused = http.post("/v1/completions", json=GREEDY | {"model": "three"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith("the model `three` is being unloaded")
        again = http.post("/v1/models/unload", json={"model": "three"})
        assert again.status_code == 409
        assert events_of(lines)[-1]["choices"][0]["finish_reason"] == "length"
    assert until(lambda: http.get("/v1/models/three").status_code == 404)
    assert until(lambda: not runs(pid))
    assert tokens_of(http, model="one") == expected


def test_a_stream_that_outlasts_the_drain_ends_with_an_error(pair, http):
    assert load(http, LLAMA, name="three").status_code == 202
    assert until(is_ready(http, "three"))
    body = LASTING | {"model": "three", "stream": True}
    with pair.http() as other, other.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        unload(http, "three", timeout_s=0)
        assert events_of(lines)[-1]["error"]["message"] == "the engine was closed"


def test_two_loads_at_once_both_end_well(pair, http):
    for name in ("three", "four"):
        assert load(http, GEMMA, name=name).status_code == 202
    assert until(lambda: all(is_ready(http, name)() for name in ("three", "four")))
    assert tokens_of(http, model="three") == tokens_of(http, model="four")
    for name in ("three", "four"):
        unload(http, name)
    assert until(lambda: len([pid for pid in pair.children if runs(pid)]) == 2)


def test_an_unloaded_model_leaves_no_file_open(pair, http):
    """The server has as many open files after three loads and unloads as after one."""
    files = f"/proc/{pair.process.pid}/fd"

    def come_and_go():
        assert load(http, LLAMA, name="three").status_code == 202
        assert until(is_ready(http, "three"))
        unload(http, "three")

    come_and_go()
    first = len(os.listdir(files))
    come_and_go()
    come_and_go()
    assert until(lambda: len(os.listdir(files)) <= first)


def test_a_model_is_unloaded_while_it_loads(pair, http):
    """The process that loads ends, and the name is free again."""
    assert load(http, LLAMA, name="three").status_code == 202
    assert until(lambda: len(pair.children) == 3)
    assert card(http, "three")["state"] == "loading"
    unload(http, "three")
    assert until(lambda: len([pid for pid in pair.children if runs(pid)]) == 2, seconds=5)
    assert load(http, LLAMA, name="three").status_code == 202
    unload(http, "three")


def test_a_failed_load_leaves_the_other_model_to_those_who_name_none():
    slots = [EngineSlot(ModelSpec.of({"model": name})) for name in ("a", "b")]
    slots[0].fail(ConfigError("no such file"))
    models = ModelDirectory(slots)
    assert models.find() is slots[1]
    slots[1].fail(ConfigError("no such file"))
    with pytest.raises(InvalidRequest, match="this server has several models: `a`, `b`"):
        models.find()


def test_a_load_that_fails_says_why_and_may_be_tried_again(pair, http, tmp_path):
    broken = shutil.copytree(LLAMA, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    options = {"max_model_len": 64}
    assert load(http, str(broken), name="three", options=options).status_code == 202
    assert until(lambda: card(http, "three")["state"] == "failed")
    assert "unheard_of" in card(http, "three")["reason"]
    refused = http.post("/v1/completions", json=GREEDY | {"model": "three"})
    assert refused.status_code == 503 and "failed to load" in refused.json()["error"]["message"]
    assert http.get("/health").status_code == 200
    assert http.get("/health/ready").status_code == 503
    assert http.get("/health", params={"model": "three"}).status_code == 503
    assert tokens_of(http, model="one")
    (broken / "config.json").write_text(json.dumps(config))
    assert load(http, "three").status_code == 202, "a failed model is loaded again by its name"
    assert until(is_ready(http, "three"))
    assert card(http, "three")["max_model_len"] == 64
    unload(http, "three")
    assert any(line.startswith("three failed to load: ") for line in pair.lines)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "model: field required"),
        ({"model": ""}, 400, "model: got ''"),
        ({"model": "x", "name": "a b"}, 400, "name: got 'a b', expected 1 to 200"),
        ({"model": "x", "options": {"threadz": 1}}, 400, "did you mean threads?"),
        ({"model": "x", "options": {"threads": "many"}}, 400, "options.threads: got 'many'"),
        ({"model": "x", "options": {"threads": 0}}, 400, "expected an integer of at least 1"),
        (
            {"model": "x", "options": {"record": "/tmp/x"}},
            400,
            "can only be set on the server's command line",
        ),
        ({"model": "x", "options": {"model": "y"}}, 400, "options.model: unknown option"),
        ({"model": "x", "option": {}}, 400, "option: no such field"),
        ({"model": "x", "name": "one"}, 409, "the model `one` exists and is ready"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_once(http, body, status, message):
    answer = http.post("/v1/models/load", json=body)
    assert answer.status_code == status and message in answer.json()["error"]["message"]


def test_what_cannot_be_unloaded_is_refused(http):
    assert http.post("/v1/models/unload", json={"model": "five"}).status_code == 404
    for timeout_s in (-1, 3601, "soon"):
        body = {"model": "one", "timeout_s": timeout_s}
        answer = http.post("/v1/models/unload", json=body)
        assert answer.status_code == 400 and "0 to 3600" in answer.json()["error"]["message"]


def test_the_death_of_one_engine_leaves_the_other_alone(pair, http):
    """A stream of the other model is not disturbed; the dead engine is replaced."""
    expected = tokens_of(http, model="one", max_tokens=400)
    expected_two = tokens_of(http, model="two", max_tokens=400)
    first, second = sorted(pair.children)
    body = GREEDY | IDS | {"max_tokens": 400, "stream": True}
    with (
        pair.http() as other,
        pair.http() as third,
        other.stream("POST", "/v1/completions", json=body | {"model": "one"}) as one,
        third.stream("POST", "/v1/completions", json=body | {"model": "two"}) as two,
    ):
        lines, lines_two = one.iter_lines(), two.iter_lines()
        begun = [next(lines)], [next(lines_two)]
        os.kill(second, signal.SIGKILL)
        assert until(lambda: http.get("/health?model=two").status_code == 503)
        assert http.get("/health").status_code == 200
        assert http.get("/health?model=one").status_code == 200
        events, events_two = events_of([*begun[0], *lines]), events_of([*begun[1], *lines_two])
    for got, wanted in ((events, expected), (events_two, expected_two)):
        assert [id_ for event in got for id_ in event["choices"][0]["token_ids"]] == wanted
    assert until(lambda: http.get("/health/ready").status_code == 200)
    assert first in pair.children
    text = http.get("/metrics").text
    assert 'num_engine_restarts_total{engine="0",model_name="one"} 0.0' in text
    assert 'num_engine_restarts_total{engine="0",model_name="two"} 1.0' in text


def test_the_last_model_may_be_unloaded():
    """A server without models is well, says that it has none, and may load one."""
    server = LiveServer(f"one={LLAMA}", "--max-models=1")
    with server.http() as http:
        expected = tokens_of(http)
        full = load(http, LLAMA, name="two")
        assert full.status_code == 429 and "expected at most 1" in full.json()["error"]["message"]
        unload(http, "one")
        assert http.get("/v1/models").json()["data"] == []
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200
        refused = http.post("/v1/completions", json=GREEDY)
        assert refused.status_code == 404
        assert "no model is loaded" in refused.json()["error"]["message"]
        assert not [pid for pid in server.children if runs(pid)]
        assert load(http, LLAMA).status_code == 202
        assert until(is_ready(http, "with-text"))
        assert tokens_of(http) == expected
    assert server.stop() == 0


def test_one_that_fails_at_the_start_does_not_end_the_others(tmp_path):
    server = LiveServer(f"one={tmp_path}/nothing", f"two={LLAMA}")
    assert any(line.startswith("one failed to load: ") for line in server.lines)
    assert f"serving two on {server.url}" in server.lines
    with server.http() as http:
        assert card(http, "one")["state"] == "failed"
        assert tokens_of(http, model="two")
        assert http.get("/health").status_code == 200
    assert server.stop() == 0


def test_a_start_at_which_all_fail_ends_the_server(tmp_path):
    server = LiveServer(f"one={tmp_path}/a", f"two={tmp_path}/b", wait=False)
    assert server.process.wait(30) == 2
    assert until(lambda: any(line.startswith("octavo: ") for line in server.lines), seconds=2)
    for name in ("one", "two"):
        assert any(line.startswith(f"{name} failed to load: ") for line in server.lines)


def test_models_that_do_not_fit_together_are_refused_in_a_sentence():
    server = LiveServer(f"one={LLAMA}", f"two={GEMMA}", "--memory-budget=300MiB", wait=False)
    assert server.process.wait(30) == 2
    wanted = "octavo: one, two do not fit in memory together: requires one "
    assert until(lambda: any(line.startswith(wanted) for line in server.lines), seconds=2)
    assert not any(line.startswith("loading ") for line in server.lines)


def test_loading_is_for_the_operator():
    """Strangers get 401, other keys 403; without an operator's key, several keys have none."""
    path, body = "/v1/models/unload", {"model": "none"}

    def status(key, **settings):
        app = create_app(EngineSlot(), ServerSettings(**settings))
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}

        async def ask():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                answer = await client.post(path, json=body, headers=headers)
                assert (await client.get("/health/live")).status_code == 200
                return answer.status_code

        return asyncio.run(ask())

    keys = {"api_key": ("guest",), "operator_key": "boss"}
    assert [status(key, **keys) for key in (None, "guest", "boss")] == [401, 403, 404]
    assert [status(key, api_key=("a", "b")) for key in ("a", "b")] == [403, 403]
    assert status("only", api_key=("only",)) == 404
    assert status(None) == 404
    assert status(None, host="0.0.0.0") == 403, "a server open to all has no operator"
