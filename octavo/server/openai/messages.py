"""Messages of a chat request in the plain form that chat templates read.

Parts of text are joined, calls of tools keep their place in the history; what the model cannot take
is refused by its path.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.errors import InvalidRequest, shown
from octavo.server.images import Content, content_of, image_part, text_part, url_source
from octavo.server.openai.message_bodies import ContentPart, Message, ToolCall
from octavo.server.tool_use import check_role


def plain_messages(messages: Sequence[Message], *, id_length: int = 0) -> list[dict[str, Any]]:
    """Converts messages for a chat template; raises InvalidRequest for parts it cannot honour.

    Ids of calls are cut to the last `id_length` characters, where the template takes no others.
    """
    if not messages:
        raise InvalidRequest(
            "messages: got an empty list, needed is at least one message", param="messages"
        )
    plain = [
        _plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)
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


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    if message.name is not None:
        plain["name"] = message.name
    thought = message.reasoning_content if message.reasoning is None else message.reasoning
    if thought is not None:
        plain["reasoning_content"] = thought
    if message.tool_calls:
        check_role(message.role, "assistant", f"{where}.tool_calls")
        plain["tool_calls"] = [
            plain_call(call, f"{where}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        check_role(message.role, "tool", f"{where}.tool_call_id")
        plain["tool_call_id"] = message.tool_call_id
    return plain


def plain_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Returns a call whose arguments are an object, as templates read them."""
    arguments = arguments_object(call.function.arguments, f"{where}.function.arguments")
    plain = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id, **plain}


def arguments_object(given: object, where: str) -> dict[str, Any]:
    """Returns a call's arguments, which may be JSON text, as an object."""
    found: Any = given
    if isinstance(given, str):
        try:
            found = json.loads(given or "{}")
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise InvalidRequest(
            f"{where}: got {shown(given)}, allowed is an object as JSON text", param=where
        )
    return found


def _content(message: Message, where: str) -> Content:
    """Joins the parts of a content, each on lines of its own, but for those beside an image; a call
    of tools needs none.
    """
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.refusal is not None:
            return message.refusal
        if message.tool_calls:
            return ""
        raise InvalidRequest(f"{where}.content: needed, and not given", param=f"{where}.content")
    return content_of(
        [
            _plain_part(part, f"{where}.content[{index}]", message.role)
            for index, part in enumerate(content)
        ]
    )


def _plain_part(part: ContentPart, where: str, role: str) -> dict[str, Any]:
    if part.type != "image_url":
        return text_part(_text(part, where))
    check_role(role, "user", where)
    return image_part(url_source(part.image_url, f"{where}.image_url"))


def _text(part: ContentPart, where: str) -> str:
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if text is None:
        raise InvalidRequest(
            f"{where}: got a part of type {part.type!r}, allowed are parts of type 'text' with a"
            " text, of type 'image_url' and of type 'refusal'",
            param=where,
        )
    return text
