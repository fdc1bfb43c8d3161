"""Adapts a conversation to the role sequence that the chat template accepts.

Clients send several system messages, consecutive messages of one role, or late system messages.
Leading system messages are always merged; other changes are made only if the template rejects the
sequence or omits its text (`text/role_rules.py`). No text is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.server.images import Content, text_part
from octavo.text.ports import RoleRules

SYSTEM_ROLES = ("system", "developer")
UNREAD_IMAGE = "[an image, which this model cannot read]"
"""Text that replaces an image in a tool result for text-only models. An error would break every
later turn of an agent.
"""
GAP = "\n\n"
"""Separator of merged messages."""

Message = dict[str, Any]


def fit_roles(messages: Sequence[Message], rules: RoleRules) -> list[Message]:
    """Returns a conversation that follows the rules; unchanged messages are the same objects."""
    if not rules.developer:
        messages = [_as_system(message) for message in messages]
    fitted = _merge_leading_system(messages)
    if not rules.system_anywhere:
        fitted = [*fitted[:1], *map(_as_user, fitted[1:])]
    if fitted and fitted[0]["role"] in SYSTEM_ROLES:
        if len(fitted) == 1 and not rules.system_alone:
            fitted = [_as_user(fitted[0])]
        elif not rules.system:
            fitted = _fold_system(fitted[0], fitted[1:])
    if not rules.repeats:
        fitted = _merge_repeats(_with_lost_results_as_users(fitted))
    if not rules.user_after_tool:
        fitted = _part_tools_from_users(fitted)
    if not rules.assistant_first:
        fitted = _begin_with_user(fitted)
    if not (rules.calls_have_content and rules.arguments_are_objects):
        fitted = [converted for message in fitted for converted in _in_call_form(message, rules)]
    return fitted


def move_tool_images(messages: Sequence[Message], *, reads_images: bool = True) -> list[Message]:
    """Moves images of tool results to a following user message, the only role for which templates
    support images. For text-only models a note replaces each image.
    """
    moved: list[Message] = []
    images: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and isinstance(message["content"], list):
            texts = [part["text"] for part in message["content"] if part["type"] == "text"]
            image_parts = [part for part in message["content"] if part["type"] != "text"]
            if not reads_images:
                texts += [UNREAD_IMAGE] * len(image_parts)
                image_parts = []
            images += image_parts
            message = {**message, "content": "\n".join(texts)}
        elif message["role"] != "tool" and images:
            moved.append({"role": "user", "content": images})
            images = []
        moved.append(message)
    return [*moved, {"role": "user", "content": images}] if images else moved


def _merge_leading_system(messages: Sequence[Message]) -> list[Message]:
    num_leading = 0
    while num_leading < len(messages) and messages[num_leading]["role"] in SYSTEM_ROLES:
        num_leading += 1
    if num_leading < 2:
        return list(messages)
    first = messages[0]
    for message in messages[1:num_leading]:
        first = _merge(first, message)
    return [first, *messages[num_leading:]]


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] in SYSTEM_ROLES else message


def _fold_system(system: Message, rest: Sequence[Message]) -> list[Message]:
    """Prepends a system message to the first user message, or converts it to one."""
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": _join(system["content"], rest[0]["content"])}, *rest[1:]]
    return [_as_user(system), *rest]


def _with_lost_results_as_users(messages: Sequence[Message]) -> list[Message]:
    """Converts tool results without a preceding call to user messages."""
    converted: list[Message] = []
    for message in messages:
        before = converted[-1] if converted else {}
        is_lost = before.get("role") != "tool" and not before.get("tool_calls")
        if message["role"] == "tool" and is_lost:
            message = {"role": "user", "content": message["content"]}
        converted.append(message)
    return converted


def _merge_repeats(messages: Sequence[Message]) -> list[Message]:
    """Merges consecutive user or assistant messages."""
    merged: list[Message] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] in ("user", "assistant"):
            merged[-1] = _merge(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _part_tools_from_users(messages: Sequence[Message]) -> list[Message]:
    """Inserts an empty assistant message between a tool call or result and a user message."""
    parted: list[Message] = []
    for message in messages:
        before = parted[-1] if parted else {}
        is_open = before.get("role") == "tool" or bool(before.get("tool_calls"))
        if is_open and message["role"] == "user":
            parted.append({"role": "assistant", "content": " "})
        parted.append(message)
    return parted


def _begin_with_user(messages: Sequence[Message]) -> list[Message]:
    """Inserts an empty user message before a leading assistant message."""
    start = 1 if messages and messages[0]["role"] in SYSTEM_ROLES else 0
    if start < len(messages) and messages[start]["role"] == "assistant":
        return [*messages[:start], {"role": "user", "content": ""}, *messages[start:]]
    return list(messages)


def _in_call_form(message: Message, rules: RoleRules) -> list[Message]:
    """Converts tool calls to the format of the template; splits off the text if it may not
    accompany calls.
    """
    if not message.get("tool_calls"):
        return [message]
    converted = dict(message)
    if not rules.arguments_are_objects:
        converted["tool_calls"] = [_with_text_arguments(call) for call in converted["tool_calls"]]
    if rules.calls_have_content:
        return [converted]
    before = (
        [{"role": converted["role"], "content": converted["content"]}]
        if converted["content"]
        else []
    )
    return [*before, {**converted, "content": None}]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _merge(first: Message, second: Message) -> Message:
    """Merges two messages of one role: their texts and tool calls."""
    both = {**second, **first, "content": _join(first["content"], second["content"])}
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    thoughts = [
        message["reasoning_content"]
        for message in (first, second)
        if message.get("reasoning_content")
    ]
    if calls:
        both["tool_calls"] = calls
    if thoughts:
        both["reasoning_content"] = GAP.join(thoughts)
    return both


def _join(first: Content, second: Content) -> Content:
    """Joins two contents: texts with a separator, or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return GAP.join(text for text in (first, second) if text)
    return [*_parts(first), *_parts(second)]


def _parts(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return content
