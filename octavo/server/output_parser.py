"""Parses a request's output into content, reasoning and tool calls.

The parser is built after the prompt, which may already contain the start or the end of the
reasoning.
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
    build_response_form,
    start_after,
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
"""Number of last prompt tokens searched for reasoning tags."""
LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class OutputParser:
    """Parser of the samples of one request."""

    form: MessageForm | None = None
    """Message format; None if all text is content."""
    marks: AnswerMarks | None = None
    rules: CallRules | None = None
    """Tools that the output may call; None if there are none."""
    before: ReasoningSpan = NO_REASONING
    """Reasoning that precedes the constrained content."""
    id_length: int = 0
    """Length of tool call ids, if the template checks it; 0: any."""
    prefix: str = ""
    """Text of the message that the output continues, without a trailing incomplete character."""
    prefix_token_ids: tuple[int, ...] = ()
    """Token ids of `prefix`."""

    def apply_to(self, params: SamplingParams) -> SamplingParams:
        """Adds the markers for the detokenizer, and the structured output that tool calls and
        reasoning require.
        """
        if self.marks is None:
            return params
        form = self._form(params.structured_outputs)
        return msgspec.structs.replace(params, answer_marks=self.marks, structured_outputs=form)

    def _form(self, own: StructuredOutputs | None) -> StructuredOutputs | None:
        """Returns the structured output of the complete message; `own` applies to its content. None
        if nothing is constrained.
        """
        assert self.form is not None, "an answer with marks is read"
        if self.rules is not None and self.form.tools is not None:
            return build_response_form(own, self.form.tools, self.rules, self.before)
        if own is not None:
            return start_after(own, self.before)
        if self.before.most_tokens is None:
            return None
        return any_text(self.before, "thinking_token_budget")

    def dump(self) -> dict[str, Any] | None:
        """Returns a serializable value for `load`; None for plain text."""
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
    def load(dumped: Mapping[str, Any] | None) -> OutputParser:
        if dumped is None:
            return PLAIN
        tools, reasoning = dumped["tools"], dumped["reasoning"]
        return OutputParser(
            MessageForm(
                None if tools is None else named_tool_format(tools),
                None if reasoning is None else named_reasoning_format(reasoning),
                dumped["functions"],
                dumped["begins_in_reasoning"],
                dumped["may_reason"],
                dumped["names"],
            )
        )

    def after(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> OutputParser:
        """Returns the parser of output that continues tokens parsed by this parser."""
        marks = self.marks
        if self.form is None or marks is None or not token_ids:
            return self
        hidden = tokenizer.special_token_ids - set(marks.shown_token_ids)
        new = (token_id for token_id in token_ids if token_id not in hidden)
        token_ids_so_far = (*self.prefix_token_ids, *new)
        text = decode_whole_characters(tokenizer, token_ids_so_far, skip_special_tokens=False)
        opening = marks.reasoning_opening
        may_reason = bool(opening) and marks.reasoning_closing not in text
        marks = msgspec.structs.replace(
            marks,
            reasoning_opening=opening if may_reason else "",
            begins_in_reasoning=may_reason and (marks.begins_in_reasoning or opening in text),
        )
        return replace(self, prefix=text, prefix_token_ids=token_ids_so_far, marks=marks)

    def reader(self) -> PartReader:
        """Returns a reader that parses one sample incrementally."""
        return make_reader(self.form, self.prefix)

    def new_call_id(self) -> str:
        if self.id_length:
            return "".join(secrets.choice(LETTERS) for _ in range(self.id_length))
        return f"call_{secrets.token_hex(12)}"


PLAIN = OutputParser()


@dataclass(frozen=True, slots=True)
class ReasoningState:
    """State of the reasoning at the end of the prompt."""

    has_begun: bool = False
    may_reason: bool = False
    """Whether reasoning may follow."""


def build_parser(
    formats: ModelFormats,
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[int],
    *,
    tools: ToolUse | None = None,
    continued: str | None = None,
    thinking_budget: int | None = None,
) -> OutputParser:
    """Builds the parser of the output to a prompt.

    `continued` is the message that the output continues, None for a new one; `thinking_budget`
    limits reasoning tokens.
    """
    reasoning = formats.reasoning
    state = ReasoningState()
    if reasoning is not None and tokenizer is not None:
        state = _state(reasoning, tokenizer, prompt_token_ids, continued)
    if tools is None and not isinstance(reasoning, ChannelFormat) and not state.may_reason:
        return PLAIN
    called = formats.tools if tools is not None else None
    aliases = {} if tools is None else tools.aliases(formats.tools)
    schemas = {} if tools is None else tools.get_enforced_schemas()
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
    """Returns the text between the reasoning and the constrained content."""
    if isinstance(reasoning, ChannelFormat):
        return reasoning.before_content if tools is None else reasoning.before_call
    return reasoning.closing


def continued_text(messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str | None:
    """Returns the message that the output continues; None for a new one."""
    if not rendering.continue_final_message:
        return None
    return str(messages[-1]["content"])
