"""The table of request fields: what clients send besides is taken within bounds, the rest refused
by name, and GET /v1/capabilities says what the checks do.
"""

import pytest

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": HELLO, "max_tokens": 2, "allowed_token_ids": [70, 71]}

TAKEN = [
    {"metadata": {"a": "b"}},
    {"store": False},
    {"store": True},
    {"service_tier": "auto"},
    {"safety_identifier": "u-1"},
    {"prompt_cache_key": "k"},
    {"prompt_cache_retention": "24h"},
    {"verbosity": "low"},
    {"parallel_tool_calls": True},
    {"modalities": ["text"]},
    {"functions": [], "function_call": "none"},
    {"tools": [], "tool_choice": "auto"},
    {"functions": [{"name": "f"}], "function_call": "none"},
    {"max_tokens": -1},
    {"max_completion_tokens": -1},
    {"logit_bias": {}},
    {"stop": []},
    {"prediction": None, "audio": None, "web_search_options": None},
    {"reasoning_effort": "medium"},
    {"reasoning_effort": "none"},
    {"session_id": "s"},
    {"stream_options": {"include_usage": True, "include_obfuscation": False}, "stream": True},
]

REFUSED = [
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"service_tier": "best"}, "service_tier"),
    ({"safety_identifier": "x" * 513}, "safety_identifier"),
    ({"prompt_cache_key": 7}, "prompt_cache_key"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{"description": "f"}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"prediction": {"type": "content", "content": ""}}, "prediction"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": "hard"}, "reasoning_effort"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"chat_template": "x"}, "chat_template"),
    ({"session_id": "x" * 513}, "session_id"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 512}, "truncate_prompt_tokens"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options"),
    ({"temprature": 1}, "temprature"),
]


def post(http, body, path="/v1/chat/completions"):
    return http.post(path, json=body)


@pytest.mark.parametrize("fields", TAKEN, ids="-".join)
def test_fields_that_mean_nothing_here_are_taken(http, fields):
    answer = post(http, CHAT | fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_out_of_bounds_is_refused_by_name(strict, fields, param):
    answer = post(strict, CHAT | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param) and error["message"].startswith(param)


def test_each_field_of_the_completions_route_is_known_by_its_meaning(strict):
    body = {"prompt": "Hello", "max_tokens": 1}
    for fields in ({"metadata": {}}, {"store": False}, {"truncate_prompt_tokens": 3}):
        assert post(strict, body | fields, "/v1/completions").status_code == 200
    for name in ("prompt_embeds", "vllm_xargs", "messages", "verbosity"):
        error = post(strict, body | {name: "x"}, "/v1/completions").json()["error"]
        assert error["param"] == name


@pytest.fixture(scope="module")
def listed(server):
    with server.http() as http:
        return http.get("/v1/capabilities").json()


def test_capabilities_name_the_model_and_every_route(http, listed):
    assert (listed["model"], listed["max_model_len"], listed["vocab_size"]) == ("tiny", 512, 320)
    assert http.get("/v1/capabilities", params={"model": "tiny"}).json() == listed
    assert http.get("/v1/capabilities", params={"model": "other"}).status_code == 404
    assert {"POST /v1/chat/completions", "GET /v1/capabilities"} <= set(listed["routes"])
    assert listed["features"]["chat"] and listed["features"]["infill"] is None


def test_capabilities_list_each_field_with_its_type_and_default(listed):
    rows = [row for row in listed["fields"] if row["name"] == "temperature"]
    assert len(rows) == 1 and len(rows[0]["paths"]) == 2
    assert (rows[0]["type"], rows[0]["min"], rows[0]["max"], rows[0]["default"]) == (
        "number",
        0,
        2,
        1.0,
    )
    assert all(row["takes"] and row["help"] and row["type"] for row in listed["fields"])
    logprobs = {row["paths"][0]: row for row in listed["fields"] if row["name"] == "logprobs"}
    assert logprobs["/v1/completions"]["max"] == 20
    assert logprobs["/v1/chat/completions"]["type"] == "boolean"


def test_values_that_go_with_others_are_those_that_are_checked(http, listed):
    """A neutral value is taken there, another one refused by the field's name."""
    others = {"top_k": 3, "mirostat_mode": 2, "repetition_penalty": 1.5, "dry_multiplier": 2}
    others["ignore_eos"] = True
    numbers = ("number", "integer", "boolean")
    rows = [row for row in listed["fields"] if "/v1/completions" in row["paths"]]
    asked = {
        "allowed_in_beam_search": {"use_beam_search": True, "n": 2},
        "allowed_at_temperature_0": {"temperature": 0},
        "allowed_with_a_form": {"guided_choice": ["yes", "no"]},
    }
    checked = 0
    for kind, fields in asked.items():
        for row in (row for row in rows if kind in row and row["type"] in numbers):
            name, body = row["name"], {"prompt": "Hello", "max_tokens": 1} | fields
            taken = http.post("/v1/completions", json=body | {name: row[kind][0]})
            assert taken.status_code == 200, (name, taken.text)
            refused = http.post("/v1/completions", json=body | {name: others.get(name, 0.5)})
            assert refused.status_code == 400, name
            assert refused.json()["error"]["param"] == name
            checked += 1
    assert checked >= 15


def test_ranges_that_are_listed_are_those_that_are_checked(http, listed):
    """A value at a listed bound is taken, one beyond it refused by its field's name."""
    numbers = [
        row
        for row in listed["fields"]
        if row["type"] in ("number", "integer") and "/v1/completions" in row["paths"]
    ]
    small = {"prompt": "Hello", "max_tokens": 1}
    needs = {
        "beam_width": {"use_beam_search": True},
        "length_penalty": {"use_beam_search": True},
        "prompt_logprob_start": {"prompt_logprobs": 0},
    }
    checked = 0
    for row in numbers:
        name = row["name"]
        for bound, step in (("min", -1), ("max", 1)):
            if bound in row and abs(row[bound]) < 2**31 - 1:
                beyond = row[bound] + step
                if (name, beyond) in (
                    ("top_k", -1),
                    ("top_n_sigma", -1),
                    ("repetition_penalty", -1),
                ):
                    beyond = row[bound] - 2
                body = small | needs.get(name, {}) | {name: beyond}
                if name == "max_tokens" and bound == "max":
                    continue  # an answer ends with the context, whatever was asked for
                answer = post(http, body, "/v1/completions")
                assert answer.status_code == 400, (name, beyond)
                assert answer.json()["error"]["param"] == name, (name, beyond)
                checked += 1
    assert checked > 15


def test_interactions_that_are_listed_are_checked(http, strict, listed):
    """A field without what it needs is refused, or ignored if it then changes nothing; one beside
    what it excludes is refused.
    """
    values = {"boolean": True, "integer": 1, "number": 0.5, "object": {}, "string": "left"}
    values["array"] = [1]
    beside = {
        "truncate_prompt_tokens": 1,
        "prompt_logprobs": 1,
        "decoder_prompt_token_ids": [1],
        "suffix": "left",
    }
    seen = 0
    for row in listed["fields"]:
        path = row["paths"][0]
        kind = row["type"] if isinstance(row["type"], str) else row["type"][0]
        value = row.get("choices", [values.get(kind)])[0]
        base = CHAT if "chat" in path else {"prompt": "Hello", "max_tokens": 1}
        if "needs" in row:
            fields = base | {row["name"]: value}
            assert post(strict, fields, path).json()["error"]["param"] == row["name"], row
            answer = post(http, fields, path)
            named = answer.headers.get("x-octavo-ignored")
            assert answer.status_code == 400 or named == row["name"], row
            seen += 1
        for other in row.get("excludes", ()):
            other_value = beside.get(other, True)
            answer = post(http, base | {row["name"]: value, other: other_value}, path)
            assert answer.json()["error"]["param"] == row["name"], row
            seen += 1
    assert seen >= 9


def test_the_openapi_description_has_each_body_that_is_read(http):
    paths = http.get("/openapi.json").json()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    schema = body["schema"]
    assert "messages" in schema["required"] and "$defs" not in schema
    temperature = schema["properties"]["temperature"]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    message = schema["properties"]["messages"]["items"]
    assert {"role", "content", "tool_calls"} <= set(message["properties"])
    assert "requestBody" in paths["/tokenize"]["post"]
