"""An answer in Cohere's form: a message of one block of text, whole or as typed events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.prompt_ports import Tokenizer
from octavo.server.deltas import Delta
from octavo.server.errors import fault_of
from octavo.server.openai.logprobs import FLOOR
from octavo.server.sse import NamedEventStream
from octavo.server.turn import Turn
from octavo.text.parsers.parts import Part, PartKind

Event = dict[str, Any]


class CohereStream(NamedEventStream):
    """A stream of Cohere's events; after an error the message ends with the reason ERROR."""

    def failure(self, error: Exception) -> list[Event]:
        delta = {"finish_reason": "ERROR", "error": fault_of(error).message}
        return [{"type": "message-end", "delta": delta}]


class CohereLineStream(CohereStream):
    """The same events as one JSON object a line, for clients that accept no server-sent events."""

    media_type = "application/stream+json"

    def format_events(self, payloads: Iterable[Event]) -> bytes:
        return b"".join([self.encode(payload) + b"\n" for payload in payloads])


SSE_RANGES = ("text/event-stream", "text/*", "*/*")


def stream_kind(accept: str | None) -> type[CohereStream]:
    """Returns the form of stream that an Accept header asks for; Cohere's own is chosen by it."""
    ranges = [part.partition(";")[0].strip() for part in (accept or "*/*").split(",")]
    return CohereStream if any(part in SSE_RANGES for part in ranges) else CohereLineStream


class CohereBlocks:
    """The events of an answer's blocks and calls: each is opened, grows and is closed."""

    def __init__(self, call_id: Callable[[str], str]) -> None:
        self._call_id = call_id
        self._kind: PartKind | None = None
        self._index = -1
        self._num_calls = 0

    def add(self, part: Part) -> list[Event]:
        """Returns the events of one more part."""
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        events: list[Event] = []
        if kind is not self._kind or part.kind is PartKind.CALL:
            events = [*self.close(), self._open(kind, part)]
        if part.kind is PartKind.CALL:
            return events
        return [*events, self._grow(part)]

    def close(self) -> list[Event]:
        """Returns the event that ends the open block."""
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        if kind is PartKind.CALL:
            return [{"type": "tool-call-end", "index": self._num_calls - 1}]
        return [{"type": "content-end", "index": self._index}]

    def _open(self, kind: PartKind, part: Part) -> Event:
        self._kind = kind
        if kind is PartKind.CALL:
            self._num_calls += 1
            call = {
                "id": self._call_id(part.call_id),
                "type": "function",
                "function": {"name": part.text, "arguments": ""},
            }
            return _event("tool-call-start", part.call, {"tool_calls": call})
        self._index += 1
        word = _word(kind)
        return _event("content-start", self._index, {"content": {"type": word, word: ""}})

    def _grow(self, part: Part) -> Event:
        if part.kind is PartKind.ARGUMENTS:
            function = {"arguments": part.text}
            return _event("tool-call-delta", part.call, {"tool_calls": {"function": function}})
        return _event("content-delta", self._index, {"content": {_word(part.kind): part.text}})


def _word(kind: PartKind) -> str:
    return "thinking" if kind is PartKind.REASONING else "text"


def _event(name: str, index: int, message: dict[str, Any]) -> Event:
    return {"type": name, "index": index, "delta": {"message": message}}


class CohereAnswer:
    """The message that answers one request."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.id = secrets.token_hex(16)
        self._tokenizer = tokenizer

    def whole(self, turn: Turn, output: RequestOutput) -> dict[str, Any]:
        sample = output.outputs[0]
        found = turn.reading.message(sample.text)
        message: dict[str, Any] = {"role": "assistant"}
        blocks = [{"type": "thinking", "thinking": found.reasoning}] if found.reasoning else []
        if found.content or not found.calls:
            blocks.append({"type": "text", "text": found.content})
        if blocks:
            message["content"] = blocks
        if found.calls:
            message["tool_calls"] = [
                {
                    "id": turn.reading.call_id(call.call_id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in found.calls
            ]
        ended = ending(sample.finish_reason, sample.stop_reason, has_calls=bool(found.calls))
        made = {
            "id": self.id,
            "finish_reason": ended,
            "message": message,
            "usage": usage_of(output),
        }
        return made if sample.logprobs is None else made | {"logprobs": self._logprobs(sample)}

    async def events(self, turn: Turn) -> AsyncGenerator[list[Event], None]:
        """Yields the events of a stream; the first come with the answer's first tokens."""
        is_first = True
        blocks = CohereBlocks(turn.reading.call_id)
        async with aclosing(turn.deltas()) as deltas:
            async for delta in deltas:
                events = [self._opening()] if is_first else []
                is_first = False
                new = [event for part in delta.parts for event in blocks.add(part)]
                if delta.logprobs:
                    new = new or blocks.add(Part(PartKind.CONTENT, ""))
                    new[-1] |= {"logprobs": self._joined_logprobs(delta)}
                events += new
                if delta.finish_reason is not None:
                    assert turn.latest is not None, "a delta comes of an output"
                    events += [*blocks.close(), self._closing(delta, turn.latest)]
                yield events

    def _opening(self) -> Event:
        message = {
            "role": "assistant",
            "content": [],
            "tool_plan": "",
            "tool_calls": [],
            "citations": [],
        }
        return {"type": "message-start", "id": self.id, "delta": {"message": message}}

    def _joined_logprobs(self, delta: Delta) -> dict[str, Any]:
        parts = self._logprobs(delta)
        return {
            "token_ids": [part["token_ids"][0] for part in parts],
            "text": "".join(part["text"] for part in parts),
            "logprobs": [part["logprobs"][0] for part in parts],
        }

    def _closing(self, delta: Delta, output: RequestOutput) -> Event:
        reason = ending(delta.finish_reason, delta.stop_reason, has_calls=delta.has_calls)
        return {
            "type": "message-end",
            "id": self.id,
            "delta": {"finish_reason": reason, "usage": usage_of(output)},
        }

    def _logprobs(self, gained: Delta | CompletionOutput) -> list[dict[str, Any]]:
        """Returns an item for each token."""
        steps = gained.logprobs or []
        return [
            {
                "token_ids": [token_id],
                "text": self._tokenizer.token_text(token_id) if self._tokenizer else "",
                "logprobs": [max(step[token_id].logprob, FLOOR)],
            }
            for token_id, step in zip(gained.token_ids, steps, strict=True)
        ]


def ending(
    finish_reason: str | None, stop_reason: int | str | None, *, has_calls: bool = False
) -> str:
    """Returns Cohere's word for how an answer ended."""
    if finish_reason == "length":
        return "MAX_TOKENS"
    if finish_reason != "stop":
        return "ERROR"
    if isinstance(stop_reason, str):
        return "STOP_SEQUENCE"
    return "TOOL_CALL" if has_calls else "COMPLETE"


def usage_of(output: RequestOutput) -> dict[str, Any]:
    num_new = 0 if output.metrics is None else output.metrics.num_generation_tokens
    tokens = {"input_tokens": len(output.prompt_token_ids), "output_tokens": num_new}
    return {
        "billed_units": tokens,
        "tokens": tokens,
        "cached_tokens": output.num_cached_tokens,
    }
