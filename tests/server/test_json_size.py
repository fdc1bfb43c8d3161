"""A body of many small values is refused before it is parsed, or at its first fault: it would keep
the server busy for as long as a text of its size takes a hundredth of.
"""

import json

import pytest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from octavo.server.anthropic.bodies import MessagesBody
from octavo.server.http.body import MAX_OBJECTS, check_json_size
from octavo.server.ollama.bodies import OllamaChatBody
from octavo.server.openai.bodies import ChatBody, CompletionBody
from octavo.server.openai.responses.body import ResponseBody
from octavo.server.settings import ServerSettings

LIMIT = ServerSettings().max_body_values
MESSAGE = {"role": "user", "content": ""}


def body(value: object) -> bytes:
    return json.dumps({"prompt": value}).encode()


@pytest.mark.parametrize(
    "value",
    [
        [1] * LIMIT,
        [MESSAGE] * (MAX_OBJECTS - 1),
        'a, "quoted" {text} and a \\' * (LIMIT // 2),
        ['\\", {'] * (LIMIT - 1),
        "",
    ],
    ids=["numbers", "messages", "text", "texts", "nothing"],
)
def test_what_is_within_the_limits_or_within_a_text_is_taken(value):
    check_json_size(body(value), LIMIT)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1] * (LIMIT + 2), f"too many values: got {LIMIT + 1}, expected at most {LIMIT}"),
        ([MESSAGE] * MAX_OBJECTS, f"too many objects: got {MAX_OBJECTS + 1}"),
        (["\\"] * (LIMIT + 2), "too many values"),
    ],
    ids=["numbers", "messages", "texts"],
)
def test_what_is_beyond_the_limits_is_refused(value, said):
    with pytest.raises(HTTPException) as caught:
        check_json_size(body(value), LIMIT)
    assert caught.value.status_code == 413 and said in caught.value.detail


def test_a_text_that_does_not_end_is_still_counted():
    check_json_size(b'{"a": "' + b"," * (LIMIT + 9), LIMIT)
    with pytest.raises(HTTPException):
        check_json_size(b"[" + b"1," * (LIMIT + 9), LIMIT)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (ChatBody, {"messages": [0] * 99}),
        (ChatBody, {"messages": [{"role": "user", "content": [0] * 99}]}),
        (ChatBody, {"messages": [MESSAGE], "tools": [0] * 99}),
        (CompletionBody, {"prompt": [{}] * 99}),
        (CompletionBody, {"prompt": [[{}] * 99]}),
        (MessagesBody, {"messages": [{"role": "user", "content": [0] * 99}]}),
        (OllamaChatBody, {"messages": [0] * 99}),
        (ResponseBody, {"input": [0] * 99}),
    ],
)
def test_a_list_of_faults_ends_at_the_first(kind, given):
    """Each fault that is collected takes hundreds of bytes, and a body may hold a million."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(given))
    assert caught.value.error_count() < 9
