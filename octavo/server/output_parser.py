"""Parser of a request's output: content alone, or reasoning, content and tool calls.

It is built after the prompt, which may have opened or closed the reasoning already.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from octavo.api.sampling_params import SamplingParams
from octavo.api.structured_outputs import StructuredOutputs
from octavo.server.state.model_formats import ModelFormats
from octavo.server.tool_use import ToolUse
from octavo.text.answer_marks import AnswerMarks
from octavo.text.detokenizer import decode_whole_characters
from octavo.text.parsers.call_forms import (
    NO_REASONING,
    CallRules,
    ReasoningSpan,
    any_text,
    behind,
    form_of_answer,
)
from octavo.text.parsers.formats import (
    ChannelFormat,
    ReasoningFormat,
    named_reasoning_format,
    named_tool_format,
)
from octavo.text.parsers.reader import MessageForm, PartReader, make_reader
from octavo.text.ports import Rendering, Tokenizer

TAIL_TOKENS = 32
"""Last tokens of a prompt, among which the tags that open or close the reasoning stand."""
LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class OutputParser:
    """Parser of the samples of one request."""

    form: MessageForm | None = None
    """Parts that the answer may have; None where all of it is content."""
    marks: AnswerMarks | None = None
    rules: CallRules | None = None
    """Functions that the answer may call; None for none."""
    before: ReasoningSpan = NO_REASONING
    """Reasoning before the form of the content begins."""
    id_length: int = 0
    """Length of a call's id where the model's template checks it; 0 for any."""
    given: str = ""
    """Text of the message that the answer goes on from, without a character that it begins."""
    given_token_ids: tuple[int, ...] = ()
    """Tokens of that text."""

    def apply_to(self, params: SamplingParams) -> SamplingParams:
        """Returns params with the marks that the detokenizer must know, and with the structured
        output that calls and reasoning require.
        """
        if self.marks is None:
            return params
        form = self._form(params.structured_outputs)
        return msgspec.structs.replace(params, answer_marks=self.marks, structured_outputs=form)

    def _form(self, own: StructuredOutputs | None) -> StructuredOutputs | None:
        """Returns the form of the whole answer, of which `own` is the form of its content."""
        assert self.form is not None, "an answer with marks is read"
        if self.rules is not None and self.form.tools is not None:
            return form_of_answer(own, self.form.tools, self.rules, self.before)
        if own is not None:
            return behind(own, self.before)
        if self.before.most_tokens is None:
            return None
        return any_text(self.before, "thinking_token_budget")

    def dump(self) -> dict[str, Any] | None:
        """Returns the value from which `load` makes the same parser; None for plain text."""
        form = self.form
        if form is None:
            return None
        return {
            "tools": None if form.tools is None else form.tools.name,
            "reasoning": None if form.reasoning is None else form.reasoning.name,
            "functions": dict(form.functions),
            "begins_in_reasoning": form.begins_in_reasoning,
            "may_reason": form.may_reason,
            "names": dict(form.names),
        }

    @staticmethod
    def load(found: Mapping[str, Any] | None) -> OutputParser:
        if found is None:
            return PLAIN
        tools, reasoning = found["tools"], found["reasoning"]
        return OutputParser(
            MessageForm(
                None if tools is None else named_tool_format(tools),
                None if reasoning is None else named_reasoning_format(reasoning),
                found["functions"],
                found["begins_in_reasoning"],
                found["may_reason"],
                found["names"],
            )
        )

    def after(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> OutputParser:
        """Returns the parser of an answer that continues tokens of one that this parser parsed."""
        marks = self.marks
        if self.form is None or marks is None or not token_ids:
            return self
        hidden = tokenizer.special_token_ids - set(marks.shown_token_ids)
        new = (token_id for token_id in token_ids if token_id not in hidden)
        told = (*self.given_token_ids, *new)
        given = decode_whole_characters(tokenizer, told, skip_special_tokens=False)
        opening = marks.reasoning_opening
        may_reason = bool(opening) and marks.reasoning_closing not in given
        marks = msgspec.structs.replace(
            marks,
            reasoning_opening=opening if may_reason else "",
            begins_in_reasoning=may_reason and (marks.begins_in_reasoning or opening in given),
        )
        return replace(self, given=given, given_token_ids=told, marks=marks)

    def reader(self) -> PartReader:
        """Returns the reader of one sample as it grows."""
        return make_reader(self.form, self.given)

    def new_call_id(self) -> str:
        if self.id_length:
            return "".join(secrets.choice(LETTERS) for _ in range(self.id_length))
        return f"call_{secrets.token_hex(12)}"


PLAIN = OutputParser()


@dataclass(frozen=True, slots=True)
class ReasoningState:
    """Point up to which the prompt has brought the reasoning."""

    has_begun: bool = False
    may_reason: bool = False
    """Whether there may be reasoning still."""


def build_parser(
    formats: ModelFormats,
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[int],
    *,
    tools: ToolUse | None = None,
    continued: str | None = None,
    thinking_budget: int | None = None,
) -> OutputParser:
    """Returns the parser of the answers to a prompt.

    `continued` is the message that the answer continues, None for a new one; `thinking_budget`
    bounds the reasoning, in tokens.
    """
    reasoning = formats.reasoning
    state = ReasoningState()
    if reasoning is not None and tokenizer is not None:
        state = _state(reasoning, tokenizer, prompt_token_ids, continued)
    if tools is None and not isinstance(reasoning, ChannelFormat) and not state.may_reason:
        return PLAIN
    called = formats.tools if tools is not None else None
    aliases = {} if tools is None else tools.aliases(formats.tools)
    schemas = {} if tools is None else tools.enforced()
    schemas = {aliases.get(name, name): schema for name, schema in schemas.items()}
    names = {alias: name for name, alias in aliases.items()}
    form = MessageForm(called, reasoning, schemas, state.has_begun, state.may_reason, names)
    shown = [*formats.reasoning_token_ids, *(formats.tool_token_ids if tools is not None else ())]
    marks = AnswerMarks(
        shown_token_ids=shown,
        reasoning_opening=reasoning.opening if reasoning is not None and state.may_reason else "",
        reasoning_closing=reasoning.closing if reasoning is not None else "",
        begins_in_reasoning=state.has_begun,
    )
    rules = None
    if tools is not None:
        rules = CallRules(schemas, tools.choice == "required", tools.is_parallel)
    before = NO_REASONING
    if reasoning is not None and state.may_reason:
        opening = "" if state.has_begun else reasoning.opening
        before = ReasoningSpan(opening, _closing(reasoning, tools), thinking_budget)
    return OutputParser(form, marks, rules, before, formats.tools.id_length)


def _state(
    reasoning: ReasoningFormat | ChannelFormat,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    continued: str | None,
) -> ReasoningState:
    if continued is not None:
        begun = continued.rfind(reasoning.opening) > continued.rfind(reasoning.closing)
        return ReasoningState(begun, begun or not continued)
    last = list(prompt_token_ids[-TAIL_TOKENS:])
    tail = tokenizer.decode(last, skip_special_tokens=False).rstrip()
    return ReasoningState(tail.endswith(reasoning.opening), not tail.endswith(reasoning.closing))


def _closing(reasoning: ReasoningFormat | ChannelFormat, tools: ToolUse | None) -> str:
    """Returns the text between the reasoning and what a grammar may constrain."""
    if isinstance(reasoning, ChannelFormat):
        return reasoning.before_content if tools is None else reasoning.before_call
    return reasoning.closing


def continued_text(messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str | None:
    """Returns the message that an answer goes on with; None where it begins a new one."""
    if not rendering.continue_final_message:
        return None
    return str(messages[-1]["content"])
