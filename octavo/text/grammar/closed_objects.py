"""Closes objects of a JSON schema that do not specify additional properties.

JSON Schema allows them by default, and small models then add properties until the length limit.
llama.cpp and xgrammar (strict mode) do the same. Objects without named properties, and those that
set `additionalProperties` or `unevaluatedProperties`, are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.text.grammar.schema import SubSchema, children, resolve_reference, walk_subschemas

UNIONS = ("anyOf", "oneOf")
CONDITIONS = ("not", "if", "contains", "propertyNames")
"""Keywords whose subschemas are conditions; closing these would change the schema's meaning."""
APPLICATORS = ("allOf", *UNIONS, "if", "then", "else", "not", "dependentSchemas", "$ref")
"""Keywords whose subschemas apply to the same value."""
OBJECT_KEYWORDS = (
    "properties",
    "patternProperties",
    "required",
    "minProperties",
    "maxProperties",
    "dependentRequired",
)
SPOKEN = ("additionalProperties", "unevaluatedProperties", "const", "enum")
"""Keywords with which a schema specifies its properties completely."""


def close_objects(root: dict[str, Any]) -> None:
    """Sets `additionalProperties` to false, in place, for objects that list properties but do not
    specify others.

    Schemas that apply to one value together (`allOf`, `$ref` beside `properties`) are closed
    jointly, because each lists only some of the properties.
    """
    schemas = [
        subschema.schema
        for subschema in walk_subschemas(root)
        if isinstance(subschema.schema, dict)
    ]
    parts = {id(part) for schema in schemas for part in _iter_open_subschemas(root, schema)}
    for schema in schemas:
        if id(schema) not in parts and not _is_transparent(schema):
            _close(root, schema)


def _iter_open_subschemas(root: dict[str, Any], schema: dict[str, Any]) -> Iterator[Any]:
    """Yields subschemas that must stay open because of their context."""
    for key in CONDITIONS:
        yield from _within(root, schema.get(key))
    if not _is_transparent(schema):
        for part in _get_applied_subschemas(root, schema):
            yield from _within(root, part)


def _within(root: dict[str, Any], schema: Any) -> list[dict[str, Any]]:
    """Returns a schema and all schemas that apply to the same value."""
    schemas_by_id: dict[int, dict[str, Any]] = {}
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and id(one) not in schemas_by_id:
            schemas_by_id[id(one)] = one
            waiting += reversed(list(_get_applied_subschemas(root, one)))
    return list(schemas_by_id.values())


def _get_applied_subschemas(root: dict[str, Any], schema: dict[str, Any]) -> Iterator[Any]:
    """Yields the direct subschemas that apply to the same value."""
    target = resolve_reference(root, schema.get("$ref"))
    if target is not None:
        yield target.schema
    own = {key: value for key, value in schema.items() if key in APPLICATORS}
    for part in children(SubSchema("#", own)):
        yield part.schema


def _is_transparent(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema only refers to a single other schema."""
    used = [key for key in APPLICATORS if key in schema]
    if len(used) != 1 or any(key in schema for key in (*OBJECT_KEYWORDS, *SPOKEN)):
        return False
    if used[0] == "allOf":
        return isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1
    return used[0] in (*UNIONS, "$ref")


def _close(root: dict[str, Any], schema: dict[str, Any]) -> None:
    """Closes a schema to the properties listed by it and the schemas that apply with it."""
    whole = _within(root, schema)
    if not any(isinstance(one.get("properties"), dict) for one in whole):
        return
    if any(key in one for one in whole for key in SPOKEN):
        return
    if any("patternProperties" in one for one in whole if one is not schema):
        return
    names: dict[str, bool] = {}
    for one in whole:
        properties, required = one.get("properties"), one.get("required")
        names |= dict.fromkeys(properties, True) if isinstance(properties, dict) else {}
        if isinstance(required, list):
            names |= dict.fromkeys((name for name in required if isinstance(name, str)), True)
    min_properties = max((one.get("minProperties", 0) for one in whole), key=_number)
    if _number(min_properties) > len(names) and "patternProperties" not in schema:
        return
    own = schema.get("properties")
    schema["properties"] = {**(own if isinstance(own, dict) else {}), **_missing(names, own)}
    schema["additionalProperties"] = False


def _missing(names: Mapping[str, bool], own: Any) -> dict[str, bool]:
    return {name: True for name in names if not isinstance(own, dict) or name not in own}


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0
