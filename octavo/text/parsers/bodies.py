"""Tool-call bodies: JSON objects, a name before JSON, key-value pairs.

A format (`formats.py`) combines a body with its delimiters. Python notation is in `pythonic.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.text.grammar.arguments import TEXT_ONLY, PairLayout, arguments_grammar
from octavo.text.grammar.raw_values import is_inside_string, is_json, may_be_json, read_raw
from octavo.text.parsers.calls import NAME, CallBody, CallSection, CallWriter, json_piece
from octavo.text.parsers.json_text import at_key, copy_value, read_string, unescape_string
from octavo.text.parsers.source import CutText, Emit, MalformedText, Steps, TextSource

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
ID_KEY = "id"
OTHER_KEYS = ("type", "tool_call_id")


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`{"name": ..., "arguments": {...}}`, one or several, in a list or with separators."""

    separators: str = ",;"
    openings: Sequence[str] = ("{", "[")
    marks: Sequence[str] = ()

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"schema": schema}

    def read(self, source: TextSource, section: CallSection) -> Steps[None]:
        yield from source.skip_space()
        in_list = (yield from source.next()) == "["
        if in_list:
            source.take()
        while True:
            yield from source.skip_space()
            yield from _json_call(source, section.next_call())
            if not (yield from self._behind_call(source, in_list=in_list)):
                return

    def _behind_call(self, source: TextSource, *, in_list: bool) -> Steps[bool]:
        """Reads the separator between calls; returns whether another call follows."""
        char = yield from source.peek_past_space()
        if in_list and char == "]":
            yield from source.skip_space()
            source.take()
            return False
        if in_list and not char:
            raise CutText
        if not in_list and char == "{":
            return True
        if not char or char not in ("," if in_list else self.separators):
            if in_list:
                raise MalformedText
            return False
        yield from source.skip_space()
        source.take()
        return True


def _json_call(source: TextSource, call: CallWriter) -> Steps[None]:
    """Reads one object; arguments that precede the name are buffered."""
    yield from source.expect("{")
    waiting: list[str] = []
    call_id = ""
    while (yield from at_key(source)):
        key = yield from read_string(source)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if key in NAME_KEYS and not call.has_begun:
            call.begin((yield from read_string(source)), call_id)
            for text in waiting:
                call.add_arguments(text)
        elif key in ARGUMENT_KEYS:
            yield from _copy_arguments(
                source, call.add_arguments if call.has_begun else waiting.append
            )
        elif key == ID_KEY and not call.has_begun and (yield from source.next()) == '"':
            call_id = yield from read_string(source)
        elif call.has_begun or key in (ID_KEY, *OTHER_KEYS):
            yield from copy_value(source, _drop)
        else:
            raise MalformedText
    if not call.has_begun:
        raise MalformedText
    call.end()


def _copy_arguments(source: TextSource, emit: Emit) -> Steps[None]:
    """Emits a call's arguments; some models write them as a JSON string, or null for none."""
    first = yield from source.next()
    if first == '"':
        yield from unescape_string(source, emit)
    elif first == "{":
        yield from copy_value(source, emit)
    else:
        value: list[str] = []
        yield from copy_value(source, value.append)
        text = "".join(value)
        emit("" if text == "null" else text)


def _drop(text: str) -> None:
    """Discards text."""


@dataclass(frozen=True, slots=True)
class NamedJson:
    """A function name, a separator, and JSON arguments."""

    before: str = ""
    separators: Sequence[str] = ()
    """Texts after the name; () if the arguments follow directly."""
    id_mark: str = ""
    """Text between the name and the call id, if the model writes one."""
    openings: Sequence[str] = ()

    @property
    def marks(self) -> Sequence[str]:
        return [mark for mark in (self.before, *self.separators, self.id_mark) if mark]

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"schema": schema}

    def read(self, source: TextSource, section: CallSection) -> Steps[None]:
        call = section.next_call()
        yield from source.expect(self.before)
        name, call_id = yield from self._head(source)
        call.begin(name, call_id)
        yield from source.skip_space()
        yield from _copy_arguments(source, call.add_arguments)
        call.end()

    def _head(self, source: TextSource) -> Steps[tuple[str, str]]:
        """Reads the function name and the call id."""
        yield from source.skip_space()
        name: list[str] = []
        yield from source.run(NAME, name.append)
        yield from source.skip_space()
        marks = [*self.separators, *([self.id_mark] if self.id_mark else [])]
        mark = (yield from source.at(marks)) if marks else ""
        call_id: list[str] = []
        if self.id_mark and mark == self.id_mark:
            yield from source.run(NAME, call_id.append)
            mark = yield from source.at(self.separators)
        if not mark and (yield from source.next()) != "{":
            raise MalformedText
        return _plain_name("".join(name)), "".join(call_id) or _given_id("".join(name))


def _plain_name(name: str) -> str:
    """Strips the namespace and index that some models add to a name."""
    return name.removeprefix("functions.").partition(":")[0]


def _given_id(name: str) -> str:
    """Returns a name that is also a call id, such as functions.look_up:0; "" for other names."""
    return name if ":" in name else ""


@dataclass(frozen=True, slots=True)
class JsonOr:
    """JSON objects, or another body if the text does not start with a bracket."""

    other: CallBody
    json: JsonCalls = JsonCalls()
    openings: Sequence[str] = ()

    @property
    def marks(self) -> Sequence[str]:
        return self.other.marks

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"schema": schema}

    def read(self, source: TextSource, section: CallSection) -> Steps[None]:
        yield from source.skip_space()
        is_json = (yield from source.next()) in "[{"
        body: CallBody = self.json if is_json else self.other
        yield from body.read(source, section)


@dataclass(frozen=True, slots=True)
class KeyValues:
    """A function name and tagged key-value pairs."""

    name_open: str
    name_end: str
    layout: PairLayout
    call_end: str
    openings: Sequence[str] = ()

    @property
    def marks(self) -> Sequence[str]:
        pair = self.layout
        opens = (self.name_open, pair.key_open, pair.value_open.strip())
        marks = (*opens, pair.key_end, pair.value_end, self.call_end)
        return [mark for mark in marks if mark]

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"grammar": arguments_grammar(schema, self.layout)}

    def read(self, source: TextSource, section: CallSection) -> Steps[None]:
        yield from source.skip_space()
        yield from source.expect(self.name_open)
        name: list[str] = []
        yield from source.run(NAME, name.append)
        yield from source.next()
        yield from source.expect(self.name_end)
        call = section.next_call()
        call.begin("".join(name))
        before = "{"
        while True:
            yield from source.skip_space()
            mark = yield from source.at([self.layout.key_open, self.call_end])
            if not mark:
                raise MalformedText
            if mark == self.call_end:
                break
            yield from self._pair(source, section, call, before)
            before = ", "
        call.add_arguments("{}" if before == "{" else "}")

    def _pair(
        self, source: TextSource, section: CallSection, call: CallWriter, before: str
    ) -> Steps[None]:
        key: list[str] = []
        if not (yield from source.until([self.layout.key_end], key.append)):
            raise CutText
        if self.layout.value_open:
            yield from source.skip_space()
            yield from source.expect(self.layout.value_open.strip())
        quoted = read_raw("".join(key), self.layout.key_end, TEXT_ONLY)
        types = section.types.get_types(call.name, json.loads(quoted))
        call.add_arguments(f"{before}{quoted}: ")
        value = RawValue(call.add_arguments, self.layout, types)
        while True:
            mark = yield from source.until([self.layout.value_end], value.add, keeps_end=False)
            if not mark:
                raise CutText
            if not value.is_inside_string:
                break
            value.add(mark)
        value.end()


class RawValue:
    """Converts a streamed value to JSON: strings are emitted as soon as the value can only be a
    string, other values at the end.
    """

    def __init__(self, emit: Emit, layout: PairLayout, types: frozenset[str]) -> None:
        self._emit = emit
        self._layout = layout
        self._types = types
        self._waiting = ""
        """Text that has not been emitted."""
        self._is_string = False

    def add(self, text: str) -> None:
        self._waiting += text
        line = self._layout.line
        if self._is_string:
            self._emit_string()
        elif "string" in self._types and not may_be_json(
            self._waiting.removeprefix(line), self._types
        ):
            self._is_string = True
            self._waiting = self._waiting.removeprefix(line)
            self._emit('"')
            self._emit_string()

    @property
    def is_inside_string(self) -> bool:
        """Whether the value is a list or object with an open string."""
        text = self._waiting.removeprefix(self._layout.line)
        return not self._is_string and is_inside_string(text, self._types)

    def end(self) -> None:
        line = self._layout.line
        if self._is_string:
            self._emit(json_piece(self._waiting.removesuffix(line)) + '"')
            return
        text = self._waiting.removeprefix(line).removesuffix(line)
        if "string" in self._types:
            self._emit(read_raw(text, self._layout.value_end, self._types))
        else:
            self._emit(_json_value(text.strip()))

    def _emit_string(self) -> None:
        """Emits the received text except a trailing newline that may belong to the delimiter."""
        line = self._layout.line
        held_back = line if line and self._waiting.endswith(line) else ""
        self._emit(
            json_piece(self._waiting.removesuffix(held_back) if held_back else self._waiting)
        )
        self._waiting = held_back


def _json_value(text: str) -> str:
    """Returns a non-string value as JSON; invalid JSON becomes a string."""
    if is_json(text):
        return text
    constants = {"True": "true", "False": "false", "None": "null"}
    return constants.get(text) or json.dumps(text, ensure_ascii=False)
