"""The grammar of calls: what a format's row says of how a call is written, for given functions.

A call that must be made is the whole answer; one that may be made begins with the format's own
opening, and is valid from there on.
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
    """Functions that an answer may call, and how."""

    functions: Mapping[str, Mapping[str, Any]]
    """JSON schema of each function's arguments, by name."""
    must_call: bool = False
    may_call_several: bool = True
    given_as: str = "tools"
    """Name of the request's field that holds the functions."""


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The part of an answer before its form begins."""

    opening: str = ""
    """Text with which it begins; "" where the prompt has opened it already."""
    closing: str = ""
    """Text with which it ends; "" where there is none."""
    most_tokens: int | None = None
    """Number of tokens after which it is closed; None: no limit."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of StructuredOutputs that say where the form begins."""
        return {
            "starts_after": self.closing,
            "begins_with": self.opening,
            "most_tokens_before": self.most_tokens,
        }


NO_REASONING = ReasoningSpan()
OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")
"""Options of a form that hold for all JSON in it."""


def form_of_answer(
    own: StructuredOutputs | None,
    tools: ToolFormat | ChannelFormat,
    rules: CallRules,
    before: ReasoningSpan,
) -> StructuredOutputs:
    """Returns the form of an answer that calls functions, or has the form `own` where it calls
    none.
    """
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
        return behind(own, before, or_structural_tag=calls)
    tag, calls = own.tag, _calls_tag(tools, rules)
    for name in ("structures", "triggers"):
        tag[name] = [*tag.get(name, ()), *calls[name]]
    return behind(own, before, structural_tag=tag)


def _framed_form(
    own: StructuredOutputs | None, tools: ChannelFormat, rules: CallRules, before: ReasoningSpan
) -> StructuredOutputs:
    """Returns the form of messages among which calls may stand, or of calls or the form `own`."""
    tag = _calls_tag(tools, replace(rules, must_call=own is not None))
    if own is not None:
        if own.structural_tag is not None:
            raise InvalidRequest(
                f"{own.given_as}: got a structural_tag with tools, which an answer of several"
                " messages cannot have",
                hint="give a schema, or no tools",
                param=own.given_as,
            )
        begin, end = tools.answer
        tag["structures"].append({"begin": begin, "end": end, **_part(own)})
        tag["triggers"] = sorted({*tag["triggers"], begin})
        tag["stop_after_first"] = True
    given = rules if own is None else own
    options = {} if own is None else {name: getattr(own, name) for name in OPTIONS}
    return StructuredOutputs(
        structural_tag=tag,
        frame=_frame(tools.frame, before, may_end=own is None),
        given_as=given.given_as,
        **options,
    )


def _frame(frame: MessageFrame, before: ReasoningSpan, *, may_end: bool) -> MessageFrame:
    """Returns a frame with the reasoning that its messages come after."""
    thought = before.opening.removeprefix(frame.opening).removesuffix(frame.text)
    return msgspec.structs.replace(
        frame,
        thought=thought,
        has_begun=bool(before.closing and not before.opening),
        most_tokens=before.most_tokens,
        may_end_in_thought=may_end,
    )


def _part(own: StructuredOutputs) -> dict[str, Any]:
    """Returns a form as what a structure holds."""
    if own.choice is not None:
        return {"grammar": lark.choice(own.choice)}
    found = {"schema": own.json, "regex": own.regex, "grammar": own.grammar}
    given = {kind: value for kind, value in found.items() if value is not None}
    return given or {"schema": {"type": "object"}}


def behind(own: StructuredOutputs, before: ReasoningSpan, **changed: Any) -> StructuredOutputs:
    """Returns a form that begins behind the reasoning, with other values of some fields."""
    return msgspec.structs.replace(own, **before.fields, **changed)


def _calls_tag(tools: ToolFormat | ChannelFormat, rules: CallRules) -> dict[str, Any]:
    """Returns the structural tag of calls: within free text, or where they must come alone."""
    structures = [
        _structure(tools, name, _checked(name, schema, rules.given_as))
        for name, schema in rules.functions.items()
    ]
    return {
        "structures": structures,
        "triggers": sorted({_trigger(tools, structure["begin"]) for structure in structures}),
        "at_least_one": rules.must_call,
        "stop_after_first": not rules.may_call_several,
    }


def any_text(before: ReasoningSpan, given_as: str) -> StructuredOutputs:
    """Returns the form of an answer whose reasoning alone is bounded."""
    text = lark.any_text("TEXT", before.opening)
    return StructuredOutputs(grammar=f"start: TEXT\n{text}\n", given_as=given_as, **before.fields)


def _structure(
    tools: ToolFormat | ChannelFormat, name: str, schema: Mapping[str, Any]
) -> dict[str, Any]:
    begin, end = tools.written
    structure: dict[str, Any] = {"begin": begin.replace(NAME_HERE, name), "end": end}
    return structure | tools.arguments_form(schema)


def _checked(name: str, schema: Mapping[str, Any], given_as: str) -> Mapping[str, Any]:
    """Returns the schema of a function's arguments as the compiler may see it; InvalidRequest if it
    cannot be enforced.
    """
    try:
        return enforceable(schema, is_strict=True).schema
    except SchemaError as error:
        raise InvalidRequest(f"{given_as}: {name}: {error}", param=given_as) from None


def _trigger(tools: ToolFormat | ChannelFormat, begin: str) -> str:
    """Returns the front of a call's text that no other text has."""
    return next((mark for mark in tools.triggers if begin.startswith(mark)), begin)
