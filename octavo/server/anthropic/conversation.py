"""The conversation that a body of Anthropic's holds, as the model's template reads it."""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.anthropic.bodies import CacheControl, CountTokensBody, ThinkingConfig
from octavo.server.plain_chat import (
    TextBlock,
    joined_text,
    may_think,
    refuse_extra,
    refuse_values,
    rendering_of,
)
from octavo.server.state.served_model import ServedModel
from octavo.server.turn import Conversation

TAKEN = ("cache_control", "citations")
"""Fields of text blocks that change nothing: every prefix is cached, and nothing is cited."""


def conversation_of(body: CountTokensBody, model: ServedModel) -> Conversation:
    """Returns the body's conversation; raises InvalidRequest for what is not supported."""
    refuse_values(body, ["tools"])
    if not body.messages:
        raise InvalidRequest(
            "messages: got an empty list, needed is at least one message", param="messages"
        )
    messages = _messages(body)
    thinks = _thinks(body.thinking, model)
    return Conversation(
        messages, rendering=rendering_of(messages, model, continues=True, thinks=thinks)
    )


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    """Returns plain messages; consecutive ones of a role are one."""
    plain: list[dict[str, Any]] = []
    if body.system:
        plain.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        refuse_extra(message, where)
        text = _text(message.content, f"{where}.content")
        if plain and plain[-1]["role"] == message.role:
            plain[-1] = {"role": message.role, "content": f"{plain[-1]['content']}\n{text}"}
        else:
            plain.append({"role": message.role, "content": text})
    return plain


def _text(content: str | list[TextBlock], where: str) -> str:
    text = joined_text(content, where, TAKEN)
    for index, block in enumerate(content):
        if isinstance(block, TextBlock):
            _check_taken(block, f"{where}[{index}]")
    return text


def _check_taken(block: TextBlock, where: str) -> None:
    extra = block.model_extra or {}
    if extra.get("citations"):
        raise InvalidRequest(
            f"{where}.citations: this server does not support them", param=f"{where}.citations"
        )
    mark = extra.get("cache_control")
    try:
        CacheControl.model_validate(mark or {"type": "ephemeral"})
    except ValueError:
        raise InvalidRequest(
            f"{where}.cache_control: allowed is {{'type': 'ephemeral'}}, with a ttl of '5m' or"
            " '1h'",
            param=f"{where}.cache_control",
        ) from None


def _thinks(thinking: ThinkingConfig | None, model: ServedModel) -> bool | None:
    """Returns False where thinking is to be off; refuses what would need blocks of thinking."""
    if thinking is None:
        return None
    if thinking.type == "disabled":
        return False
    if thinking.type == "adaptive" and not may_think(model):
        return None
    raise InvalidRequest(
        f"thinking.type: got {thinking.type!r}, but this server returns no blocks of thinking",
        hint='leave thinking out, or send {"type": "disabled"}',
        param="thinking.type",
    )
