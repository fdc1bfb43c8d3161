"""Selects a model's output formats: by option, or by its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import ConfigError, did_you_mean
from octavo.text.parsers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ChannelFormat,
    ReasoningFormat,
    ToolFormat,
    find_reasoning_format,
    find_tool_format,
    named_reasoning_format,
    named_tool_format,
)

NONE = "none"


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """Tool-call and reasoning formats of a model."""

    tools: ToolFormat | ChannelFormat | None
    """None if neither the option nor the template specifies one."""
    reasoning: ReasoningFormat | ChannelFormat | None


def choose_formats(
    template: str | None,
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    tool_template: str | None = None,
) -> AnswerFormats:
    """Returns a model's formats; raises ConfigError for an unknown name. `tool_template` is the
    template for conversations with tools, if different.
    """
    tools = find_tool_format(template if tool_template is None else tool_template)
    if tool_call_parser is not None:
        tools = named_tool_format(tool_call_parser)
        if tools is None:
            names = [row.name for row in TOOL_FORMATS]
            raise _unknown("tool_call_parser", tool_call_parser, names)
    reasoning = find_reasoning_format(template)
    if reasoning_parser is not None:
        reasoning = named_reasoning_format(reasoning_parser)
        if reasoning is None and reasoning_parser != NONE:
            names = [name for row in REASONING_FORMATS for name in (row.name, *row.aliases)]
            raise _unknown("reasoning_parser", reasoning_parser, [*names, NONE])
    return AnswerFormats(tools, reasoning)


def _unknown(option: str, name: str, names: list[str]) -> ConfigError:
    return ConfigError(
        f"{option}: got {name!r}, expected {', '.join(names)}", hint=did_you_mean(name, names)
    )
