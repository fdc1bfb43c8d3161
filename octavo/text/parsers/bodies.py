"""The bodies of calls: JSON objects, a name before JSON, pairs of keys and values.

A format (`formats.py`) is one of these with the texts that stand around its parts. Python's
notation is in `pythonic.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.text.parsers.call_rules import PairRule, is_needed, pairs_grammar
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
        """Reads what separates two calls; returns whether another call follows."""
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
    """Reads one object; arguments that come before the name wait for it."""
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
                call.argue(text)
        elif key in ARGUMENT_KEYS:
            yield from _copy_arguments(source, call.argue if call.has_begun else waiting.append)
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
    """Emits nothing."""


@dataclass(frozen=True, slots=True)
class NamedJson:
    """A function's name, a separator, and its arguments in JSON."""

    before: str = ""
    separators: Sequence[str] = ()
    """Texts behind the name; () where the arguments follow at once."""
    id_mark: str = ""
    """Text between the name and an id of the call, where the model gives one."""
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
        yield from _copy_arguments(source, call.argue)
        call.end()

    def _head(self, source: TextSource) -> Steps[tuple[str, str]]:
        """Returns the function's name and the call's id."""
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
    """Returns a name without the namespace and the number that some models put around it."""
    return name.removeprefix("functions.").partition(":")[0]


def _given_id(name: str) -> str:
    """Returns a name that is a call's id too, such as functions.look_up:0."""
    return name if ":" in name else ""


@dataclass(frozen=True, slots=True)
class JsonOr:
    """JSON objects, or another body where the text begins with no bracket."""

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
    """A function's name and pairs of keys and values, between tags."""

    name_open: str
    name_end: str
    key_open: str
    key_end: dict[str, bool | None]
    """Texts behind a key, and whether its value is a text; None leaves that to the schema."""
    value_end: str
    call_end: str
    line: str = ""
    """Text around a value, which is no part of it."""
    openings: Sequence[str] = ()

    @property
    def marks(self) -> Sequence[str]:
        found = (self.name_open, self.key_open, *self.key_end, self.value_end, self.call_end)
        return [mark for mark in found if mark]

    def arguments_form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        key_end = next(iter(self.key_end))
        ending = f"{self.line}{self.value_end}\n"
        rules = []
        for index, (key, value) in enumerate(schema.get("properties", {}).items()):
            front = f"{self.key_open}{key}{key_end}{self.line}"
            rules.append(PairRule(index, front, value, ending, is_needed(schema, key)))
        return {"grammar": pairs_grammar(rules, schema)}

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
            mark = yield from source.at([self.key_open, self.call_end])
            if not mark:
                raise MalformedText
            if mark == self.call_end:
                break
            yield from self._pair(source, section, call, before)
            before = ", "
        call.argue("{}" if before == "{" else "}")

    def _pair(
        self, source: TextSource, section: CallSection, call: CallWriter, before: str
    ) -> Steps[None]:
        key: list[str] = []
        end = yield from source.until(list(self.key_end), key.append)
        if not end:
            raise CutText
        is_text = self.key_end[end]
        if is_text is None:
            is_text = section.types.is_text(call.name, "".join(key))
        call.argue(f"{before}{json.dumps(''.join(key), ensure_ascii=False)}: ")
        if is_text:
            yield from self._text_value(source, call)
        else:
            value: list[str] = []
            if not (yield from source.until([self.value_end], value.append)):
                raise CutText
            call.argue(_json_value("".join(value).strip()))

    def _text_value(self, source: TextSource, call: CallWriter) -> Steps[None]:
        """Copies a text as a JSON string, without the line ends that stand around it."""
        call.argue('"')
        lines = _InnerLines(call.argue)
        if not (yield from source.until([self.value_end], lines.add, keeps_end=False)):
            raise CutText
        call.argue('"')


class _InnerLines:
    """Emits a text without a line end at its front and one at its end."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._waiting = ""
        self._is_first = True

    def add(self, text: str) -> None:
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\n")
        text = self._waiting + text
        self._waiting = "\n" if text.endswith("\n") else ""
        self._emit(json_piece(text.removesuffix("\n")))


def _json_value(text: str) -> str:
    """Returns a value that is no text as JSON; what is none becomes a string."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        constants = {"True": "true", "False": "false", "None": "null"}
        return constants.get(text) or json.dumps(text, ensure_ascii=False)
