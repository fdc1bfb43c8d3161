"""Strings and objects of a JSON schema: patterns and lengths apply to decoded values, and objects
that are silent about additional properties are closed.
"""

import json
import re
import warnings

import pytest

from octavo.api.structured_outputs import StructuredOutputs
from octavo.text.grammar.lazy import GrammarSetup, LazyGrammars
from octavo.text.grammar.strings import rewrite_pattern
from tests.support.tiny_tokenizer import SPECIALS

END = SPECIALS.index("<eos>")
CHARACTERS = [*map(chr, range(0x20, 0x7F)), *"\b\t\n\f\r\u00a0\u2028é😀"]
"""Characters that JSON spells in all its ways but for `\\u`."""
PATTERNS = [
    r'^[^"]$',
    r"^[^\\]$",
    r'^[^"\\]$',
    r"^[^'\"]$",
    r'^[^"a-z]$',
    r"^[^\x22\x5c]$",
    r"^[^\u0022]$",
    r'^[^\s"]$',
    r"^[^\n]$",
    r"^[^/]$",
    r"^.$",
    r"^\S$",
    r"^\s$",
    r"^\D$",
    r"^[\s\S]$",
    r"^[\u0000-\u001f]$",
    r"^[\x20-\x7e]$",
    r"^[!-~]$",
    r'^(?:[^"]|"x)$',
    r'^(a|[^"\\])$',
    r"^[\b]$",
    r"^[a[b]$",
    r"^[^[\]]$",
    r"^[a&&b]$",
    r"^[a~~b]$",
    r"^[+--]$",
    r"^[-a]$",
    r"^[a-]$",
    r"^[$^]$",
    r"^\/$",
    r'"',
    r"\\",
]


@pytest.fixture
def holds(grammars, tokenizer):
    """A function that tells whether a schema's grammar allows a whole text."""

    def check(schema, text, **options):
        token_ids = [*tokenizer.encode(text, add_special_tokens=False), END]
        form = StructuredOutputs(json=schema, disable_any_whitespace=False, **options)
        return grammars.continues(grammars.admit(form), token_ids)

    return check


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_applies_to_the_decoded_value(holds, pattern):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # operators that Python's re may get
        expected = [char for char in CHARACTERS if re.search(pattern, char)]
    schema = {"type": "string", "pattern": pattern}
    assert [char for char in CHARACTERS if holds(schema, written(char))] == expected


def written(text):
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize(
    ("pattern", "rewritten"),
    [
        ("^[a-z]+$", "^[a-z]+$"),
        (r"\cJ\Z", r"\x0a\z"),
        (r"[\cJ\0]", r"[[\x0a\x00]&&[^\x00]]"),
        (r"[^]a]", r"[^]a\x00]"),
        (r"[[:alpha:]-]", r"[[:alpha:]-]"),
        ("a[", "a["),
        ("a\\", "a\\"),
    ],
)
def test_a_pattern_is_rewritten_in_rusts_syntax(pattern, rewritten):
    assert rewrite_pattern(pattern) == rewritten


@pytest.mark.parametrize(
    ("bounds", "value", "allowed"),
    [
        ({"maxLength": 2}, '"\\', True),
        ({"maxLength": 2}, "\n\t", True),
        ({"maxLength": 2}, "😀😀", True),
        ({"maxLength": 2}, "\n\t\b", False),
        ({"minLength": 2}, "\n", False),
        ({"minLength": 2}, '"', False),
        ({"minLength": 2, "maxLength": 2, "pattern": '^[^"]*$'}, "\\\\", True),
        ({"minLength": 2, "maxLength": 2, "pattern": '^[^"]*$'}, '\\"', False),
        ({"minLength": 2, "pattern": "^.{2}$"}, "\\é", True),
    ],
)
def test_a_length_counts_decoded_characters(holds, bounds, value, allowed):
    schema = {"type": "string", **bounds}
    assert holds(schema, json.dumps(value, ensure_ascii=False)) is allowed
    if "pattern" not in bounds:
        assert holds(schema, json.dumps(value)) is allowed


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, r'"\u00e9\ud83d\ude00\u0041\u0000"'),
        ({"type": "object"}, r'{"\u00e9":"\u0022"}'),
        ({}, r'["\u005c"]'),
        ({"const": "\x01"}, r'"\u0001"'),
        ({"enum": ["\n", "\x7f"]}, r'"\u007f"'),
    ],
)
def test_an_escape_may_go_on_where_it_may_begin(holds, schema, text):
    assert holds(schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": '^[^"]+$'},
        {"type": "string", "pattern": "^.*$"},
        {"type": "object", "patternProperties": {"^[^a]": {"type": "string"}}},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"enum": ["é"]},
    ],
)
def test_an_escape_does_not_begin_where_it_could_not_go_on(grammars, tokenizer, schema):
    """Every text that may come before one is tried: an escape begins behind none of them."""
    for begun in ('"\\', '"b\\', '{"\\', '{"b\\', '{"b":"\\', '{"a":1,"\\'):
        matcher = grammars.compile(grammars.admit(StructuredOutputs(json=schema)))
        token_ids = tokenizer.encode(begun, add_special_tokens=False)
        if all(matcher.try_accept(token_id) for token_id in token_ids):
            (letter,) = tokenizer.encode("u", add_special_tokens=False)
            assert not matcher.allows(letter), begun


def test_a_name_is_not_spelled_by_escapes_to_pass_for_another(holds):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    assert holds(schema, r'{"b":"x"}')
    assert not holds(schema, r'{"\u0061":"x"}')


# -- objects ---------------------------------------------------------------------------------------

A, B = ({"properties": {name: {"type": "integer"}}} for name in "ab")
PET = {"$defs": {"pet": {"type": "object", **A}}}
CLOSED = [
    {"type": "object", **A},
    {"anyOf": [{"type": "object", **A}, {"type": "null"}]},
    {"allOf": [{"type": "object", **A}]},
    {"$ref": "#/$defs/pet", **PET},
    {"$ref": "#/components/pet", "components": {"pet": {"type": "object", **A}}},
    {"type": "object", **A, "required": ["a"], "description": "a pet"},
    {"allOf": [{"type": "object", **A}, {"type": "object", "required": ["a"]}]},
    {"type": "object", **A, "anyOf": [{"required": ["a"]}]},
]


@pytest.mark.parametrize("schema", CLOSED, ids=json.dumps)
def test_an_object_that_names_its_properties_is_closed(holds, schema):
    assert holds(schema, '{"a":1}')
    assert not holds(schema, '{"a":1,"z":2}')
    assert not holds(schema, '{"a":1,"z":2}', disable_additional_properties=True)
    assert holds(schema, '{"a":1,"z":2}', disable_additional_properties=False)


def test_objects_within_others_are_closed(holds):
    pet = {"type": "object", **A}
    schema = {"type": "object", "properties": {"pets": {"type": "array", "items": pet}}}
    assert holds(schema, '{"pets":[{"a":1}]}')
    assert not holds(schema, '{"pets":[{"a":1,"z":2}]}')


def test_an_engine_may_leave_objects_open(tokenizer):
    setup = GrammarSetup(tokenizer, 300, (END,))
    token_ids = [*tokenizer.encode('{"a": 1, "z": 2}', add_special_tokens=False), END]
    for opens_objects in (False, True):
        grammars = LazyGrammars(lambda: setup, opens_objects=opens_objects)
        for asked in (None, True, False):
            form = StructuredOutputs(json=CLOSED[0], disable_additional_properties=asked)
            is_open = opens_objects if asked is None else not asked
            assert grammars.continues(grammars.admit(form), token_ids) is is_open


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"z": 1}),
        ({}, {"z": {"y": 1}}),
        ({"type": "object", **A, "additionalProperties": True}, {"a": 1, "z": 2}),
        ({"type": "object", **A, "additionalProperties": {}}, {"a": 1, "z": 2}),
        ({"type": "object", "required": ["z"]}, {"z": 1}),
        ({"type": "object", **A, "required": ["z"]}, {"a": 1, "z": 2}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"z": 1}),
        ({"type": "object", "patternProperties": {"^z": {"type": "integer"}}}, {"z": 1, "y": 2}),
        ({"type": "object", **A, "patternProperties": {"^z": {}}}, {"a": 1, "z": 2}),
        ({"type": "object", **A, "minProperties": 2, "required": ["a"]}, {"a": 1, "z": 2}),
        ({"allOf": [{"type": "object", **A}, {"type": "object", **B}]}, {"a": 1, "b": 2}),
        ({"type": "object", **A, "allOf": [B]}, {"a": 1, "b": 2}),
        ({"type": "object", **A, "anyOf": [{**B, "required": ["b"]}]}, {"a": 1, "b": 2}),
        ({"$ref": "#/$defs/pet", **PET, "type": "object", **B}, {"a": 1, "b": 2}),
        ({"allOf": [{"$ref": "#/$defs/pet"}, B], **PET}, {"a": 1, "b": 2}),
    ],
    ids=json.dumps,
)
def test_an_object_stays_open_to_what_its_schema_means(holds, schema, value):
    assert holds(schema, json.dumps(value))


def test_objects_that_apply_together_are_closed_together(holds):
    schema = {"allOf": [{"type": "object", **A}, {"type": "object", **B}]}
    more = '{"a":1,"b":2,"z":3}'
    assert not holds(schema, more, disable_additional_properties=True)
    assert holds(schema, more, disable_additional_properties=False)


def test_tools_are_closed_as_other_schemas_are(grammars, tokenizer):
    calls = {
        "structures": [{"begin": "<c>", "schema": {"type": "object", **A}, "end": "</c>"}],
        "triggers": ["<c>"],
        "at_least_one": True,
    }
    for closes, allowed in ((True, False), (False, True)):
        form = StructuredOutputs(structural_tag=calls, disable_additional_properties=closes)
        token_ids = tokenizer.encode('<c>{"a":1,"z":2}</c>', add_special_tokens=False)
        assert grammars.continues(grammars.admit(form), [*token_ids, END]) is allowed
