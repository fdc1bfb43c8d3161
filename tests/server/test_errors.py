"""Errors over HTTP: one form of body, a message with what, got and allowed, no traceback, and a
server that goes on.
"""

import openai
import pytest

from tests.support.live_server import LASTING, LONG, READABLE, until

GOOD = {"prompt": "Hello", "max_tokens": 2}


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert (
        body["error"]["code"] == status
        and "Traceback" not in response.text
        and "\n" not in body["error"]["message"]
    )
    return body["error"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"temperature": -1},
            "temperature",
            "temperature: got -1.0, expected a number from 0 to 2 (hint: 0 is greedy)",
        ),
        ({"temperature": "hot"}, "temperature", "temperature: got 'hot', expected a number"),
        (
            {"temprature": 1},
            "temprature",
            "temprature: no such field (hint: did you mean temperature?)",
        ),
        ({"top_p": 0}, "top_p", "top_p: got 0.0, expected a number above 0 and at most 1"),
        (
            {"top_k": -2},
            "top_k",
            "top_k: got -2, expected 0 or -1 (off), or an integer from 1 to 2147483647",
        ),
        ({"top_k": 1.5}, "top_k", "top_k: got 1.5, expected 0 or -1 (off), or an integer"),
        ({"n": 0}, "n", "n: got 0, expected an integer from 1 to 16384"),
        ({"n": 2, "temperature": 0}, "n", "n: got 2, expected 1 when the temperature is 0"),
        (
            {"max_tokens": -3},
            "max_tokens",
            "max_tokens: got -3, expected an integer from 1 to 2147483647",
        ),
        (
            {"max_tokens": 0},
            "max_tokens",
            "max_tokens: got 0, requires echo and no stream",
        ),
        ({"logprobs": 21}, "logprobs", "logprobs: got 21, expected at most 20"),
        ({"logprobs": -1}, "logprobs", "logprobs: got -1, expected an integer of at least 0"),
        ({"seed": 2**70}, "seed", "seed: got 1180591620717411303424, expected a"),
        (
            {"stop": [""]},
            "stop[0]",
            "stop[0]: got an empty string",
        ),
        ({"stop": [1]}, "stop", "stop: got [1], expected a string or a list of strings"),
        (
            {"stop_token_ids": [999]},
            "stop_token_ids",
            "stop_token_ids: got the token id 999, expected 0 to 319",
        ),
        (
            {"logit_bias": {"a": 1}},
            "logit_bias",
            "logit_bias: got the key 'a', expected token ids",
        ),
        ({"prompt": []}, "prompt", "prompt: got an empty list, expected at least one prompt"),
        ({"prompt": ""}, "prompt", "prompt: got no token, expected at least one"),
        ({"prompt": [5, 320]}, "prompt", "prompt: got the token id 320, expected 0 to 319"),
        ({"prompt": [5, -1]}, "prompt", "prompt: got the token id -1, expected 0 to 319"),
        (
            {"prompt": {"text": 1}},
            "prompt",
            "prompt: got {'text': 1}, expected a string, token ids, or a list of either",
        ),
        (
            {"suffix": "end"},
            "suffix",
            "suffix: the model's vocabulary has no fill-in-the-middle tokens",
        ),
        (
            {"n": 3, "best_of": 2},
            "best_of",
            "best_of: got 2, expected None, or an integer from n (3) to 16384",
        ),
        (
            {"best_of": 3, "temperature": 0},
            "best_of",
            "best_of: got 3, expected 1 when the temperature is 0",
        ),
        (
            {"best_of": 3, "stream": True},
            "best_of",
            "best_of: got 3 with stream, expected the value of n (1)",
        ),
        (
            {"use_beam_search": True, "stream": True},
            "stream",
            "stream: got true, not supported with use_beam_search",
        ),
        (
            {"use_beam_search": True, "n": 3, "beam_width": 2},
            "n",
            "n: got 3, expected at most the beam_width (2)",
        ),
        (
            {"use_beam_search": True, "beam_width": 65},
            "beam_width",
            "beam_width: got 65, expected at most 64 sequences at once",
        ),
        (
            {"use_beam_search": True, "top_p": 0.5},
            "top_p",
            "top_p: got 0.5, expected 1.0 in a beam search",
        ),
        (
            {"length_penalty": 1.0},
            "length_penalty",
            "length_penalty: requires use_beam_search true",
        ),
        (
            {"stream_options": {"include": 1}, "stream": True},
            "stream_options.include",
            "stream_options.include: no such field",
        ),
        (
            {"request_id": ""},
            "request_id",
            "request_id: got '', expected a string of 1 to 200 characters",
        ),
    ],
)
def test_a_bad_field_is_named(strict, fields, param, message):
    error = error_of(strict.post("/v1/completions", json=GOOD | fields), 400)
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert error["message"].startswith(message)
    assert strict.post("/v1/completions", json=GOOD).status_code == 200


def test_a_missing_field_is_named(http):
    error = error_of(http.post("/v1/completions", json={}), 400)
    assert (error["param"], error["message"]) == ("prompt", "prompt: field required")


@pytest.mark.parametrize(
    "body", [b'{"prompt": ', b"", b"[1]", b'"text"', b"\xff", rb'{"prompt": "\ud800"}']
)
def test_a_body_that_is_no_json_object(http, body):
    assert "JSON" in error_of(http.post("/v1/completions", content=body), 400)["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-Infinity"])
def test_numbers_that_are_not_finite(http, number):
    error = error_of(
        http.post("/v1/completions", content=f'{{"prompt": "Hello", "temperature": {number}}}'), 400
    )
    assert error["param"] == "temperature"


def test_a_body_that_is_too_large(http):
    error = error_of(http.post("/v1/completions", content=b" " * (33 << 20)), 413)
    assert error["message"] == "the body is too large: expected at most 33554432 bytes"


def test_an_unknown_model(client, http):
    with pytest.raises(openai.NotFoundError, match="The model `gpt-4` does not exist") as caught:
        client.completions.create(model="gpt-4", prompt="Hello")
    assert caught.value.param == "model" and caught.value.type == "NotFoundError"
    error_of(http.get("/v1/models/gpt-4"), 404)


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("GET", "/v1/nothing", "route not found (hint: see GET /openapi.json)"),
        ("GET", "/docs", "'/docs': route not found"),
        ("POST", "/chat/completions", "did you mean POST /v1/chat/completions?"),
        ("POST", "/v1/v1/completions", "did you mean POST /v1/completions?"),
        ("DELETE", "/v1/v1/completions", "see GET /openapi.json"),
        ("GET", "/" + "x" * 5000, f"/{'x' * 198}...: route not found"),
    ],
)
def test_an_unknown_path_is_told_which_was_meant(http, method, path, said):
    error = error_of(http.request(method, path), 404)
    assert error["type"] == "NotFoundError" and said in error["message"]


def test_an_unknown_method_is_told_those_of_all_routes_of_the_path(http):
    refused = http.put("/v1/files")
    error = error_of(refused, 405)
    assert error["type"] == "MethodNotAllowedError"
    said = "PUT '/v1/files': method not allowed, expected GET, POST"
    assert error["message"] == said
    assert refused.headers["allow"] == "GET, POST"


def test_a_request_id_in_use(server, http):
    body = LASTING | {"stream": True, "request_id": "twice"}
    with server.http() as other, http.stream("POST", "/v1/completions", json=body) as first:
        lines = first.iter_lines()
        next(lines)
        error = error_of(other.post("/v1/completions", json=GOOD | {"request_id": "twice"}), 400)
    assert error["param"] == "request_id" and "is in use" in error["message"]


@pytest.mark.alone
def test_one_bad_prompt_of_several_refuses_them_all(server, http):
    error = error_of(http.post("/v1/completions", json=LONG | {"prompt": [[5], [6], [999]]}), 400)
    assert "got the token id 999" in error["message"]
    assert until(lambda: server.metric("num_requests_running") == 0, seconds=0.5)


def test_openai_raises_its_own_kinds(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="tiny", prompt="Hello", **READABLE | {"temperature": 1.9, "top_p": 3}
        )
    assert caught.value.param == "top_p"
