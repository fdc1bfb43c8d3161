"""Bodies that the OpenAI routes take (pydantic) and give (msgspec structs, one for every token).

Names are OpenAI's, and vLLM's where OpenAI has none. Knows nothing of the engine but
SamplingParams' names.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, Field

from octavo.server.body import Body

Text = Annotated[str | list[str] | None, Field(description="a text or a list of texts")]
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenIds = Annotated[list[TokenId] | None, Field(description="a list of token ids")]
Number = Annotated[float | None, Field(description="a number")]
Whole = Annotated[
    int | None, Field(ge=-(2**63), lt=2**63, description="a whole number of at most 64 bits")
]
"""A whole number that fits the engine's types; SamplingParams says which values make sense."""
Flag = Annotated[bool, Field(description="true or false")]

SAMPLING_FIELDS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "prompt_logprob_start",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
"""Fields that go to SamplingParams unchanged."""


class StreamOptions(BaseModel):
    model_config = Body.model_config | {"extra": "forbid"}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(Body):
    """Base of the bodies that ask for text; None stands for a field that is not given."""

    unsupported: ClassVar[frozenset[str]] = frozenset(
        {
            "audio",
            "echo",
            "function_call",
            "functions",
            "modalities",
            "parallel_tool_calls",
            "prediction",
            "reasoning_effort",
            "store",
            "structured_outputs",
            "truncate_prompt_tokens",
            "web_search_options",
        }
    )

    model: Annotated[str | None, Field(description="the name of a model")] = None
    n: Whole = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    temperature: Number = None
    top_p: Number = None
    top_k: Whole = None
    min_p: Number = None
    seed: Whole = None
    stop: Text = None
    stop_token_ids: TokenIds = None
    ignore_eos: bool | None = None
    max_tokens: Whole = None
    min_tokens: Whole = None
    prompt_logprobs: Whole = None
    prompt_logprob_start: Whole = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[
        dict[str, float] | None, Field(description="an object of token ids and numbers")
    ] = None
    allowed_token_ids: TokenIds = None
    bad_words: Annotated[list[str] | None, Field(description="a list of texts")] = None
    use_beam_search: Annotated[bool | None, Field(description="true or false")] = None
    beam_width: Annotated[
        Whole, Field(description="a whole number; without it a beam search has n beams")
    ] = None
    length_penalty: Number = None
    early_stopping: Annotated[
        bool | Literal["never"] | None, Field(description='true, false or "never"')
    ] = None
    cache_salt: Annotated[str | None, Field(description="a text")] = None
    request_id: Annotated[
        str | None, Field(min_length=1, max_length=200, description="a text of 1 to 200 characters")
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False
    timings: Annotated[bool, Field(description="true or false: say where the time went")] = False
    user: Annotated[
        str | None,
        Field(
            max_length=200,
            description="a text of at most 200 characters; a fair policy shares among them",
        ),
    ] = None
    priority: Annotated[
        int | None,
        Field(
            ge=-(2**31),
            lt=2**31,
            description="a whole number of at most 32 bits; lower goes first, where the policy is"
            " priority",
        ),
    ] = None


class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str] | list[TokenId] | list[list[TokenId]],
        Field(description="a text, token ids, or a list of either"),
    ]
    echo: Flag = False
    logprobs: Annotated[
        Whole, Field(description="a whole number: how many alternatives for each token")
    ] = None
    best_of: Whole = None
    suffix: Annotated[str | None, Field(description="null; this server does not insert text")] = (
        None
    )
    add_special_tokens: Flag = True


class TextPart(BaseModel):
    model_config = Body.model_config

    type: str
    text: str | None = None


class Message(BaseModel):
    """One message of a conversation; fields beyond these are refused by name."""

    model_config = Body.model_config

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None


class ChatBody(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Whole = None
    logprobs: bool | None = None
    top_logprobs: Whole = None
    response_format: Annotated[
        dict[str, Any] | None, Field(description='{"type": "text"}; this server forces no form')
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        Field(description="an empty list; this server does not support tools"),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Field(description='"none" or "auto"; this server does not support tools'),
    ] = None
    add_generation_prompt: Flag = True
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="an object of the template's variables")
    ] = None


# -- what goes out ---------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ResponseTimings(msgspec.Struct):
    """The fields of `outputs.Timings` over all samples of an answer; times in seconds."""

    queued_s: float
    prefill_s: float
    decode_s: float
    preempted_s: float
    cached_tokens: int
    num_preemptions: int
    num_swaps: int
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
    """A choice of an answer, whole or as a stream's delta."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    score: float | msgspec.UnsetType = msgspec.UNSET
    """Score of a beam search's hypothesis."""
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: ResponseTimings | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct):
    """The answer's message, or in a stream its new part."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    refusal: msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage | msgspec.UnsetType
    delta: ChatMessage | msgspec.UnsetType
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    score: float | msgspec.UnsetType = msgspec.UNSET
    """Score of a beam search's hypothesis."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: ResponseTimings | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType | None = msgspec.UNSET
