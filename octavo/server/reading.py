"""How the text of one answer is to be read: as content alone, or with reasoning and calls.

Found once the prompt is made, for the prompt may have opened or closed the reasoning already.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.answer_marks import AnswerMarks
from octavo.ports import Rendering, Tokenizer
from octavo.sampling_params import SamplingParams
from octavo.server.state.model_formats import ModelFormats
from octavo.server.tool_use import ToolUse
from octavo.text.parsers.formats import (
    ChannelFormat,
    named_reasoning_format,
    named_tool_format,
)
from octavo.text.parsers.parts import MessageText, Part, PartKind
from octavo.text.parsers.reader import MessageForm, MessageReader, read_message

TAIL_TOKENS = 32
"""Last tokens of a prompt, among which the tags that open or close the reasoning stand."""
LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """The reading of every sample of one request."""

    form: MessageForm | None = None
    """Parts that the answer may have; None where all of it is content."""
    marks: AnswerMarks | None = None
    id_length: int = 0
    """Length of a call's id where the model's template checks it; 0 for any."""

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """Returns params with the marks that the detokenizer must know."""
        if self.marks is None:
            return params
        return msgspec.structs.replace(params, answer_marks=self.marks)

    def stored(self) -> dict[str, Any] | None:
        """Returns what `restored` makes the same reading of; None where all text is content."""
        form = self.form
        if form is None:
            return None
        return {
            "tools": None if form.tools is None else form.tools.name,
            "reasoning": None if form.reasoning is None else form.reasoning.name,
            "functions": dict(form.functions),
            "begins_in_reasoning": form.begins_in_reasoning,
            "may_reason": form.may_reason,
        }

    @staticmethod
    def restored(found: Mapping[str, Any] | None) -> AnswerReading:
        """Returns the reading of a stored text."""
        if found is None:
            return PLAIN
        tools, reasoning = found["tools"], found["reasoning"]
        return AnswerReading(
            MessageForm(
                None if tools is None else named_tool_format(tools),
                None if reasoning is None else named_reasoning_format(reasoning),
                found["functions"],
                found["begins_in_reasoning"],
                found["may_reason"],
            )
        )

    def reader(self) -> MessageReader | None:
        """Returns what reads one sample as it grows; None where its text is content."""
        return None if self.form is None else MessageReader(self.form)

    def message(self, text: str) -> MessageText:
        """Returns a whole sample's message."""
        return MessageText(content=text) if self.form is None else read_message(self.form, text)

    def call_id(self, given: str) -> str:
        """Returns the id of a new call: the model's own, where it gave one."""
        if given:
            return given
        if self.id_length:
            return "".join(secrets.choice(LETTERS) for _ in range(self.id_length))
        return f"call_{secrets.token_hex(12)}"


PLAIN = AnswerReading()


def plain_parts(text: str) -> list[Part]:
    """Returns a text that is all content as parts."""
    return [Part(PartKind.CONTENT, text)] if text else []


def reading_of(
    formats: ModelFormats,
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[int],
    tools: ToolUse | None,
    continued: str | None,
) -> AnswerReading:
    """Returns how answers to a prompt are read; `continued` is the message that they go on with."""
    reasoning = formats.reasoning
    begins = closed = False
    if reasoning is not None and tokenizer is not None:
        tail = continued
        if tail is None:
            last = list(prompt_token_ids[-TAIL_TOKENS:])
            tail = tokenizer.decode(last, skip_special_tokens=False).rstrip()
            begins = tail.endswith(reasoning.opening)
            closed = tail.endswith(reasoning.closing)
        else:
            begins = tail.rfind(reasoning.opening) > tail.rfind(reasoning.closing)
            closed = not begins and bool(tail)
    is_channel = isinstance(reasoning, ChannelFormat)
    if tools is None and not is_channel and (reasoning is None or closed):
        return PLAIN
    called = formats.tools if tools is not None else None
    form = MessageForm(called, reasoning, _schemas(tools), begins, not closed)
    shown = [*formats.reasoning_token_ids] if reasoning is not None else []
    shown += formats.tool_token_ids if tools is not None else ()
    marks = AnswerMarks(
        shown_token_ids=shown,
        reasoning_opening=reasoning.opening if reasoning is not None and not closed else "",
        reasoning_closing=reasoning.closing if reasoning is not None else "",
        begins_in_reasoning=begins,
    )
    return AnswerReading(form, marks, formats.tools.id_length)


def continued_text(messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str | None:
    """Returns the message that an answer goes on with; None where it begins a new one."""
    if not rendering.continue_final_message:
        return None
    return str(messages[-1]["content"])


def _schemas(tools: ToolUse | None) -> dict[str, Mapping[str, Any]]:
    if tools is None:
        return {}
    return {function.name: function.parameters for function in tools.callable}
