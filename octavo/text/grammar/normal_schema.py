"""Normal form of a JSON schema: a union of alternatives without references, `allOf`, `anyOf` and
`oneOf`.

Tool-call formats other than JSON objects are compiled from it: object properties (`object_shapes`)
and scalar values (`leaves`). Nested lists and objects remain JSON schemas, which llguidance
compiles (`standalone`). Source of the semantics: JSON Schema 2020-12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from octavo.text.grammar.schema import Schema, SchemaError, SubSchema, children, resolve_reference
from octavo.text.grammar.schema_faults import UNMET
from octavo.text.grammar.strings import rewrite_patterns

MAX_ALTERNATIVES = 64
"""Maximum number of alternatives per schema; an allOf of unions multiplies alternatives."""
NUMBERS = frozenset({"integer", "number"})
"""Types implied by each type: a number schema also allows integers, so that types can be
intersected as sets.
"""
TYPES = NUMBERS | {"null", "boolean", "string", "array", "object"}
LIMITS = (
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
"""Keywords that limit strings and numbers."""
ALL_TYPES = frozenset(TYPES)

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Leaf:
    """Values of some types, enumerated or limited."""

    types: frozenset[str]
    values: tuple[Any, ...] | None = None
    """All possible values; None if only types and limits are known."""
    limits: tuple[tuple[str, Any], ...] = ()

    def having(self, types: Iterable[str]) -> Leaf | None:
        """Restricts the leaf to some types; None if no value remains."""
        remaining_types = self.types & frozenset(types)
        values = self.values
        if values is not None:
            values = tuple(
                value
                for value in values
                if get_json_type(value) in remaining_types and is_within(value, self.limits)
            )
        return (
            None
            if not remaining_types or values == ()
            else replace(self, types=remaining_types, values=values)
        )

    @property
    def may_be_empty(self) -> bool:
        """Whether the string limits may contradict each other, so that no value may remain."""
        keys = [key for key, _ in self.limits]
        return len(keys) > 1 and ("pattern" in keys or "format" in keys)

    def admits(self, constant: bool | None) -> bool:
        """Returns whether a constant, to which no limit applies, is allowed."""
        is_listed = self.values is None or any(value is constant for value in self.values)
        return is_listed and get_json_type(constant) in self.types

    def get_limits(self, keyword: str) -> list[Any]:
        return [value for key, value in self.limits if key == keyword]


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """Objects with some properties."""

    properties: dict[str, Schema] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    patterns: tuple[tuple[str, Schema], ...] = ()
    """Schemas of other properties by name pattern."""
    additional: Schema = True
    """Schema of properties that match neither a name nor a pattern."""
    least: int = 0
    """Smallest number of properties."""
    most: int | None = None

    def get_schema(self, name: str) -> Schema:
        if name in self.properties:
            return self.properties[name]
        schemas = [schema for pattern, schema in self.patterns if matches(pattern, name)]
        return intersect(*schemas) if schemas else self.additional


def get_json_type(value: Any) -> str:
    """Returns the JSON type of a value; "integer" for numbers without a fraction."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {int: "integer", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def is_within(value: Any, limits: Iterable[tuple[str, Any]]) -> bool:
    """Returns whether a scalar is within limits; ignores multiples and formats."""
    if isinstance(value, str):
        return all(
            (key != "minLength" or len(value) >= limit)
            and (key != "maxLength" or len(value) <= limit)
            and (key != "pattern" or matches(limit, value))
            for key, limit in limits
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return all(
        (key != "minimum" or value >= limit)
        and (key != "maximum" or value <= limit)
        and (key != "exclusiveMinimum" or isinstance(limit, bool) or value > limit)
        and (key != "exclusiveMaximum" or isinstance(limit, bool) or value < limit)
        for key, limit in limits
    )


def matches(pattern: str, name: str) -> bool:
    """Returns whether a name matches a pattern; True if Python cannot parse it."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def intersect(*schemas: Schema) -> Schema:
    """Returns the intersection of schemas."""
    if any(schema is False for schema in schemas):
        return False
    remaining: list[Schema] = []
    for schema in schemas:
        if schema is not True and schema != {} and schema not in remaining:
            remaining.append(schema)
    if not remaining:
        return True
    return remaining[0] if len(remaining) == 1 else {"allOf": remaining}


# -- alternatives ----------------------------------------------------------------------------------


def _alternatives(
    root: Schema,
    schema: Schema,
    own: Callable[[Mapping[str, Any]], list[Part]],
    meet: Callable[[Part, Part], Part | None],
    following: frozenset[int] = frozenset(),
) -> list[Part]:
    """Returns the alternatives of a schema.

    `own` returns the alternatives of the schema's own keywords, `meet` intersects two alternatives.
    A recursive reference adds none.
    """
    if not isinstance(schema, Mapping):
        return [] if schema is False else own({})
    if id(schema) in following:
        return []
    inside = following | {id(schema)}
    unions: list[list[Schema]] = []
    if "$ref" in schema and (subschema := resolve_reference(root, schema["$ref"])) is not None:
        unions.append([subschema.schema])
    unions += [[part] for part in schema.get("allOf", ())]
    unions += [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    alternatives = own(schema)
    for union in unions:
        others = [
            part for branch in union for part in _alternatives(root, branch, own, meet, inside)
        ]
        met = (meet(one, other) for one in alternatives for other in others)
        alternatives = _unique(part for part in met if part is not None)
        if len(alternatives) > MAX_ALTERNATIVES:
            raise SchemaError("#", f"has more than {MAX_ALTERNATIVES} alternatives")
    return alternatives


def _unique(parts: Iterable[Part]) -> list[Part]:
    """Removes duplicates and merges enumerated leaves of the same types."""
    unique: list[Part] = []
    for part in parts:
        if isinstance(part, Leaf) and part.values is not None and not part.limits:
            same = next(
                (
                    index
                    for index, one in enumerate(unique)
                    if isinstance(one, Leaf) and one.values is not None and not one.limits
                ),
                None,
            )
            if same is not None:
                one: Any = unique[same]
                more = [value for value in part.values if not _is_in(value, one.values)]
                values = (*one.values, *more)
                unique[same] = replace(one, types=one.types | part.types, values=values)
                continue
        if part not in unique:
            unique.append(part)
    return unique


def _is_in(value: Any, values: Iterable[Any]) -> bool:
    return any(get_json_type(one) == get_json_type(value) and one == value for one in values)


# -- scalars ---------------------------------------------------------------------------------------


def leaves(root: Schema, schema: Schema) -> list[Leaf]:
    """Returns the alternatives of a scalar: its types and limits."""
    return _alternatives(root, schema, _own_leaves, _intersect_leaves)


def get_types(root: Schema, schema: Schema) -> frozenset[str]:
    """Returns the JSON types that a value may have."""
    return frozenset().union(*(leaf.types for leaf in leaves(root, schema)))


def _own_leaves(schema: Mapping[str, Any]) -> list[Leaf]:
    given = schema.get("type", sorted(ALL_TYPES))
    types = frozenset([given] if isinstance(given, str) else given)
    if "number" in types:
        types |= NUMBERS
    values = None
    if "const" in schema or "enum" in schema:
        listed = [schema["const"]] if "const" in schema else schema["enum"]
        values = tuple(value for value in listed if get_json_type(value) in types)
        types = frozenset(map(get_json_type, values))
    limits = tuple((key, schema[key]) for key in LIMITS if key in schema)
    leaf = Leaf(types, values, limits).having(types)
    return [] if leaf is None else [leaf]


def _intersect_leaves(one: Leaf, other: Leaf) -> Leaf | None:
    values = one.values
    if one.values is None:
        values = other.values
    elif other.values is not None:
        values = tuple(value for value in one.values if _is_in(value, other.values))
    limits = tuple(dict.fromkeys((*one.limits, *other.limits)))
    return Leaf(one.types & other.types, values, limits).having(one.types & other.types)


# -- objects ---------------------------------------------------------------------------------------


def object_shapes(root: Schema) -> list[ObjectShape]:
    """Returns the alternatives of a schema's objects; each property count can be met by unnamed
    required properties.

    Raises SchemaError if no object is allowed.
    """
    shapes = _alternatives(root, root, _own_shapes, _intersect_shapes)
    found = [counted for shape in shapes for counted in _count(_satisfiable(root, shape))]
    if not found:
        raise SchemaError("#", "allows no object")
    return found


def _own_shapes(schema: Mapping[str, Any]) -> list[ObjectShape]:
    types = schema.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        return []
    patterns = tuple(schema.get("patternProperties", {}).items())
    properties = {
        name: intersect(part, *(more for pattern, more in patterns if matches(pattern, name)))
        for name, part in schema.get("properties", {}).items()
    }
    shape = ObjectShape(
        properties,
        frozenset(schema.get("required", ())),
        patterns,
        schema.get("additionalProperties", True),
        schema.get("minProperties", 0),
        schema.get("maxProperties"),
    )
    if "const" not in schema and "enum" not in schema:
        return [shape]
    listed = [schema["const"]] if "const" in schema else schema["enum"]
    met = (
        _intersect_shapes(_make_shape(value), shape) for value in listed if isinstance(value, dict)
    )
    return [one for one in met if one is not None]


def _make_shape(value: Mapping[str, Any]) -> ObjectShape:
    properties = {name: {"const": part} for name, part in value.items()}
    return ObjectShape(properties, frozenset(properties), additional=False)


def _intersect_shapes(one: ObjectShape, other: ObjectShape) -> ObjectShape | None:
    names = dict.fromkeys((*one.properties, *other.properties))
    mine, theirs = dict(one.patterns), dict(other.patterns)
    patterns = tuple(
        (
            pattern,
            intersect(mine.get(pattern, one.additional), theirs.get(pattern, other.additional)),
        )
        for pattern in dict.fromkeys((*mine, *theirs))
    )
    bounds = [most for most in (one.most, other.most) if most is not None]
    return ObjectShape(
        {name: intersect(one.get_schema(name), other.get_schema(name)) for name in names},
        one.required | other.required,
        patterns,
        intersect(one.additional, other.additional),
        max(one.least, other.least),
        min(bounds, default=None),
    )


def _satisfiable(root: Schema, shape: ObjectShape) -> ObjectShape | None:
    """Lists all required properties, with False for impossible ones; None if a required one is
    impossible.
    """
    required = [name for name in sorted(shape.required) if name not in shape.properties]
    named = shape.properties | {name: shape.get_schema(name) for name in required}
    properties = {name: part if can_be(root, part) else False for name, part in named.items()}
    if any(properties[name] is False for name in shape.required):
        return None
    patterns = (
        (pattern, part if can_be(root, part) else False) for pattern, part in shape.patterns
    )
    additional = shape.additional if can_be(root, shape.additional) else False
    return replace(shape, properties=properties, patterns=tuple(patterns), additional=additional)


def can_be(root: Schema, schema: Schema) -> bool:
    """Returns whether a schema allows any value, judging by types and string limits."""
    found = leaves(root, schema)
    if not any(leaf.may_be_empty for leaf in found):
        return bool(found)
    from octavo.text.grammar.compiler import fault_in  # llguidance is loaded when it is needed

    part = standalone(root, schema)
    rewrite_patterns(part)
    return not fault_in(json.dumps({"grammars": [{"json_schema": part}]})).startswith(UNMET)


def _count(shape: ObjectShape | None) -> list[ObjectShape]:
    """Returns shapes whose `min_count` and `max_count` count only unnamed properties."""
    if shape is None:
        return []
    num_required = len(shape.required)
    min_count = max(0, shape.least - num_required)
    max_count = None if shape.most is None else shape.most - num_required
    if max_count is not None and max_count < 0:
        return []
    can_be = [name for name, part in shape.properties.items() if part is not False]
    optional = [name for name in can_be if name not in shape.required]
    is_open = shape.additional is not False or any(part is not False for _, part in shape.patterns)
    if not optional or (min_count == 0 and max_count is None):
        return [replace(shape, least=min_count, most=max_count)] if is_open or not min_count else []
    uncounted = replace(shape, least=0, most=None)
    if min_count > 1 or max_count not in (None, 1):
        return [uncounted]
    one_of = [replace(uncounted, required=shape.required | {name}) for name in optional]
    if max_count == 1:
        one_of = [_without(one, set(optional) - one.required, is_closed=True) for one in one_of]
    rest = _without(uncounted, set(optional), is_closed=False)
    if is_open:
        return [*one_of, replace(rest, least=min_count, most=max_count)]
    return one_of if min_count else [*one_of, rest]


def _without(shape: ObjectShape, names: set[str], *, is_closed: bool) -> ObjectShape:
    """Removes some optional properties from a shape."""
    properties = shape.properties | dict.fromkeys(names, False)
    if not is_closed:
        return replace(shape, properties=properties)
    return replace(shape, properties=properties, patterns=(), additional=False)


# -- parts -----------------------------------------------------------------------------------------


def standalone(root: Schema, schema: Schema) -> dict[str, Any]:
    """Returns a subschema on its own, with the definitions that it refers to."""
    names: dict[str, str] = {}
    definitions: dict[str, Schema] = {}
    definition = _with_names(root, schema, names)
    while len(definitions) < len(names):
        reference = list(names)[len(definitions)]
        subschema = resolve_reference(root, reference)
        target = True if subschema is None else subschema.schema
        definitions[names[reference]] = _with_names(root, target, names)
    whole = dict(definition) if isinstance(definition, Mapping) else {"allOf": [definition]}
    return {**whole, "$defs": definitions} if definitions else whole


def _with_names(root: Schema, schema: Schema, names: dict[str, str]) -> Schema:
    """Copies a schema with references to definitions, which are added to `names`."""
    if not isinstance(schema, Mapping):
        return schema
    copied = {key: part for key, part in schema.items() if key not in ("$defs", "definitions")}
    copied = json.loads(json.dumps(copied))
    waiting = [SubSchema("#", copied)]
    while waiting:
        subschema = waiting.pop()
        if isinstance(subschema.schema, dict) and isinstance(subschema.schema.get("$ref"), str):
            reference = subschema.schema["$ref"]
            names.setdefault(reference, f"d{len(names)}")
            subschema.schema["$ref"] = f"#/$defs/{names[reference]}"
        waiting += children(subschema)
    return copied
