"""Grammars of arguments that are no JSON object, in Lark's notation as llguidance reads it.

Every parameter is written in the schema's order; one that is not required may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.text.parsers.calls import is_text
from octavo.text.parsers.patterns import whole_pattern

WHITESPACE = r"[\x20\x0A\x0D\x09]{0,8}"
"""Whitespace between the parts of a JSON value."""
DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class PairRule:
    """One key and its value, with the texts around them."""

    index: int
    front: str
    schema: Any
    ending: str
    is_needed: bool


def is_needed(schema: Mapping[str, Any], key: str) -> bool:
    """Tells whether a schema requires a property."""
    return key in schema.get("required", ())


def pairs_grammar(rules: Sequence[PairRule], root: Mapping[str, Any]) -> str:
    """Returns the grammar of pairs one behind the other; texts end where the ending begins."""
    names = [f"pair_{rule.index}{'' if rule.is_needed else '?'}" for rule in rules]
    lark = [f"start: {' '.join(names) or _quoted('')}"]
    for rule in rules:
        front, ending = _quoted(rule.front), _quoted(rule.ending)
        value = f"value_{rule.index}"
        choices = _choices(rule.schema)
        if choices:
            lark.append(f"pair_{rule.index}: {front} ({choices}) {ending}")
        elif is_text(rule.schema):
            lark.append(f"pair_{rule.index}: {front} {value}")
            lark.append(f"TEXT_{rule.index}: {_any_text(rule.schema)}")
            lark.append(f"{value}[suffix={ending}]: TEXT_{rule.index}")
        else:
            lark.append(f"pair_{rule.index}: {front} {value} {ending}")
            lark.append(f"{value}: %json {_inlined(rule.schema, root)}")
    return "\n".join(lark) + "\n"


def keywords_grammar(schema: Mapping[str, Any]) -> str:
    """Returns the grammar of Python keyword arguments, their values in JSON."""
    properties = list(schema.get("properties", {}).items())
    lark = ["start: first_0"]
    for index, (key, value) in enumerate(properties):
        pair, rest = f"pair_{index}", f"rest_{index + 1}"
        skips = not is_needed(schema, key)
        lark.append(f"first_{index}: {pair} {rest}{f' | first_{index + 1}' if skips else ''}")
        lark.append(f'rest_{index}: ", " {pair} {rest}{f" | {rest}" if skips else ""}')
        lark.append(f"{pair}: {_quoted(f'{key}=')} value_{index}")
        lark.append(f"value_{index}: %json {_inlined(value, schema)}")
    end = len(properties)
    lark += [f"first_{end}: {_quoted('')}", f"rest_{end}: {_quoted('')}"]
    return "\n".join(lark) + "\n"


def _choices(schema: Any) -> str:
    """Returns the rule of a text of which the schema names the values; "" for any other."""
    found = schema.get("enum", ()) if isinstance(schema, Mapping) else ()
    if not found or not all(isinstance(value, str) for value in found):
        return ""
    return " | ".join(map(_quoted, found))


def _any_text(schema: Any) -> str:
    """Returns the rule of a text, with the length and the pattern that its schema gives it."""
    bounds = schema if isinstance(schema, Mapping) else {}
    least, most = bounds.get("minLength", 0), bounds.get("maxLength")
    pattern = bounds.get("pattern")
    rules = [f"/{whole_pattern(pattern)}/"] if isinstance(pattern, str) else []
    if least or most is not None:
        rules.append(f"/(.|\\n){{{least},{'' if most is None else most}}}/")
    return " & ".join(rules) or "/(.|\\n)*/"


def _inlined(schema: Any, root: Mapping[str, Any]) -> str:
    """Returns a part of a schema on its own, with the definitions that it may refer to."""
    if isinstance(schema, bool):
        return json.dumps(schema)
    found = {name: root[name] for name in DEFINITIONS if name in root}
    options = {"whitespace_pattern": WHITESPACE}
    return json.dumps({**found, **schema, "x-guidance": options})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
