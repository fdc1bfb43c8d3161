"""Forms of answers over HTTP, through OpenAI's own client where it knows the field."""

import json

import jsonschema
import pytest
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


FORMS = [
    {"response_format": schema_format(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
    {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_an_answer_has_the_form_that_it_was_asked_for(http, form, path):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    answer = http.post(path, json={"max_tokens": 200, "seed": 4} | prompt | form)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    jsonschema.validate(json.loads(text), SCHEMA)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"guided_choice": ["a", "b"]}, {"a", "b"}),
        ({"guided_regex": "x{2}"}, {"xx"}),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"a", "b"}),
    ],
)
def test_older_names_of_forms(http, form, texts):
    answer = http.post(CHAT, json={"messages": HELLO, "seed": 1} | form).json()
    assert answer["choices"][0]["message"]["content"] in texts


def test_a_stream_has_the_form_too(client):
    chunks = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=200,
        seed=2,
        stream=True,
        response_format=schema_format(SCHEMA),
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), SCHEMA)


class Answer(BaseModel):
    right: bool
    grade: int


def test_the_client_parses_an_answer_into_its_model(client):
    made = client.chat.completions.parse(
        model="tiny", messages=HELLO, max_tokens=200, seed=5, response_format=Answer
    )
    assert isinstance(made.choices[0].message.parsed, Answer)


def test_a_json_object_may_bring_its_schema(http):
    """In llama.cpp's form."""
    given = {"type": "json_object", "schema": SCHEMA}
    body = {"messages": HELLO, "max_tokens": 200, "seed": 2, "response_format": given}
    answer = http.post(CHAT, json=body)
    jsonschema.validate(json.loads(answer.json()["choices"][0]["message"]["content"]), SCHEMA)


REFUSED = [
    (
        {"response_format": schema_format({"properties": {"a": {"not": {}}}})},
        "response_format",
        "#/properties/a/not",
    ),
    ({"response_format": schema_format({"$ref": "#"})}, "response_format", "#/$ref"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "expected an object"),
    (
        {"response_format": {"type": "json_object", "schema": "a"}},
        "response_format",
        "schema: got 'a', expected an object",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "exactly one of json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "not supported with"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "with structured_outputs"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "requires guided_json"),
]


@pytest.mark.parametrize(("form", "param", "words"), REFUSED)
def test_a_form_that_cannot_be_kept_is_refused(http, form, param, words):
    answer = http.post(CHAT, json={"messages": HELLO} | form)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_without_strict_keywords_that_no_grammar_enforces_are_ignored(http):
    """Zod's records have propertyNames, pydantic's sets uniqueItems."""
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["a"]}, "maxItems": 1, "uniqueItems": True},
            "scores": {"type": "object", "maxProperties": 0, "propertyNames": {"type": "string"}},
        },
        "required": ["tags", "scores"],
    }
    format = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 200, "response_format": format})
    assert answer.status_code == 200, answer.text
    at = "response_format.json_schema.schema.properties"
    assert answer.headers["x-octavo-ignored"].split(", ") == [
        f"{at}.tags.uniqueItems",
        f"{at}.scores.propertyNames",
    ]
    found = json.loads(answer.json()["choices"][0]["message"]["content"])
    jsonschema.validate(found, schema)


def test_a_deep_schema_is_refused_and_the_next_request_is_answered(http):
    deep = '{"a":' * 10_000 + "{}" + "}" * 10_000
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"guided_json":{deep}}}'
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    form = {"guided_choice": ["fine"]}
    assert http.post(CHAT, json={"messages": HELLO} | form).status_code == 200


def test_capabilities_tell_of_forms(http):
    listed = http.get("/v1/capabilities").json()
    assert "structured_outputs" in json.dumps(listed)
