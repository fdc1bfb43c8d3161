"""Calls in Python notation: `[look_up(city="Oslo", days=3), now()]`; names that are not identifiers
use a dictionary: `f(**{"a-b": 1})`.

A call begins at its first keyword, or at the closing parenthesis if it has none; each argument is
emitted as JSON once it is complete.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.text.grammar.arguments import PythonKeywords, arguments_grammar
from octavo.text.grammar.raw_values import is_json
from octavo.text.parsers.calls import NAME, CallSection, CallWriter
from octavo.text.parsers.source import CutText, MalformedText, Steps, TextSource

KEYWORD = re.compile(r"\w+")
PAIRS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls in a list, or consecutive ones if not `in_list`."""

    in_list: bool = True
    suffix: str = ""
    """Method suffix of a function name, such as ".call"."""
    openings: Sequence[str] = ("[",)
    marks: Sequence[str] = ()

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"grammar": arguments_grammar(schema, PythonKeywords())}

    def read(self, source: TextSource, section: CallSection) -> Steps[None]:
        yield from source.skip_space()
        if self.in_list:
            yield from source.expect("[")
        while True:
            yield from source.skip_space()
            yield from self._call(source, section.next_call())
            char = yield from source.peek_past_space()
            if self.in_list and char not in (",", "]"):
                raise CutText if not char else MalformedText
            if char not in (",", "]") and NAME.match(char or " ") is None:
                return
            if char in (",", "]"):
                yield from source.skip_space()
                source.take()
            if char == "]":
                return

    def _call(self, source: TextSource, call: CallWriter) -> Steps[None]:
        name: list[str] = []
        yield from source.run(NAME, name.append)
        yield from source.expect("(")
        function = "".join(name).removesuffix(self.suffix)
        before = "{"
        while True:
            yield from source.skip_space()
            if (yield from source.next()) == ")":
                source.take()
                break
            pairs = yield from _pairs(source)
            if not call.has_begun:
                call.begin(function)
            if pairs:
                call.add_arguments(before + pairs)
                before = ", "
        if not call.has_begun:
            call.begin(function)
        call.add_arguments("{}" if before == "{" else "}")


def _pairs(source: TextSource) -> Steps[str]:
    """Returns a keyword argument as JSON object pairs, also for `**{...}`."""
    if not (yield from source.at(["**"])):
        keyword = json.dumps((yield from _keyword(source)), ensure_ascii=False)
        return f"{keyword}: {_as_json((yield from _literal(source)))}"
    pairs = _as_json((yield from _literal(source)))
    if not pairs.startswith("{"):
        raise MalformedText
    return pairs[1:-1]


def _keyword(source: TextSource) -> Steps[str]:
    keyword: list[str] = []
    yield from source.run(KEYWORD, keyword.append)
    yield from source.skip_space()
    if not keyword:
        raise MalformedText
    yield from source.expect("=")
    yield from source.skip_space()
    return "".join(keyword)


def _literal(source: TextSource) -> Steps[str]:
    """Returns the text of one value and consumes the following comma."""
    pieces: list[str] = []
    closing: list[str] = []
    while True:
        char = yield from source.next()
        if char in "\"'":
            yield from _quote(source, pieces)
            continue
        if not closing and char in ",)":
            if char == ",":
                source.take()
            return "".join(pieces).strip()
        pieces.append(source.take())
        if char in PAIRS:
            closing.append(PAIRS[char])
        elif closing and char == closing[-1]:
            closing.pop()


def _quote(source: TextSource, pieces: list[str]) -> Steps[None]:
    """Copies a string including its single or triple quotes."""
    quote = yield from source.next()
    end = quote * 3 if (yield from source.peek(3)) == quote * 3 else quote
    for _ in end:
        pieces.append(source.take())
    while (mark := (yield from source.at([end, "\\"]))) != end:
        if mark:
            pieces.append(mark)
        yield from source.next()
        pieces.append(source.take())
    pieces.append(end)


def _as_json(text: str) -> str:
    """Converts a Python literal to JSON; anything else becomes a string."""
    if is_json(text):
        return text
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)
