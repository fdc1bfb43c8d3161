"""Anthropic's, Ollama's and Cohere's APIs in their own forms, without their clients."""

import json

import pytest

from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

HELLO = [{"role": "user", "content": "Hello"}]
TALK = [*HELLO, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on"}]
LENGTH = 24


@pytest.fixture(scope="module")
def plain(server):
    """Returns the chat route's text for messages and a seed."""

    def ask(messages, **fields):
        body = {"model": "tiny", "messages": messages, "max_tokens": LENGTH, "seed": 5} | fields
        with server.http() as http:
            answer = http.post("/v1/chat/completions", json=body).json()
        return answer["choices"][0]["message"]["content"], answer

    return ask


def anthropic(http, messages=HELLO, **fields):
    body = {"model": "tiny", "messages": messages, "max_tokens": LENGTH, "seed": 5}
    return http.post("/v1/messages", json=body | fields)


def ollama(http, path="/api/chat", *, options=None, **fields):
    body = {"model": "tiny", "options": {"num_predict": LENGTH, "seed": 5} | (options or {})}
    body |= {"messages": HELLO} if path == "/api/chat" else {"prompt": "Hello"}
    return http.post(path, json=body | fields)


def cohere(http, messages=HELLO, **fields):
    body = {"model": "tiny", "messages": messages, "max_tokens": LENGTH, "seed": 5}
    return http.post("/v2/chat", json=body | fields)


def named_events(response):
    """Returns the events of a stream, and checks that each one's name is its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def lines(response):
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


# -- Anthropic -------------------------------------------------------------------------------------


def test_a_message_is_the_chat_routes_answer(http, plain):
    text, chat = plain(TALK)
    response = anthropic(http, TALK)
    made = response.json()
    assert response.headers["request-id"].startswith("req_")
    assert made["content"] == [{"type": "text", "text": text}]
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", "tiny")
    assert (made["stop_reason"], made["stop_sequence"]) == ("max_tokens", None)
    usage = made["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == LENGTH and usage["cache_read_input_tokens"] > 0


def test_the_typed_events_of_a_message_come_in_order(http, plain):
    events = named_events(anthropic(http, TALK, stream=True))
    kinds = [event["type"] for event in events]
    opening, closing = kinds[:3], kinds[-3:]
    assert opening == ["message_start", "content_block_start", "ping"]
    assert closing == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == plain(TALK)[0]
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == LENGTH


def test_system_blocks_and_turns_of_one_role_are_joined(http, plain):
    text, _ = plain(
        [{"role": "system", "content": "Be\nkind"}, {"role": "user", "content": "a\nb"}]
    )
    blocks = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "kind"},
    ]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ]
    assert anthropic(http, turns, system=blocks).json()["content"][0]["text"] == text


def test_a_last_message_of_the_assistants_is_continued(http, plain):
    prefilled = [*HELLO, {"role": "assistant", "content": "Well, "}]
    text, chat = plain(prefilled, continue_final_message=True, add_generation_prompt=False)
    assert anthropic(http, prefilled).json()["content"][0]["text"] == text
    assert ollama(http, messages=prefilled, stream=False).json()["message"]["content"] == text
    counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": prefilled})
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_each_api_says_which_text_ended_the_answer(http, plain):
    whole, _ = plain(HELLO)
    stop = whole[4:6]
    before = whole[: whole.index(stop)]
    message = anthropic(http, stop_sequences=[stop]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == before
    line = ollama(http, stream=False, options={"stop": [stop]}).json()
    assert (line["done_reason"], line["message"]["content"]) == ("stop", before)
    answer = cohere(http, stop_sequences=[stop]).json()
    assert answer["finish_reason"] == "STOP_SEQUENCE"
    assert answer["message"]["content"][0]["text"] == before


def test_an_answer_that_fills_the_context_says_so(http):
    made = anthropic(http, max_tokens=100_000, temperature=0.0, seed=3).json()
    usage = made["usage"]
    total = sum(usage[name] for name in usage)
    assert (made["stop_reason"], total) in {
        ("model_context_window_exceeded", 512),
        ("end_turn", total),
    }


def test_models_have_anthropics_form_for_its_clients(http):
    headers = {"anthropic-version": "2023-06-01"}
    page = http.get("/v1/models", headers=headers).json()
    (card,) = page["data"]
    assert (card["type"], card["id"], card["max_input_tokens"]) == ("model", "tiny", 512)
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "tiny", "tiny")
    assert http.get("/v1/models", params={"after_id": "tiny"}, headers=headers).json()["data"] == []
    assert http.get("/v1/models/tiny", headers=headers).json() == card
    assert http.get("/v1/models").json()["object"] == "list"
    unknown = http.get("/v1/models", params={"after_id": "x"}, headers=headers)
    assert (unknown.status_code, unknown.json()["type"]) == (400, "error")


# -- Ollama ----------------------------------------------------------------------------------------


def test_a_chat_of_ollamas_is_the_chat_routes_answer(http, plain):
    text, chat = plain(TALK)
    made = ollama(http, messages=TALK, stream=False, model="tiny:latest").json()
    assert made["message"] == {"role": "assistant", "content": text}
    assert (made["model"], made["done"], made["done_reason"]) == ("tiny:latest", True, "length")
    counts = (made["prompt_eval_count"], made["eval_count"], made["load_duration"])
    assert counts == (chat["usage"]["prompt_tokens"], LENGTH, 0)
    assert made["total_duration"] >= made["eval_duration"] + made["prompt_eval_duration"] > 0


def test_a_stream_of_ollamas_ends_with_statistics(http, plain):
    *parts, last = lines(ollama(http, messages=TALK))
    assert "".join(part["message"]["content"] for part in parts) == plain(TALK)[0]
    assert not any(part["done"] for part in parts)
    assert last["done"] and last["message"]["content"] == "" and last["eval_count"] == LENGTH


def test_logprobs_of_ollamas_are_the_chat_routes(http, plain):
    _, chat = plain(HELLO, logprobs=True, top_logprobs=2)
    expected = chat["choices"][0]["logprobs"]["content"]
    made = ollama(http, logprobs=True, top_logprobs=2, stream=False).json()
    assert made["logprobs"] == expected
    parts = lines(ollama(http, logprobs=True, top_logprobs=2))
    assert [entry for part in parts for entry in part.get("logprobs", ())] == expected


def test_generate_renders_the_prompt_or_takes_it_raw(http, plain):
    system = [{"role": "system", "content": "Be kind"}]
    made = ollama(http, "/api/generate", system="Be kind", stream=False).json()
    assert made["response"] == plain([*system, *HELLO])[0] and made["done"]
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": LENGTH, "seed": 5}
    raw = http.post("/v1/completions", json=body).json()
    unset = {"suffix": "", "template": "", "context": [], "images": [], "format": "", "raw": False}
    again = ollama(http, "/api/generate", system="Be kind", stream=False, **unset).json()
    assert again["response"] == made["response"]
    parts = lines(ollama(http, "/api/generate", raw=True))
    assert "".join(part["response"] for part in parts) == raw["choices"][0]["text"]
    assert parts[-1]["prompt_eval_count"] == raw["usage"]["prompt_tokens"]


def test_an_answer_without_a_bound_ends_with_the_context(http):
    options = {"num_predict": -1, "temperature": 1.5, "seed": 1, "num_ctx": 512}
    made = ollama(http, stream=False, options=options).json()
    total = made["prompt_eval_count"] + made["eval_count"]
    assert made["done_reason"] == "stop" or total == 512


def test_a_request_without_text_says_that_the_model_is_loaded(http):
    for path, empty in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})):
        made = ollama(http, path, **empty, keep_alive="5m").json()
        assert (made["done"], made["done_reason"]) == (True, "load")


def test_models_are_listed_and_described(http):
    (entry,) = http.get("/api/tags").json()["models"]
    assert entry["name"] == entry["model"] == "tiny:latest" and len(entry["digest"]) == 64
    (running,) = http.get("/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == ("tiny:latest", 512)
    details = entry["details"]
    assert (details["format"], details["family"]) == ("safetensors", "llama")
    assert details["families"] == ["llama"] and details["quantization_level"] in ("F32", "BF16")
    assert details["parameter_size"].endswith("K") and entry["size"] > 10_000
    shown = http.post("/api/show", json={"model": "tiny:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["template"].startswith("{% for m in messages %}")
    assert http.get("/api/version").json() == http.get("/version").json()
    assert http.head("/").status_code == 200


@pytest.mark.parametrize("path", ["push", "create", "blobs/sha256:0"])
def test_what_ollama_has_besides_is_refused_by_name(http, path):
    response = http.post(f"/api/{path}", json={"model": "tiny"})
    assert response.status_code == 501
    assert response.json()["error"].startswith(f"/api/{path}: not supported by this server (hint:")


# -- Cohere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v2/chat", "/cohere/v2/chat"])
def test_an_answer_of_coheres_is_the_chat_routes(http, plain, path):
    text, chat = plain(TALK)
    blocks = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in TALK
    ]
    body = {"model": "tiny", "messages": blocks, "max_tokens": LENGTH, "seed": 5}
    made = http.post(path, json=body).json()
    assert made["message"] == {"role": "assistant", "content": [{"type": "text", "text": text}]}
    assert made["finish_reason"] == "MAX_TOKENS"
    num_prompt = chat["usage"]["prompt_tokens"]
    assert made["usage"]["tokens"] == {"input_tokens": num_prompt, "output_tokens": LENGTH}


def test_a_stream_of_coheres_has_its_events_and_logprobs(http, plain):
    events = named_events(cohere(http, TALK, stream=True, logprobs=True))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message-start", "content-start"]
    assert kinds[-2:] == ["content-end", "message-end"]
    gains = events[2:-2]
    text = "".join(event["delta"]["message"]["content"]["text"] for event in gains)
    assert text == plain(TALK)[0]
    whole = cohere(http, TALK, logprobs=True).json()["logprobs"]
    ids = [token_id for event in gains for token_id in event["logprobs"]["token_ids"]]
    assert ids == [token_id for item in whole for token_id in item["token_ids"]]
    assert len(ids) == LENGTH
    assert events[-1]["delta"]["finish_reason"] == "MAX_TOKENS"


def test_what_a_tool_of_coheres_found_may_come_as_documents(http):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [*HELLO, {"role": "assistant", "tool_plan": "Look", "tool_calls": [call]}]
    found = [{"type": "document", "document": {"data": '{"a": 1}'}}, {"type": "text", "text": "b"}]
    told = [*asked, {"role": "tool", "tool_call_id": "1", "content": found}]
    text = [*asked, {"role": "tool", "tool_call_id": "1", "content": '{"a": 1}\nb'}]
    assert cohere(http, told).json()["message"] == cohere(http, text).json()["message"]
    document = [{"role": "user", "content": found[:1]}]
    assert "expected 'tool'" in message_of("cohere", cohere(http, document))


# -- all -------------------------------------------------------------------------------------------

ASKS = {"anthropic": anthropic, "ollama": ollama, "cohere": cohere}


def message_of(api, response):
    """Returns the message of an error's body, and checks the body's form."""
    body = response.json()
    if api == "anthropic":
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
        assert response.headers["request-id"] == body["request_id"]
        return body["error"]["message"]
    return body["error"] if api == "ollama" else body["message"]


FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
IMAGE = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
TOOL = [{"name": "f", "input_schema": {}}]


@pytest.mark.parametrize(
    ("api", "fields", "said"),
    [
        (
            "anthropic",
            {"max_token": 3},
            "max_token: no such field (hint: did you mean max_tokens?)",
        ),
        ("anthropic", {"max_tokens": 0}, "max_tokens: got 0, expected"),
        ("anthropic", {"max_tokens": None}, "max_tokens: "),
        ("anthropic", {"messages": []}, "messages: got an empty list"),
        ("anthropic", {"messages": IMAGE}, "image: got an image, but the model accepts"),
        ("anthropic", {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role: "),
        ("anthropic", {"tools": TOOL * 2}, "tools[1].name: got 'f' twice"),
        ("anthropic", {"tools": [{"type": "bash_20250124", "name": "b"}]}, "tools[0].type: "),
        ("anthropic", {"tool_choice": {"type": "any"}}, "tool_choice: requires tools"),
        (
            "anthropic",
            {"tools": TOOL, "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice: got the function 'g', expected f",
        ),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: "),
        (
            "anthropic",
            {"thinking": {"type": "adaptive"}},
            "thinking: got the type 'adaptive', but `tiny` does not support thinking",
        ),
        ("anthropic", {"stop_sequences": [""]}, "stop_sequences[0]: "),
        ("anthropic", {"temperature": 9}, "temperature: got 9"),
        ("anthropic", {"metadata": {"user_id": "u" * 513}}, "metadata.user_id: "),
        (
            "anthropic",
            {"output_config": {"format": FORMAT}, "output_format": FORMAT},
            'output_config: got {"format": {"type": "json_schema", ',
        ),
        ("anthropic", {"mcp_servers": [{}]}, "mcp_servers: not supported by this server"),
        (
            "anthropic",
            {"output_config": {"effort": "low"}},
            "output_config.effort: got 'low', but the model's chat template has no such",
        ),
        ("ollama", {"formt": "json"}, "formt: no such field (hint: did you mean format?)"),
        ("ollama", {"format": "xml"}, "format: got 'xml', expected 'json' or a JSON schema"),
        ("ollama", {"tools": [{"type": "function"}]}, "tools[0].function: field required"),
        ("ollama", {"think": True}, 'think: got True, but "tiny" does not support thinking'),
        ("ollama", {"options": {"num_ctx": 513}}, "options.num_ctx: got 513, expected at most"),
        ("ollama", {"options": {"repeat_last_n": 1}}, "options.repeat_last_n: no such field"),
        ("ollama", {"options": {"num_predict": 0}}, "num_predict: got 0"),
        ("ollama", {"options": {"repeat_penalty": 0.0}}, "repeat_penalty: got 0"),
        ("ollama", {"messages": [{"role": "user", "content": "", "images": ["x"]}]}, "image: got"),
        ("cohere", {"seeds": 3}, "seeds: no such field (hint: did you mean seed?)"),
        ("cohere", {"p": 1.5}, "p: got 1.5, expected"),
        ("cohere", {"tool_choice": "REQUIRED"}, "tool_choice: requires tools"),
        ("cohere", {"documents": ["a"]}, "documents: not supported by this server"),
        ("cohere", {"safety_mode": "STRICT"}, "safety_mode: got 'STRICT', expected \"OFF\""),
        ("cohere", {"stop_sequences": list("abcdef")}, "stop_sequences: got "),
        ("cohere", {"messages": IMAGE}, "messages[0].content[0].type: got 'image', expected"),
    ],
)
def test_a_fault_is_named_in_the_apis_own_form(strict, api, fields, said):
    response = ASKS[api](strict, **fields)
    assert response.status_code == 400, response.text
    assert message_of(api, response).startswith(said)


def test_fields_of_anthropics_tools_that_mean_nothing_here_are_taken(http):
    """Its own coding client sends the first with every tool."""
    inert = {"eager_input_streaming": True, "defer_loading": False, "allowed_callers": ["direct"]}
    answer = ASKS["anthropic"](http, tools=[TOOL[0] | inert])
    assert answer.status_code == 200, answer.text
    answer = ASKS["anthropic"](http, tools=[TOOL[0] | {"defer_loading": True}])
    assert answer.status_code == 200
    assert answer.headers["x-octavo-ignored"] == "tools[].defer_loading"


@pytest.mark.parametrize("api", ASKS)
def test_an_unknown_model_and_a_body_that_is_no_json(http, api):
    unknown = ASKS[api](http, model="nobody")
    assert unknown.status_code == 404
    assert message_of(api, unknown).startswith("The model `nobody` does not exist.")
    broken = http.post(
        unknown.request.url, content="{", headers={"content-type": "application/json"}
    )
    assert broken.status_code == 400
    assert message_of(api, broken).startswith("the body is not valid JSON")
    wrong = http.get(unknown.request.url)
    assert wrong.status_code == 405 and message_of(api, wrong)


def test_every_dialect_needs_the_key_and_may_send_it_its_own_way():
    server = LiveServer(str(tiny_model_with_text()), "--served-model-name=tiny", key="secret")
    try:
        with server.http() as http:
            with_key = dict(http.headers)
            del http.headers["authorization"]
            for api, ask in ASKS.items():
                refused = ask(http)
                assert refused.status_code == 401
                assert message_of(api, refused).startswith("a valid API key is required")
            assert http.get("/api/tags").status_code == 401
            http.headers["x-api-key"] = "secret"
            assert anthropic(http).status_code == 200
            http.headers["x-api-key"] = "wrong"
            assert anthropic(http).status_code == 401
            del http.headers["x-api-key"]
            http.headers["authorization"] = with_key["authorization"]
            for ask in ASKS.values():
                tolerant = ask(http, unheard_of=1)
                assert tolerant.status_code == 200
                assert tolerant.headers["x-octavo-ignored"] == "unheard_of"
    finally:
        server.stop()


# -- what all of them share ------------------------------------------------------------------------

FILTERS = {
    "typical_p": 0.7,
    "top_n_sigma": 2.0,
    "dynatemp_range": 0.5,
    "xtc_probability": 1.0,
    "xtc_threshold": 0.001,
    "dry_multiplier": 1.5,
}


def respond(http, **fields):
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": LENGTH, "seed": 5}
    return http.post("/v1/responses", json=body | fields)


def texts(http, **fields):
    """Returns what Anthropic's, Cohere's and the Responses API answer to the same."""
    said = anthropic(http, **fields).json()["content"][0]["text"]
    told = cohere(http, **fields).json()["message"]["content"][0]["text"]
    item = respond(http, **fields).json()["output"][0]
    return [said, told, item["content"][0]["text"]]


def test_filters_of_whole_distributions_mean_the_same_in_every_dialect(http, plain):
    wanted, _ = plain(HELLO, **FILTERS)
    assert wanted != plain(HELLO)[0]
    assert texts(http, **FILTERS) == [wanted] * 3


def test_a_pattern_ends_answers_of_every_dialect(http, plain):
    whole, _ = plain(HELLO)
    pattern = rf"(?s).{{{len(whole) // 2}}}"
    assert texts(http, stop_regex=pattern, include=None) == [""] * 3


@pytest.mark.parametrize("ask", [anthropic, cohere, respond])
def test_a_filter_out_of_its_range_is_refused_by_name(http, ask):
    refused = ask(http, typical_p=2)
    assert refused.status_code == 400 and "typical_p" in refused.text
    refused = ask(http, stop_regex="a+")
    assert refused.status_code == 400 and "stop_regex: got 'a+'" in refused.text
