"""Formats Anthropic responses: a message of blocks, or typed events."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from octavo.api.errors import InvalidRequest
from octavo.server.http.error_formats import format_anthropic_error
from octavo.server.http.errors import make_fault
from octavo.server.http.sse import NamedEventStream
from octavo.server.response_builder import (
    ChoiceDelta,
    ResponseBuilder,
    ResponseFormatter,
    ResponseOptions,
    TokenUsage,
    new_hex_id,
)
from octavo.text.parsers.parts import MessageText, Part, PartKind, parse_arguments

Event = dict[str, Any]


class MessageStream(NamedEventStream):
    """A stream of Anthropic events; errors are events of type "error"."""

    def failure(self, error: Exception) -> list[Event]:
        return [format_anthropic_error(make_fault(error))]


class BlockWriter:
    """Produces the events of content blocks; only one block is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: PartKind | None = None

    def add(self, part: Part) -> list[Event]:
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        events: list[Event] = []
        if kind is not self._kind or part.kind is PartKind.CALL:
            events = [*self.close(), self._open(kind, part)]
        if part.kind is not PartKind.CALL:
            events.append(self._event("content_block_delta", delta=_format_block_delta(part)))
        return events

    def open_text(self) -> list[Event]:
        """Opens a text block unless a block is open."""
        return [] if self._kind else [self._open(PartKind.CONTENT, Part(PartKind.CONTENT, ""))]

    def close(self) -> list[Event]:
        if self._kind is None:
            return []
        kind, self._kind = self._kind, None
        events = []
        if kind is PartKind.REASONING:
            signature = {"type": "signature_delta", "signature": ""}
            events.append(self._event("content_block_delta", delta=signature))
        return [*events, self._event("content_block_stop")]

    def _open(self, kind: PartKind, part: Part) -> Event:
        self._index += 1
        self._kind = kind
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind is PartKind.REASONING:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        if kind is PartKind.CALL:
            block = _tool_use(part.call_id, part.text, {})
        return self._event("content_block_start", content_block=block)

    def _event(self, name: str, **content: Any) -> Event:
        return {"type": name, "index": self._index, **content}


def _format_block_delta(part: Part) -> dict[str, Any]:
    match part.kind:
        case PartKind.REASONING:
            return {"type": "thinking_delta", "thinking": part.text}
        case PartKind.ARGUMENTS:
            return {"type": "input_json_delta", "partial_json": part.text}
        case _:
            return {"type": "text_delta", "text": part.text}


def _tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


class MessageFormatter(ResponseFormatter):
    def __init__(self, model: str, max_tokens: int, *, shows_reasoning: bool = True) -> None:
        self.id = new_hex_id("msg_")
        self.options = ResponseOptions(
            shows_reasoning=shows_reasoning, new_call_id=partial(new_hex_id, "toolu_")
        )
        self._model = model
        self._max_tokens = max_tokens
        self._blocks = BlockWriter()

    def format_whole(
        self, response: ResponseBuilder, choices: Sequence[ChoiceDelta]
    ) -> dict[str, Any]:
        (choice,) = choices
        ending = self._get_stop_reason(choice, response.usage)
        return self._message(_blocks(choice.message), ending, format_usage(response.usage))

    def format_deltas(
        self, response: ResponseBuilder, deltas: Sequence[ChoiceDelta]
    ) -> list[Event]:
        (delta,) = deltas
        new = [event for part in delta.parts for event in self._blocks.add(part)]
        events = [*self._opening(response.usage, new), *new[1:]] if delta.is_first else new
        if delta.finish_reason is not None:
            ending = self._get_stop_reason(delta, response.usage)
            events += [] if delta.has_calls else self._blocks.open_text()
            events += [*self._blocks.close(), *_format_end(ending, format_usage(response.usage))]
        return events

    def _opening(self, usage: TokenUsage, new: list[Event]) -> list[Event]:
        """Returns the first events; a ping follows the first block's start."""
        none_yet = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], none_yet, format_usage(usage) | {"output_tokens": 0})
        return [{"type": "message_start", "message": message}, *new[:1], {"type": "ping"}]

    def _get_stop_reason(self, last: ChoiceDelta, usage: TokenUsage) -> dict[str, Any]:
        """Returns the stop reason and stop sequence. Raises InvalidRequest for an aborted request,
        for which the API has no stop reason.
        """
        if last.finish_reason == "abort":
            raise InvalidRequest("the request was aborted before its response was complete")
        if last.finish_reason == "length":
            is_full = usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "tool_use" if last.has_calls else "end_turn", "stop_sequence": None}

    def _message(
        self, content: list[dict[str, Any]], end: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": usage,
        }


def _format_end(end: dict[str, Any], usage: dict[str, Any]) -> list[Event]:
    return [
        {"type": "message_delta", "delta": end, "usage": usage},
        {"type": "message_stop"},
    ]


def _blocks(message: MessageText) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        blocks.append(_tool_use(call.call_id, call.name, parse_arguments(call)))
    return blocks


def format_usage(usage: TokenUsage) -> dict[str, Any]:
    """Returns Anthropic's usage, which excludes cached tokens from input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
