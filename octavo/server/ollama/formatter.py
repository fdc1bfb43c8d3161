"""Formats Ollama responses: a JSON object, or JSON lines with statistics in the last.

Durations are in nanoseconds.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from octavo.api.sampling_params import SamplingParams
from octavo.server.http.error_formats import format_ollama_error
from octavo.server.http.errors import make_fault
from octavo.server.http.sse import EventStream
from octavo.server.openai.logprobs import TokenNames, chat_logprobs
from octavo.server.response_builder import (
    ChoiceDelta,
    ResponseBuilder,
    ResponseFormatter,
    new_hex_id,
)
from octavo.server.state.served_model import ServedModel
from octavo.text.parsers.parts import MessageText, PartKind, parse_arguments

Line = dict[str, Any]

NANOSECONDS = 1_000_000_000


class LineStream(EventStream):
    """A stream of JSON lines; an error is a line too."""

    end = b""
    ping = b""
    media_type = "application/x-ndjson"

    def failure(self, error: Exception) -> list[Line]:
        return [format_ollama_error(make_fault(error))]

    def format_events(self, payloads: Iterable[Line]) -> bytes:
        return b"".join([self.encode(payload) + b"\n" for payload in payloads])


class OllamaFormatter(ResponseFormatter):
    """Formats one response; construct it when the request starts."""

    def __init__(self, name: str, model: ServedModel, params: SamplingParams) -> None:
        """`name` is the model's name as given by the client."""
        self.id = new_hex_id("ollama-")
        self.model = model
        self.params = params
        self._name = name
        self._names = TokenNames(model.tokenizer, as_ids=False)
        self._start = time.monotonic()
        self._call = MessageText()
        """The tool call being generated."""

    @staticmethod
    @abstractmethod
    def format_message(message: MessageText) -> Line:
        """Returns the fields of a message or a part of one."""

    def loaded(self) -> Line:
        """Returns the response to a request without a prompt, which only loads the model."""
        return self._line(MessageText(), done=True) | {"done_reason": "load"}

    @classmethod
    def unloaded(cls, name: str) -> Line:
        """Returns the response to a request that unloads a model."""
        line = {"model": name, "created_at": _now(), **cls.format_message(MessageText())}
        return line | {"done": True, "done_reason": "unload"}

    def format_whole(self, response: ResponseBuilder, choices: Sequence[ChoiceDelta]) -> Line:
        (choice,) = choices
        line = self._line(choice.message, choice, done=True)
        return line | self._statistics(response, choice)

    def format_deltas(self, response: ResponseBuilder, deltas: Sequence[ChoiceDelta]) -> list[Line]:
        """Returns the lines of new output. Each tool call is sent in one line. The last line
        contains the statistics and no text.
        """
        (delta,) = deltas
        text = MessageText()
        lines = []
        for part in delta.parts:
            if part.kind is PartKind.CALL:
                lines += self._end_call()
            if part.kind in (PartKind.CALL, PartKind.ARGUMENTS):
                self._call.add([replace(part, call=0)])
            else:
                text.add([part])
        if text.content or text.reasoning or delta.logprobs:
            lines.insert(0, self._line(text, delta))
        if delta.finish_reason is not None:
            last = self._line(MessageText(), done=True) | self._statistics(response, delta)
            lines += [*self._end_call(), last]
        return lines

    def _end_call(self) -> list[Line]:
        """Returns the line of a completed tool call; [] if there is none."""
        call, self._call = self._call, MessageText()
        return [self._line(call)] if call.calls else []

    def _line(
        self,
        message: MessageText,
        delta: ChoiceDelta | None = None,
        *,
        done: bool = False,
    ) -> Line:
        line = {
            "model": self._name,
            "created_at": _now(),
            **self.format_message(message),
            "done": done,
        }
        if delta is not None and delta.logprobs:
            logprobs = chat_logprobs(delta, self.params.num_shown_logprobs, self._names)
            if logprobs is not None:
                line["logprobs"] = logprobs.content
        return line

    def _statistics(self, response: ResponseBuilder, last: ChoiceDelta) -> Line:
        """Returns the finish reason, durations and token counts."""
        timings, usage, reason = response.timings, response.usage, last.finish_reason
        return {
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": _nanoseconds(time.monotonic() - self._start + self.model.load_s),
            "load_duration": _nanoseconds(self.model.load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": 0 if timings is None else _nanoseconds(timings.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": 0 if timings is None else _nanoseconds(timings.decode_s),
        }


class OllamaChatFormatter(OllamaFormatter):
    @staticmethod
    def format_message(message: MessageText) -> Line:
        fields: Line = {"role": "assistant", "content": message.content}
        if message.reasoning:
            fields["thinking"] = message.reasoning
        if message.calls:
            fields["tool_calls"] = [
                {"function": {"name": call.name, "arguments": parse_arguments(call)}}
                for call in message.calls
            ]
        return {"message": fields}


class OllamaGenerateFormatter(OllamaFormatter):
    @staticmethod
    def format_message(message: MessageText) -> Line:
        thought = {"thinking": message.reasoning} if message.reasoning else {}
        return {"response": message.content, **thought}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
