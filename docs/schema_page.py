"""The reference's page on JSON schema: the keywords that structured output enforces, found by
compiling a schema of each.
"""

from __future__ import annotations

from typing import Any

from tables import table

from octavo.api.structured_outputs import StructuredOutputs
from octavo.text.grammar.admission import find_schema_error, json_options
from octavo.text.grammar.schema import OPTIONS as OPTIONS_KEY
from octavo.text.grammar.schema import prepare_schema

NUMBER, TEXT, LIST, OBJECT = ({"type": kind} for kind in ("number", "string", "array", "object"))
NAMED = OBJECT | {"properties": {"a": NUMBER}}
TWO = [{"type": "string"}, {"type": "null"}]

KEYWORDS: dict[str, dict[str, Any]] = {
    "type": NUMBER,
    "enum": {"enum": [1, "a", None, [1]]},
    "const": {"const": {"a": 1}},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": NUMBER}},
    "$defs": {"$ref": "#/$defs/a", "$defs": {"a": NUMBER}},
    "definitions": {"$ref": "#/definitions/a", "definitions": {"a": NUMBER}},
    "$anchor": {"$ref": "#a", "$defs": {"a": {"$anchor": "a"} | NUMBER}},
    "$dynamicRef": {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}},
    "allOf": {"allOf": [NUMBER, {"minimum": 1}]},
    "anyOf": {"anyOf": TWO},
    "oneOf": {"oneOf": TWO},
    "not": {"not": TEXT},
    "if": {"if": TEXT, "then": TEXT},
    "properties": NAMED,
    "required": NAMED | {"required": ["a"]},
    "additionalProperties": NAMED | {"additionalProperties": TEXT},
    "patternProperties": OBJECT | {"patternProperties": {"^a": NUMBER}},
    "propertyNames": OBJECT | {"propertyNames": {"pattern": "^a"}},
    "minProperties": NAMED | {"minProperties": 1, "additionalProperties": False},
    "maxProperties": NAMED | {"maxProperties": 1, "additionalProperties": False},
    "dependentRequired": OBJECT | {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": OBJECT | {"dependentSchemas": {"a": NAMED}},
    "dependencies": OBJECT | {"dependencies": {"a": ["b"]}},
    "unevaluatedProperties": OBJECT | {"unevaluatedProperties": False},
    "items": LIST | {"items": NUMBER},
    "prefixItems": LIST | {"prefixItems": [NUMBER]},
    "additionalItems": LIST | {"items": [NUMBER], "additionalItems": False},
    "minItems": LIST | {"minItems": 1},
    "maxItems": LIST | {"maxItems": 2},
    "uniqueItems": LIST | {"uniqueItems": True},
    "contains": LIST | {"contains": NUMBER},
    "unevaluatedItems": LIST | {"unevaluatedItems": False},
    "minLength": TEXT | {"minLength": 1},
    "maxLength": TEXT | {"maxLength": 2},
    "pattern": TEXT | {"pattern": "^[a-z]+$"},
    "minimum": NUMBER | {"minimum": 1},
    "maximum": NUMBER | {"maximum": 2},
    "exclusiveMinimum": NUMBER | {"exclusiveMinimum": 1},
    "exclusiveMaximum": NUMBER | {"exclusiveMaximum": 2},
    "multipleOf": {"type": "integer", "multipleOf": 3},
}
"""A schema that uses each keyword."""

FORMATS = (
    "date date-time time duration email hostname ipv4 ipv6 uuid uri uri-reference iri regex"
    " idn-email idn-hostname uri-template byte binary int32 int64 float double password"
)
"""Values of `format` that schemas have."""


def json_schema() -> str:
    """Returns the keywords of JSON schema that are enforced, found by compiling each."""
    kept = {
        name: not find_schema_error({"name": "a", "json_schema": _with_options(schema)})
        for name, schema in KEYWORDS.items()
    }
    formats = {
        name: not find_schema_error(
            {"name": "a", "json_schema": _with_options(TEXT | {"format": name})}
        )
        for name in FORMATS.split()
    }
    rows = [
        (f"`{name}`", "yes" if holds else "no", NOTES.get(name, "")) for name, holds in kept.items()
    ]
    known = ", ".join(f"`{name}`" for name, holds in formats.items() if holds)
    others = ", ".join(f"`{name}`" for name, holds in formats.items() if not holds)
    return "\n\n".join(
        (
            "# JSON schema",
            "Structured output enforces these keywords of JSON schemas. In `response_format` and"
            " tools, a keyword that is not enforced is ignored and named in the response header"
            " `X-Octavo-Ignored`. With `strict: true`, and in `structured_outputs`, the schema is"
            " rejected and the error names the location of the keyword. Annotations (`title`,"
            " `description`, `default`, `examples` and others) have no effect.",
            table(("keyword", "enforced", "limits"), rows),
            f"Enforced values of `format`: {known}. Not enforced: {others}, and all others.",
        )
    )


NOTES = {
    "properties": "generated in the order of the schema",
    "oneOf": "if types or constants distinguish the branches",
    "pattern": "without look-around and back-references",
    "patternProperties": "if no two patterns match the same name",
    "minProperties": "if all names are listed",
    "maxProperties": "if all names are listed",
    "enum": "numbers in the notation of the schema",
    "const": "numbers in the notation of the schema",
}
"""Limits of a keyword."""


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    form = StructuredOutputs(json=schema)
    return prepare_schema(schema) | {OPTIONS_KEY: json_options(form)}
