"""Fields that are ignored: their paths, the bounds of the header and of the log."""

import json

import pytest

from octavo.api.errors import InvalidRequest
from octavo.server.ignored import MAX_HEADER, IgnoredFields, join_path
from octavo.server.openai.bodies import ChatBody

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
NESTED_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
LONG = "x" * 600

TAKEN = [
    ("chat/completions", {"max_tokens": 1.0, "top_k": 40.0, "seed": 7.0}, ""),
    ("completions", {"prompt": "Hi", "max_tokens": 1.0, "logprobs": 0.0}, ""),
    ("messages", {"max_tokens": 1.0, "top_k": 5.0}, ""),
    ("responses", {"input": "Hi", "max_output_tokens": 1.0}, ""),
    ("chat/completions", {"stop": ""}, "stop"),
    ("chat/completions", {"stop": ["", None, "a stop"]}, "stop[]"),
    ("chat/completions", {"stop_regex": [""]}, "stop_regex[]"),
    ("responses", {"input": "Hi", "max_output_tokens": 1, "stop": [None]}, "stop[]"),
    ("messages", {"max_tokens": 1, "stop_sequences": [""]}, "stop_sequences[]"),
    ("chat/completions", {"top_logprobs": 0}, ""),
    ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat/completions", {"stream": False, "stream_options": {}}, "stream_options"),
    ("chat/completions", {"length_penalty": 1.0, "early_stopping": True}, "length_penalty, early_"),
    ("chat/completions", {"metadata": {"turn": 3, "tags": {"a": ["b"]}}}, "metadata"),
    ("chat/completions", {"metadata": {"a": LONG}, "user": LONG}, "user, metadata"),
    (
        "chat/completions",
        {"prompt_cache_key": LONG, "safety_identifier": 7},
        "safety_identifier, prompt_cache_key",
    ),
    ("messages", {"max_tokens": 1, "metadata": {"user_id": LONG, "a": {"b": 1}}}, "metadata.a, "),
    ("chat/completions", {"tools": [FLAT_TOOL], "tool_choice": "none"}, ""),
    ("chat/completions", {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, ""),
    ("chat/completions", {"tools": [FLAT_TOOL, NESTED_TOOL]}, "tools[f]"),
    ("chat/completions", {"tools": [FLAT_TOOL | {"cache_control": {}}]}, "tools[].cache_control"),
    ("chat/completions", {"response_format": {"type": "json_object", "schema": SCHEMA}}, ""),
    ("chat/completions", {"response_format": {"type": "json_schema", "schema": SCHEMA}}, ""),
    (
        "chat/completions",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": LONG, "schema": SCHEMA},
            }
        },
        "response_format.json_schema.name",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_object", "schema": SCHEMA | {"not": {"required": "y"}}}},
        "response_format.schema.not",
    ),
]
"""Values that clients send and other servers take, and the fields that are named as ignored."""


def test_paths_leave_indices_out_and_quote_odd_names():
    ignored = IgnoredFields()
    for path in ("a[0].b", "a[17].b", join_path("a[1]", "b c"), join_path("", 'x[3]"é')):
        ignored.add(path)
    assert ignored.header == 'a[].b, a[]["b c"], ["x[3]\\"\\u00e9"]'
    assert not ignored.drops_entries("a")
    ignored.add("a[2].type", shown_as="a[type=x]")
    assert ignored.drops_entries("a")


def test_a_strict_server_raises_the_reason():
    with pytest.raises(InvalidRequest) as caught:
        IgnoredFields(is_strict=True).add("a[3].b", "no such field", hint="remove it")
    assert caught.value.param == "a[3].b"
    assert str(caught.value.message) == "a[3].b: no such field"


def test_the_header_is_bounded_and_counts_what_it_leaves_out():
    ignored = IgnoredFields()
    for index in range(1000):
        ignored.add(join_path("", f"{'x' * 500}" if index == 3 else f"field_{index}"))
    assert len(ignored.header) <= MAX_HEADER + len("and 1000 more")
    num_named = ignored.header.count(", ")
    assert ignored.header.endswith(f", and {1000 - num_named} more")


def test_nested_parts_are_walked_and_unknown_types_removed():
    body = ChatBody.model_validate(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "sparkle"}]}
            ],
            "tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "mcp", "server_label": "x"},
            "service_tier": "best",
            "stream_options": {"include_usage": True, "more": 1, "include_obfuscation": True},
            "stream": True,
        }
    )
    body.note_unknown_fields(IgnoredFields())
    assert set(body.ignored.paths) == {
        "messages[].content[type=sparkle]",
        "tools[type=web_search]",
        "tool_choice",
        "service_tier",
        "stream_options.more",
        "stream_options.include_obfuscation",
    }
    assert [part.type for part in body.messages[0].content or ()] == ["text"]
    assert [tool.function.name for tool in body.tools or ()] == ["f"]
    assert body.tool_choice is None and body.service_tier is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"store": "yes", "temperature": "hot"}, "temperature"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"max_tokens": 4.5}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"use_beam_search": False, "beam_width": 2}, "beam_width"),
        ({"stop": 7}, "stop"),
        ({"messages": [{"role": "user", "content": {"text": "Hi"}}]}, "messages[0].content"),
        ({"tools": [FLAT_TOOL, FLAT_TOOL | {"description": "other"}]}, "tools[1].function.name"),
    ],
)
def test_what_changes_the_answer_or_has_a_wrong_type_is_a_400(http, fields, param):
    answer = http.post("/v1/chat/completions", json=HELLO | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_streams_and_errors_have_the_header_too(http):
    body = HELLO | {"cache": 1, "stream": True}
    streamed = http.post("/v1/chat/completions", json=body)
    assert streamed.headers["x-octavo-ignored"] == "cache"
    refused = http.post("/v1/chat/completions", json=body | {"temperature": 9})
    assert refused.status_code == 400
    assert refused.headers["x-octavo-ignored"] == "cache"


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("chat/completions", {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ("responses", {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
    ],
)
def test_a_format_of_plain_text_is_read_as_others_are(http, path, fields, name):
    asked = HELLO if path.startswith("chat") else {"input": "Hi", "max_output_tokens": 1}
    response = http.post(f"/v1/{path}", json=asked | fields)
    assert response.status_code == 200 and response.headers["x-octavo-ignored"] == name


@pytest.mark.parametrize(("path", "fields", "ignored"), TAKEN, ids=lambda value: str(value)[:50])
def test_values_that_other_servers_take_are_taken(http, path, fields, ignored):
    model = {"model": "tiny"} if path == "messages" else {}
    asked = HELLO if "prompt" not in fields and "input" not in fields else {}
    answer = http.post(f"/v1/{path}", json=model | asked | fields)
    assert answer.status_code == 200, answer.text
    found = answer.headers.get("x-octavo-ignored", "")
    assert found.startswith(ignored) and bool(found) == bool(ignored)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_is_enforced(http, kind):
    form = {"response_format": {"type": kind, "schema": SCHEMA}, "max_tokens": 30}
    answer = http.post("/v1/chat/completions", json=HELLO | form).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"x": 1}


def test_a_lone_part_and_texts_in_a_list_are_a_messages_content(http):
    text = {"type": "text", "text": "Hi"}
    counts = set()
    for content in ("Hi", text, ["Hi"], [text]):
        body = HELLO | {"messages": [{"role": "user", "content": content}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        counts.add(answer.json()["usage"]["prompt_tokens"])
    assert len(counts) == 1


def test_all_forms_of_a_tool_are_the_same_prompt(http):
    forms = (FLAT_TOOL, NESTED_TOOL, {"name": "f", "input_schema": {"type": "object"}})
    answers = [http.post("/v1/chat/completions", json=HELLO | {"tools": [one]}) for one in forms]
    assert len({answer.json()["usage"]["prompt_tokens"] for answer in answers}) == 1


def test_a_budget_of_thinking_may_be_small(http):
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 16}}
    body = {"model": "tiny", "max_tokens": 1, **HELLO, **thinking}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
