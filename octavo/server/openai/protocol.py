"""Response bodies of the OpenAI API.

Names are OpenAI's, or vLLM's for fields that it lacks. Request bodies are in `bodies.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class ResponseTimings(msgspec.Struct):
    """`outputs.Timings` over all samples of a response; times in seconds."""

    queued_s: float
    prefill_s: float
    decode_s: float
    preempted_s: float
    cached_tokens: int
    num_preemptions: int
    num_swaps: int
    draft_tokens: int
    accepted_tokens: int
    streamed_bytes: int
    neurons_found: int
    neurons_read: int
    num_steps: int
    mean_batch_size: float
    max_batch_size: int
    waits: dict[str, float]
    reason: str


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    score: float | msgspec.UnsetType = msgspec.UNSET
    """Score in a beam search."""
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: ResponseTimings | msgspec.UnsetType = msgspec.UNSET


class CalledFunction(msgspec.Struct):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str = ""


class ChatToolCall(msgspec.Struct):
    """A tool call, or in a stream a part of the call with this index."""

    function: CalledFunction
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    index: int | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: CalledFunction | msgspec.UnsetType = msgspec.UNSET
    """OpenAI's old format of a single call, for requests with `functions`."""


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage | msgspec.UnsetType
    delta: ChatMessage | msgspec.UnsetType
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    score: float | msgspec.UnsetType = msgspec.UNSET
    """Score in a beam search."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: ResponseTimings | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
