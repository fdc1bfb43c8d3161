"""Items of a response's conversation: what clients send, what is stored, what a template takes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.images import content_of, image_part, text_part, url_source
from octavo.server.openai.messages import arguments_object
from octavo.server.openai.responses.body import InputItem, ItemPart
from octavo.server.openai.responses.output import call_item, output_part
from octavo.server.tool_use import check_role

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Each role of an item, and the role that a chat template knows for it."""

REFERENCE = "item_reference"
"""Type of an input item that stands for an item of a stored answer."""
TYPES = ("message", "function_call", "function_call_output", "reasoning", REFERENCE)


def input_items(given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Returns the input as items to be stored; raises InvalidRequest for what none can be."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    if not given:
        raise InvalidRequest("input: got an empty list, needed is an item", param="input")
    return [_stored(item, f"input[{index}]") for index, item in enumerate(given)]


def messages_of(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns items as messages for a chat template; the parts of one item are joined by lines.

    Reasoning and calls belong to the assistant's message beside them.
    """
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        match item["type"]:
            case "reasoning":
                thought = "\n".join(part["text"] for part in item["content"])
                continue
            case "function_call":
                last = messages[-1] if messages else {}
                if last.get("role") != "assistant" or thought:
                    last = {"role": "assistant", "content": ""}
                    messages.append(last)
                last.setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
                )
            case _:
                content = content_of([_plain_part(part) for part in item["content"]])
                messages.append({"role": ROLES[item["role"]], "content": content})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages


def _call(item: dict[str, Any]) -> dict[str, Any]:
    """Returns a call as templates read it; one that was cut has no arguments."""
    try:
        arguments = arguments_object(item["arguments"], "arguments")
    except InvalidRequest:
        arguments = {}
    function = {"name": item["name"], "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def _plain_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image":
        return image_part(part["image_url"])
    return text_part(_text(part))


def _text(part: dict[str, Any]) -> str:
    text: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return text


def _stored(item: InputItem, where: str) -> dict[str, Any]:
    match item.type:
        case "message":
            return _message(item, where)
        case "function_call":
            return _stored_call(item, where)
        case "function_call_output":
            return _stored_result(item, where)
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
                raise InvalidRequest(f"{where}.id: needed, and not given", param=where)
            return {"type": REFERENCE, "id": item.id}
    raise InvalidRequest(
        f"{where}: got an item of type {item.type!r}, allowed are {', '.join(TYPES)}", param=where
    )


def _stored_call(item: InputItem, where: str) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise InvalidRequest(f"{where}.{name}: needed, and not given", param=where)
    arguments_object(item.arguments, f"{where}.arguments")
    item_id = item.id or f"fc_{secrets.token_hex(12)}"
    status = item.status or "completed"
    return call_item(item_id, item.call_id or "", item.name or "", item.arguments or "", status)


def _stored_result(item: InputItem, where: str) -> dict[str, Any]:
    if item.call_id is None or item.output is None:
        raise InvalidRequest(f"{where}: needed are call_id and output", param=where)
    output = item.output
    if not isinstance(output, str):
        parts = [_part(part, f"{where}.output[{index}]") for index, part in enumerate(output)]
        output = "\n".join(_text(part) for part in parts)
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
            f"{where}.role: got {item.role!r}, allowed are {', '.join(ROLES)}",
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
        raise InvalidRequest(f"{where}: needed, and not given", param=where)
    if isinstance(item.content, str):
        if item.role == "assistant":
            return [output_part(item.content)]
        return [{"type": "input_text", "text": item.content}]
    return [
        _image(part, f"{where}[{index}]", item.role or "")
        if part.type == "input_image"
        else _part(part, f"{where}[{index}]")
        for index, part in enumerate(item.content)
    ]


def _image(part: ItemPart, where: str, role: str) -> dict[str, Any]:
    check_role(role, "user", where)
    return {"type": "input_image", "image_url": url_source(part.image_url, where)}


def _part(part: ItemPart, where: str) -> dict[str, Any]:
    if part.type in ("input_text", "text") and part.text is not None:
        return {"type": "input_text", "text": part.text}
    if part.type == "output_text" and part.text is not None:
        return output_part(part.text)
    if part.type == "refusal" and part.refusal is not None:
        return {"type": "refusal", "refusal": part.refusal}
    raise InvalidRequest(
        f"{where}: got a part of type {part.type!r}, allowed are input_text and output_text with a"
        " text, input_image, and refusal",
        param=where,
    )
