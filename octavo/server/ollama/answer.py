"""An answer in Ollama's form: a JSON object, or one a line with statistics in the last.

Durations are in nanoseconds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.deltas import Delta
from octavo.server.error_forms import ollama_form
from octavo.server.errors import fault_of
from octavo.server.openai.logprobs import TokenNames, chat_logprobs
from octavo.server.sse import EventStream
from octavo.server.state.served_model import ServedModel
from octavo.server.turn import Turn
from octavo.text.parsers.parts import MessageText, PartKind, arguments_of

Line = dict[str, Any]

NANOSECONDS = 1_000_000_000


class LineStream(EventStream):
    """A stream of one JSON object a line; an error is a line too."""

    end = b""
    ping = b""
    media_type = "application/x-ndjson"

    def failure(self, error: Exception) -> list[Line]:
        return [ollama_form(fault_of(error))]

    def format_events(self, payloads: Iterable[Line]) -> bytes:
        return b"".join([self.encode(payload) + b"\n" for payload in payloads])


class OllamaAnswer(ABC):
    """The answer to one request; its clock starts when it is made."""

    def __init__(self, name: str, model: ServedModel, params: SamplingParams) -> None:
        """`name` is the model's as the client spelt it."""
        self.model = model
        self.params = params
        self._name = name
        self._names = TokenNames(model.tokenizer, as_ids=False)
        self._start = time.monotonic()

    @staticmethod
    @abstractmethod
    def part(message: MessageText) -> Line:
        """Returns the fields that hold a part of the answer."""

    def loaded(self) -> Line:
        """Returns the answer to a request that asks for no text: the model is there."""
        return self._line(MessageText(), done=True) | {"done_reason": "load"}

    @classmethod
    def unloaded(cls, name: str) -> Line:
        """Returns the answer to a request that has a model unloaded."""
        line = {"model": name, "created_at": _now(), **cls.part(MessageText())}
        return line | {"done": True, "done_reason": "unload"}

    def whole(self, turn: Turn, output: RequestOutput) -> Line:
        sample = output.outputs[0]
        message = turn.reading.message(sample.text)
        return self._line(message, sample, done=True) | self._statistics(output)

    async def lines(self, turn: Turn) -> AsyncGenerator[list[Line], None]:
        """Yields the lines of a stream, a call as one; the last has no text and all statistics."""
        call = MessageText()
        async with aclosing(turn.deltas()) as deltas:
            async for delta in deltas:
                told = MessageText()
                lines = []
                for part in delta.parts:
                    if part.kind is PartKind.CALL and call.calls:
                        lines.append(self._line(call))
                        call = MessageText()
                    if part.kind in (PartKind.CALL, PartKind.ARGUMENTS):
                        call.add([replace(part, call=0)])
                    else:
                        told.add([part])
                if told.content or told.reasoning or delta.logprobs:
                    lines.insert(0, self._line(told, delta))
                if delta.finish_reason is not None and call.calls:
                    lines.append(self._line(call))
                if delta.finish_reason is not None:
                    assert turn.latest is not None, "a delta comes of an output"
                    lines.append(
                        self._line(MessageText(), done=True) | self._statistics(turn.latest)
                    )
                yield lines

    def _line(
        self,
        message: MessageText,
        gained: Delta | CompletionOutput | None = None,
        *,
        done: bool = False,
    ) -> Line:
        line = {"model": self._name, "created_at": _now(), **self.part(message), "done": done}
        if gained is not None and self.params.logprobs is not None and gained.logprobs:
            found = chat_logprobs(
                gained.token_ids, gained.logprobs, self.params.logprobs, self._names
            )
            line["logprobs"] = found.content
        return line

    def _statistics(self, output: RequestOutput) -> Line:
        """Counts what a finished answer took."""
        timings, metrics = output.timings, output.metrics
        return {
            "done_reason": output.outputs[0].finish_reason,
            "total_duration": _nanoseconds(time.monotonic() - self._start + self.model.load_s),
            "load_duration": _nanoseconds(self.model.load_s),
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": 0 if timings is None else _nanoseconds(timings.prefill_s),
            "eval_count": 0 if metrics is None else metrics.num_generation_tokens,
            "eval_duration": 0 if timings is None else _nanoseconds(timings.decode_s),
        }


class ChatLines(OllamaAnswer):
    """An answer to POST /api/chat."""

    @staticmethod
    def part(message: MessageText) -> Line:
        made: Line = {"role": "assistant", "content": message.content}
        if message.reasoning:
            made["thinking"] = message.reasoning
        if message.calls:
            made["tool_calls"] = [
                {"function": {"name": call.name, "arguments": arguments_of(call)}}
                for call in message.calls
            ]
        return {"message": made}


class GenerateLines(OllamaAnswer):
    """An answer to POST /api/generate."""

    @staticmethod
    def part(message: MessageText) -> Line:
        thought = {"thinking": message.reasoning} if message.reasoning else {}
        return {"response": message.content, **thought}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
