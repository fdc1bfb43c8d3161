"""Converts messages of a chat request to plain ones for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.api.errors import InvalidRequest
from octavo.frontend.media import input_audio_url
from octavo.server.ignored import IgnoredFields
from octavo.server.images import (
    Content,
    audio_part,
    image_part,
    join_parts,
    text_part,
    url_source,
    video_part,
)
from octavo.server.notes import describe_unread
from octavo.server.openai.message_bodies import (
    MEDIA,
    TEXTS,
    UNREADABLE,
    ContentPart,
    Message,
    ToolCall,
)
from octavo.server.tool_use import check_role, parse_arguments

ROLES = {"function": "tool"}
"""Current names of deprecated roles."""
MAY_BE_EMPTY = ("assistant", "tool", "function")
"""Roles with optional content: interrupted responses, tools without output."""


def plain_messages(
    messages: Sequence[Message], *, id_length: int = 0, ignored: IgnoredFields | None = None
) -> list[dict[str, Any]]:
    """Converts messages for a chat template; raises InvalidRequest for unsupported parts.

    With `ignored`, unsupported parts are replaced by notes and added to it, except in the last user
    message. Tool call ids are truncated to the last `id_length` characters, if the template
    requires that.
    """
    if not messages:
        raise InvalidRequest(
            "messages: got an empty list, expected at least one message", param="messages"
        )
    asked = [index for index, message in enumerate(messages) if message.role == "user"][-1:]
    plain = [
        _plain_message(message, f"messages[{index}]", None if index in asked else ignored)
        for index, message in enumerate(messages)
    ]
    if id_length:
        for message in plain:
            _shorten_ids(message, id_length)
    return plain


def _shorten_ids(message: dict[str, Any], length: int) -> None:
    if "tool_call_id" in message:
        message["tool_call_id"] = message["tool_call_id"][-length:]
    for call in message.get("tool_calls", ()):
        if "id" in call:
            call["id"] = call["id"][-length:]


def _plain_message(message: Message, where: str, ignored: IgnoredFields | None) -> dict[str, Any]:
    role = ROLES.get(message.role, message.role)
    plain: dict[str, Any] = {"role": role, "content": _content(message, where, ignored)}
    if message.name is not None:
        plain["name"] = message.name
    thought = message.reasoning_content if message.reasoning is None else message.reasoning
    if thought is not None:
        plain["reasoning_content"] = thought
    calls = message.tool_calls
    if not calls and message.function_call is not None:
        calls = [ToolCall(function=message.function_call)]
    if calls:
        check_role(message.role, "assistant", f"{where}.tool_calls")
        plain["tool_calls"] = [
            plain_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    if message.tool_call_id is not None:
        check_role(message.role, "tool", f"{where}.tool_call_id")
        plain["tool_call_id"] = message.tool_call_id
    return plain


def plain_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Returns a plain tool call with parsed arguments. A custom tool's text becomes the argument
    `input`.
    """
    if call.custom is not None:
        name, arguments = call.custom.name, {"input": call.custom.input}
    elif call.function is not None:
        name, arguments = call.function.name, parse_arguments(call.function.arguments)
    else:
        raise InvalidRequest(f"{where}.function: field required", param=f"{where}.function")
    plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id, **plain}


def _content(message: Message, where: str, ignored: IgnoredFields | None) -> Content:
    """Joins text parts by newlines; parts stay separate if there is an image."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.refusal is not None:
            return message.refusal
        if message.role in MAY_BE_EMPTY:
            return ""
        raise InvalidRequest(f"{where}.content: field required", param=f"{where}.content")
    return join_parts(
        [
            build_part(part, f"{where}.content[{index}]", message.role, ignored)
            for index, part in enumerate(content)
        ]
    )


def build_part(
    part: ContentPart, where: str, role: str, ignored: IgnoredFields | None
) -> dict[str, Any]:
    """Converts a part, or replaces it by a note if it is not supported and may be ignored."""
    try:
        return _plain_part(part, where, role)
    except InvalidRequest as error:
        if ignored is None or part.type not in (*UNREADABLE, *MEDIA):
            raise
        shown_as = f"{where.rpartition('[')[0]}[type={part.type}]"
        ignored.add(where, error.message.partition(": ")[2], shown_as=shown_as)
        return text_part(describe_unread(part.type))


def _plain_part(part: ContentPart, where: str, role: str) -> dict[str, Any]:
    if part.type not in MEDIA:
        return text_part(_text(part, where))
    if role != "tool":
        check_role(role, "user", where)
    if part.type == "input_audio":
        return audio_part(input_audio_url(part.input_audio, f"{where}.input_audio"))
    if part.type == "audio_url":
        return audio_part(url_source(part.audio_url, f"{where}.audio_url", "audio/wav"))
    if part.type == "video_url":
        return video_part(url_source(part.video_url, f"{where}.video_url", "video/mp4"))
    return image_part(url_source(part.image_url, f"{where}.image_url"))


def _text(part: ContentPart, where: str) -> str:
    text = {**dict.fromkeys(TEXTS, part.text), "refusal": part.refusal}.get(part.type)
    if text is None:
        raise InvalidRequest(
            f"{where}: got a part of type {part.type!r}, expected 'text' with a text,"
            " 'image_url', 'video_url', 'audio_url', 'input_audio' or 'refusal'",
            param=where,
        )
    return text
