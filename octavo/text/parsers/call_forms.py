"""Grammar of tool calls in a format, for given functions.

A required call is the entire output; an optional one is constrained from the format's opening
marker on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from octavo.api.errors import InvalidRequest
from octavo.api.structured_outputs import MessageFrame, StructuredOutputs
from octavo.text.grammar import lark
from octavo.text.grammar.enforceable import enforceable
from octavo.text.grammar.schema import SchemaError
from octavo.text.parsers.formats import NAME_HERE, ChannelFormat, ToolFormat


@dataclass(frozen=True, slots=True)
class CallRules:
    """Functions that an output may call, and constraints."""

    functions: Mapping[str, Mapping[str, Any]]
    """JSON schema of each function's arguments, by name."""
    must_call: bool = False
    may_call_several: bool = True
    given_as: str = "tools"
    """Request field that contains the functions, for errors."""


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The reasoning part of an output before the constrained part."""

    opening: str = ""
    """Opening text; "" if it is in the prompt."""
    closing: str = ""
    """Closing text; "" if there is none."""
    most_tokens: int | None = None
    """Token limit of the reasoning; None: unlimited."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of StructuredOutputs that specify where the constrained part starts."""
        return {
            "starts_after": self.closing,
            "begins_with": self.opening,
            "most_tokens_before": self.most_tokens,
        }


NO_REASONING = ReasoningSpan()
OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")
"""Options that apply to all JSON in an output."""


def build_response_form(
    own: StructuredOutputs | None,
    tools: ToolFormat | ChannelFormat,
    rules: CallRules,
    before: ReasoningSpan,
) -> StructuredOutputs:
    """Returns the structured output of a response that contains tool calls, or else `own`."""
    if isinstance(tools, ChannelFormat) and not rules.must_call:
        return _framed_form(own, tools, rules, before)
    if own is None or rules.must_call:
        tag = _calls_tag(tools, rules)
        return StructuredOutputs(
            structural_tag=tag,
            given_as=rules.given_as,
            may_end_before=not rules.must_call,
            **before.fields,
        )
    if own.structural_tag is None:
        calls = _calls_tag(tools, replace(rules, must_call=True))
        return start_after(own, before, or_structural_tag=calls)
    tag, calls = own.tag, _calls_tag(tools, rules)
    for name in ("structures", "triggers"):
        tag[name] = [*tag.get(name, ()), *calls[name]]
    return start_after(own, before, structural_tag=tag)


def _framed_form(
    own: StructuredOutputs | None, tools: ChannelFormat, rules: CallRules, before: ReasoningSpan
) -> StructuredOutputs:
    """Returns the structured output of messages with optional calls, or of calls or `own`."""
    tag = _calls_tag(tools, replace(rules, must_call=own is not None))
    if own is not None:
        if own.structural_tag is not None:
            raise InvalidRequest(
                f"{own.given_as}: structural_tag is not supported with tools in this format",
                hint="use a schema, or remove tools",
                param=own.given_as,
            )
        begin, end = tools.answer
        tag["structures"].append({"begin": begin, "end": end, **_part(own)})
        tag["triggers"] = sorted({*tag["triggers"], begin})
        tag["stop_after_first"] = True
    source_of_rules = rules if own is None else own
    options = {} if own is None else {name: getattr(own, name) for name in OPTIONS}
    return StructuredOutputs(
        structural_tag=tag,
        frame=_frame(tools.frame, before, may_end=own is None),
        given_as=source_of_rules.given_as,
        **options,
    )


def _frame(frame: MessageFrame, before: ReasoningSpan, *, may_end: bool) -> MessageFrame:
    """Adds the reasoning to a message frame."""
    thought = before.opening.removeprefix(frame.opening).removesuffix(frame.text)
    return msgspec.structs.replace(
        frame,
        thought=thought,
        has_begun=bool(before.closing and not before.opening),
        most_tokens=before.most_tokens,
        may_end_in_thought=may_end,
    )


def _part(own: StructuredOutputs) -> dict[str, Any]:
    """Returns a structured output as the content of a structure."""
    if own.choice is not None:
        return {"grammar": lark.choice(own.choice)}
    fields = {"schema": own.json, "regex": own.regex, "grammar": own.grammar}
    present = {kind: value for kind, value in fields.items() if value is not None}
    return present or {"schema": {"type": "object"}}


def start_after(own: StructuredOutputs, before: ReasoningSpan, **changed: Any) -> StructuredOutputs:
    """Returns a structured output that starts after the reasoning, with `changes` applied to its
    fields.
    """
    return msgspec.structs.replace(own, **before.fields, **changed)


def _calls_tag(tools: ToolFormat | ChannelFormat, rules: CallRules) -> dict[str, Any]:
    """Returns the structural tag of calls: within free text, or alone if required."""
    structures = [
        _structure(tools, name, _get_schema(name, schema, rules.given_as))
        for name, schema in rules.functions.items()
    ]
    return {
        "structures": structures,
        "triggers": sorted({_trigger(tools, structure["begin"]) for structure in structures}),
        "at_least_one": rules.must_call,
        "stop_after_first": not rules.may_call_several,
    }


def any_text(before: ReasoningSpan, given_as: str) -> StructuredOutputs:
    """Returns a structured output that only bounds the reasoning."""
    text = lark.any_text("TEXT", before.opening)
    return StructuredOutputs(grammar=f"start: TEXT\n{text}\n", given_as=given_as, **before.fields)


def _structure(
    tools: ToolFormat | ChannelFormat, name: str, schema: Mapping[str, Any]
) -> dict[str, Any]:
    begin, end = tools.written
    structure: dict[str, Any] = {"begin": begin.replace(NAME_HERE, name), "end": end}
    return structure | tools.arguments_form(schema)


def _get_schema(name: str, schema: Mapping[str, Any], given_as: str) -> Mapping[str, Any]:
    """Returns the function's schema for the compiler; raises InvalidRequest if it cannot be
    enforced.
    """
    try:
        return enforceable(schema, is_strict=True).schema
    except SchemaError as error:
        raise InvalidRequest(f"{given_as}: {name}: {error}", param=given_as) from None


def _trigger(tools: ToolFormat | ChannelFormat, begin: str) -> str:
    """Returns the text that identifies the beginning of a call."""
    return next((mark for mark in tools.triggers if begin.startswith(mark)), begin)
