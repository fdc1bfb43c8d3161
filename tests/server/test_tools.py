"""Tools of chat completions: what is taken, what is refused, what the model is told."""

import json

import pytest

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name="look_up", parameters=None, **more):
    function = {"name": name, "parameters": SCHEMA if parameters is None else parameters, **more}
    return {"type": "function", "function": function}


def ask(http, **body):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0, **body}
    return http.post("/v1/chat/completions", json=asked)


def deep(levels):
    schema = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "field required"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        (
            {"tools": [tool(" ")]},
            "tools[0].function.name",
            "got ' ', expected a name of 1 to 256",
        ),
        ({"tools": [tool("a" * 257)]}, "tools[0].function.name", "expected a name of"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "got 'look_up' twice"),
        (
            {"tools": [tool(parameters={"type": "array"})]},
            "tools[0].function.parameters.type",
            "not enforced by the grammar",
        ),
        (
            {"tools": [tool(parameters=deep(70))]},
            "tools[0].function.parameters",
            "not enforced by the grammar",
        ),
        (
            {"tools": [tool(parameters=deep(70), strict=True)]},
            "tools[0].function.parameters",
            "nested more than 64 deep",
        ),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [tool(description="a" * (1 << 20))]}, "tools", "bytes of definitions"),
        ({"tool_choice": "required"}, "tool_choice", "requires tools"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "look"}}},
            "tool_choice",
            "got the function 'look', expected look_up",
        ),
        ({"tools": [tool()], "tool_choice": "some"}, "tool_choice", "got 'some'"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice", "without a name"),
        ({"tools": [tool(extra=1)]}, "tools[0].function.extra", "no such field"),
        ({"functions": [{"name": "f"}], "tools": [tool()]}, "functions", "tools overrides it"),
        ({"functions": [{"name": "f"}] * 2}, "functions[1].name", "got 'f' twice"),
        (
            {"functions": [{"name": "f"}], "function_call": {"name": "g"}},
            "function_call",
            "got the function 'g', expected f",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_refused_by_its_path(strict, body, param, message):
    answer = ask(strict, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


NAMES_KEYWORD = {
    "properties": {
        "answers": {"propertyNames": {}},
        "tags": {"uniqueItems": True},
    },
}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_keywords_that_no_grammar_enforces_are_ignored_and_named(http, choice):
    answer = ask(http, tools=[tool("f", NAMES_KEYWORD)], tool_choice=choice)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-octavo-ignored"] == (
        "tools[f].parameters.properties.answers.propertyNames,"
        " tools[f].parameters.properties.tags.uniqueItems"
    )
    refused = ask(http, tools=[tool("f", NAMES_KEYWORD, strict=True)], tool_choice=choice)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "tools[0].function.parameters"
    assert "#/properties/answers/propertyNames" in error["message"]
    assert "without strict" in error["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "string"},
        {"$ref": "#/$defs/none"},
        {"properties": {"a": {"type": "strng"}}},
        {"properties": {"a": {"pattern": "(?!x)", "type": "string"}}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ],
)
def test_no_schema_of_a_tool_fails_a_request(http, parameters, choice):
    answer = ask(http, tools=[tool("f", parameters)], tool_choice=choice)
    assert answer.status_code == 200, answer.text


def test_a_model_without_tools_in_its_template_is_told_of_them(http):
    body = {"tools": [tool(description="Weather.")], "return_prompt_text": True}
    text = ask(http, **body).json()["prompt_text"]
    assert json.dumps(tool(description="Weather.")["function"]["parameters"]) in text
    assert "<tool_call>" in text and text.index("look_up") < text.index("hi")
    without = ask(http, **body, tool_choice="none").json()["prompt_text"]
    assert "look_up" not in without


def test_calls_and_results_of_the_history_are_told_in_text(http):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    text = ask(http, messages=messages, return_prompt_text=True).json()["prompt_text"]
    assert '<tool_call>\n{"name": "look_up", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text


def test_an_answer_without_calls_is_content(http):
    made = ask(http, tools=[tool()]).json()
    choice = made["choices"][0]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"
    assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        "any",
        {"type": "function", "function": {"name": "look_up"}},
        {"type": "function", "name": "look_up"},
        {"type": "tool", "name": "look_up"},
    ],
    ids=str,
)
def test_a_choice_may_be_spelt_as_in_any_api(http, choice):
    """In the forms of OpenAI's two APIs, and of Anthropic's."""
    answer = ask(http, tools=[tool()], tool_choice=choice, max_tokens=60)
    assert answer.status_code == 200 and "x-octavo-ignored" not in answer.headers, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"


def test_an_empty_list_of_parameters_is_none(http):
    """PHP writes an empty object so."""
    answer = ask(http, tools=[tool(parameters=[])], tool_choice="required", max_tokens=60)
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}


def test_no_limit_is_none_in_chats_and_completions(http):
    """-1 is llama.cpp's and LM Studio's; the answer goes on until the context of 512 ends."""
    fields = {"max_tokens": -1, "ignore_eos": True, "temperature": 0}
    for path, body in (
        ("chat/completions", {"messages": HELLO}),
        ("completions", {"prompt": "hi"}),
    ):
        usage = http.post(f"/v1/{path}", json=body | fields).json()["usage"]
        assert usage["total_tokens"] > 500, path
