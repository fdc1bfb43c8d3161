"""An answer in Anthropic's form: a message of one block of text, whole or as typed events."""

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

Event = dict[str, Any]

INDEX = {"index": 0}
"""Place of the only block of an answer."""


class MessageStream(NamedEventStream):
    """A stream of Anthropic's events; an error is an event of the type "error"."""

    def failure(self, error: Exception) -> list[Event]:
        return [anthropic_form(fault_of(error))]


class MessageAnswer:
    """The message that answers one request."""

    def __init__(self, model: str, max_tokens: int) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._max_tokens = max_tokens

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        sample = output.outputs[0]
        return self._message(
            [{"type": "text", "text": sample.text}],
            self._ending(sample, output),
            usage_of(output),
        )

    async def events(self, turn: Turn) -> AsyncGenerator[list[Event], None]:
        """Yields the events of a stream; the first come with the answer's first text."""
        is_first = True
        async with aclosing(turn.deltas()) as deltas:
            async for delta in deltas:
                assert turn.latest is not None, "a delta comes of an output"
                events = self._opening(turn.latest) if is_first else []
                is_first = False
                if delta.text:
                    gain = {"type": "text_delta", "text": delta.text}
                    events.append({"type": "content_block_delta", **INDEX, "delta": gain})
                if delta.finish_reason is not None:
                    end = self._ending(delta, turn.latest)
                    events += _closing(end, usage_of(turn.latest))
                yield events

    def _opening(self, output: RequestOutput) -> list[Event]:
        none_yet = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], none_yet, usage_of(output) | {"output_tokens": 0})
        return [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", **INDEX, "content_block": {"type": "text", "text": ""}},
            {"type": "ping"},
        ]

    def _ending(self, last: Delta | CompletionOutput, output: RequestOutput) -> dict[str, Any]:
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
        return {"stop_reason": "end_turn", "stop_sequence": None}

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
        {"type": "content_block_stop", **INDEX},
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
