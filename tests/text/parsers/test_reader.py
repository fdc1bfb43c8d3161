"""Messages read from text: every format, however the text was cut."""

import codecs
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.parsers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ToolFormat,
    named_tool_format,
)
from octavo.text.parsers.parts import MessageText, PartKind
from octavo.text.parsers.reader import MessageForm, MessageReader, read_message
from tests.text.parsers.recorded import FUNCTIONS, RECORDED, UNFINISHED, Recorded

ALL = [*RECORDED, *UNFINISHED]


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def streamed(form: MessageForm, pieces: list[str]) -> MessageText:
    """Reads a text piece by piece; each state of the arguments begins the next one."""
    reader, message = MessageReader(form), MessageText()
    for piece in pieces:
        message.add(reader.read(piece))
    message.add(reader.read("", finished=True))
    return message


def decoded(pieces: list[bytes]) -> list[str]:
    """Returns pieces of bytes as a detokenizer shows them: whole characters only."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [decoder.decode(piece) for piece in pieces]


@named(RECORDED)
def test_an_answer_is_the_message_that_its_writer_meant(case: Recorded):
    message = read_message(case.form, case.text)
    assert (message.content, message.reasoning) == (case.content, case.thought)
    found = [(call.name, json.loads(call.arguments)) for call in message.calls]
    assert found == list(case.calls)


def test_every_format_is_recorded():
    assert {case.tools for case in RECORDED} >= {row.name for row in TOOL_FORMATS}
    found = [case.form.reasoning for case in RECORDED]
    assert all(row in found for row in REASONING_FORMATS)


@named(UNFINISHED)
def test_what_is_no_call_is_content_as_it_was_written(case: Recorded):
    message = read_message(case.form, case.text)
    assert (message.content, message.reasoning, message.calls) == (case.text, "", [])


@named(ALL)
def test_a_text_cut_at_any_byte_is_the_same_message(case: Recorded):
    whole, data = read_message(case.form, case.text), case.text.encode()
    for place in range(len(data) + 1):
        assert streamed(case.form, decoded([data[:place], data[place:]])) == whole
    assert streamed(case.form, decoded([bytes([byte]) for byte in data])) == whole


@named(ALL)
def test_a_text_cut_at_two_places_near_tags_and_escapes_is_the_same_message(case: Recorded):
    whole, text = read_message(case.form, case.text), case.text
    near = [
        place
        for place in range(len(text))
        if any(char in '<>[]{}"\\|\n' for char in text[max(0, place - 1) : place + 1])
    ]
    for first in near[:: max(1, len(near) // 12)]:
        for second in near:
            if first < second:
                pieces = [text[:first], text[first:second], text[second:]]
                assert streamed(case.form, pieces) == whole


@named(RECORDED)
def test_a_text_that_ends_anywhere_keeps_what_there_is(case: Recorded):
    whole = read_message(case.form, case.text)
    for end in range(len(case.text)):
        cut = read_message(case.form, case.text[:end])
        assert len(cut.calls) <= len(whole.calls)
        for mine, theirs in zip(cut.calls, whole.calls, strict=False):
            assert mine.name == theirs.name
            assert theirs.arguments.startswith(mine.arguments) or mine.arguments == "{}"
        assert whole.reasoning.startswith(cut.reasoning.rstrip()) or not cut.reasoning


@named(RECORDED)
def test_a_closing_tag_that_the_length_cuts_is_no_content(case: Recorded):
    ends = case.form.tools.end if isinstance(case.form.tools, ToolFormat) else ()
    whole, text = read_message(case.form, case.text), case.text.rstrip()
    for end in ends:
        for left in range(1, len(end) if text.endswith(end) else 1):
            cut = read_message(case.form, text[:-left])
            assert cut.content.rstrip() == whole.content.rstrip(), text[:-left]
            assert cut.calls == whole.calls


@named(RECORDED)
def test_arguments_only_grow_by_their_end(case: Recorded):
    reader = MessageReader(case.form)
    parts = [part for char in case.text for part in reader.read(char)]
    parts += reader.read("", finished=True)
    message = MessageText()
    for part in parts:
        message.add([part])
        if part.kind is PartKind.ARGUMENTS:
            assert part.call == len(message.calls) - 1
    assert message == read_message(case.form, case.text)


@named(ALL)
def test_a_fork_tells_what_its_parent_did_not(case: Recorded):
    """Wherever the text is cut, calls that the first part completes are its own, the others are the
    second part's and whole; nothing of the content is told twice or lost, but space at the cut.
    """
    whole = read_message(case.form, case.text)
    for cut in range(1, len(case.text)):
        before = MessageText()
        before.add(MessageReader(case.form).read(case.text[:cut]))
        after = read_message(case.form, case.text[cut:], case.text[:cut])
        num_before = len(whole.calls) - len(after.calls)
        told = [(call.name, call.arguments) for call in (*before.calls[:num_before], *after.calls)]
        assert told == [(call.name, call.arguments) for call in whole.calls], cut
        assert squeezed(before.content + after.content) == squeezed(whole.content), cut
        assert squeezed(before.reasoning + after.reasoning) == squeezed(whole.reasoning), cut


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", [row.name for row in TOOL_FORMATS])
@given(text=st.text(st.sampled_from('ab1 \n<>[]{}():;,="\\|/_'), max_size=80), data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_text_is_read_alike_in_pieces_and_whole(name, text, data):
    tools = named_tool_format(name)
    assert tools is not None
    marks = [*tools.marks, '{"name": "now"', "look_up", '"arguments": ']
    pieces = data.draw(st.lists(st.sampled_from([*marks, text, "{", "}", "\n"]), max_size=8))
    whole = "".join(pieces)
    form = MessageForm(tools, None, FUNCTIONS)
    places = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    cuts = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    assert streamed(form, cuts) == read_message(form, whole)


def test_arguments_are_told_before_a_call_is_complete():
    form = MessageForm(named_tool_format("hermes"), None, FUNCTIONS)
    reader = MessageReader(form)
    parts = reader.read('<tool_call>{"name": "look_up", "arguments": {"city": "Os')
    assert [part.text for part in parts] == ["look_up", '{"city": "Os']


def test_content_without_tags_is_told_at_once():
    form = MessageForm(named_tool_format("hermes"), None, FUNCTIONS)
    reader = MessageReader(form)
    assert [part.text for part in reader.read("one two")] == ["one two"]
    assert [part.text for part in reader.read(" <tool")] == []
    assert [part.text for part in reader.read("s> ")] == [" <tools>"]
