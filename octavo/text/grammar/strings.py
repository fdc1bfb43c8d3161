r"""Prepares the strings of a JSON schema for llguidance: patterns and allowed escapes.

A `pattern` has ECMA-262's syntax and applies to the decoded string; llguidance expects Rust's
syntax.

In llguidance 1.9, a character class that contains every control character also matches `\"` and
`\\`: `[^"]` admits a quote. Without U+0000 a class is handled exactly, so this character is removed
from each class. Source of the syntaxes: ECMA-262 (Patterns), the documentation of Rust's regex.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.text.grammar.schema import walk_subschemas

SHORT_ESCAPES = 'nrbtf\\"'
"""Characters that JSON escapes with a backslash and one character, in the compiler's order."""
WITHOUT_SHORT_ESCAPE = re.compile(r"\\u00[01]|\x7f")
r"""Control characters that JSON only writes as `\\u`, as `json.dumps` does."""

TOKEN = re.compile(r"\\c[A-Za-z]|\\.|\[|[^\\\[]+", re.DOTALL)
"""An escape, the start of a class, or other text."""
CLASS = re.compile(r"\[(\^?)(\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*)\]", re.DOTALL)
CLASS_TOKEN = re.compile(r"\\c[A-Za-z]|\\.|\[:\^?[a-z]+:\]|\[|&&|~~|--|[^\\\[&~-]+|.", re.DOTALL)
OUTSIDE = {r"\Z": r"\z", r"\0": r"\x00", r"\/": "/"}
"""ECMA-262 and Python syntax mapped to Rust's, outside of classes."""
INSIDE = {
    r"\b": r"\x08",
    r"\0": r"\x00",
    "[": r"\[",
    "&&": r"&\&",
    "~~": r"~\~",
    "--": r"-\-",
}
"""The same mapping within a character class, where Rust has operators (`&&`, `--`, `~~`, `[`)."""


def rewrite_pattern(pattern: str) -> str:
    """Returns a Rust pattern of the same strings, except those that contain U+0000."""
    made: list[str] = []
    at = 0
    while at < len(pattern):
        found = CLASS.match(pattern, at) if pattern[at] == "[" else None
        if found is not None:
            made.append(_rewrite_class(found[1], found[2]))
        else:
            found = TOKEN.match(pattern, at)
            if found is None:  # a trailing backslash, which llguidance rejects
                made.append(pattern[at:])
                break
            made.append(OUTSIDE.get(found[0], _control(found[0])))
        at = found.end()
    return "".join(made)


def _rewrite_class(negation: str, inside: str) -> str:
    items = "".join(INSIDE.get(token, _control(token)) for token in CLASS_TOKEN.findall(inside))
    if negation:
        return rf"[^{items}\x00]"
    may_hold_controls = any(mark in items for mark in ("\\x", "\\u", "\\D", "\\S", "\\W", "[:^"))
    may_hold_controls |= any(char < " " for char in items)
    return rf"[[{items}]&&[^\x00]]" if may_hold_controls else f"[{items}]"


def _control(token: str) -> str:
    r"""Converts `\\cA` to a character code; other tokens are unchanged."""
    return rf"\x{ord(token[2]) % 32:02x}" if token.startswith(r"\c") and len(token) == 3 else token


def rewrite_patterns(schema: dict[str, Any]) -> None:
    """Converts a schema's patterns to the compiler's syntax, in place."""
    for subschema in walk_subschemas(schema):
        part = subschema.schema
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("pattern"), str):
            part["pattern"] = rewrite_pattern(part["pattern"])
        named = part.get("patternProperties")
        if isinstance(named, dict):
            part["patternProperties"] = {rewrite_pattern(key): named[key] for key in named}


def escape_options(schema: dict[str, Any]) -> dict[str, Any]:
    r"""Returns the compiler's escape options: `\\u` is either allowed or never used.

    The compiler does not apply patterns to `\\u` escapes, so schemas that compare strings with
    patterns or names exclude them.
    """
    found = [
        subschema.schema
        for subschema in walk_subschemas(schema)
        if isinstance(subschema.schema, dict)
    ]
    if not any(_compares_spellings(one) for one in found):
        return {"json_allow_general_unicode_escapes": True}
    spelled = [[one.get(key) for key in ("const", "enum", "properties")] for one in found]
    if WITHOUT_SHORT_ESCAPE.search(json.dumps(spelled, ensure_ascii=False)):
        return {}
    return {"json_allowed_escapes": SHORT_ESCAPES}


def _compares_spellings(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema compares strings with a pattern or names."""
    if "pattern" in schema or "patternProperties" in schema:
        return True
    names = schema.get("properties") or schema.get("required")
    return bool(names) and schema.get("additionalProperties") is not False
