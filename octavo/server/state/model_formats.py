"""Output formats of a model: tool calls, reasoning and their special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.api.async_llm import AsyncLLM
from octavo.text.parsers.choice import AnswerFormats, choose_formats
from octavo.text.parsers.formats import (
    DEFAULT_TOOL_FORMAT,
    ChannelFormat,
    ReasoningFormat,
    ToolFormat,
    named_tool_format,
)
from octavo.text.ports import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFormats:
    tools: ToolFormat | ChannelFormat
    reasoning: ReasoningFormat | ChannelFormat | None
    tool_token_ids: tuple[int, ...]
    """Special tokens of tool calls."""
    reasoning_token_ids: tuple[int, ...]
    """Special tokens of reasoning."""
    template: str
    """The model's chat template; "" without one."""
    tool_template: str
    """Template of conversations with tools."""

    @staticmethod
    def of(llm: AsyncLLM) -> ModelFormats:
        options = llm.config.model
        tokenizer = None if options.skip_tokenizer_init else llm.get_tokenizer()
        template = None if tokenizer is None else tokenizer.chat_template
        tool_template = None if tokenizer is None else tokenizer.tool_chat_template
        formats = choose_formats(
            template, options.tool_call_parser, options.reasoning_parser, tool_template
        )
        return ModelFormats(
            _tools(formats),
            formats.reasoning,
            _special_ids(tokenizer, _tools(formats).marks),
            _special_ids(tokenizer, () if formats.reasoning is None else formats.reasoning.marks),
            template or "",
            tool_template or "",
        )

    @property
    def reads_tools(self) -> bool:
        """Whether the chat template supports tools."""
        return re.search(r"\btools\b", self.tool_template) is not None


def _tools(formats: AnswerFormats) -> ToolFormat | ChannelFormat:
    """Returns the format of tool calls; the default if the model has none."""
    if formats.tools is not None:
        return formats.tools
    taught = named_tool_format(DEFAULT_TOOL_FORMAT)
    assert taught is not None, "the default is a row of the table"
    return taught


def _special_ids(tokenizer: Tokenizer | None, marks: Iterable[str]) -> tuple[int, ...]:
    if tokenizer is None:
        return ()
    ids = {
        token_id
        for mark in marks
        for token_id in tokenizer.encode(mark, add_special_tokens=False, allow_special_text=True)
    }
    return tuple(sorted(ids & tokenizer.special_token_ids))
