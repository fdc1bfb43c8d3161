"""An answer in Anthropic's form: a message of blocks, whole or as typed events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from octavo.errors import InvalidRequest
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.deltas import Delta
from octavo.server.error_forms import anthropic_form
from octavo.server.errors import fault_of
from octavo.server.sse import NamedEventStream
from octavo.server.turn import Turn
from octavo.text.parsers.parts import MessageText, Part, PartKind, arguments_of

Event = dict[str, Any]


class MessageStream(NamedEventStream):
    """A stream of Anthropic's events; an error is an event of the type "error"."""

    def failure(self, error: Exception) -> list[Event]:
        return [anthropic_form(fault_of(error))]


class BlockWriter:
    """The events of an answer's blocks: each is opened, grows and is closed before the next."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: PartKind | None = None

    def add(self, part: Part) -> list[Event]:
        """Returns the events of one more part."""
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        events: list[Event] = []
        if kind is not self._kind or part.kind is PartKind.CALL:
            events = [*self.close(), self._open(kind, part)]
        if part.kind is not PartKind.CALL:
            events.append(self._event("content_block_delta", delta=_gain(part)))
        return events

    def open_text(self) -> list[Event]:
        """Returns the event that opens an answer's block of text, where none is open yet."""
        return [] if self._kind else [self._open(PartKind.CONTENT, Part(PartKind.CONTENT, ""))]

    def close(self) -> list[Event]:
        """Returns the events that end the open block."""
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


def _gain(part: Part) -> dict[str, Any]:
    match part.kind:
        case PartKind.REASONING:
            return {"type": "thinking_delta", "thinking": part.text}
        case PartKind.ARGUMENTS:
            return {"type": "input_json_delta", "partial_json": part.text}
        case _:
            return {"type": "text_delta", "text": part.text}


def _tool_use(call_id: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    call_id = call_id or f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


class MessageAnswer:
    """The message that answers one request."""

    def __init__(self, model: str, max_tokens: int, *, tells_thinking: bool = True) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._max_tokens = max_tokens
        self._tells_thinking = tells_thinking

    def whole(self, turn: Turn, output: RequestOutput) -> dict[str, Any]:
        sample = output.outputs[0]
        message = turn.reading.message(sample.text)
        ending = self._ending(sample, output, has_calls=bool(message.calls))
        return self._message(self._blocks(message), ending, usage_of(output))

    async def events(self, turn: Turn) -> AsyncGenerator[list[Event], None]:
        """Yields the events of a stream; the first come with the answer's first text."""
        is_first = True
        blocks = BlockWriter()
        async with aclosing(turn.deltas()) as deltas:
            async for delta in deltas:
                assert turn.latest is not None, "a delta comes of an output"
                events = self._opening(turn.latest) if is_first else []
                for part in delta.parts:
                    if self._tells(part):
                        events += blocks.add(part)
                if is_first:
                    events.insert(2, {"type": "ping"})
                    is_first = False
                if delta.finish_reason is not None:
                    ending = self._ending(delta, turn.latest, has_calls=delta.has_calls)
                    events += [] if delta.has_calls else blocks.open_text()
                    events += [*blocks.close(), *_closing(ending, usage_of(turn.latest))]
                yield events

    def _tells(self, part: Part) -> bool:
        return self._tells_thinking or part.kind is not PartKind.REASONING

    def _blocks(self, message: MessageText) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if message.reasoning and self._tells_thinking:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content or not message.calls:
            blocks.append({"type": "text", "text": message.content})
        for call in message.calls:
            blocks.append(_tool_use(call.call_id, call.name, arguments_of(call)))
        return blocks

    def _opening(self, output: RequestOutput) -> list[Event]:
        none_yet = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], none_yet, usage_of(output) | {"output_tokens": 0})
        return [{"type": "message_start", "message": message}]

    def _ending(
        self, last: Delta | CompletionOutput, output: RequestOutput, *, has_calls: bool
    ) -> dict[str, Any]:
        """Returns Anthropic's words for how an answer ended; raises where it was aborted, for which
        they have none.
        """
        if last.finish_reason == "abort":
            raise InvalidRequest("the request was aborted before its answer was complete")
        if last.finish_reason == "length":
            is_full = usage_of(output)["output_tokens"] < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}

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


def _closing(end: dict[str, Any], usage: dict[str, Any]) -> list[Event]:
    return [
        {"type": "message_delta", "delta": end, "usage": usage},
        {"type": "message_stop"},
    ]


def usage_of(output: RequestOutput) -> dict[str, Any]:
    """Counts an answer's tokens; those of the prompt that were cached are counted apart."""
    num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": 0 if output.metrics is None else output.metrics.num_generation_tokens,
    }
