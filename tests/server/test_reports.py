"""Answers that public reports about other servers ask for: streams, logprobs, errors, usage.

Each test names its report, OWNER/REPO#NUMBER. Reports about requests alone are in
`tests/data/agent_requests.jsonl`.
"""

import json

import pytest

HELLO = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
FLAG = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": FLAG}}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}
MUST_CALL = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def ask(http, path=CHAT, **fields):
    return http.post(path, json={"model": "tiny", "messages": HELLO, "max_tokens": 4} | fields)


def chunks(answer):
    """Returns the events of a stream that are JSON."""
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def with_pattern(pattern):
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    named = {"name": "a", "strict": True, "schema": schema | {"required": ["x"]}}
    return {"type": "json_schema", "json_schema": named}


def test_a_list_of_many_wrong_parts_has_a_short_error(http):
    """vllm-project/vllm#49239"""
    content = [{"type": "input_text", "text": 7}] * 3000
    body = {"model": "tiny", "input": [{"role": "user", "content": content}]}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 400 and len(answer.text) < 1000


def test_an_unknown_effort_is_refused_by_its_name(http):
    """vllm-project/vllm#50256"""
    answer = ask(http, reasoning_effort="hard")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "reasoning_effort"


def test_a_pattern_that_is_none_is_a_400_and_a_needless_escape_is_read(http):
    """ggml-org/llama.cpp#19051"""
    refused = ask(http, response_format=with_pattern("^hello(there$"))
    assert refused.status_code == 400, refused.text
    answer = ask(http, response_format=with_pattern(r"^hello there\!$"), max_tokens=60)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"x": "hello there!"}


def test_usage_is_in_a_streams_last_chunk_alone_and_only_if_asked_for(http):
    """BerriAI/litellm#9657 and #3490"""
    *first, last = chunks(ask(http, stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in first)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert all("usage" not in chunk for chunk in chunks(ask(http, stream=True)))


def test_logprobs_of_a_stream_are_those_of_a_whole_answer(http):
    """modular/modular#5085, ml-explore/mlx-lm#1630"""
    fields = {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    whole = ask(http, **fields).json()["choices"][0]["logprobs"]["content"]
    found = [
        choice for one in chunks(ask(http, stream=True, **fields)) for choice in one["choices"]
    ]
    streamed = [one for choice in found for one in (choice["logprobs"] or {}).get("content", ())]
    assert len(whole) == 4 and all(len(one["top_logprobs"]) == 3 for one in whole)
    assert [one["token"] for one in streamed] == [one["token"] for one in whole]
    for ours, theirs in zip(streamed, whole, strict=True):
        assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)


@pytest.mark.parametrize("messages", [[None], ["x"], [[]], 7, "x", {}, []], ids=str)
def test_messages_that_are_none_are_a_400(http, messages):
    """n8n-io/n8n#38408"""
    answer = ask(http, messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")


def test_a_limit_below_nothing_is_a_400(http):
    """vllm-project/vllm#4667"""
    answer = ask(http, max_tokens=-160)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_400_in_openais_words(http, stream):
    """huggingface/text-generation-inference#2749"""
    answer = ask(http, messages=[{"role": "user", "content": "x " * 2000}], stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in error["message"]


def test_anthropics_stream_of_a_call_has_its_id_and_whole_arguments(http):
    """vllm-project/vllm#34887"""
    tool = {"name": "f", "input_schema": FLAG}
    fields = {"tools": [tool], "tool_choice": ONE_CALL, "max_tokens": 150, "stream": True}
    events = chunks(ask(http, "/v1/messages", **fields))
    opened = next(event for event in events if event["type"] == "content_block_start")
    assert opened["content_block"]["type"] == "tool_use" and opened["content_block"]["id"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    read = json.loads("".join(delta.get("partial_json", "") for delta in deltas))
    assert isinstance(read["x"], bool)
    ended = next(event for event in events if event["type"] == "message_delta")
    assert ended["delta"]["stop_reason"] == "tool_use"


def test_no_chunk_has_a_role_that_is_null(http):
    """vercel/ai#2548"""
    found = chunks(ask(http, stream=True))
    roles = [choice["delta"].get("role", "") for chunk in found for choice in chunk["choices"]]
    assert roles[0] == "assistant" and None not in roles


def test_a_streamed_call_ends_with_tool_calls_and_has_one_id(http):
    """vllm-project/vllm-ascend#8327, vllm-project/vllm#9693"""
    found = chunks(ask(http, stream=True, **MUST_CALL | {"max_tokens": 150}))
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [choice["delta"] for chunk in found for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert calls[0]["id"] and all(call.get("id") is None for call in calls[1:])
    assert {call["index"] for call in calls} == {0}
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert isinstance(json.loads(arguments)["x"], bool)


def test_a_list_of_prompts_is_one_answer_each(http):
    """abetlen/llama-cpp-python#187"""
    answer = http.post(
        "/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2, "stop": None}
    )
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
