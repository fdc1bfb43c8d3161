"""Parses a model's output into reasoning, content and calls as it streams.

The result does not depend on how the text is split. A malformed call becomes content, as written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.text.parsers.calls import CallSection, CallWriter, FunctionTypes
from octavo.text.parsers.formats import ChannelFormat, ReasoningFormat, ToolFormat
from octavo.text.parsers.parts import FunctionText, MessageText, Part, PartKind, PartList
from octavo.text.parsers.source import Emit, MalformedText, Steps, TextSource

OPENINGS = ("<|start|>", "<|channel|>")
ENDINGS = ("<|end|>", "<|call|>", "<|return|>")
MESSAGE = "<|message|>"
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
ANALYSIS = re.compile(r"(?:<\|channel\|>|^)\s*analysis")
ANYTHING = re.compile(r"[\s\S]+")


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The parts that an output may contain."""

    tools: ToolFormat | ChannelFormat | None = None
    """Tool-call format; None if the request offers no functions."""
    reasoning: ReasoningFormat | ChannelFormat | None = None
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schema of each function's arguments, by name."""
    begins_in_reasoning: bool = False
    """Whether the prompt already opened the reasoning."""
    may_reason: bool = True
    """Whether reasoning is possible; the prompt may have closed it."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Client names of functions with an alias, by alias."""


class MessageReader:
    """Parser of one output."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._parts = PartList(form.names)
        self._source = TextSource()
        self._types = FunctionTypes(form.functions)
        self._space = ""
        """Trailing whitespace that is held back and emitted only if more text of the same kind
        follows.
        """
        self._steps = self._message()
        self._has_ended = False

    def read(self, text: str, *, finished: bool = False) -> list[Part]:
        """Adds text; returns the parts that are now certain, or all parts if finished."""
        self._source.add(text)
        if finished:
            self._source.end()
        if not self._has_ended:
            self._has_ended = next(self._steps, "ended") == "ended"
        return self._parts.pop_parts()

    def _message(self) -> Steps[None]:
        form = self._form
        channels = form.tools if form.reasoning is None else form.reasoning
        if isinstance(channels, ChannelFormat):
            yield from read_channels(self._source, self._parts)
            return
        dropped: Sequence[str] = ()
        if isinstance(form.reasoning, ReasoningFormat):
            yield from self._reasoning(form.reasoning)
            dropped = form.reasoning.dropped
        if isinstance(form.tools, ToolFormat):
            yield from self._content_and_calls(form.tools, dropped)
            return
        while dropped and (yield from self._source.until(dropped, self._emit_content)):
            yield from self._skip_space()
        yield from self._rest()

    def _skip_space(self) -> Steps[None]:
        """Drops the whitespace around a marker."""
        self._space = ""
        yield from self._source.skip_space()

    def _rest(self) -> Steps[None]:
        """Emits the remaining text as content."""
        self._emit_text(self._space)
        yield from self._source.run(ANYTHING, self._emit_text)

    # -- reasoning ---------------------------------------------------------------------------------

    def _reasoning(self, tags: ReasoningFormat) -> Steps[None]:
        """Reads the text between the reasoning tags, stripped."""
        if not self._form.may_reason:
            return
        self._source.hold()
        yield from self._source.skip_space()
        opened = yield from self._source.at([tags.opening])
        before = self._source.held()
        if not opened and not self._form.begins_in_reasoning:
            self._emit_content(before)
            return
        yield from self._source.skip_space()
        yield from self._source.until([tags.closing], self._emit_reasoning, keeps_end=False)
        self._space = ""
        yield from self._source.skip_space()

    def _emit_reasoning(self, text: str) -> None:
        self._emit(PartKind.REASONING, text)

    # -- content and calls -------------------------------------------------------------------------

    def _content_and_calls(self, tools: ToolFormat, dropped: Sequence[str]) -> Steps[None]:
        """Reads content and calls; whitespace between them is dropped."""
        if tools.body.openings:
            yield from self._unmarked(tools)
        marks = [*tools.begin, *dropped]
        while marks and (mark := (yield from self._source.until(marks, self._emit_content))):
            if mark in dropped:
                yield from self._skip_space()
            else:
                yield from self._section(tools, mark)
        yield from self._rest()

    def _at_front(self, tools: ToolFormat) -> Steps[bool]:
        """Returns whether the text continues with something other than a call without a marker."""
        char = yield from self._source.peek_past_space()
        return char not in tools.body.openings if char else True

    def _unmarked(self, tools: ToolFormat) -> Steps[None]:
        """Reads calls without a marker; only functions of the request are accepted."""
        while not (yield from self._at_front(tools)):
            section = CallSection(self._source, self._parts, self._types, self._types.names)
            self._source.hold()
            yield from self._source.skip_space()
            if not (yield from self._calls(tools, section)):
                return

    def _section(self, tools: ToolFormat, mark: str) -> Steps[None]:
        """Reads the calls of a section after its marker."""
        section = CallSection(self._source, self._parts, self._types)
        self._source.hold(mark)
        while (yield from self._at_call(tools, section)):
            if not (yield from self._calls(tools, section)):
                return
        if not section.writer.has_begun:
            self._emit_content(self._source.held())
            return
        self._source.held()
        yield from self._source.skip_space()
        yield from self._source.at_or_cut(tools.end)

    def _at_call(self, tools: ToolFormat, section: CallSection) -> Steps[bool]:
        """Reads the marker of the section's next call; returns whether there is one."""
        if not tools.call_begin:
            return not section.writer.has_begun
        yield from self._source.skip_space()
        return bool((yield from self._source.at([tools.call_begin])))

    def _calls(self, tools: ToolFormat, section: CallSection) -> Steps[bool]:
        """Reads calls; returns whether they were valid. Invalid text is emitted as content."""
        try:
            yield from tools.body.read(self._source, section)
            if tools.call_end:
                yield from self._source.skip_space()
                yield from self._source.expect(tools.call_end)
        except MalformedText:
            text = self._source.held()
            if not section.writer.has_begun:
                self._emit_content(text)
            return False
        self._source.held()
        self._space = ""
        return True

    # -- telling -----------------------------------------------------------------------------------

    def _emit_content(self, text: str) -> None:
        self._emit(PartKind.CONTENT, text)

    def _emit_text(self, text: str) -> None:
        self._parts.add_text(PartKind.CONTENT, text)

    def _emit(self, kind: PartKind, text: str) -> None:
        """Emits text but holds back trailing whitespace."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        self._parts.add_text(kind, body)


class ContinuedReader:
    """Parser of an output that continues an earlier text.

    Of the earlier text, only a call with incomplete arguments is emitted, from its beginning.
    """

    def __init__(self, form: MessageForm, earlier_text: str) -> None:
        self._reader = MessageReader(form)
        before = MessageText()
        before.add(self._reader.read(earlier_text))
        self._num_told = len(before.calls)
        self._open: list[Part] = []
        if before.calls and not _is_whole(before.calls[-1].arguments):
            self._num_told -= 1
            self._open = _make_parts(before.calls[-1])

    def read(self, text: str, *, finished: bool = False) -> list[Part]:
        """Adds text; returns the parts that are now certain. Calls are numbered from 0."""
        parts, self._open = self._open, []
        for part in self._reader.read(text, finished=finished):
            is_of_call = part.kind in (PartKind.CALL, PartKind.ARGUMENTS)
            parts.append(replace(part, call=part.call - self._num_told) if is_of_call else part)
        return parts


def _is_whole(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True


def _make_parts(call: FunctionText) -> list[Part]:
    """Returns a possibly incomplete call as parts."""
    begun = [Part(PartKind.CALL, call.name, 0, call.call_id)]
    return [*begun, Part(PartKind.ARGUMENTS, call.arguments, 0)] if call.arguments else begun


class PlainReader:
    """Parser of an output that is only content."""

    def read(self, text: str, *, finished: bool = False) -> list[Part]:
        return [Part(PartKind.CONTENT, text)] if text else []


PartReader = MessageReader | ContinuedReader | PlainReader


def make_reader(form: MessageForm | None, earlier_text: str) -> PartReader:
    """Returns a parser; with `earlier_text`, one for an output that continues that text."""
    if form is None:
        return PlainReader()
    return ContinuedReader(form, earlier_text) if earlier_text else MessageReader(form)


def read_message(form: MessageForm, text: str, earlier_text: str = "") -> MessageText:
    """Parses a complete output, which may continue the text `earlier_text`."""
    message = MessageText()
    message.add(make_reader(form, earlier_text).read(text, finished=True))
    return message


def read_channels(source: TextSource, parts: PartList) -> Steps[None]:
    """Reads an output message by message; text outside of messages is content.

    The analysis channel is reasoning, messages to a function are call arguments, others are
    content. Source: OpenAI's description of the harmony response format.
    """
    num_thoughts = 0
    while (yield from source.until(OPENINGS, _make_emit(parts, PartKind.CONTENT))):
        header: list[str] = []
        if not (yield from source.until([MESSAGE], header.append)):
            return
        text = "".join(header)
        recipient = RECIPIENT.search(text)
        if recipient is not None:
            yield from _call(source, CallWriter(parts), recipient[1])
        elif ANALYSIS.search(text) or "to=" in text:
            think = _make_emit(parts, PartKind.REASONING)
            if num_thoughts:
                think("\n")
            num_thoughts += 1
            yield from source.until(ENDINGS, think, keeps_end=False)
        else:
            yield from source.until(ENDINGS, _make_emit(parts, PartKind.CONTENT))


def _make_emit(parts: PartList, kind: PartKind) -> Emit:
    return lambda text: parts.add_text(kind, text)


def _call(source: TextSource, call: CallWriter, name: str) -> Steps[None]:
    try:
        call.begin(name)
    except MalformedText:
        return
    if (yield from source.until(ENDINGS, call.add_arguments, keeps_end=False)):
        call.end()
