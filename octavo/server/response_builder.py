"""Builds the response to one request in a common form: content, reasoning, tool calls, logprobs,
usage and finish reasons.

Each API's formatter formats what `ResponseBuilder` yields, streamed or not.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from fastapi import Request, Response

from octavo.api.outputs import CompletionOutput, Logprob, RequestOutput, Timings
from octavo.api.sampling_params import SamplingParams
from octavo.frontend.arguments import Prompt
from octavo.frontend.input_processor import DEFAULT_CONTEXT, RequestContext
from octavo.server.conversation import Conversation
from octavo.server.http.connection import cancel_on_disconnect
from octavo.server.http.sse import NO_HEADERS, EventStream
from octavo.server.output_parser import PLAIN, OutputParser
from octavo.server.output_streams import OutputStreams
from octavo.server.state.served_model import ServedModel
from octavo.text.parsers.parts import MessageText, Part, PartKind
from octavo.text.parsers.reader import PartReader


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of outputs that are returned together."""

    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens served from the prefix cache."""
    completion_tokens: int
    reasoning_tokens: int

    @staticmethod
    def of(outputs: Collection[RequestOutput]) -> TokenUsage:
        return TokenUsage(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(output.num_cached_tokens for output in outputs),
            sum(output.metrics.num_generation_tokens for output in outputs if output.metrics),
            sum(sample.num_reasoning_tokens for output in outputs for sample in output.outputs),
        )


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New output of one choice. A response that is not streamed has one delta for each choice."""

    index: int
    output: RequestOutput
    """Latest output of the choice's prompt."""
    text: str
    start: int
    """Number of the choice's characters before `text`."""
    parts: list[Part]
    """New parts of the message; some may come from text of earlier deltas."""
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    """The engine's finish reason, or "tool_calls" if the model stopped after a tool call."""
    stop_reason: int | str | None
    has_calls: bool
    """Whether the choice has any tool call so far."""
    is_first: bool
    score: float | None = None

    @property
    def message(self) -> MessageText:
        """The joined parts: the complete message if the response is not streamed."""
        message = MessageText()
        message.add(self.parts)
        return message


@dataclass(slots=True)
class _ChoiceState:
    index: int
    reader: PartReader
    num_chars: int = 0
    has_calls: bool = False
    has_started: bool = False
    has_finished: bool = False


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options of a request and its API for the content of the response."""

    every_token: bool = False
    """Whether a stream has deltas for tokens without text."""
    shows_reasoning: bool = True
    new_call_id: Callable[[], str] | None = None
    """Generates an id for each tool call to which the model gave none; None: ids of the output
    parser are used.
    """


class ResponseFormatter(ABC):
    """Formats the response to one request for an API."""

    id: str
    """Id of the request and its response."""
    options = ResponseOptions()

    @abstractmethod
    def format_whole(self, response: ResponseBuilder, choices: Sequence[ChoiceDelta]) -> Any:
        """Returns the body of a response that is not streamed."""

    @abstractmethod
    def format_deltas(self, response: ResponseBuilder, deltas: Sequence[ChoiceDelta]) -> list[Any]:
        """Returns the events of new output."""

    def format_end(self, response: ResponseBuilder) -> list[Any]:
        """Returns the events after the last output."""
        return []


@dataclass(slots=True)
class ResponseBuilder:
    """A response in progress; choices are numbered over all samples of all prompts."""

    streams: OutputStreams
    params: SamplingParams
    parser: OutputParser = PLAIN
    options: ResponseOptions = ResponseOptions()
    _choices: dict[int, _ChoiceState] = field(default_factory=dict)
    _latest: dict[int, RequestOutput] = field(default_factory=dict)

    @property
    def latest(self) -> RequestOutput | None:
        """Latest output of the first prompt; None before the first token."""
        return self._latest.get(0)

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage.of(self._latest.values())

    @property
    def timings(self) -> Timings | None:
        """Merged timings of finished prompts; None if there are none."""
        return merge_timings(self._latest.values())

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Yields the new output of each step; closing it aborts the request."""
        async with aclosing(self.streams.outputs()) as outputs:
            async for prompt_index, output in outputs:
                if new := self._add(prompt_index, output):
                    yield new

    async def events(self, formatter: ResponseFormatter) -> AsyncGenerator[list[Any], None]:
        """Yields the events of a stream; closing it aborts the request."""
        async with aclosing(self.deltas()) as steps:
            async for new in steps:
                yield formatter.format_deltas(self, new)
        if end := formatter.format_end(self):
            yield end

    async def choices(self) -> list[ChoiceDelta]:
        """Returns each choice as one delta when all have finished; cancellation aborts the
        request.
        """
        outputs = await self.streams.results()
        return [delta for index, output in enumerate(outputs) for delta in self._add(index, output)]

    def _add(self, prompt_index: int, output: RequestOutput) -> list[ChoiceDelta]:
        self._latest[prompt_index] = output
        deltas = []
        for sample in output.outputs:
            index = prompt_index * self.params.n + sample.index
            if index not in self._choices:
                self._choices[index] = _ChoiceState(index, self.parser.reader())
            delta = self._advance(self._choices[index], sample, output)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _advance(
        self, choice: _ChoiceState, new: CompletionOutput, output: RequestOutput
    ) -> ChoiceDelta | None:
        """Returns the delta of a choice; None if it has nothing new."""
        if choice.has_finished:
            return None
        choice.has_finished = new.finish_reason is not None
        parts = choice.reader.read(new.text, finished=choice.has_finished)
        choice.has_calls |= any(part.kind is PartKind.CALL for part in parts)
        sends_tokens = self.options.every_token or self.params.logprobs is not None
        if not (parts or choice.has_finished or (sends_tokens and new.token_ids)):
            return None
        calls = choice.has_calls and new.finish_reason == "stop"
        delta = ChoiceDelta(
            index=choice.index,
            output=output,
            text=new.text,
            start=choice.num_chars,
            parts=self._finish_parts(parts),
            token_ids=new.token_ids,
            logprobs=new.logprobs,
            finish_reason="tool_calls" if calls else new.finish_reason,
            stop_reason=new.stop_reason,
            has_calls=choice.has_calls,
            is_first=not choice.has_started,
            score=new.score,
        )
        choice.has_started = True
        choice.num_chars += len(new.text)
        return delta

    def _finish_parts(self, parts: list[Part]) -> list[Part]:
        """Adds ids to tool calls and removes reasoning that the options hide."""
        new_call_id = self.options.new_call_id or self.parser.new_call_id
        return [
            replace(part, call_id=new_call_id())
            if part.kind is PartKind.CALL and not part.call_id
            else part
            for part in parts
            if self.options.shows_reasoning or part.kind is not PartKind.REASONING
        ]


def merge_timings(outputs: Collection[RequestOutput]) -> Timings | None:
    """Merges the timings of finished outputs; None if there are none."""
    parts = [output.timings for output in outputs if output.timings is not None]
    return Timings.merged(parts) if parts else None


def new_hex_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


async def start_response(
    model: ServedModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    formatter: ResponseFormatter,
    *,
    parser: OutputParser = PLAIN,
    origin: RequestContext = DEFAULT_CONTEXT,
    stream: bool,
) -> ResponseBuilder:
    """Submits prompts and returns the response in progress; raises ClientError for an invalid
    request.
    """
    params = parser.apply_to(params)
    await model.llm.check_grammar(params)
    streams = OutputStreams(model, prompts, params, formatter.id, origin=origin, deltas=stream)
    return ResponseBuilder(streams, params, parser, formatter.options)


async def start_chat(
    model: ServedModel,
    conversation: Conversation,
    params: SamplingParams,
    formatter: ResponseFormatter,
    *,
    origin: RequestContext,
    stream: bool,
) -> ResponseBuilder:
    """Renders and submits a conversation; raises ClientError for an invalid request."""
    prompt = await conversation.prompt(model)
    parser = conversation.parser(model, prompt)
    return await start_response(
        model, [prompt], params, formatter, parser=parser, origin=origin, stream=stream
    )


async def send_response(
    request: Request,
    response: ResponseBuilder,
    formatter: ResponseFormatter,
    stream_type: type[EventStream] | None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Returns a stream, or the whole body if `stream_type` is None. A disconnect aborts the
    request.
    """
    if stream_type is not None:
        return stream_type(response.events(formatter), headers or NO_HEADERS)
    choices = await cancel_on_disconnect(request.receive, response.choices())
    body = msgspec.json.encode(formatter.format_whole(response, choices))
    return Response(body, headers=headers, media_type="application/json")
