"""--model-alias: other names of models, in every API."""

import json

import pytest

from octavo.api.errors import ConfigError
from octavo.server.settings import ServerSettings
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.model_spec import ModelSpec
from octavo.server.state.slot import EngineSlot
from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def aliased():
    aliases = ("claude-*=tiny", "gpt-4o=tiny", "gpt-4o*=tiny")
    flags = [f"--model-alias={alias}" for alias in aliases]
    server = LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny", *flags)
    yield server
    assert server.stop() == 0


@pytest.fixture
def http(aliased):
    with aliased.http() as client:
        yield client


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": 4}, "stream": False}),
        ("/api/show", {}),
        ("/v2/chat", {"messages": HELLO, "max_tokens": 4}),
        ("/tokenize", {"prompt": "Hello"}),
    ],
)
def test_an_alias_is_the_model_in_every_api(http, path, fields):
    for name in ("tiny", "claude-sonnet-4-5", "gpt-4o", "gpt-4o-mini"):
        answer = http.post(path, json={"model": name, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.json().get("model", name) == name, "an answer repeats the request's name"
    unknown = http.post(path, json={"model": "mistral", **fields})
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("path", "fields", "find"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, lambda event: event["model"]),
        ("/v1/completions", {"prompt": "Hello"}, lambda event: event["model"]),
        (
            "/v1/messages",
            {"messages": HELLO, "max_tokens": 2},
            lambda event: event["message"]["model"] if "message" in event else "gpt-4o",
        ),
        (
            "/v1/responses",
            {"input": "Hello"},
            lambda event: event["response"]["model"] if "response" in event else "gpt-4o",
        ),
    ],
)
def test_streams_repeat_the_name_too(http, path, fields, find):
    text = http.post(path, json={"model": "gpt-4o", "stream": True, **fields}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert {find(event) for event in events} == {"gpt-4o"}
    nothing = {"model": None, **fields, "stream": False}
    if path != "/v1/messages":
        assert http.post(path, json=nothing).json()["model"] == "tiny"


def test_plain_aliases_are_listed(http):
    cards = http.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [("tiny", "tiny"), ("gpt-4o", "tiny")]
    assert http.get("/v1/models/claude-opus-4").json()["id"] == "claude-opus-4"
    anthropic = http.get("/v1/models/claude-opus-4", headers={"anthropic-version": "2023-06-01"})
    assert anthropic.json()["type"] == "model" and anthropic.json()["id"] == "claude-opus-4"
    assert http.get("/v1/models/mistral").status_code == 404


@pytest.mark.parametrize("given", ["x", "=tiny", "x=", ""])
def test_what_is_no_alias_is_refused(given):
    with pytest.raises(ConfigError, match=r"model_alias: got .*, expected ALIAS=NAME"):
        ServerSettings(model_alias=(given,))


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ("gpt=other", "gpt refers to other, which is not served"),
        ("one=one", "a model or adapter is also named one"),
        ("fr=one", "a model or adapter is also named fr"),
    ],
)
def test_an_alias_is_checked_against_what_is_served(alias, message):
    aliases = ServerSettings(model_alias=(alias,)).model_aliases()
    models = ModelDirectory(
        [EngineSlot(ModelSpec.of({"model": "x", "served_model_name": "one"}))], aliases
    )
    with pytest.raises(ConfigError, match=message):
        models.check_aliases(["fr"])


def test_an_alias_may_name_an_adapter():
    models = ModelDirectory(
        [EngineSlot(ModelSpec.of({"model": "x", "served_model_name": "one"}))], {"chat": "fr"}
    )
    models.check_aliases(["fr"])
    assert models.resolve("chat") == "fr" and models.resolve("other") == "other"
