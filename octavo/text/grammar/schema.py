"""Validates a JSON schema before compilation: size, depth, endless cycles, and compiler options
that users may not set.

Errors contain the JSON pointer. `oneOf` becomes `anyOf` if a constant distinguishes the branches.
llguidance determines the supported keywords; `schema_faults.py` locates its errors.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin

MAX_BYTES = 1 << 20
"""Maximum size of a schema or grammar in bytes."""
MAX_DEPTH = 64
"""Maximum nesting depth of objects and arrays."""
MAX_NODES = 20_000
"""Maximum number of objects and arrays."""
MAX_PROPERTIES = 2_000
"""Maximum number of properties per object; compile time grows with the square."""
MAX_REFERENCES = 200
"""Maximum length of the chain of references to any part of a schema; the compiler takes over a
second for 4,000.
"""

OPTIONS = "x-guidance"
"""Key of compiler options in a schema, which users may not set."""

DEFINITIONS = ("$defs", "definitions")
"""Keywords whose subschemas apply only through references."""
MAPS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
SINGLES = (
    "additionalProperties",
    "items",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Keywords whose values are schemas: by name, in a list, or single."""

Schema = Any
"""A JSON schema: an object or a boolean."""


class SchemaError(Exception):
    """Raised for an invalid schema, with the pointer of the error."""

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(f"{pointer}: {message}")
        self.pointer = pointer


@dataclass(frozen=True, slots=True)
class SubSchema:
    pointer: str
    schema: Schema


def read(schema: Mapping[str, Any] | str | bool) -> dict[str, Any]:
    """Returns a schema as an object, from an object, JSON text or boolean."""
    if isinstance(schema, str):
        schema = _parse(schema)
    if schema is False:
        raise SchemaError("#", "the schema false matches nothing")
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise SchemaError("#", "expected a JSON object")
    _check_size(schema)
    return dict(schema)


def _parse(text: str) -> Any:
    if len(text) > MAX_BYTES:
        raise SchemaError("#", f"got {len(text):,} characters, expected at most {MAX_BYTES:,}")
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except ValueError as error:
        raise SchemaError("#", f"no JSON: {error}") from None
    except RecursionError:
        raise SchemaError("#", f"nested more than {MAX_DEPTH} deep") from None


def _check_size(schema: Any) -> None:
    """Rejects values that are too deep, too large or not JSON, without recursion."""
    stack = [("#", schema, 1)]
    num_nodes = num_bytes = 0
    while stack:
        pointer, value, depth = stack.pop()
        num_bytes += _own_bytes(pointer, value)
        if isinstance(value, Mapping | list | tuple):
            num_nodes += 1
            if depth > MAX_DEPTH:
                raise SchemaError(_cut(pointer), f"nested more than {MAX_DEPTH} deep")
            stack += [(at, part, depth + 1) for at, part in _parts(pointer, value)]
        if num_nodes > MAX_NODES or num_bytes > MAX_BYTES:
            raise SchemaError(
                "#", f"too large, expected at most {MAX_BYTES:,} bytes in {MAX_NODES:,} objects"
            )


def _own_bytes(pointer: str, value: Any) -> int:
    """Returns the approximate size of a value without its children; rejects non-JSON."""
    if isinstance(value, str):
        _check_text(pointer, value)
        return len(value) + 2
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SchemaError(_cut(pointer), f"got the key {key!r}, expected string keys")
            _check_text(pointer, key)
        for key in ("properties", "required"):
            names = value.get(key)
            if isinstance(names, Mapping | list | tuple) and len(names) > MAX_PROPERTIES:
                raise SchemaError(
                    _cut(f"{pointer}/{key}"),
                    f"got {len(names):,}, expected at most {MAX_PROPERTIES:,}",
                )
        return sum(len(key) + 4 for key in value)
    if isinstance(value, float) and not (abs(value) < float("inf")):
        raise SchemaError(_cut(pointer), f"got {value}, which JSON cannot represent")
    if value is None or isinstance(value, bool | int | float | list | tuple):
        return 2
    raise SchemaError(_cut(pointer), f"got {type(value).__name__}, which JSON does not support")


def _check_text(pointer: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SchemaError(
            _cut(pointer), "got a lone surrogate, which UTF-8 cannot encode"
        ) from None


def _parts(pointer: str, value: Any) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in items:
        yield f"{pointer}/{escape_pointer(str(key))}", part


def escape_pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _cut(pointer: str) -> str:
    return pointer if len(pointer) <= 200 else f"{pointer[:200]}..."


# -- walks over schemas ----------------------------------------------------------------------------


def children(subschema: SubSchema) -> Iterator[SubSchema]:
    """Yields the direct subschemas."""
    schema = subschema.schema
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        pointer = f"{subschema.pointer}/{escape_pointer(key)}"
        if key in MAPS and isinstance(value, Mapping):
            for name, part in value.items():
                yield SubSchema(f"{pointer}/{escape_pointer(name)}", part)
        elif isinstance(value, list | tuple) and (key in LISTS or key == "items"):
            for index, part in enumerate(value):
                yield SubSchema(f"{pointer}/{index}", part)
        elif key in SINGLES and isinstance(value, Mapping | bool):
            yield SubSchema(pointer, value)


def walk_subschemas(root: Schema) -> Iterator[SubSchema]:
    """Yields a schema and all subschemas in document order, then subschemas that are only reachable
    by reference, such as `#/components/schemas/Pet`.
    """
    stack = [SubSchema("#", root)]
    references: list[Any] = []
    seen: set[int] = set()
    while stack:
        subschema = stack.pop()
        if isinstance(subschema.schema, Mapping):
            if id(subschema.schema) in seen:
                continue
            seen.add(id(subschema.schema))
            references.append(subschema.schema.get("$ref"))
        yield subschema
        stack += reversed(list(children(subschema)))
        while references and not stack:
            target = resolve_reference(root, references.pop())
            stack += [] if target is None else [target]


def pointer_keys(pointer: str) -> list[str]:
    """Returns the keys and indices of a JSON pointer that begins with #."""
    parts = pointer[2:].split("/") if len(pointer) > 1 else []
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def resolve_reference(root: Schema, reference: object) -> SubSchema | None:
    """Returns the target of a local `$ref`; None for other references."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    if reference != "#" and not reference.startswith("#/"):
        return None
    target = root
    for key in pointer_keys(unquote(reference)):
        if isinstance(target, Mapping) and key in target:
            target = target[key]
        elif isinstance(target, list | tuple) and key.isdigit() and int(key) < len(target):
            target = target[int(key)]
        else:
            return None
    return SubSchema(reference, target)


# -- what is prepared ------------------------------------------------------------------------------


def prepare_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a schema for the compiler; rejects long chains of references."""
    schema = json.loads(json.dumps(schema), parse_float=_number)
    _point_references(schema)
    check_chains(schema)
    for subschema in walk_subschemas(schema):
        if not isinstance(subschema.schema, dict):
            continue
        if OPTIONS in subschema.schema:
            raise SchemaError(f"{subschema.pointer}/{OPTIONS}", "not supported in a request")
        if "$id" in subschema.schema and "$ref" in subschema.schema and subschema.pointer != "#":
            raise SchemaError(
                f"{subschema.pointer}/$id", "its meaning next to $ref differs between drafts"
            )
        if "oneOf" in subschema.schema and "anyOf" not in subschema.schema:
            _open_one_of(schema, subschema.schema)
    return schema


def _point_references(root: dict[str, Any]) -> None:
    """Converts references to an `$anchor` or `$id` of the schema itself to pointers."""
    own_id = root.get("$id")
    base = own_id if isinstance(own_id, str) else ""
    named: dict[str, str] = {}
    subschemas = [
        subschema for subschema in walk_subschemas(root) if isinstance(subschema.schema, dict)
    ]
    for subschema in subschemas:
        own = subschema.schema.get("$id")
        if isinstance(own, str):
            named.setdefault(urljoin(base, own).rstrip("#"), subschema.pointer)
        if isinstance(anchor := subschema.schema.get("$anchor"), str):
            named.setdefault(f"#{anchor}", subschema.pointer)
    for subschema in subschemas if named else ():
        reference = subschema.schema.get("$ref")
        if not isinstance(reference, str) or resolve_reference(root, reference) is not None:
            continue
        whole, _, inner = urljoin(base, reference).partition("#")
        if reference in named:
            subschema.schema["$ref"] = named[reference]
        elif whole in named and (not inner or inner.startswith("/")):
            subschema.schema["$ref"] = named[whole] + inner


def _number(text: str) -> int | float:
    """Parses a number with fraction or exponent; small integral ones become integers."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _open_one_of(root: Schema, schema: dict[str, Any]) -> None:
    """Converts `oneOf` to `anyOf` if its branches are disjoint; otherwise leaves it to the
    compiler.
    """
    branches = schema["oneOf"]
    if not isinstance(branches, list) or not branches:
        return
    whole = [_constants(root, branch) for branch in branches]
    names = {name for branch in branches for name in _required(root, branch)}
    by_name = ([_get_constants(root, branch, name) for branch in branches] for name in names)
    if _are_disjoint(whole) or any(_are_disjoint(sets) for sets in by_name):
        schema["anyOf"] = schema.pop("oneOf")


def _are_disjoint(sets: list[set[str] | None]) -> bool:
    known = [values for values in sets if values is not None]
    return len(known) == len(sets) and sum(map(len, known)) == len(set().union(*known))


def _target(root: Schema, schema: Schema) -> Mapping[str, Any]:
    """Follows references to a schema."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        subschema = resolve_reference(root, schema["$ref"])
        schema = {} if subschema is None else subschema.schema
    return schema if isinstance(schema, Mapping) else {}


def _constants(root: Schema, schema: Schema) -> set[str] | None:
    """Returns the normalized values that a schema enumerates; None if it is not an enumeration."""
    schema = _target(root, schema)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_spell(value) for value in values} if isinstance(values, list) else None


def _spell(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _required(root: Schema, schema: Schema) -> list[str]:
    schema = _target(root, schema)
    names = schema.get("required") if schema.get("type") == "object" else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _get_constants(root: Schema, schema: Schema, name: str) -> set[str] | None:
    """Returns the values that a schema enumerates for a required property; None if it does not."""
    if name not in _required(root, schema):
        return None
    properties = _target(root, schema).get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return None
    return _constants(root, properties[name])


# -- chains of references --------------------------------------------------------------------------


def check_chains(root: Schema) -> None:
    """Rejects a schema with a part reachable only through too many references."""
    reached: set[int] = set()
    waiting = deque([(0, SubSchema("#", root))])
    while waiting:
        num_followed, subschema = waiting.popleft()
        if id(subschema.schema) in reached or not isinstance(subschema.schema, Mapping):
            continue
        reached.add(id(subschema.schema))
        if num_followed > MAX_REFERENCES:
            raise SchemaError(
                _cut(subschema.pointer),
                f"requires more than {MAX_REFERENCES} nested references",
            )
        named = resolve_reference(root, subschema.schema.get("$ref"))
        if named is not None:
            waiting.append((num_followed + 1, named))
        used = {key: part for key, part in subschema.schema.items() if key not in DEFINITIONS}
        inner = children(SubSchema(subschema.pointer, used))
        waiting.extendleft((num_followed, part) for part in inner)


def schemas_in(grammar: str) -> Iterator[Schema]:
    """Yields the JSON schemas embedded in a Lark grammar."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        with suppress(ValueError, RecursionError):
            yield decoder.raw_decode(grammar, found.end())[0]


# -- cycles ----------------------------------------------------------------------------------------


def check_cycles(root: Schema) -> None:
    """Rejects a schema without finite instances, because it requires itself."""
    found = [subschema for subschema in walk_subschemas(root) if isinstance(subschema.schema, dict)]
    endless = {id(subschema.schema): subschema for subschema in found}
    needed_by: dict[int, list[SubSchema]] = {}
    for subschema in found:
        for part in (*children(subschema), resolve_reference(root, subschema.schema.get("$ref"))):
            if part is not None:
                needed_by.setdefault(id(part.schema), []).append(subschema)
    waiting = dict.fromkeys(id(subschema.schema) for subschema in reversed(found))
    while waiting:
        subschema = endless[next(iter(waiting))]
        del waiting[id(subschema.schema)]
        if _has_end(root, subschema.schema, endless):
            del endless[id(subschema.schema)]
            others = needed_by.get(id(subschema.schema), ())
            waiting |= {id(one.schema): None for one in others if id(one.schema) in endless}
    if endless:
        at = next((one for one in endless.values() if "$ref" in one.schema), None)
        at = at or next(iter(endless.values()))
        raise SchemaError(
            f"{at.pointer}/$ref" if "$ref" in at.schema else at.pointer,
            "recurses without end, so no finite output can match it",
        )


def _has_end(root: Schema, schema: Schema, endless: Container[int]) -> bool:
    """Returns whether a schema has a finite instance, given that the schemas in `endless` have
    none.
    """

    def ends(part: Any) -> bool:
        return id(part) not in endless

    if "const" in schema or "enum" in schema:
        return True
    if "$ref" in schema:
        subschema = resolve_reference(root, schema["$ref"])
        if subschema is not None and not ends(subschema.schema):
            return False
    if not all(map(ends, _list(schema, "allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        branches = _list(schema, key)
        if branches and not any(map(ends, branches)):
            return False
    return schema.get("type") not in ("object", "array") or all(map(ends, _needed(schema)))


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _needed(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the subschemas of parts that every instance has."""
    if schema["type"] == "object":
        properties = schema.get("properties")
        named = properties if isinstance(properties, Mapping) else {}
        names = (name for name in _list(schema, "required") if isinstance(name, str))
        return [named[name] for name in names if name in named]
    least = schema.get("minItems", 0)
    first = _list(schema, "prefixItems") or _list(schema, "items")
    needed = first[:least] if isinstance(least, int) else []
    rest = schema.get("items")
    if isinstance(least, int) and least > len(first) and isinstance(rest, Mapping):
        needed = [*needed, rest]
    return needed
