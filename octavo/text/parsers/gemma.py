"""Calls in Gemma 4's notation: `call:look_up{city:<|"|>Oslo<|"|>,days:3,tags:[<|"|>a<|"|>]}`.

Keys are bare, strings have no escapes. JSON's strings are read too. Source: the chat template of
Gemma 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.text.grammar.arguments import BareKeys, arguments_grammar
from octavo.text.grammar.raw_values import is_json
from octavo.text.parsers.calls import NAME, CallSection, json_piece
from octavo.text.parsers.json_text import copy_value, read_string
from octavo.text.parsers.source import CutText, Emit, MalformedText, Steps, TextSource

QUOTE = '<|"|>'
BARE_KEY = re.compile(r"[^:,{}\[\]<\"\s]+")
SCALAR = re.compile(r"[^,{}\[\]<\"]+")
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
MAX_DEPTH = 64
"""Maximum nesting of values."""


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """One call: `call:`, a name, and its arguments in braces."""

    openings: Sequence[str] = ()
    marks: Sequence[str] = (QUOTE,)

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"grammar": arguments_grammar(schema, BareKeys())}

    def read(self, source: TextSource, section: CallSection) -> Steps[None]:
        yield from source.skip_space()
        yield from source.expect("call:")
        name: list[str] = []
        yield from source.run(NAME, name.append)
        yield from source.skip_space()
        if (yield from source.next()) != "{":
            raise MalformedText
        call = section.next_call()
        call.begin("".join(name))
        yield from _object(source, call.add_arguments, depth=0)


def _object(source: TextSource, emit: Emit, *, depth: int) -> Steps[None]:
    """Emits an object as JSON; arguments begin with their first key, so that a call without any
    has an empty object.
    """

    def member(before: str) -> Steps[None]:
        key = yield from _key(source)
        yield from source.skip_space()
        yield from source.expect(":")
        emit(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(source, emit, depth=depth + 1)

    yield from _entries(source, emit, "{}", member)


def _list(source: TextSource, emit: Emit, *, depth: int) -> Steps[None]:
    """Emits a list as JSON."""

    def element(before: str) -> Steps[None]:
        emit(before)
        yield from _value(source, emit, depth=depth + 1)

    yield from _entries(source, emit, "[]", element)


def _entries(
    source: TextSource, emit: Emit, brackets: str, entry: Callable[[str], Steps[None]]
) -> Steps[None]:
    """Reads the entries between brackets. `entry` reads one and emits it after the text that it is
    given: the opening bracket or a comma.
    """
    opening, closing = brackets[0], brackets[1]
    yield from source.expect(opening)
    before = opening
    while True:
        yield from source.skip_space()
        char = yield from source.next()
        if char in (",", closing):
            source.take()
            if char == closing:
                break
            continue
        yield from entry(before)
        before = ", "
    emit(brackets if before == opening else closing)


def _key(source: TextSource) -> Steps[str]:
    pieces: list[str] = []
    if (yield from source.at([QUOTE])):
        if not (yield from source.until([QUOTE], pieces.append)):
            raise CutText
    elif (yield from source.next()) == '"':
        return (yield from read_string(source))
    else:
        yield from source.run(BARE_KEY, pieces.append)
    if not pieces:
        raise MalformedText
    return "".join(pieces)


def _value(source: TextSource, emit: Emit, *, depth: int) -> Steps[None]:
    """Emits a value as JSON; strings as they arrive."""
    if depth > MAX_DEPTH:
        raise MalformedText
    yield from source.skip_space()
    if (yield from source.at([QUOTE])):
        emit('"')
        quote = yield from source.until(
            [QUOTE], lambda text: emit(json_piece(text)), keeps_end=False
        )
        if not quote:
            raise CutText
        emit('"')
        return
    char = yield from source.next()
    if char == '"':
        yield from copy_value(source, emit)
    elif char == "{":
        yield from _object(source, emit, depth=depth)
    elif char == "[":
        yield from _list(source, emit, depth=depth)
    else:
        pieces: list[str] = []
        yield from source.run(SCALAR, pieces.append)
        yield from source.next()
        text = "".join(pieces).strip()
        if not text:
            raise MalformedText
        constant = CONSTANTS.get(text) or json.dumps(text, ensure_ascii=False)
        emit(text if is_json(text) else constant)
