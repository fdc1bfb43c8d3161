"""Grammars of tool-call arguments in formats other than a JSON object: tagged key-value pairs and
Python keyword arguments.

Compiled from the normalized schema of a function; a format only defines how names and values are
written (`PairLayout`, `PythonKeywords`). Named properties appear in schema order, others after
them.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from octavo.text.grammar import raw_values
from octavo.text.grammar.lark import literal
from octavo.text.grammar.normal_schema import (
    ObjectShape,
    get_types,
    leaves,
    object_shapes,
    standalone,
)
from octavo.text.grammar.schema import OPTIONS, Schema
from octavo.text.grammar.string_patterns import whole_pattern
from octavo.text.grammar.strings import escape_options, rewrite_patterns

INLINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON options: on one line, as templates write it."""
EMPTY = literal("")
TEXT_ONLY = frozenset({"string"})
PLAIN_NAME = r'/[^"\\\x00-\x1f\x7f]*/'
"""Matches names that can be quoted without escapes."""
QUOTED_KEY, QUOTED_KEY_END = literal('"'), literal('":')
QUOTED_FRONT, QUOTED_BACK = literal('**{"'), literal('": ')
WORDS = {"None": None, "True": True, "False": False}
"""Python constants that models write instead of JSON constants."""


class ArgumentTypes:
    """Allowed JSON types of each property of a function's arguments."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.shapes = object_shapes(root)
        self._root = root
        self._named: dict[str, frozenset[str]] = {}
        others = [
            get_types(root, part)
            for shape in self.shapes
            for part in (shape.additional, *(part for _, part in shape.patterns))
        ]
        self._others = frozenset().union(*others)

    def of(self, name: str) -> frozenset[str]:
        """Returns a property's types; only strings if the schema does not allow the property."""
        if name not in self._named:
            types = [
                get_types(self._root, shape.properties[name])
                if name in shape.properties
                else self._others
                for shape in self.shapes
            ]
            self._named[name] = frozenset().union(*types)
        return self._named[name] or TEXT_ONLY

    @property
    def others(self) -> frozenset[str]:
        """Types of properties that the schema does not name."""
        return self._others


@lru_cache(maxsize=1024)
def parse_argument_types(schema: str) -> ArgumentTypes:
    return ArgumentTypes(json.loads(schema))


class Notation(Hashable, Protocol):
    """How a format writes a property."""

    @property
    def separator(self) -> str:
        """Text between two properties."""
        ...

    def named(self, rule: str, name: str, value: ArgumentValue) -> list[str]:
        """Returns the rules of a named property."""
        ...

    def unnamed(self, rule: str, names: str, value: ArgumentValue) -> list[str]:
        """Returns the rules of a property with a name pattern."""
        ...


@dataclass(frozen=True, slots=True)
class ArgumentValue:
    """A property's value."""

    root: Schema
    schema: Schema
    types: frozenset[str]
    """Types that the parser assumes for the property."""


def arguments_grammar(root: Mapping[str, Any], notation: Notation) -> str:
    """Returns the grammar of a function's arguments; raises SchemaError if its schema allows no
    object.
    """
    return _grammar(json.dumps(root), notation)


@lru_cache(maxsize=1024)
def _grammar(text: str, notation: Notation) -> str:
    root, types = json.loads(text), parse_argument_types(text)
    lines = [f"start: {' | '.join(f's{i}' for i in range(len(types.shapes)))}"]
    for index, shape in enumerate(types.shapes):
        lines += _shape_lines(f"s{index}", root, shape, types, notation)
    return "\n".join(lines) + "\n"


def _shape_lines(
    rule: str, root: Schema, shape: ObjectShape, types: ArgumentTypes, notation: Notation
) -> list[str]:
    lines: list[str] = []
    pairs: list[tuple[str, bool]] = []
    for index, (name, part) in enumerate(shape.properties.items()):
        if part is not False:
            pair = f"{rule}_{index}"
            lines += notation.named(pair, name, ArgumentValue(root, part, types.of(name)))
            pairs.append((pair, name in shape.required))
    free = []
    for index, (names, part) in enumerate(_free_names(shape)):
        if part is not False:
            free.append(f"{rule}_free_{index}")
            lines += notation.unnamed(free[-1], names, ArgumentValue(root, part, types.others))
    if free and shape.most != 0:
        lines.append(f"{rule}_free: {' | '.join(free)}")
    else:
        free = []
    sequence = _sequence(rule, pairs, shape if free else None, notation.separator)
    return [*sequence, *lines]


def _sequence(
    rule: str, pairs: Sequence[tuple[str, bool]], free: ObjectShape | None, separator: str
) -> list[str]:
    """Returns the rules of a sequence of pairs: `first` before the first pair, `rest` after it."""
    least, most = (0, 0) if free is None else (free.least, free.most)
    bounds = f"{{{least},{'' if most is None else most}}}"
    if not separator:
        row = [pair if is_required else f"{pair}?" for pair, is_required in pairs]
        row += [] if free is None else [f"{rule}_free{bounds}"]
        return [f"{rule}: {' '.join(row) or EMPTY}"]
    separator = literal(separator)
    lines = [f"{rule}: {rule}_first_0"]
    for index, (pair, is_required) in enumerate(pairs):
        after = f"{rule}_rest_{index + 1}"
        skips = "" if is_required else f" | {rule}_first_{index + 1}"
        lines.append(f"{rule}_first_{index}: {pair} {after}{skips}")
        skips = "" if is_required else f" | {after}"
        lines.append(f"{rule}_rest_{index}: {separator} {pair} {after}{skips}")
    end = len(pairs)
    if free is None:
        return [*lines, f"{rule}_first_{end}: {EMPTY}", f"{rule}_rest_{end}: {EMPTY}"]
    more = f"({separator} {rule}_free)"
    rest = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    first = f"{rule}_free {more}{rest}" + ("" if least else f" | {EMPTY}")
    return [*lines, f"{rule}_first_{end}: {first}", f"{rule}_rest_{end}: {more}{bounds}"]


def _free_names(shape: ObjectShape) -> list[tuple[str, Schema]]:
    """Returns terminals for names that a shape does not list, and the schemas of their values;
    excludes names that match two patterns.
    """
    whole = {pattern: f"/{whole_pattern(pattern)}/" for pattern, _ in shape.patterns}
    found = []
    for pattern, schema in shape.patterns:
        others = [f"~{other}" for key, other in whole.items() if key != pattern]
        found.append((" & ".join([whole[pattern], *others]), schema))
    found.append((" & ".join(f"~{other}" for other in whole.values()), shape.additional))
    listed_names = " | ".join(map(literal, shape.properties))
    return [
        (
            " & ".join(
                [*([names] if names else []), *([f"~({listed_names})"] if listed_names else [])]
            ),
            schema,
        )
        for names, schema in found
    ]


def _json(value: ArgumentValue, options: Mapping[str, Any]) -> str:
    schema = {} if isinstance(value.schema, bool) else standalone(value.root, value.schema)
    rewrite_patterns(schema)
    return json.dumps(schema | {OPTIONS: {**options, **escape_options(schema)}})


# -- pairs between tags ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Delimiters of a format that writes tagged key-value pairs."""

    key_open: str
    key_end: str
    value_end: str
    value_open: str = ""
    """Text between key and value; models omit its leading space."""
    line: str = ""
    """Text around a value that is not part of it."""

    @property
    def separator(self) -> str:
        return ""

    @property
    def _between(self) -> str:
        return f"{self.key_end}{self.value_open}{self.line}"

    def named(self, rule: str, name: str, value: ArgumentValue) -> list[str]:
        if self.key_end in name:
            name = raw_values.quote(name, self.key_end)
        front = literal(f"{self.key_open}{name}{self._between}")
        written, lines = self._value(rule, value)
        return [f"{rule}: {front} {written}", *lines]

    def unnamed(self, rule: str, names: str, value: ArgumentValue) -> list[str]:
        plain = raw_values.plain_terminal(self.key_end, TEXT_ONLY)
        written, lines = self._value(rule, value)
        return [
            f"{rule}: {rule}_key {written}",
            f"{rule}_key[suffix={literal(self._between)}]: {rule.upper()}_KEY",
            f"{rule.upper()}_KEY: {literal(self.key_open)} {rule.upper()}_NAME",
            f"{rule.upper()}_NAME: {plain}{' & ' if names else ''}{names}",
            *lines,
        ]

    def _value(self, rule: str, value: ArgumentValue) -> tuple[str, list[str]]:
        ending = literal(f"{self.line}{self.value_end}\n")
        if "string" not in value.types:
            return f"{rule}_json {ending}", [f"{rule}_json: %json {_json(value, INLINE)}"]
        alternatives = leaves(value.root, value.schema)
        texts = raw_values.raw_terminal(alternatives, self.value_end, value.types)
        lines, options = [], []
        if texts:
            options.append(f"{rule}_text")
            lines += [f"{rule}_text[suffix={ending}]: {rule.upper()}", f"{rule.upper()}: {texts}"]
        if by_json := raw_values.json_types(alternatives):
            types = {"type": sorted(by_json)}
            schema = types if isinstance(value.schema, bool) else {"allOf": [value.schema, types]}
            options.append(f"{rule}_json {ending}")
            inline = _json(ArgumentValue(value.root, schema, value.types), INLINE)
            lines.append(f"{rule}_json: %json {inline}")
        return f"({' | '.join(options)})", lines


# -- bare keys


@dataclass(frozen=True, slots=True)
class BareKeys:
    """An object in braces with bare keys and JSON values; keys that are not identifiers are quoted
    (Gemma 4).
    """

    separator: str = ","

    def named(self, rule: str, name: str, value: ArgumentValue) -> list[str]:
        key = name if name.isidentifier() else json.dumps(name, ensure_ascii=False)
        lines = [f"{rule}_json: %json {_json(value, INLINE)}"]
        return [f"{rule}: {literal(f'{key}:')} {rule}_json", *lines]

    def unnamed(self, rule: str, names: str, value: ArgumentValue) -> list[str]:
        key, more = rule.upper(), f" & {names}" if names else ""
        return [
            f"{rule}: ({key} | {key}_QUOTED) {rule}_json",
            f'{key}: (/[A-Za-z_][0-9A-Za-z_]*/{more}) ":"',
            f"{key}_QUOTED: {QUOTED_KEY} ({PLAIN_NAME}{more}) {QUOTED_KEY_END}",
            f"{rule}_json: %json {_json(value, INLINE)}",
        ]


# -- Python's keyword arguments --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PythonKeywords:
    """Keyword arguments with JSON values; names that are not identifiers use `**{...}`."""

    separator: str = ", "

    def named(self, rule: str, name: str, value: ArgumentValue) -> list[str]:
        if name.isidentifier():
            front, back = literal(f"{name}="), ""
        else:
            front, back = literal(f"**{{{json.dumps(name, ensure_ascii=False)}: "), literal("}")
        written, lines = self._value(rule, value)
        return [f"{rule}: {front} {written} {back}", *lines]

    def unnamed(self, rule: str, names: str, value: ArgumentValue) -> list[str]:
        key, more = rule.upper(), f" & {names}" if names else ""
        written, lines = self._value(rule, value)
        return [
            f'{rule}: {key} {written} | {key}_QUOTED {written} "}}"',
            f'{key}: (/[A-Za-z_][0-9A-Za-z_]*/{more}) "="',
            f"{key}_QUOTED: {QUOTED_FRONT} ({PLAIN_NAME}{more}) {QUOTED_BACK}",
            *lines,
        ]

    def _value(self, rule: str, value: ArgumentValue) -> tuple[str, list[str]]:
        alternatives = leaves(value.root, value.schema)
        words = [
            literal(text)
            for text, constant in WORDS.items()
            if any(leaf.admits(constant) for leaf in alternatives)
        ]
        options = " | ".join([f"{rule}_json", *words])
        return f"({options})", [f"{rule}_json: %json {_json(value, INLINE)}"]
