"""Requests of every API that set no sampling value get the model's, and those that set some keep
the others'.
"""

from __future__ import annotations

import json

import pytest

from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

SAID = [{"role": "user", "content": "hello"}]
REQUESTS = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": "hello"},
    "/v2/chat": {"messages": SAID, "model": ""},
    "/api/chat": {"messages": SAID, "stream": False, "model": ""},
    "/api/generate": {"prompt": "hello", "stream": False, "model": ""},
}
"""Bodies without a limit of tokens."""
LIMITS = {
    "/v1/chat/completions": {"max_completion_tokens": 3},
    "/v1/responses": {"max_output_tokens": 3},
    "/v2/chat": {"max_tokens": 3},
    "/api/chat": {"options": {"num_predict": 3}},
    "/api/generate": {"options": {"num_predict": 3}},
}


@pytest.fixture(scope="module")
def server():
    values = {"temperature": 0, "max_new_tokens": 6}
    flag = f"--override-generation-config={json.dumps(values)}"
    server = LiveServer(str(tiny_model_with_text()), flag)
    yield server
    server.stop()


def num_tokens(found: dict) -> int:
    """Returns the number of answered tokens, as each API tells it."""
    usage = found.get("usage", {})
    return next(
        usage[name] if name in usage else found[name]
        for name in ("completion_tokens", "output_tokens", "tokens", "eval_count")
        if name in usage or name in found
    )


def ask(server: LiveServer, path: str, body: dict) -> dict:
    with server.http() as http:
        name = http.get("/v1/models").json()["data"][0]["id"]
        answer = http.post(path, json={**body, "model": name})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found | ({"usage": found["usage"]["tokens"]} if path == "/v2/chat" else {})


@pytest.mark.parametrize("path", REQUESTS)
def test_a_request_that_sets_nothing_has_the_defaults(server, path):
    body = REQUESTS[path]
    first, second = ask(server, path, body), ask(server, path, body)
    assert num_tokens(first) == num_tokens(second) == 6

    def text(found: dict) -> object:
        return found.get("choices") or found.get("output") or found.get("message") or found

    for key in ("text", "content", "response"):
        texts = [json.dumps(text(one)).partition(f'"{key}": ')[2][:40] for one in (first, second)]
        assert texts[0] == texts[1], "greedy"


@pytest.mark.parametrize("path", REQUESTS)
def test_a_limit_of_the_request_goes_over_the_default(server, path):
    assert num_tokens(ask(server, path, {**REQUESTS[path], **LIMITS[path]})) == 3


def test_unlimited_is_unlimited(server):
    body = REQUESTS["/api/generate"] | {"options": {"num_predict": -1}}
    assert num_tokens(ask(server, "/api/generate", body)) > 6


def test_several_samples_are_not_greedy(server):
    path = "/v1/chat/completions"
    found = ask(server, path, {**REQUESTS[path], "n": 4, "seed": 3})
    assert len({choice["message"]["content"] for choice in found["choices"]}) > 1


def test_a_beam_search_takes_none_of_them(server):
    body = {"prompt": "hello", "use_beam_search": True, "n": 2, "max_tokens": 4}
    assert len(ask(server, "/v1/completions", body)["choices"]) == 2


def test_completions_keep_their_own_limit(server):
    assert num_tokens(ask(server, "/v1/completions", {"prompt": "hello"})) <= 16


def test_the_fields_show_the_defaults(server):
    with server.http() as http:
        fields = http.get("/v1/capabilities").json()["fields"]
    found = {row["name"]: row for row in fields if "/v1/chat/completions" in row["paths"]}
    assert found["temperature"]["default"] == 0
    assert found["max_tokens"]["default"] == 6
