"""Schemas of tools that no grammar enforces whole: what is dropped, and that the rest compiles."""

import json
import random

import pytest

from octavo.text.grammar.admission import admit
from octavo.text.grammar.enforceable import enforceable, without_unenforced
from octavo.text.grammar.schema import SchemaError
from octavo.text.parsers.call_forms import NO_REASONING, CallRules, build_response_form
from octavo.text.parsers.formats import named_tool_format
from tests.support.call_texts import marked_vocabulary
from tests.support.schemas import some_schema
from tests.support.tiers import examples
from tests.text.test_grammar_fuzz import broken


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return marked_vocabulary(tmp_path_factory.mktemp("tokenizer"))[1]


def compiles(compiler, schema) -> None:
    """Raises if the grammar of a call is refused in any kind of format."""
    for name in ("hermes", "qwen3_coder", "glm45", "pythonic"):
        rules = CallRules({"f": schema}, must_call=True)
        tools = named_tool_format(name)
        assert tools is not None
        admit(build_response_form(None, tools, rules, NO_REASONING), compiler)


TEXT = {"type": "string"}
PROPERTY = "#/properties/x"
DROPPED = {
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 3}}, ["propertyNames"]),
    "uniqueItems": ({"type": "array", "items": TEXT, "uniqueItems": True}, ["uniqueItems"]),
    "not": ({"not": {"type": "null"}}, ["not"]),
    "conditions": ({"if": {"type": "null"}, "then": True, "else": False}, ["if", "then", "else"]),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b"}, ["pattern"]),
    "back-reference": ({"type": "string", "pattern": "(a)\\1"}, ["pattern"]),
    "word boundary": ({"type": "string", "pattern": "\\bfoo"}, ["pattern"]),
    "broken pattern": ({"type": "string", "pattern": "("}, ["pattern"]),
    "format": ({"type": "string", "format": "phone"}, ["format"]),
    "oneOf that overlaps": ({"oneOf": [TEXT, {"type": "string", "maxLength": 3}]}, ["oneOf"]),
    "external reference": ({"$ref": "https://example.com/a.json"}, ["$ref"]),
    "missing reference": ({"$ref": "#/$defs/none"}, ["$ref"]),
    "unknown type": ({"type": "strng"}, ["type"]),
    "negative length": ({"type": "string", "minLength": -1}, ["minLength"]),
    "length beyond another": ({"type": "string", "minLength": 3, "maxLength": 1}, [""]),
    "counted properties": (
        {
            "type": "object",
            "properties": {"a": TEXT, "b": TEXT, "c": TEXT},
            "minProperties": 2,
        },
        ["minProperties"],
    ),
    "overlapping patterns": (
        {"type": "object", "patternProperties": {"^a": TEXT, "b$": {"type": "null"}}},
        ["patternProperties"],
    ),
    "options of the compiler": ({"type": "string", "x-guidance": {}}, ["x-guidance"]),
}


@pytest.mark.parametrize("kind", DROPPED)
def test_a_keyword_that_no_grammar_enforces_is_dropped_and_named(compiler, kind):
    part, keywords = DROPPED[kind]
    schema = {"type": "object", "properties": {"x": part, "y": TEXT}, "required": ["x"]}
    found = enforceable(schema, is_strict=False)
    assert list(found.dropped) == [f"{PROPERTY}/{key}".rstrip("/") for key in keywords]
    assert found.schema["properties"]["y"] == TEXT
    compiles(compiler, found.schema)
    with pytest.raises(SchemaError):
        enforceable(schema, is_strict=True)


def deep(levels: int) -> dict:
    schema: dict = TEXT
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


WHOLE = {
    "too deep": deep(80),
    "too many properties": {
        "type": "object",
        "properties": {str(index): {} for index in range(3000)},
    },
    "endless": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    "no object": {"type": "string"},
    "nothing": {"type": "object", "properties": {"x": False}, "required": ["x"]},
    "needs itself": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "an enumeration of other types": {"enum": [1, "a"]},
    "a list for properties": {"type": "object", "properties": ["x"]},
    "text for required": {"type": "object", "required": "x"},
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_schema_that_no_object_meets_admits_any(compiler, kind):
    found = enforceable(WHOLE[kind], is_strict=False)
    assert found.dropped and found.schema["type"] == "object"
    compiles(compiler, found.schema)
    with pytest.raises(SchemaError):
        enforceable(WHOLE[kind], is_strict=True)


@pytest.mark.parametrize("seed", range(examples(20)))
def test_no_schema_at_all_keeps_a_call_from_compiling(compiler, seed):
    rng = random.Random(seed)
    part = broken(rng, some_schema(rng))
    schema = rng.choice([part, {"type": "object", "properties": {"x": part}, "required": ["x"]}])
    found = enforceable(schema, is_strict=False)
    json.dumps(found.schema)
    compiles(compiler, found.schema)


UNWRITABLE = ['"\\u003c/parameter>"', '"\\u003c/arg_value>"']


def test_strings_for_which_no_text_stands_fail_no_request(compiler):
    schema = {"type": "object", "properties": {"x": {"enum": UNWRITABLE}}, "required": ["x"]}
    compiles(compiler, enforceable(schema, is_strict=True).schema)


def test_values_that_their_limits_exclude_are_left_out(compiler):
    none = {"allOf": [{"enum": ["abcde", 7]}, {"maxLength": 4, "maximum": 3}]}
    schema = {"type": "object", "properties": {"x": none}, "additionalProperties": none}
    compiles(compiler, enforceable(schema, is_strict=True).schema)


def test_look_around_in_a_pattern_is_dropped_and_an_invalid_pattern_kept():
    texts = {"a": "(?<=a)b", "b": "(?!x)y", "c": "^a$", "d": "(a"}
    schema = {
        "properties": {key: {"type": "string", "pattern": text} for key, text in texts.items()}
    }
    found = without_unenforced(schema)
    assert found.dropped == ("#/properties/a/pattern", "#/properties/b/pattern")
    assert found.schema["properties"]["d"] == {"type": "string", "pattern": "(a"}
