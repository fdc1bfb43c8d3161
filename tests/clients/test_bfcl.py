"""The Berkeley function calling leaderboard's questions and functions, as OpenAI's tools: a call
that must be made is one of these functions, and its arguments are valid.

The functions are the data of the package bfcl-eval, whose own requirements nothing here needs.
"""

import json
import random
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import openai
import pytest

from tests.clients.conftest import MODEL
from tests.support.tiers import examples

FILES = ("simple_python", "simple_java", "multiple", "parallel", "live_simple", "live_multiple")
TYPES = {"dict": "object", "float": "number", "double": "number", "tuple": "array"}
KNOWN = ("string", "integer", "number", "boolean", "array", "object", "null")


def schema_of(found):
    """Returns a schema in JSON Schema's words, as the leaderboard turns it into one: what is no
    type there is a text, and "any" any value.
    """
    if not isinstance(found, dict):
        return found
    made = {}
    for name, value in found.items():
        if name == "properties":
            made[name] = {key: schema_of(each) for key, each in value.items()}
        elif name == "items":
            made[name] = schema_of(value)
        elif name in ("required", "enum", "description", "minItems", "maxItems"):
            made[name] = value
    kind = str(found.get("type", "any")).lower()
    kind = TYPES.get(kind, kind)
    if kind != "any":
        made["type"] = kind if kind in KNOWN else "string"
    return made


def questions(name, num):
    """Returns some of a file's questions with their functions."""
    folder = Path(find_spec("bfcl_eval").submodule_search_locations[0]) / "data"
    lines = (folder / f"BFCL_v4_{name}.json").read_text().splitlines()
    return [json.loads(line) for line in random.Random(name).sample(lines, min(num, len(lines)))]


def tools_of(question):
    """Returns a question's functions; OpenAI's names hold no dots."""
    return [
        {
            "name": function["name"].replace(".", "_"),
            "description": function["description"],
            "parameters": schema_of(function["parameters"]),
        }
        for function in question["function"]
    ]


def answer_of(client, question, functions):
    """Returns the answer to a question; None where its functions are refused, since no arguments
    are valid.
    """
    try:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=question["question"][0],
            tools=[{"type": "function", "function": one} for one in functions],
            tool_choice="required",
            max_tokens=400,
            temperature=0,
        )
    except openai.BadRequestError as error:
        assert error.param == "tools" and "Unsatisfiable" in error.message, question["id"]
        return None
    return answer.choices[0]


@pytest.mark.parametrize("name", FILES)
def test_calls_of_the_functions_are_valid(base_url, name):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    num_whole = 0
    for question in questions(name, examples(4)):
        functions = tools_of(question)
        answer = answer_of(client, question, functions)
        if answer is None or answer.finish_reason == "length":
            continue
        assert answer.finish_reason == "tool_calls" and answer.message.tool_calls, question["id"]
        schemas = {one["name"]: one["parameters"] for one in functions}
        for call in answer.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, schemas[call.function.name])
        num_whole += 1
    assert num_whole, "no answer came to its end"
