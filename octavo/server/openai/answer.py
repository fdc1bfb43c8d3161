"""The common part of completions and chat: an answer's id, its stream of chunks, its usage.

A subclass gives the form of a choice in its route.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import msgspec

from octavo.outputs import CompletionOutput, RequestOutput, Timings
from octavo.sampling_params import SamplingParams
from octavo.server.deltas import Cursor, Delta
from octavo.server.generation import Generation
from octavo.server.openai.bodies import SamplingBody, StreamOptions
from octavo.server.openai.fingerprint import fingerprint_of
from octavo.server.openai.logprobs import TokenNames
from octavo.server.openai.protocol import (
    CompletionTokensDetails,
    PromptTokensDetails,
    ResponseTimings,
    Usage,
)
from octavo.server.reading import PLAIN
from octavo.server.state.served_model import ServedModel


class Answer(ABC):
    """One response, whole or as a stream."""

    prefix: str

    def __init__(self, body: SamplingBody, params: SamplingParams, model: ServedModel) -> None:
        self.id = f"{self.prefix}-{body.request_id or secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model.name
        self.fingerprint = fingerprint_of(model.llm.config)
        self.tokenizer = model.tokenizer
        self.params = params
        self.options = body.stream_options or StreamOptions()
        self.returns_token_ids = body.return_token_ids
        self.names = TokenNames(self.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._wants_timings = body.timings
        self._wants_prompt_text = body.return_prompt_text
        self.reading = PLAIN
        """Reading of its text, once the prompt is known."""
        self._every_token = body.return_token_ids or params.logprobs is not None

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        """Returns the response of a request that does not stream."""

    @abstractmethod
    def additions(self, index: int, delta: Delta, output: RequestOutput) -> list[Any]:
        """Returns the choices, one a chunk, that add a delta to choice `index`."""

    @abstractmethod
    def chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> Any:
        """Returns one event of a stream."""

    def choice_index(self, prompt_index: int, sample_index: int) -> int:
        return prompt_index * self.params.n + sample_index

    def timings(self, outputs: Collection[RequestOutput]) -> ResponseTimings | msgspec.UnsetType:
        """Returns the outputs' timings where the request asks for them."""
        return timings_of(outputs) if self._wants_timings else msgspec.UNSET

    def prompt_text(self, output: RequestOutput) -> str | msgspec.UnsetType:
        """Returns the prompt's text, special tokens included, where the request asks for it."""
        if not self._wants_prompt_text or self.tokenizer is None:
            return msgspec.UNSET
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    @abstractmethod
    def begin(self, made: Any, output: RequestOutput) -> None:
        """Adds to a whole response, or to a stream's first chunk, what it says of its prompt."""

    async def events(self, generation: Generation) -> AsyncGenerator[list[Any], None]:
        """Yields chunks as the answer of a generation with deltas grows."""
        cursors: dict[int, Cursor] = {}
        latest: dict[int, RequestOutput] = {}
        has_begun = False
        usage: Usage | msgspec.UnsetType | None = self._running_usage(())
        async with aclosing(generation.outputs()) as outputs:
            async for prompt_index, output in outputs:
                latest[prompt_index] = output
                choices = self._new_choices(prompt_index, output, cursors)
                if choices:
                    # The last chunk brings the tokens; a role, or an earlier part, brings none.
                    before, usage = usage, self._running_usage(latest.values())
                    if isinstance(before, Usage) and isinstance(usage, Usage):
                        before = msgspec.structs.replace(
                            usage, completion_tokens=before.completion_tokens
                        )
                        before.total_tokens = before.prompt_tokens + before.completion_tokens
                    chunks = [self.chunk([choice], before) for choice in choices[:-1]]
                    chunks.append(self.chunk([choices[-1]], usage))
                    if not has_begun:
                        self.begin(chunks[0], output)
                        has_begun = True
                    yield chunks
        whole = usage_of(latest.values()) if self.options.include_usage else msgspec.UNSET
        timings = self.timings(latest.values())
        if whole is not msgspec.UNSET or timings is not msgspec.UNSET:
            last = self.chunk([], whole)
            last.timings = timings
            yield [last]

    def _new_choices(
        self, prompt_index: int, output: RequestOutput, cursors: dict[int, Cursor]
    ) -> list[Any]:
        choices: list[Any] = []
        for sample in output.outputs:
            index = self.choice_index(prompt_index, sample.index)
            if index not in cursors:
                cursors[index] = Cursor(reader=self.reading.reader())
            delta = cursors[index].advance(sample, every_token=self._every_token)
            if delta is not None:
                choices += self.additions(index, delta, output)
        return choices

    def _running_usage(
        self, outputs: Collection[RequestOutput]
    ) -> Usage | msgspec.UnsetType | None:
        if not self.options.include_usage:
            return msgspec.UNSET
        return usage_of(outputs) if self.options.continuous_usage_stats else None


def whole_of(sample: CompletionOutput, *, has_calls: bool = False) -> Delta:
    """Returns a whole sample as one delta."""
    return Delta(
        sample.text,
        0,
        sample.token_ids,
        sample.logprobs,
        sample.finish_reason,
        sample.stop_reason,
        score=sample.score,
        has_calls=has_calls,
    )


def timings_of(outputs: Collection[RequestOutput]) -> ResponseTimings | msgspec.UnsetType:
    """Returns the merged timings of outputs that have ended."""
    parts = [output.timings for output in outputs if output.timings is not None]
    if not parts:
        return msgspec.UNSET
    timings = Timings.merged(parts)
    return ResponseTimings(**asdict(timings), reason=timings.reason)


def usage_of(outputs: Collection[RequestOutput]) -> Usage:
    """Counts the tokens of outputs that are answered together."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(
        output.metrics.num_generation_tokens for output in outputs if output.metrics is not None
    )
    num_cached = sum(output.num_cached_tokens for output in outputs)
    num_thought = sum(
        sample.num_reasoning_tokens for output in outputs for sample in output.outputs
    )
    return Usage(
        num_prompt,
        num_new,
        num_prompt + num_new,
        PromptTokensDetails(num_cached),
        CompletionTokensDetails(num_thought),
    )
