"""Converts items of a response's conversation: input, stored items, and template messages."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.api.errors import InvalidRequest
from octavo.frontend.media import input_audio_url
from octavo.server.ignored import IgnoredFields
from octavo.server.images import Content, audio_part, image_part, join_parts, text_part, url_source
from octavo.server.notes import describe_unread
from octavo.server.openai.responses.body import InputItem, ItemPart
from octavo.server.openai.responses.output import call_item, output_part
from octavo.server.tool_use import check_role, parse_arguments

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of items, and the chat template's roles."""

MEDIA = ("input_image", "input_audio")
"""Types of parts that only users send."""
UNREAD = ("input_file",)
"""Types of parts that are not supported."""
REFERENCE = "item_reference"
"""Type of an input item that refers to an output item of a stored response."""


def parse_input(items: str | Sequence[InputItem], ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Converts the input to items for the store; raises InvalidRequest for invalid ones.

    Unsupported parts are replaced by notes, except in the last user message.
    """
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    asked = [index for index, item in enumerate(items) if item.role == "user"][-1:]
    for index, item in enumerate(items):
        if index not in asked:
            _note_unread(item, f"input[{index}]", ignored)
    return [_store_item(item, f"input[{index}]") for index, item in enumerate(items)]


def _note_unread(item: InputItem, where: str, ignored: IgnoredFields) -> None:
    """Replaces unsupported parts of an item by notes."""
    for name in ("content", "output"):
        for index, part in enumerate(getattr(item, name) or ()):
            if not isinstance(part, ItemPart):
                continue
            is_odd = part.type in MEDIA and name == "content" and item.role != "user"
            if part.type in UNREAD or is_odd:
                path = f"{where}.{name}"
                ignored.add(f"{path}[{index}]", shown_as=f"{path}[type={part.type}]")
                part.text = describe_unread(part.type)
                part.type = "input_text"


def make_messages(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts items to messages for a chat template; the parts of one item are joined by newlines.

    Reasoning and tool calls are merged into the assistant's adjacent message.
    """
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        match item["type"]:
            case "reasoning":
                thought = "\n".join(part["text"] for part in item["content"])
                continue
            case "mcp_list_tools":
                continue
            case "mcp_call":
                result = item["output"] if item["error"] is None else f"error: {item['error']}"
                call = {**item, "type": "function_call", "call_id": item["id"]}
                answer = {"role": "tool", "tool_call_id": item["id"], "content": result or ""}
                messages += [*make_messages([call]), answer]
            case "function_call":
                last = messages[-1] if messages else {}
                if last.get("role") != "assistant" or thought:
                    last = {"role": "assistant", "content": ""}
                    messages.append(last)
                last.setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                output = item["output"]
                content = output if isinstance(output, str) else _content(output)
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": content}
                )
            case _:
                role = ROLES[item["role"]]
                messages.append({"role": role, "content": _content(item["content"])})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages


def _call(item: dict[str, Any]) -> dict[str, Any]:
    """Converts a tool call to a plain one."""
    function = {"name": item["name"], "arguments": parse_arguments(item["arguments"])}
    return {"id": item["call_id"], "type": "function", "function": function}


def _content(parts: Iterable[dict[str, Any]]) -> Content:
    return join_parts([_plain_part(part) for part in parts])


def _plain_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image":
        return image_part(part["image_url"])
    if part["type"] == "input_audio":
        return audio_part(input_audio_url(part["input_audio"], "input_audio"))
    return text_part(_text(part))


def _text(part: dict[str, Any]) -> str:
    text: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return text


def _store_item(item: InputItem, where: str) -> dict[str, Any]:
    if item.type is None:
        item.type = REFERENCE if item.id is not None and item.role is None else "message"
    match item.type:
        case "message":
            return _message(item, where)
        case "function_call" | "custom_tool_call":
            return _store_call(item, where)
        case "function_call_output" | "custom_tool_call_output":
            return _store_result(item, where)
        case "reasoning":
            content = [
                {"type": "reasoning_text", "text": part.text or ""}
                for part in item.content or ()
                if isinstance(part, ItemPart)
            ]
            return {
                "id": item.id or f"rs_{secrets.token_hex(12)}",
                "type": "reasoning",
                "summary": [],
                "content": content,
            }
        case "item_reference":
            if item.id is None:
                raise InvalidRequest(f"{where}.id: field required", param=where)
            return {"type": REFERENCE, "id": item.id}
    raise AssertionError("items of other types have been dropped")


def _store_call(item: InputItem, where: str) -> dict[str, Any]:
    """Converts a tool call; a custom tool's text becomes the argument `input`."""
    for name in ("call_id", "name"):
        if getattr(item, name) is None:
            raise InvalidRequest(f"{where}.{name}: field required", param=where)
    arguments = {"input": item.input} if item.type == "custom_tool_call" else item.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    item_id = item.id or f"fc_{secrets.token_hex(12)}"
    status = item.status or "completed"
    return call_item(item_id, item.call_id or "", item.name or "", arguments, status)


def _store_result(item: InputItem, where: str) -> dict[str, Any]:
    if item.call_id is None or item.output is None:
        raise InvalidRequest(f"{where}: expected call_id and output", param=where)
    output: str | list[dict[str, Any]] = ""
    if isinstance(item.output, str):
        output = item.output
    else:
        output = [
            _any_part(part, f"{where}.output[{index}]", "user")
            for index, part in enumerate(item.output)
        ]
    return {
        "id": item.id or f"fco_{secrets.token_hex(12)}",
        "type": "function_call_output",
        "call_id": item.call_id,
        "output": output,
        "status": "completed",
    }


def _message(item: InputItem, where: str) -> dict[str, Any]:
    if item.role not in ROLES:
        raise InvalidRequest(
            f"{where}.role: got {item.role!r}, expected {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    return {
        "id": item.id or f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": item.role,
        "status": "completed",
        "content": _parts(item, f"{where}.content"),
    }


def _parts(item: InputItem, where: str) -> list[dict[str, Any]]:
    if item.content is None:
        if item.role == "assistant":
            return []
        raise InvalidRequest(f"{where}: field required", param=where)
    if isinstance(item.content, str):
        if item.role == "assistant":
            return [output_part(item.content)]
        return [{"type": "input_text", "text": item.content}]
    return [
        _any_part(part, f"{where}[{index}]", item.role or "")
        for index, part in enumerate(item.content)
    ]


def _any_part(part: ItemPart, where: str, role: str) -> dict[str, Any]:
    if part.type not in MEDIA:
        return _part(part, where)
    check_role(role, "user", where)
    if part.type == "input_image":
        return {"type": "input_image", "image_url": url_source(part.image_url, where)}
    input_audio_url(part.input_audio, f"{where}.input_audio")  # raises for an invalid one
    return {"type": "input_audio", "input_audio": part.input_audio}


def _part(part: ItemPart, where: str) -> dict[str, Any]:
    if part.type in ("input_text", "text") and part.text is not None:
        return {"type": "input_text", "text": part.text}
    if part.type == "output_text" and part.text is not None:
        return output_part(part.text)
    if part.type == "refusal" and part.refusal is not None:
        return {"type": "refusal", "refusal": part.refusal}
    raise InvalidRequest(
        f"{where}: got a part of type {part.type!r}, expected 'input_text' or 'output_text'"
        " with a text, 'input_image', 'input_audio' or 'refusal'",
        param=where,
    )
