"""Formats Cohere responses: a message of blocks and tool calls, or typed events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.server.http.errors import make_fault
from octavo.server.http.sse import NamedEventStream
from octavo.server.openai.logprobs import FLOOR
from octavo.server.response_builder import (
    ChoiceDelta,
    ResponseBuilder,
    ResponseFormatter,
    TokenUsage,
)
from octavo.text.parsers.parts import Part, PartKind
from octavo.text.ports import Tokenizer

Event = dict[str, Any]


class CohereStream(NamedEventStream):
    """A stream of Cohere events; an error ends the message with finish reason ERROR."""

    def failure(self, error: Exception) -> list[Event]:
        delta = {"finish_reason": "ERROR", "error": make_fault(error).message}
        return [{"type": "message-end", "delta": delta}]


class CohereLineStream(CohereStream):
    """The same events as JSON lines, for clients that do not accept server-sent events."""

    media_type = "application/stream+json"

    def format_events(self, payloads: Iterable[Event]) -> bytes:
        return b"".join([self.encode(payload) + b"\n" for payload in payloads])


SSE_RANGES = ("text/event-stream", "text/*", "*/*")


def stream_kind(accept: str | None) -> type[CohereStream]:
    """Returns the stream class for an Accept header."""
    ranges = [part.partition(";")[0].strip() for part in (accept or "*/*").split(",")]
    return CohereStream if any(part in SSE_RANGES for part in ranges) else CohereLineStream


class CohereBlocks:
    """Produces the events of blocks and tool calls; only one is open at a time."""

    def __init__(self) -> None:
        self._kind: PartKind | None = None
        self._index = -1
        self._num_calls = 0

    def add(self, part: Part) -> list[Event]:
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        events: list[Event] = []
        if kind is not self._kind or part.kind is PartKind.CALL:
            events = [*self.close(), self._open(kind, part)]
        if part.kind is PartKind.CALL:
            return events
        return [*events, self._grow(part)]

    def close(self) -> list[Event]:
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
                "id": part.call_id,
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


class CohereFormatter(ResponseFormatter):
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.id = secrets.token_hex(16)
        self._tokenizer = tokenizer
        self._blocks = CohereBlocks()

    def format_whole(
        self, response: ResponseBuilder, choices: Sequence[ChoiceDelta]
    ) -> dict[str, Any]:
        (choice,) = choices
        text = choice.message
        message: dict[str, Any] = {"role": "assistant"}
        blocks = [{"type": "thinking", "thinking": text.reasoning}] if text.reasoning else []
        if text.content or not text.calls:
            blocks.append({"type": "text", "text": text.content})
        if blocks:
            message["content"] = blocks
        if text.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in text.calls
            ]
        body = {
            "id": self.id,
            "finish_reason": format_finish_reason(choice),
            "message": message,
            "usage": format_usage(response.usage),
        }
        return body if choice.logprobs is None else body | {"logprobs": self._logprobs(choice)}

    def format_deltas(
        self, response: ResponseBuilder, deltas: Sequence[ChoiceDelta]
    ) -> list[Event]:
        (delta,) = deltas
        events = [self._opening()] if delta.is_first else []
        new = [event for part in delta.parts for event in self._blocks.add(part)]
        if delta.logprobs:
            new = new or self._blocks.add(Part(PartKind.CONTENT, ""))
            new[-1] |= {"logprobs": self._join_logprobs(delta)}
        events += new
        if delta.finish_reason is not None:
            events += [*self._blocks.close(), self._closing(response, delta)]
        return events

    def _opening(self) -> Event:
        message = {
            "role": "assistant",
            "content": [],
            "tool_plan": "",
            "tool_calls": [],
            "citations": [],
        }
        return {"type": "message-start", "id": self.id, "delta": {"message": message}}

    def _join_logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        parts = self._logprobs(delta)
        return {
            "token_ids": [part["token_ids"][0] for part in parts],
            "text": "".join(part["text"] for part in parts),
            "logprobs": [part["logprobs"][0] for part in parts],
        }

    def _closing(self, response: ResponseBuilder, last: ChoiceDelta) -> Event:
        ending = {
            "finish_reason": format_finish_reason(last),
            "usage": format_usage(response.usage),
        }
        return {"type": "message-end", "id": self.id, "delta": ending}

    def _logprobs(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Returns an item for each token."""
        steps = delta.logprobs or []
        return [
            {
                "token_ids": [token_id],
                "text": self._tokenizer.token_text(token_id) if self._tokenizer else "",
                "logprobs": [max(step[token_id].logprob, FLOOR)],
            }
            for token_id, step in zip(delta.token_ids, steps, strict=True)
        ]


def format_finish_reason(last: ChoiceDelta) -> str:
    if last.finish_reason == "length":
        return "MAX_TOKENS"
    if last.finish_reason not in ("stop", "tool_calls"):
        return "ERROR"
    if isinstance(last.stop_reason, str):
        return "STOP_SEQUENCE"
    return "TOOL_CALL" if last.has_calls else "COMPLETE"


def format_usage(usage: TokenUsage) -> dict[str, Any]:
    tokens = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return {"billed_units": tokens, "tokens": tokens, "cached_tokens": usage.cached_tokens}
