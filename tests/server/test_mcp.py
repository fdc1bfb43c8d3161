"""Responses with tools of MCP servers that the operator has named."""

import json

import pytest

from tests.server.test_dialects import named_events
from tests.support.live_server import LiveServer
from tests.support.mcp_server import McpTestServer
from tests.support.tiny_tokenizer import tiny_model_with_text

MCP = {"type": "mcp", "server_label": "weather", "require_approval": "never"}
ONE = {**MCP, "allowed_tools": ["look_up"]}


@pytest.fixture(scope="module")
def weather():
    server = McpTestServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def http(weather, tmp_path_factory):
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        "--max-model-len=2048",
        f"--mcp-server=weather={weather.url}",
        "--mcp-max-output-bytes=65536",
        "--mcp-timeout-s=4",
        "--mcp-max-calls=2",
        f"--state-dir={tmp_path_factory.mktemp('state')}",
    )
    with server.http() as client:
        yield client
    assert server.stop() == 0


@pytest.fixture(autouse=True)
def plain(weather):
    weather.mode = "json"
    weather.messages.clear()
    weather.headers.clear()


def body(**fields):
    return {
        "model": "tiny",
        "input": "How is the weather?",
        "tools": [ONE],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 120,
        "seed": 3,
        **fields,
    }


def ask(http, **fields):
    response = http.post("/v1/responses", json=body(**fields))
    assert response.status_code == 200, response.text
    return response


def test_tools_are_listed_called_and_their_results_read(http, weather):
    answer = ask(http).json()
    listing, call, *rest = answer["output"]
    assert (listing["type"], listing["server_label"]) == ("mcp_list_tools", "weather")
    assert [tool["name"] for tool in listing["tools"]] == ["look_up"]
    assert (call["type"], call["name"], call["output"]) == ("mcp_call", "look_up", "sunny")
    assert call["error"] is None and call["status"] == "completed"
    assert 1 <= json.loads(call["arguments"])["days"] <= 9
    assert weather.calls == [{"name": "look_up", "arguments": json.loads(call["arguments"])}]
    assert rest and answer["usage"]["output_tokens"] <= 120
    assert weather.headers[-1]["mcp-session-id"] == "session-1"
    assert weather.headers[-1]["mcp-protocol-version"] == "2025-06-18"
    assert answer["tools"][0]["server_label"] == "weather"


def test_a_stream_has_the_events_and_items_of_the_whole_response(http, weather):
    whole = ask(http).json()
    weather.mode = "stream"
    events = named_events(ask(http, stream=True))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:6] == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
    ]
    calls = [name for name in names if name.startswith("mcp_call")]
    assert calls[0] == "mcp_call.in_progress" and calls[-1] == "mcp_call.completed"
    assert "mcp_call_arguments.delta" in calls and calls[-2] == "mcp_call_arguments.done"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for one, other in zip(last["output"], whole["output"], strict=True):
        assert one["type"] == other["type"]
    assert last["output"][1]["arguments"] == whole["output"][1]["arguments"]


def test_a_conversation_continues_behind_a_call(http, weather):
    first = ask(http).json()
    again = http.post(
        "/v1/responses",
        json={
            "model": "tiny",
            "input": "And tomorrow?",
            "previous_response_id": first["id"],
            "max_output_tokens": 4,
        },
    ).json()
    assert again["usage"]["input_tokens"] > 100
    items = http.get(f"/v1/responses/{again['id']}/input_items").json()["data"]
    assert {"mcp_call", "mcp_list_tools"} <= {item["type"] for item in items}


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("huge", "larger than 65536 bytes"),
        ("slow", "no response within 4 s"),
        ("redirect", "HTTP status 307"),
        ("broken", "not JSON"),
    ],
)
def test_a_call_that_fails_is_an_item_with_its_error(http, weather, mode, error):
    weather.mode = mode
    call = ask(http).json()["output"][1]
    assert call["status"] == "failed" and error in call["error"] and call["output"] is None


def test_a_tool_that_fails_says_so(http, weather):
    call = ask(http, tools=[{**MCP, "allowed_tools": {"tool_names": ["fail"]}}]).json()["output"][1]
    assert (call["status"], call["error"]) == ("failed", "sunny")


def test_a_response_makes_no_more_calls_than_allowed(http, weather):
    for seed in range(4):
        ask(http, seed=seed, max_tool_calls=1)
    assert len(weather.calls) == 4


def test_functions_of_the_client_end_the_response(http, weather):
    own = {"type": "function", "name": "mine", "parameters": {"type": "object", "properties": {}}}
    choice = {"type": "function", "name": "mine"}
    output = ask(http, tools=[ONE, own], tool_choice=choice).json()["output"]
    assert [item["type"] for item in output] == ["mcp_list_tools", "function_call"]
    assert not weather.calls


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{**MCP, "server_label": "wether"}]}, "no MCP server 'wether'"),
        ({"tools": [{**MCP, "server_url": "http://10.0.0.1/mcp"}]}, "not the operator's address"),
        ({"tools": [{**MCP, "require_approval": "always"}]}, "require_approval: got"),
        ({"tools": [{"type": "mcp", "server_label": "weather"}]}, "require_approval: got"),
        ({"tools": [{**MCP, "headers": {"Authorization": "x"}}]}, "headers: not supported"),
        ({"tools": [{**MCP, "allowed_tools": ["none"]}]}, "has no tool 'none'"),
        ({"tools": [ONE, ONE]}, "an MCP server twice"),
        ({"background": True}, "background: not supported with MCP tools"),
        (
            {"tools": [ONE, {"type": "function", "name": "look_up"}]},
            "two tools have the name 'look_up'",
        ),
    ],
)
def test_what_is_not_allowed_is_refused(http, weather, fields, message):
    response = http.post("/v1/responses", json=body(**fields))
    assert response.status_code == 400 and message in response.text
    assert not weather.calls


def test_without_servers_such_tools_are_ignored_and_named():
    server = LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny")
    with server.http() as http:
        response = http.post("/v1/responses", json=body(tool_choice="auto", max_output_tokens=2))
        assert response.status_code == 200 and "tools" in response.headers["X-Octavo-Ignored"]
        assert [item["type"] for item in response.json()["output"]] == ["message"]
    assert server.stop() == 0


def test_a_server_that_is_not_there_is_a_424():
    server = LiveServer(str(tiny_model_with_text()), "--mcp-server=weather=http://127.0.0.1:1/mcp")
    with server.http() as http:
        response = http.post("/v1/responses", json={**body(), "model": None})
        assert response.status_code == 424 and "weather" in response.text
    assert server.stop() == 0
