"""Calls that must be made, and forms of answers, in every API: valid, whole and streamed alike."""

import json

import jsonschema
import pytest

from tests.server.test_dialects import lines, named_events
from tests.support.live_server import LASTING, PACE_FLAGS, LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

pytestmark = pytest.mark.sampled(one_in=3)

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look_up", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "look_up"}}
FORM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """A client of a server that keeps responses, and whose context has room for tools."""
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        "--max-model-len=2048",
        f"--state-dir={tmp_path_factory.mktemp('state')}",
    )
    with server.http() as client:
        yield client
    assert server.stop() == 0


def data_of(response):
    """Returns the events of OpenAI's stream without their names."""
    assert response.status_code == 200, response.text
    found = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


def ask(http, **body):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "seed": 3, **body}
    response = http.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.5}, {"n": 2}])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be_made_is_valid(http, fields, choice):
    body = {"tools": [TOOL, OTHER], "tool_choice": choice, "parallel_tool_calls": False}
    for one in ask(http, **body, **fields).json()["choices"]:
        assert (one["finish_reason"], one["message"]["content"]) == ("tool_calls", None)
        (call,) = one["message"]["tool_calls"]
        assert call["id"].startswith("call_") and call["type"] == "function"
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "look_up":
            jsonschema.validate(arguments, SCHEMA)
        else:
            assert choice == "required"


@pytest.mark.parametrize("share", [0, 0.3, 0.6])
@pytest.mark.parametrize("stream", [False, True])
def test_a_fork_within_arguments_tells_the_whole_call(http, share, stream):
    """Also a fork of a fork; what was told before the call's beginning is not told again."""
    body = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(http, **body, temperature=0, return_token_ids=True).json()
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    name, num_kept = whole["id"], int(share * len(whole["choices"][0]["token_ids"]))
    for kept in (num_kept, 2):
        response = http.post(f"/v1/requests/{name}/fork", json={"keep": kept, "stream": stream})
        events = data_of(response) if stream else [response.json()]
        name = events[0]["id"]
        messages = [event["choices"][0]["delta" if stream else "message"] for event in events]
        parts = [part for message in messages for part in message.get("tool_calls", ())]
        assert parts[0]["function"]["name"] == call["function"]["name"]
        arguments = "".join(part["function"].get("arguments", "") for part in parts)
        assert arguments == call["function"]["arguments"]
        assert "".join(message.get("content") or "" for message in messages) == ""
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_fork_at_any_token_tells_the_whole_call(http):
    """Also one inside a character of several tokens."""
    body = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(http, **body, temperature=0, return_token_ids=True).json()
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert not call["function"]["arguments"].isascii()
    num_tokens, last_characters = len(whole["choices"][0]["token_ids"]), 20
    for kept in range(num_tokens - last_characters):
        name = whole["id"]
        for num_more in (kept, 1):  # a fork, and a fork of it one token later
            url = f"/v1/requests/{name}/fork"
            forked = http.post(url, json={"keep": num_more}).json()
            (again,) = forked["choices"][0]["message"]["tool_calls"]
            assert again["function"] == call["function"]
            name = forked["id"]


def test_a_streamed_call_is_the_whole_one(http):
    body = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(http, **body).json()["choices"][0]["message"]["tool_calls"][0]["function"]
    events = data_of(ask(http, **body, stream=True, stream_options={"include_usage": True}))
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    parts = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert {part["index"] for part in parts} == {0}
    assert (parts[0]["type"], parts[0]["function"]["name"]) == ("function", "look_up")
    assert all("id" not in part and "name" not in part["function"] for part in parts[1:])
    assert "".join(part["function"]["arguments"] for part in parts) == whole["arguments"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_ends_with_length_and_what_there_is(http):
    body = {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 60}
    one = ask(http, **body).json()["choices"][0]
    assert one["finish_reason"] == "length"
    (call,) = one["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith("{")
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(call["function"]["arguments"])


def test_an_answer_has_its_form_or_calls_a_function(http):
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM}}
    for seed in range(4):
        body = {"tools": [TOOL], "response_format": form, "seed": seed, "temperature": 2}
        one = ask(http, **body).json()["choices"][0]["message"]
        if "tool_calls" in one:
            for call in one["tool_calls"]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        else:
            jsonschema.validate(json.loads(one["content"]), FORM)


def test_a_schema_that_no_grammar_holds_is_refused_with_its_place(http):
    bad = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}}
    body = {"model": "tiny", "messages": HELLO, "tools": [tool]}
    response = http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[0].function.parameters")
    assert "#/properties/a/not" in error["message"]


# -- the other APIs --------------------------------------------------------------------------------


def anthropic(http, **fields):
    tool = {"name": "look_up", "input_schema": SCHEMA}
    choice = {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "seed": 3}
    return http.post(
        "/v1/messages", json={**body, "tools": [tool], "tool_choice": choice, **fields}
    )


def test_anthropics_tool_use_is_whole_and_streamed_alike(http):
    made = anthropic(http).json()
    assert made["stop_reason"] == "tool_use"
    (block,) = made["content"]
    assert (block["type"], block["name"]) == ("tool_use", "look_up")
    jsonschema.validate(block["input"], SCHEMA)
    events = named_events(anthropic(http, stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert events[1]["content_block"]["type"] == "tool_use"
    assert events[1]["content_block"]["input"] == {}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    parts = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    assert json.loads("".join(parts)) == block["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_anthropics_results_go_back_to_the_model(http):
    use = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"city": "Oslo"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "rain"}],
    }
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "So"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    body = {"model": "tiny", "messages": messages}
    counted = http.post("/v1/messages/count_tokens", json=body)
    assert counted.status_code == 200, counted.text
    wrong = [{"role": "user", "content": [use]}]
    refused = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": wrong})
    assert "messages[0].content[0]: not supported in a message of the role" in refused.text


def test_anthropics_form_of_an_answer(http):
    form = {"type": "json_schema", "schema": FORM}
    for fields in ({"output_format": form}, {"output_config": {"format": form}}):
        made = anthropic(http, tools=None, tool_choice=None, **fields).json()
        jsonschema.validate(json.loads(made["content"][0]["text"]), FORM)


def test_ollamas_form_of_an_answer(http):
    for form, schema in (("json", {"type": "object"}), (FORM, FORM)):
        body = {"model": "tiny", "messages": HELLO, "format": form, "stream": False}
        body["options"] = {"num_predict": 200, "seed": 3}
        made = http.post("/api/chat", json=body).json()
        if made["done_reason"] == "stop":
            jsonschema.validate(json.loads(made["message"]["content"]), schema)
        else:
            assert made["message"]["content"].startswith("{")


def cohere(http, **fields):
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "seed": 3}
    given = {"tools": [TOOL], "tool_choice": "REQUIRED"}
    return http.post("/v2/chat", json={**body, **given, **fields})


def test_coheres_calls_are_whole_and_streamed_alike(http):
    made = cohere(http).json()
    assert made["finish_reason"] in ("TOOL_CALL", "MAX_TOKENS")
    calls = [call["function"] for call in made["message"]["tool_calls"]]
    jsonschema.validate(json.loads(calls[0]["arguments"]), SCHEMA)
    told = []
    for event in named_events(cohere(http, stream=True)):
        if event["type"] == "tool-call-start":
            told.append(dict(event["delta"]["message"]["tool_calls"]["function"]))
        if event["type"] == "tool-call-delta":
            told[-1]["arguments"] += event["delta"]["message"]["tool_calls"]["function"][
                "arguments"
            ]
    assert told == calls
    form = {"type": "json_object", "json_schema": FORM}
    text = cohere(http, tools=None, tool_choice=None, response_format=form).json()
    jsonschema.validate(json.loads(text["message"]["content"][0]["text"]), FORM)


RESPONSE = {
    "input": "hi",
    "max_output_tokens": 200,
    "seed": 3,
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "look_up"},
    "parallel_tool_calls": False,
}


def test_a_responses_call_is_an_item_whole_and_streamed_alike(http):
    made = http.post("/v1/responses", json=RESPONSE).json()
    (item,) = made["output"]
    assert (item["type"], item["name"], item["status"]) == (
        "function_call",
        "look_up",
        "completed",
    )
    jsonschema.validate(json.loads(item["arguments"]), SCHEMA)
    events = named_events(http.post("/v1/responses", json={**RESPONSE, "stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in events))
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(deltas) == item["arguments"]
    last = events[-1]["response"]["output"]
    assert [one["arguments"] for one in last] == [item["arguments"]]
    assert events[-2]["item"] == last[0]


def test_a_conversation_of_items_goes_on_behind_a_call(http):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]
    body = {"input": items, "max_output_tokens": 2}
    made = http.post("/v1/responses", json=body)
    assert made.status_code == 200, made.text
    assert made.json()["output"][0]["type"] == "message"


def test_a_responses_form(http):
    form = {"type": "json_schema", "name": "f", "strict": True, "schema": FORM}
    body = {"input": "hi", "seed": 3, "text": {"format": form}, "max_output_tokens": 60}
    made = http.post("/v1/responses", json=body).json()
    assert made["text"]["format"] == form
    jsonschema.validate(json.loads(made["output"][0]["content"][0]["text"]), FORM)


# -- forks -----------------------------------------------------------------------------------------


def forked(http, name):
    """Returns the message and the id of a fork that goes on behind an answer's first two tokens."""
    made = http.post(f"/v1/requests/{name}/fork", json={"keep": 2, "max_tokens": 200})
    assert made.status_code == 200, made.text
    return made.json()["choices"][0]["message"], made.json()["id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v2/chat"])
def test_a_fork_of_any_api_tells_its_calls(http, path):
    """Also a fork of a fork: each is an answer of chat completions."""
    asked = {"/v1/messages": anthropic, "/v2/chat": cohere}
    options = {} if path == "/v2/chat" else {"temperature": 0}
    if path in asked:
        name = asked[path](http, **options).json()["id"]
    else:
        name = http.post(path, json=RESPONSE | options).json()["id"]
    for _ in range(2):
        message, name = forked(http, name)
        first = message["tool_calls"][0]["function"]
        jsonschema.validate(json.loads(first["arguments"]), SCHEMA)


def test_a_fork_of_a_background_response_tells_its_call(http):
    made = http.post("/v1/responses", json=RESPONSE | {"background": True}).json()
    while made["status"] in ("queued", "in_progress"):
        made = http.get(f"/v1/responses/{made['id']}").json()
    message, _ = forked(http, made["id"])
    (call,) = message["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


# -- reasoning -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker():
    """A server whose model is said to reason."""
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        "--reasoning-parser=qwen3",
        *PACE_FLAGS,
    )
    with server.http() as http:
        yield http
    assert server.stop() == 0


THOUGHT = {"structured_outputs": {"regex": "<think>\\n[a-z]{5} x\\n</think>\\n\\n[A-Z]{4}"}}


def test_reasoning_is_told_apart_and_counted(thinker):
    made = ask(thinker, **THOUGHT).json()
    message = made["choices"][0]["message"]
    assert message["reasoning"].endswith(" x") and len(message["reasoning"]) == 7
    assert len(message["content"]) == 4 and message["content"].isupper()
    usage = made["usage"]
    behind = usage["completion_tokens"] - len("\n\nABCD") - 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == behind
    events = data_of(ask(thinker, **THOUGHT, stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    without = ask(thinker, **THOUGHT, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning" not in without and without["content"] == message["content"]


def test_stop_strings_are_looked_for_behind_the_reasoning(thinker):
    made = ask(thinker, **THOUGHT, stop=["x"]).json()["choices"][0]
    assert len(made["message"]["content"]) == 4
    first = made["message"]["content"][1]
    cut = ask(thinker, **THOUGHT, stop=[first]).json()["choices"][0]
    assert cut["stop_reason"] == first
    assert cut["message"]["content"] == made["message"]["content"].partition(first)[0]


def test_reasoning_is_closed_where_its_budget_ends(thinker):
    prefilled = [*HELLO, {"role": "assistant", "content": "<think>"}]
    body = {
        "messages": prefilled,
        "continue_final_message": True,
        "thinking_token_budget": 7,
        "max_tokens": 40,
    }
    made = ask(thinker, **body).json()
    thought = made["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thought <= 7 + len("</think>")
    assert made["choices"][0]["message"]["content"] or made["choices"][0]["finish_reason"] == "stop"


def test_a_budget_needs_a_model_that_reasons(http):
    body = {"model": "tiny", "messages": HELLO, "thinking_token_budget": 5}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "thinking_token_budget"


def test_each_api_tells_reasoning_in_its_own_form(thinker):
    prefilled = [*HELLO, {"role": "assistant", "content": "<think>ab</think>"}]
    opened = [*HELLO, {"role": "assistant", "content": "<think>"}]
    body = {"model": "tiny", "max_tokens": 6, "seed": 3}
    made = thinker.post("/v1/messages", json={**body, "messages": opened}).json()
    assert made["content"][0]["type"] == "thinking"
    made = thinker.post("/v1/messages", json={**body, "messages": prefilled}).json()
    assert [block["type"] for block in made["content"]] == ["text"]
    events = named_events(
        thinker.post("/v1/messages", json={**body, "messages": opened, "stream": True})
    )
    assert {"thinking_delta", "signature_delta"} <= {
        event["delta"]["type"] for event in events if event["type"] == "content_block_delta"
    }
    asked = {"model": "tiny", "messages": opened, "options": {"num_predict": 6, "seed": 3}}
    made = thinker.post("/api/chat", json={**asked, "stream": False}).json()["message"]
    assert made["thinking"] and made["content"] == ""
    told = lines(thinker.post("/api/chat", json=asked))
    assert "".join(line["message"].get("thinking", "") for line in told) == made["thinking"]
    shown = thinker.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]


def test_a_fork_of_ollamas_answer_tells_its_reasoning(thinker):
    """Ollama's answers have no id of their own: one that runs beside others is found among them.
    The other request sets the pace, so that the answer lasts until it has been found.
    """
    opened = [*HELLO, {"role": "assistant", "content": "<think>"}]
    long = {"type": "array", "items": {"type": "string"}, "minItems": 300}
    options = {"num_predict": 300, "seed": 3}
    asked = {"model": "tiny", "messages": opened, "options": options, "format": long}
    with (
        thinker.stream("POST", "/v1/completions", json=LASTING | {"stream": True}),
        thinker.stream("POST", "/api/chat", json=asked) as stream,
    ):
        told = (json.loads(line)["message"] for line in stream.iter_lines())
        first = next(message for message in told if message.get("thinking"))
        running = [one["id"] for one in thinker.get("/v1/requests").json()["data"]]
        (name,) = (one for one in running if one.startswith("ollama-"))
        body = {"keep": 1, "max_tokens": 6}
        fork = thinker.post(f"/v1/requests/{name}/fork", json=body).json()
    message = fork["choices"][0]["message"]
    assert message["reasoning"] and not message["content"]
    assert first["content"] == ""


def test_reasoning_goes_back_to_cohere_as_it_came(thinker):
    text = {"type": "text", "text": "cd"}
    body = {"model": "tiny", "max_tokens": 6, "seed": 3}

    def told(**thinking):
        answer = {"role": "assistant", "content": [{"type": "thinking", **thinking}, text]}
        return {**body, "messages": [*HELLO, answer, {"role": "user", "content": "Go on"}]}

    made = thinker.post("/v2/chat", json=told(thinking="ab"))
    assert made.status_code == 200, made.text
    usage = thinker.post("/v1/messages", json=told(thinking="ab", signature="")).json()["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert made.json()["usage"]["tokens"]["input_tokens"] == num_prompt
    wrong = [{"role": "user", "content": [{"type": "thinking", "thinking": "ab"}]}]
    assert thinker.post("/v2/chat", json={**body, "messages": wrong}).status_code == 400
