"""Requests that are seen, changed, ended and forked while they run, over HTTP."""

import json
from contextlib import contextmanager

import httpx
import pytest

from tests.support.live_server import LETTERS, LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text

SLOW = {
    "prompt": "Hello",
    "max_tokens": 480,
    "temperature": 1,
    "seed": 3,
    "allowed_token_ids": LETTERS,
    "ignore_eos": True,
    "stream": True,
    "n": 64,
}
"""A request of 64 samples, which takes even a tiny model a while."""


class Stream:
    """An open stream of one completion: its id and its events so far."""

    def __init__(self, response):
        self._lines = response.iter_lines()
        self.events = []
        self.take()
        self.id = self.events[0]["id"]

    def take(self):
        """Reads one event; returns whether there was one."""
        for line in self._lines:
            if line == "data: [DONE]":
                return False
            if line:
                self.events.append(json.loads(line.removeprefix("data: ")))
                return True
        return False

    def finish(self):
        """Reads to the end; returns the finish_reason of each choice."""
        while self.take():
            pass
        reasons = {}
        for event in self.events:
            for choice in event["choices"]:
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        return reasons

    def tokens(self, index=0):
        return [
            token
            for event in self.events
            for choice in event["choices"]
            if choice["index"] == index
            for token in choice["token_ids"]
        ]


@contextmanager
def streaming(http, path="/v1/completions", **body):
    body = SLOW | {"return_token_ids": True} | body
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        yield Stream(response)


def listed(http):
    return {one["id"]: one for one in http.get("/v1/requests").json()["data"]}


def test_a_running_request_is_listed_and_shown(http):
    with streaming(http) as stream:
        shown = listed(http)[stream.id]
        assert shown["object"] == "request" and shown["state"] in ("running", "waiting")
        assert shown["prompt_tokens"] == 5 and shown["max_tokens"] == 480
        assert len(shown["choices"]) == 64 and shown["age_s"] > 0
        assert "prompts" not in shown and "text" not in shown["choices"][0]
        whole = http.get(f"/v1/requests/{stream.id}").json()
        assert whole["prompts"][0]["text"] == "Hello"
        assert until(lambda: http.get(f"/v1/requests/{stream.id}").json()["choices"][0]["text"])
        http.delete(f"/v1/requests/{stream.id}")
        stream.finish()
    assert until(lambda: stream.id not in listed(http))


def test_a_request_that_waits_says_for_what_and_how_long(http):
    with streaming(http) as first, streaming_later(http) as second:
        assert until(lambda: second in listed(http))
        # Until a step has seen it, it waits for the step that runs.
        assert until(lambda: listed(http)[second]["waits_for"] == "batch full")
        shown = listed(http)[second]
        assert shown["state"] == "waiting" and shown["waited_s"] > 0
        assert http.delete(f"/v1/requests/{second}").json()["aborted"]
        http.delete(f"/v1/requests/{first.id}")
        first.finish()


@contextmanager
def streaming_later(http):
    """Starts a request that has to wait; yields its id."""
    import threading

    name = "waiting-one"

    def run():
        with httpx.Client(base_url=http.base_url, timeout=60) as own:
            own.post("/v1/completions", json=SLOW | {"stream": False, "n": 1, "request_id": name})

    thread = threading.Thread(target=run)
    thread.start()
    yield f"cmpl-{name}"
    thread.join()


def test_a_deleted_request_ends_with_abort(http):
    with streaming(http) as stream:
        answer = http.delete(f"/v1/requests/{stream.id}").json()
        assert answer == {"id": stream.id, "object": "request", "aborted": True}
        assert set(stream.finish().values()) == {"abort"}


def test_a_shorter_length_ends_a_running_request(http):
    with streaming(http) as stream:
        made = http.get(f"/v1/requests/{stream.id}").json()["choices"]
        length = max(choice["tokens"] for choice in made) + 60
        changed = http.patch(f"/v1/requests/{stream.id}", json={"max_tokens": length})
        assert changed.status_code == 200 and changed.json()["max_tokens"] == length
        assert set(stream.finish().values()) == {"length"}
        assert all(length <= len(stream.tokens(index)) < 480 for index in range(64))


def test_a_new_stop_text_ends_a_running_request(http):
    with streaming(http) as stream:
        changed = http.patch(f"/v1/requests/{stream.id}", json={"stop": ["a", "b", "c", "d"]})
        assert changed.json()["stop"] == ["a", "b", "c", "d"]
        assert set(stream.finish().values()) == {"stop"}


REFUSED = [
    ({"max_tokens": 5000}, "max_tokens", "expected"),
    ({"max_tokens": 0}, "max_tokens", "expected"),
    ({"priority": 1}, "priority", "scheduling_policy priority"),
    ({"stop": [""]}, "stop", "none of them empty"),
    ({"temperature": 1}, "temperature", "no such field"),
    ({}, None, "expected one of max_tokens, priority, stop"),
]


def test_changes_out_of_their_range_are_refused_and_do_no_harm(http):
    with streaming(http) as stream:
        for body, param, words in REFUSED:
            answer = http.patch(f"/v1/requests/{stream.id}", json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == param and words in error["message"]
        assert set(stream.finish().values()) == {"length"}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("DELETE", ""), ("PATCH", ""), ("POST", "/fork")]
)
def test_an_unknown_id_is_a_404(http, method, path):
    body = {"json": {"max_tokens": 3}} if method in ("PATCH", "POST") else {}
    answer = http.request(method, f"/v1/requests/cmpl-none{path}", **body)
    assert answer.status_code == 404 and "cmpl-none" in answer.json()["error"]["message"]


def test_a_fork_goes_on_as_a_fresh_request_would(http):
    with streaming(http) as stream:
        while len(stream.tokens()) < 30:
            stream.take()
        kept = stream.tokens()[:30]
        body = {"keep": 30, "then": [LETTERS[0]], "temperature": 0, "max_tokens": 12, "n": 1}
        forked = http.post(
            f"/v1/requests/{stream.id}/fork", json=body | {"return_token_ids": True}
        ).json()
        http.delete(f"/v1/requests/{stream.id}")
        stream.finish()
    prompt = http.get(f"/v1/requests/{stream.id}").json()["prompts"][0]["token_ids"]
    fresh = http.post(
        "/v1/completions",
        json={
            "prompt": prompt + kept + [LETTERS[0]],
            "temperature": 0,
            "max_tokens": 12,
            "allowed_token_ids": LETTERS,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    ).json()
    assert forked["choices"][0]["token_ids"] == fresh["choices"][0]["token_ids"]
    assert forked["choices"][0]["text"] == fresh["choices"][0]["text"]
    usage = forked["usage"]
    assert usage["prompt_tokens"] == 5 + 30 + 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5 + 30


def test_a_fork_of_a_chat_is_a_stream_of_chat_chunks(http):
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole = http.post("/v1/chat/completions", json=body).json()
    path = f"/v1/requests/{whole['id']}/fork"
    with http.stream("POST", path, json={"keep": 4, "stream": True}) as response:
        events = [line for line in response.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    first = json.loads(events[0].removeprefix("data: "))
    assert first["object"] == "chat.completion.chunk" and first["id"].startswith("chatcmpl-")
    text = "".join(
        choice["delta"].get("content") or ""
        for line in events[:-1]
        for choice in json.loads(line.removeprefix("data: "))["choices"]
    )
    content = whole["choices"][0]["message"]["content"]
    assert text and content.endswith(text), "a greedy fork goes on as its parent did"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"keep": 1000}, "keep"),
        ({"keep": -1}, "keep"),
        ({"index": 7}, "index"),
        ({"then": [10**6]}, "then"),
        ({"temperature": 9}, "temperature"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"cache_salt": "x"}, "cache_salt"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_by_field(http, body, param):
    made = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3}).json()
    answer = http.post(f"/v1/requests/{made['id']}/fork", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_fork_counts_for_its_key_and_a_refused_one_leaves_nothing_running(tmp_path):
    """A key that may run one request at once can fork again and again, also after a refusal."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: small, key: secret, max_running: 1}\n")
    server = LiveServer(str(tiny_model_with_text()), f"--api-key-file={keys}")
    try:
        with server.http() as http:
            http.headers["Authorization"] = "Bearer secret"
            made = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3}).json()
            path = f"/v1/requests/{made['id']}/fork"
            for body, status in (({}, 200), ({"then": [10**6]}, 400), ({"request_id": "a"}, 200)):
                assert http.post(path, json=body).status_code == status
            assert http.get(f"/v1/requests/{made['id']}").json()["owner"] == "small"
            assert http.get("/v1/requests").json()["data"] == []
    finally:
        assert server.stop() == 0
