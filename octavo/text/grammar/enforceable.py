"""The enforceable part of a function's schema.

A non-strict tool schema never fails a request: keywords that no grammar enforces are dropped and
their JSON pointers returned. A strict one raises SchemaError. Results are cached, because clients
repeat their functions in every request.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from octavo.text.grammar.closed_objects import close_objects
from octavo.text.grammar.normal_schema import object_shapes
from octavo.text.grammar.schema import (
    OPTIONS,
    SchemaError,
    SubSchema,
    check_cycles,
    pointer_keys,
    prepare_schema,
    read,
    walk_subschemas,
)
from octavo.text.grammar.schema_faults import blame
from octavo.text.grammar.string_patterns import FORMATS, whole_pattern
from octavo.text.grammar.strings import escape_options, rewrite_patterns

MAX_REPAIRS = 64
"""Maximum number of errors that are dropped one by one; with more, the entire schema is dropped."""
REPAIR_S = 1.0
"""Time limit of the search for errors, in seconds."""
NOT_ENFORCED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", OPTIONS),
)
"""Keywords that llguidance does not support, or that users may not set."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Enforceable:
    """A schema without unenforceable parts."""

    schema: Mapping[str, Any]
    dropped: tuple[str, ...] = ()
    """JSON pointers of dropped parts."""


def enforceable(schema: Mapping[str, Any], *, is_strict: bool) -> Enforceable:
    """Returns the enforceable part of a function's schema.

    Raises SchemaError if `is_strict` and anything cannot be enforced.
    """
    try:
        text = json.dumps(read(schema))
    except SchemaError:
        if is_strict:
            raise
        return Enforceable(ANY_OBJECT, ("#",))
    return _enforceable(text, is_strict)


def without_unenforced(schema: Mapping[str, Any]) -> Enforceable:
    """Returns a schema of any type without unenforceable keywords and look-around patterns.

    Unlike `enforceable`, keeps other errors, which are reported when the schema is compiled.
    """
    try:
        root = json.loads(json.dumps(read(schema)))
    except SchemaError:
        return Enforceable(schema)
    return Enforceable(root, (*_drop_known(root), *_drop_lookaround(root)))


def _drop_lookaround(root: dict[str, Any]) -> list[str]:
    """Removes valid patterns that no grammar enforces (look-ahead, look-behind); returns their
    pointers.
    """
    dropped = []
    for subschema in list(walk_subschemas(root)):
        pattern = subschema.schema.get("pattern") if isinstance(subschema.schema, dict) else None
        if isinstance(pattern, str) and _is_regex(pattern) and _pattern_fault(pattern):
            del subschema.schema["pattern"]
            dropped.append(f"{subschema.pointer}/pattern")
    return dropped


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError):
        return False
    return True


@lru_cache(maxsize=1024)
def _enforceable(text: str, is_strict: bool) -> Enforceable:
    root = json.loads(text)
    dropped: list[str] = [] if is_strict else _drop_known(root)
    dropped += _restrict_to_objects(root, is_strict=is_strict)
    until = time.monotonic() + REPAIR_S
    for _ in range(MAX_REPAIRS):
        try:
            return Enforceable(_prepare_for_compiler(root), tuple(dropped))
        except SchemaError as error:
            if is_strict:
                raise
            if time.monotonic() > until or not _drop(root, error.pointer):
                break
            dropped.append(error.pointer)
    return Enforceable(ANY_OBJECT, (*dropped, "#"))


def _prepare_for_compiler(root: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema prepared for the compiler; raises SchemaError with the location of an
    error.
    """
    prepared = prepare_schema(root)
    check_cycles(prepared)
    close_objects(prepared)

    def check(part: dict[str, Any]) -> str:
        part = json.loads(json.dumps(part))
        rewrite_patterns(part)
        options = {"coerce_one_of": False, "lenient": False, **escape_options(part)}
        return _fault_in({"json_schema": part | {OPTIONS: options}})

    if check(prepared):
        raise blame(prepared, check)
    _check_patterns(prepared)
    object_shapes(prepared)
    return prepared


def _check_patterns(root: dict[str, Any]) -> None:
    """Rejects patterns that cannot be compiled to terminals, as unquoted strings require."""
    for subschema in walk_subschemas(root):
        if not isinstance(subschema.schema, Mapping):
            continue
        patterns = [(f"{subschema.pointer}/pattern", subschema.schema.get("pattern"))]
        names = subschema.schema.get("patternProperties", {})
        patterns += [(f"{subschema.pointer}/patternProperties", name) for name in names]
        for pointer, pattern in patterns:
            if isinstance(pattern, str) and (fault := _pattern_fault(pattern)):
                raise SchemaError(pointer, fault)


@lru_cache(maxsize=1024)
def _pattern_fault(pattern: str) -> str:
    grammar = f"start: TEXT\nTEXT: /{whole_pattern(pattern)}/\n"
    return _fault_in({"lark_grammar": grammar})


def _fault_in(grammar: dict[str, Any]) -> str:
    from octavo.text.grammar.compiler import fault_in  # llguidance is loaded when it is needed

    return fault_in(json.dumps({"grammars": [grammar]}))


# -- what is dropped -------------------------------------------------------------------------------


def _drop_known(root: dict[str, Any]) -> list[str]:
    """Drops keywords that are never enforced; returns their pointers."""
    dropped = []
    for subschema in list(walk_subschemas(root)):
        if not isinstance(subschema.schema, dict):
            continue
        for key in [key for key in subschema.schema if _is_never_enforced(subschema, key)]:
            del subschema.schema[key]
            dropped.append(f"{subschema.pointer}/{key}")
    return dropped


def _is_never_enforced(subschema: SubSchema, key: str) -> bool:
    if key != "format":
        return key in NOT_ENFORCED
    types = subschema.schema.get("type", "string")
    if types != "string" and not (isinstance(types, list) and "string" in types):
        return False  # does not restrict other types
    return (
        not isinstance(subschema.schema["format"], str) or subschema.schema["format"] not in FORMATS
    )


def _restrict_to_objects(root: dict[str, Any], *, is_strict: bool) -> list[str]:
    """Restricts the root schema to objects; returns the pointer of an incompatible type."""
    types = root.get("type", "object")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    if not is_object and is_strict:
        raise SchemaError("#/type", f'got {json.dumps(types)}, expected "object"')
    root["type"] = "object"
    return [] if is_object else ["#/type"]


def _drop(root: dict[str, Any], pointer: str) -> bool:
    """Drops the keyword or subschema at a pointer; returns whether that was possible. `oneOf`
    becomes the weaker `anyOf`.
    """
    *keys, last = pointer_keys(pointer) or [""]
    if not last:
        return False
    parent: Any = root
    try:
        for key in keys:
            parent = parent[int(key) if isinstance(parent, list) else key]
        index: Any = int(last) if isinstance(parent, list) else last
        value = parent[index]
    except (KeyError, IndexError, ValueError, TypeError):
        return False
    if any(subschema.pointer == pointer for subschema in walk_subschemas(root)):
        if value in ({}, True):
            return False
        parent[index] = {}
    elif last == "oneOf" and "anyOf" not in parent and isinstance(value, list):
        parent["anyOf"] = parent.pop("oneOf")
    else:
        del parent[index]
    return True
