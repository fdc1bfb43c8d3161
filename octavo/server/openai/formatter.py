"""Formatting common to completions and chat: ids, chunks, usage.

Subclasses format the choices.
"""

from __future__ import annotations

import functools
import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

import msgspec

from octavo.api.outputs import RequestOutput, Timings
from octavo.api.sampling_params import SamplingParams
from octavo.config.config_hooks import get_result_options
from octavo.config.engine_config import EngineConfig
from octavo.server.openai.bodies import SamplingBody, StreamOptions
from octavo.server.openai.logprobs import TokenNames
from octavo.server.openai.protocol import (
    CompletionTokensDetails,
    PromptTokensDetails,
    ResponseTimings,
    Usage,
)
from octavo.server.response_builder import (
    ChoiceDelta,
    ResponseBuilder,
    ResponseFormatter,
    ResponseOptions,
    TokenUsage,
)
from octavo.server.state.served_model import ServedModel
from octavo.utils.version import __version__


class OpenAIFormatter(ResponseFormatter):
    """Formats one response, complete or in chunks."""

    prefix: str

    def __init__(
        self,
        body: SamplingBody,
        params: SamplingParams,
        model: ServedModel,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        self.id = f"{self.prefix}-{body.request_id or secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model.name
        self.fingerprint = make_fingerprint(model.llm.config)
        self.tokenizer = model.tokenizer
        self.params = params
        self.returns_token_ids = body.return_token_ids
        self.names = TokenNames(self.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self.options = ResponseOptions(body.return_token_ids, shows_reasoning)
        self._stream_options = body.stream_options or StreamOptions()
        self._wants_timings = body.timings
        self._wants_prompt_text = body.return_prompt_text
        self._has_begun = False
        self._num_completion_tokens = 0

    @abstractmethod
    def format_chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> Any:
        """Returns one event of a stream."""

    @abstractmethod
    def format_choices(self, delta: ChoiceDelta) -> list[Any]:
        """Returns the choices of a delta, each for its own chunk."""

    @abstractmethod
    def add_prompt(self, completion: Any, output: RequestOutput) -> None:
        """Adds the requested prompt fields to a body or to the first chunk."""

    def timings(self, response: ResponseBuilder) -> ResponseTimings | msgspec.UnsetType:
        """Returns the timings if the request asks for them."""
        return format_timings(response.timings) if self._wants_timings else msgspec.UNSET

    def prompt_text(self, output: RequestOutput) -> str | msgspec.UnsetType:
        """Returns the prompt's text with special tokens, if the request asks for it."""
        if not self._wants_prompt_text or self.tokenizer is None:
            return msgspec.UNSET
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def format_deltas(self, response: ResponseBuilder, deltas: Sequence[ChoiceDelta]) -> list[Any]:
        choices = [choice for delta in deltas for choice in self.format_choices(delta)]
        before, usage = self._running_usages(response)
        # Only the last chunk has tokens; the earlier ones contain a role or an earlier part.
        chunks = [self.format_chunk([choice], before) for choice in choices[:-1]]
        chunks.append(self.format_chunk([choices[-1]], usage))
        if not self._has_begun:
            self.add_prompt(chunks[0], deltas[0].output)
            self._has_begun = True
        return chunks

    def format_end(self, response: ResponseBuilder) -> list[Any]:
        includes_usage = self._stream_options.include_usage
        usage = format_usage(response.usage) if includes_usage else msgspec.UNSET
        timings = self.timings(response)
        if usage is msgspec.UNSET and timings is msgspec.UNSET:
            return []
        last = self.format_chunk([], usage)
        last.timings = timings
        return [last]

    def _running_usages(
        self, response: ResponseBuilder
    ) -> tuple[Usage | msgspec.UnsetType | None, Usage | msgspec.UnsetType | None]:
        """Returns two usage values: for chunks before a step's tokens, and for chunks with the
        tokens.
        """
        if not self._stream_options.include_usage:
            return msgspec.UNSET, msgspec.UNSET
        if not self._stream_options.continuous_usage_stats:
            return None, None
        usage, num_before = response.usage, self._num_completion_tokens
        self._num_completion_tokens = usage.completion_tokens
        return format_usage(usage, num_before), format_usage(usage)


def format_timings(timings: Timings | None) -> ResponseTimings | msgspec.UnsetType:
    if timings is None:
        return msgspec.UNSET
    return ResponseTimings(**asdict(timings), reason=timings.reason)


def format_usage(usage: TokenUsage, num_completion_tokens: int | None = None) -> Usage:
    """Returns OpenAI's usage; `num_completion_tokens` overrides the count."""
    num_new = usage.completion_tokens if num_completion_tokens is None else num_completion_tokens
    return Usage(
        usage.prompt_tokens,
        num_new,
        usage.prompt_tokens + num_new,
        PromptTokensDetails(usage.cached_tokens),
        CompletionTokensDetails(usage.reasoning_tokens),
    )


@functools.lru_cache(maxsize=64)
def make_fingerprint(config: EngineConfig) -> str:
    """Returns a digest of everything that affects an engine's numerical results."""
    deciding = (
        __version__,
        config.model,
        config.backend,
        config.cache.kv_cache_dtype,
        get_result_options(config),
        *((config.lora.lora_dtype,) if config.lora.enable_lora else ()),
    )
    return f"fp_{blake2b(repr(deciding).encode(), digest_size=6).hexdigest()}"
