"""Items of a response's conversation: what clients send, what is stored, what a template takes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.openai.responses.body import InputItem, ItemPart

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Each role of an item, and the role that a chat template knows for it."""


def input_items(given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Returns the input as items to be stored; raises InvalidRequest for what none can be."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    if not given:
        raise InvalidRequest("input: got an empty list, needed is an item", param="input")
    return [_stored(item, f"input[{index}]") for index, item in enumerate(given)]


def output_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    """Returns the item of an answer's message."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [output_part(text)],
    }


def output_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def messages_of(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns items as messages for a chat template; the parts of one item are joined by lines."""
    return [
        {
            "role": ROLES[item["role"]],
            "content": "\n".join(_text(part) for part in item["content"]),
        }
        for item in items
    ]


def _text(part: dict[str, Any]) -> str:
    text: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return text


def _stored(item: InputItem, where: str) -> dict[str, Any]:
    if item.type != "message":
        raise InvalidRequest(
            f"{where}: got an item of type {item.type!r}, allowed is 'message'", param=where
        )
    for name, value in (item.model_extra or {}).items():
        if value is not None:
            raise InvalidRequest(f"{where}.{name}: this server does not support it", param=where)
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
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(item.content)]


def _part(part: ItemPart, where: str) -> dict[str, Any]:
    if part.type in ("input_text", "text") and part.text is not None:
        return {"type": "input_text", "text": part.text}
    if part.type == "output_text" and part.text is not None:
        return output_part(part.text)
    if part.type == "refusal" and part.refusal is not None:
        return {"type": "refusal", "refusal": part.refusal}
    raise InvalidRequest(
        f"{where}: got a part of type {part.type!r}, allowed are input_text and output_text with a"
        " text, and refusal",
        param=where,
    )
