"""An answer in Cohere's form: a message of one block of text, whole or as typed events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.ports import Tokenizer
from octavo.server.deltas import Delta
from octavo.server.errors import fault_of
from octavo.server.openai.logprobs import FLOOR
from octavo.server.sse import NamedEventStream
from octavo.server.turn import Turn

Event = dict[str, Any]


class CohereStream(NamedEventStream):
    """A stream of Cohere's events; after an error the message ends with the reason ERROR."""

    def failure(self, error: Exception) -> list[Event]:
        delta = {"finish_reason": "ERROR", "error": fault_of(error).message}
        return [{"type": "message-end", "delta": delta}]


class CohereAnswer:
    """The message that answers one request."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.id = secrets.token_hex(16)
        self._tokenizer = tokenizer

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        sample = output.outputs[0]
        made = {
            "id": self.id,
            "finish_reason": ending(sample.finish_reason, sample.stop_reason),
            "message": {"role": "assistant", "content": [{"type": "text", "text": sample.text}]},
            "usage": usage_of(output),
        }
        return made if sample.logprobs is None else made | {"logprobs": self._logprobs(sample)}

    async def events(self, turn: Turn) -> AsyncGenerator[list[Event], None]:
        """Yields the events of a stream; the first come with the answer's first tokens."""
        is_first = True
        async with aclosing(turn.deltas()) as deltas:
            async for delta in deltas:
                events = self._opening() if is_first else []
                is_first = False
                if delta.text or delta.logprobs:
                    events.append(self._gain(delta))
                if delta.finish_reason is not None:
                    assert turn.latest is not None, "a delta comes of an output"
                    events += self._closing(delta, turn.latest)
                yield events

    def _opening(self) -> list[Event]:
        message = {
            "role": "assistant",
            "content": [],
            "tool_plan": "",
            "tool_calls": [],
            "citations": [],
        }
        content = {"type": "text", "text": ""}
        return [
            {"type": "message-start", "id": self.id, "delta": {"message": message}},
            {"type": "content-start", "index": 0, "delta": {"message": {"content": content}}},
        ]

    def _gain(self, delta: Delta) -> Event:
        event = {
            "type": "content-delta",
            "index": 0,
            "delta": {"message": {"content": {"text": delta.text}}},
        }
        if not delta.logprobs:
            return event
        parts = self._logprobs(delta)
        joined = {
            "token_ids": [part["token_ids"][0] for part in parts],
            "text": "".join(part["text"] for part in parts),
            "logprobs": [part["logprobs"][0] for part in parts],
        }
        return event | {"logprobs": joined}

    def _closing(self, delta: Delta, output: RequestOutput) -> list[Event]:
        reason = ending(delta.finish_reason, delta.stop_reason)
        return [
            {"type": "content-end", "index": 0},
            {
                "type": "message-end",
                "id": self.id,
                "delta": {"finish_reason": reason, "usage": usage_of(output)},
            },
        ]

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


def ending(finish_reason: str | None, stop_reason: int | str | None) -> str:
    """Returns Cohere's word for how an answer ended."""
    if finish_reason == "length":
        return "MAX_TOKENS"
    if finish_reason != "stop":
        return "ERROR"
    return "STOP_SEQUENCE" if isinstance(stop_reason, str) else "COMPLETE"


def usage_of(output: RequestOutput) -> dict[str, Any]:
    num_new = 0 if output.metrics is None else output.metrics.num_generation_tokens
    tokens = {"input_tokens": len(output.prompt_token_ids), "output_tokens": num_new}
    return {
        "billed_units": tokens,
        "tokens": tokens,
        "cached_tokens": output.num_cached_tokens,
    }
