"""A prompt that is too long is refused in each API's own words, by which its clients shorten a
conversation; a stream is refused in the same way.
"""

import json
import re

import pytest

LONG = "word " * 3_000
TALK = [{"role": "user", "content": LONG}]
OPENAI = (
    r"This model's maximum context length is 512 tokens, .*Please reduce the length of the prompt"
)
FORMS = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": LONG},
    "/v1/messages": {"messages": TALK, "max_tokens": 8},
    "/v1/responses": {"input": LONG},
    "/api/chat": {"messages": TALK},
    "/api/generate": {"prompt": LONG},
    "/v2/chat": {"messages": TALK},
}


def refused(http, path, **fields):
    answer = http.post(path, json={"model": "tiny", **FORMS[path], **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openai_names_the_code(http, path, stream):
    error = refused(http, path, stream=stream)["error"]
    assert re.match(OPENAI, error["message"])
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert error["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_names_both_lengths(http, stream):
    answer = refused(http, "/v1/messages", stream=stream)
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    found = re.fullmatch(
        r"prompt is too long: (\d+) tokens > (\d+) maximum", answer["error"]["message"]
    )
    assert int(found[1]) > int(found[2]) == 511


def test_a_response_is_refused_whole_and_fails_in_a_stream(http):
    error = refused(http, "/v1/responses")["error"]
    known = "Your input exceeds the context window of this model."
    assert error["message"].startswith(known) and error["code"] == "context_length_exceeded"
    streamed = http.post("/v1/responses", json={"input": LONG, "stream": True})
    assert streamed.status_code == 200
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.text.splitlines()
        if line.startswith("data: ")
    ]
    kinds = ["response.created", "response.in_progress", "response.failed"]
    assert [event["type"] for event in events] == kinds
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "context_length_exceeded"
    assert failed["error"]["message"] == error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_names_the_context_size(http, path, stream):
    message = refused(http, path, stream=stream, truncate=False)["error"]
    assert "the input length exceeds the context length" in message
    assert re.search(r"exceeds the available context size \(511 tokens\)", message)


@pytest.mark.parametrize("stream", [False, True])
def test_cohere_says_too_many_tokens(http, stream):
    message = refused(http, "/v2/chat", stream=stream)["message"]
    assert message.startswith("too many tokens: ") and "511" in message


def test_a_limit_of_the_server_is_told_in_the_same_words(start):
    """The server takes shorter prompts than the context holds: its limit counts."""
    server = start("--max-prompt-len=64")
    with server.http() as http:
        error = refused(http, "/v1/chat/completions")["error"]
        found = re.match(r"This model's maximum context length is (\d+) tokens", error["message"])
        assert "prompt limit" in error["message"] and found[1] == "64"
        message = refused(http, "/v1/messages")["error"]["message"]
        assert message.endswith(f" tokens > {found[1]} maximum")
