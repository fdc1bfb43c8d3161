"""Locates the subschema and keyword that llguidance rejects, by compiling parts of a schema within
a time limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.text.grammar.schema import (
    Schema,
    SchemaError,
    SubSchema,
    children,
    escape_pointer,
    resolve_reference,
)

UNMET = "Unsatisfiable schema"
"""Prefix of llguidance's errors for unsatisfiable schemas."""
BLAME_S = 0.5
"""Time limit of the search, in seconds."""


def blame(root: dict[str, Any], check: Callable[[dict[str, Any]], str]) -> SchemaError:
    """Returns the location of the error: the innermost subschema that `check` rejects for the same
    reason.
    """
    reason = check(root)
    shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    subschema = SubSchema("#", root)
    until = time.monotonic() + BLAME_S
    seen = {"#"}
    while time.monotonic() < until:
        inner = next(
            (
                part
                for part in _inner(root, subschema)
                if part.pointer not in seen
                and isinstance(part.schema, Mapping)
                and time.monotonic() < until
                and _is_same_fault(check({**shared, **part.schema}), reason)
            ),
            None,
        )
        if inner is None:
            break
        seen.add(inner.pointer)
        subschema = inner
        reason = check({**shared, **inner.schema})
    return SchemaError(subschema.pointer + _keyword(subschema.schema, reason), reason)


def _is_same_fault(reported: str, reason: str) -> bool:
    """Returns whether two errors have the same cause; unsatisfiable schemas have several
    messages.
    """
    return reported == reason or (reported.startswith(UNMET) and reason.startswith(UNMET))


def _inner(root: Schema, subschema: SubSchema) -> Iterator[SubSchema]:
    yield from children(subschema)
    if isinstance(subschema.schema, Mapping):
        target = resolve_reference(root, subschema.schema.get("$ref"))
        if target is not None:
            yield target


def _keyword(schema: Mapping[str, Any], reason: str) -> str:
    """Returns the last part of the pointer if the message names a keyword of the schema."""
    if reason.startswith("min/maxProperties"):
        named = [key for key in ("minProperties", "maxProperties") if key in schema]
    else:
        named = [key for key in schema if re.search(rf"""["']{re.escape(key)}["']""", reason)]
        named = named or [key for key in schema if reason.startswith(f"{key} ")]
    if not named and reason.startswith(("patternProperty", "can't determine if patternProperty")):
        named = [key for key in schema if key == "patternProperties"]
    if not named and reason.startswith("Invalid type") and "type" in schema:
        named = ["type"]
    if not named and "$ref" in schema and reason.startswith(("Pointer", "Resource", "circular")):
        named = ["$ref"]
    if not named and "regex" in reason and "pattern" in schema:
        named = ["pattern"]
    if not named and "format" in reason and "format" in schema:
        named = ["format"]
    return f"/{escape_pointer(named[0])}" if named else ""
