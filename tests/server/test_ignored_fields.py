"""Fields that are ignored: their paths, the bounds of the header and of the log."""

import pytest

from octavo.errors import InvalidRequest
from octavo.server.ignored import MAX_HEADER, IgnoredFields, join_path
from octavo.server.openai.bodies import ChatBody

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def test_paths_leave_indices_out_and_quote_odd_names():
    ignored = IgnoredFields()
    for path in ("a[0].b", "a[17].b", join_path("a[1]", "b c"), join_path("", 'x[3]"é')):
        ignored.add(path)
    assert ignored.header == 'a[].b, a[]["b c"], ["x[3]\\"\\u00e9"]'
    assert not ignored.drops_entries_of("a")
    ignored.add("a[2].type", shown_as="a[type=x]")
    assert ignored.drops_entries_of("a")


def test_a_strict_server_raises_the_reason():
    with pytest.raises(InvalidRequest) as caught:
        IgnoredFields(is_strict=True).add("a[3].b", "no such field", hint="leave it out")
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
    body.take_unknown_fields(IgnoredFields())
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
        ({"prompt_cache_key": 7}, "prompt_cache_key"),
    ],
)
def test_what_changes_the_answer_or_has_a_wrong_type_is_a_400(http, fields, param):
    answer = http.post("/v1/chat/completions", json=HELLO | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


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
