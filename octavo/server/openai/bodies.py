"""Request bodies of the OpenAI API, with vLLM's names for fields that OpenAI lacks.

The fields (`server/fields.py`) are validated, documented and listed by GET /v1/capabilities from
their declarations.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from octavo.api.sampling_params import OPTIONS
from octavo.server.fields import Whole, accepted, field, required, sampling, user_name
from octavo.server.http.body import Body
from octavo.server.http.body_part import BodyPart
from octavo.server.openai.filter_body import FilterBody
from octavo.server.openai.message_bodies import (
    AllowedToolsChoice,
    FunctionName,
    Message,
    NamedTool,
    OfferedFunctionBody,
    ToolBody,
)

TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""An integer that fits the engine's types; SamplingParams checks its value."""

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]

FLAG = "true or false"
MAX_NAME = 512
"""Maximum length of a client's identifiers, in characters."""
MAX_TEMPLATE = 100_000
"""Maximum length of a request's chat template, in characters."""


class StreamOptions(BodyPart):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = accepted("false; no stream is obfuscated")


class SamplingBody(FilterBody):
    """Base class of generation bodies; None means that a field is not given."""

    unsupported: ClassVar[frozenset[str]] = frozenset(
        {
            "audio",
            "include_reasoning",
            "kv_transfer_params",
            "mm_processor_kwargs",
            "moderation",
            "prediction",
            "return_token_offsets",
            "vllm_xargs",
            "web_search_options",
        }
    )

    refused: ClassVar[frozenset[str]] = frozenset({"prompt_embeds"})

    model: str | None = field("the name of a model", "model that answers; null is the only model")
    n: Whole | None = sampling("n")
    presence_penalty: float | None = sampling("presence_penalty")
    frequency_penalty: float | None = sampling("frequency_penalty")
    repetition_penalty: float | None = sampling("repetition_penalty")
    temperature: float | None = sampling("temperature")
    top_p: float | None = sampling("top_p")
    top_k: Whole | None = sampling("top_k")
    min_p: float | None = sampling("min_p")
    seed: Whole | None = sampling("seed")
    stop: str | list[str] | None = sampling("stop")
    stop_token_ids: list[TokenId] | None = sampling("stop_token_ids")
    repetition_detection: dict[str, TokenId] | None = sampling(
        "repetition_detection", excludes={"use_beam_search": "a beam search has no single answer"}
    )
    ignore_eos: bool | None = sampling("ignore_eos")
    max_tokens: Whole | None = field(
        "a whole number from 1 to 2147483647; -1 is no limit",
        "most tokens of an answer",
        rules={"minimum": -1, "maximum": 2147483647},
    )
    min_tokens: Whole | None = sampling("min_tokens")
    logprob_token_ids: list[TokenId] | None = sampling(
        "logprob_token_ids", excludes={"use_beam_search": "a search gives the likeliest tokens'"}
    )
    logits_processors: list[str] | None = sampling(
        "logits_processors", excludes={"use_beam_search": "a search draws nothing"}
    )
    prompt_logprobs: Whole | None = sampling("prompt_logprobs")
    prompt_logprob_start: Whole | None = sampling("prompt_logprob_start")
    skip_special_tokens: bool | None = sampling("skip_special_tokens")
    spaces_between_special_tokens: bool | None = sampling("spaces_between_special_tokens")
    include_stop_str_in_output: bool | None = sampling("include_stop_str_in_output")
    logit_bias: dict[str, float] | None = sampling("logit_bias")
    allowed_token_ids: list[TokenId] | None = sampling("allowed_token_ids")
    bad_words: list[str] | None = sampling("bad_words")
    response_format: dict[str, Any] | None = field(
        'an object whose type is "text", "json_object", "json_schema" or "structural_tag"',
        "form of the answer",
    )
    structured_outputs: dict[str, Any] | None = sampling("structured_outputs")
    guided_json: dict[str, Any] | str | None = field(
        "a JSON schema", "the old name of structured_outputs.json"
    )
    guided_regex: str | None = field(
        "a regular expression", "the old name of structured_outputs.regex"
    )
    guided_choice: list[str] | None = field(
        "a list of texts", "the old name of structured_outputs.choice"
    )
    guided_grammar: str | None = field(
        "a grammar in Lark's or GBNF's notation",
        "the old name of structured_outputs.grammar",
    )
    guided_whitespace_pattern: str | None = field(
        "a regular expression",
        "whitespace between the parts of JSON",
        rules={"needs": {"guided_json": []}},
    )
    use_beam_search: bool | None = field(
        FLAG, "searches for the likeliest answers instead of drawing one"
    )
    beam_width: Whole | None = sampling("beam_width", needs={"use_beam_search": [True]})
    length_penalty: float | None = sampling(
        "length_penalty", needs={"use_beam_search": [True]}, idle=True, minimum=-10, maximum=10
    )
    early_stopping: bool | Literal["never"] | None = sampling(
        "early_stopping", needs={"use_beam_search": [True]}, idle=True
    )
    cache_salt: str | None = field("a text", "shares cached prefixes with the same salt only")
    request_id: str | None = field(
        "a text of 1 to 200 characters",
        "part of the answer's id",
        min_length=1,
        max_length=200,
    )
    session_id: str | None = accepted("a text of at most 512 characters", max_length=MAX_NAME)
    stream: bool | None = field(
        FLAG,
        "sends the answer as it grows, as server-sent events",
        rules={"excludes": {"use_beam_search": "a beam search knows its answer at the end"}},
    )
    stream_options: StreamOptions | None = field(
        "an object of include_usage, continuous_usage_stats and include_obfuscation (false)",
        "what a stream says besides",
        by_path=True,
        rules={"needs": {"stream": [True]}, "idle": True},
    )
    return_token_ids: bool = field(FLAG, "adds token ids to the answer", default=False)
    return_tokens_as_token_ids: bool = field(
        FLAG, 'names tokens in logprobs "token_id:17"', default=False
    )
    return_prompt_text: bool = field(
        FLAG, "adds the prompt's text, special tokens included", default=False
    )
    timings: bool = field(
        "true or false: say where the time went", "adds queueing, prefill and decode", default=False
    )
    user: str | None = user_name()
    priority: int | None = field(
        "a whole number of at most 32 bits; lower goes first, where the policy is priority",
        "place in the queue",
        ge=-(2**31),
        lt=2**31,
    )
    metadata: dict[MetadataKey, MetadataText] | None = accepted(
        "an object of at most 16 texts of 512 characters", max_length=16
    )
    store: bool | None = accepted("true or false; this route keeps no answer")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = accepted(
        '"auto", "default", "flex", "scale" or "priority"'
    )
    safety_identifier: str | None = accepted(
        "a text of at most 512 characters", max_length=MAX_NAME
    )
    prompt_cache_key: str | None = accepted("a text of at most 512 characters", max_length=MAX_NAME)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = accepted(
        '"in_memory" or "24h"'
    )


CONVERTED_FIELDS = (
    "max_tokens",
    "structured_outputs",
    "beam_width",
    "length_penalty",
    "early_stopping",
)
"""SamplingParams fields whose values depend on other fields of the body."""
SAMPLING_FIELDS = tuple(
    name for name in SamplingBody.model_fields if name in OPTIONS and name not in CONVERTED_FIELDS
)
"""Fields copied to SamplingParams unchanged."""


class PromptBody(SamplingBody):
    """Base class of bodies with a prompt that may be truncated."""

    truncate_prompt_tokens: Whole | None = field(
        "-1, or a whole number from 1 to the context length minus 1",
        "keeps this many tokens of the prompt; -1 as many as leave room for max_tokens",
        rules={"minimum": -1},
    )
    truncation_side: Literal["left", "right"] | None = field(
        '"left" or "right"',
        "side at which the prompt is cut; null is left",
        rules={"needs": {"truncate_prompt_tokens": []}, "idle": True},
    )


class CompletionBody(PromptBody):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = required(
        "a text, token ids, or a list of either", "what is continued"
    )
    echo: bool = field(
        FLAG,
        "puts the prompt before the answer",
        default=False,
    )
    logprobs: Whole | None = field(
        "a whole number from 0 up: how many alternatives for each token",
        "logprobs of the answer's tokens",
        ge=0,
    )
    best_of: Whole | None = field(
        "a whole number from n up",
        "samples made, of which the n best are returned; in a stream n",
        rules={"minimum": 1},
    )
    decoder_prompt: str | None = field(
        "a text, for an encoder before a decoder",
        "what the decoder begins with, in place of what the model's makers say",
        rules={
            "excludes": {
                "suffix": "an encoder reads one text",
                "decoder_prompt_token_ids": "the decoder begins with one of them",
            }
        },
    )
    decoder_prompt_token_ids: list[TokenId] | None = field(
        "a list of token ids, for an encoder before a decoder",
        "what the decoder begins with, as tokens",
    )
    suffix: str | None = field(
        "a text, where the vocabulary has tokens for filling in the middle",
        "what comes after the answer",
        rules={
            "excludes": {
                "echo": "the answer goes between two texts",
                "truncate_prompt_tokens": "both texts are needed whole",
            }
        },
    )
    add_special_tokens: bool = field(
        FLAG, "puts the tokenizer's own tokens around the prompt", default=True
    )


class ConversationBody(Body):
    """Base class of bodies with a conversation for the chat template."""

    messages: list[Message] = required(
        "a list of messages, each with a role and a content", "the conversation", by_path=True
    )
    add_generation_prompt: bool | None = field(
        FLAG, "begins an assistant's message; null is true unless the last one is continued"
    )
    continue_final_message: bool = field(
        FLAG,
        "goes on within the last message, which is the assistant's",
        default=False,
        rules={"excludes": {"add_generation_prompt": "no new message begins"}},
    )
    chat_template: str | None = field(
        f"the name of one of the model's, or a Jinja text of at most {MAX_TEMPLATE} characters,"
        " where the server trusts them",
        "template in place of the model's",
        max_length=MAX_TEMPLATE,
    )
    chat_template_kwargs: dict[str, Any] | None = field(
        "an object of the template's variables", "what the template is given besides"
    )
    documents: list[dict[str, Any]] | None = field(
        "a list of objects, where the template reads documents", "texts that the template quotes"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        field(
            '"none", "minimal", "low", "medium", "high", "xhigh" or "max"; where the template reads'
            ' no such variable "none" and "medium"',
            "how long the model thinks; chat_template_kwargs goes before it",
        )
    )


class ChatBody(ConversationBody, PromptBody):
    unsupported = SamplingBody.unsupported

    max_completion_tokens: Whole | None = field(
        "a whole number from 1 to 2147483647; -1 is no limit",
        "most tokens of an answer; goes before max_tokens",
        rules={"minimum": -1, "maximum": 2147483647},
    )
    logprobs: bool | None = field(FLAG, "logprobs of the answer's tokens")
    top_logprobs: Whole | None = field(
        "a whole number from 0 up",
        "alternatives given for each token",
        rules={"needs": {"logprobs": [True]}, "neutral": 0},
        ge=0,
    )
    echo: bool = field(
        FLAG,
        "puts the last message before the answer where it is the assistant's",
        default=False,
    )
    add_special_tokens: bool = field(
        FLAG, "puts the tokenizer's own tokens around what the template writes", default=False
    )
    tools: list[ToolBody] | None = field(
        "a list of functions, each with a name and a JSON schema of its arguments",
        "functions that the model may call",
        by_path=True,
    )
    tool_choice: (
        Literal["none", "auto", "required", "any"] | NamedTool | AllowedToolsChoice | None
    ) = field(
        '"none", "auto", "required" (or "any"), a function or a list of allowed ones',
        "whether a function is called; required and named ones are",
        rules={"types": ("function", "tool", "allowed_tools")},
    )
    parallel_tool_calls: bool | None = field(
        FLAG, "whether one answer may call several functions; null is true"
    )
    include_reasoning: bool | None = field(
        FLAG, "gives the model's reasoning with the answer; null is true"
    )
    thinking_token_budget: Whole | None = field(
        "a whole number from 0 up, or -1 for no limit",
        "most tokens of reasoning, which is closed there",
        rules={"minimum": -1},
        ge=-1,
        lt=2**31,
    )
    functions: list[OfferedFunctionBody] | None = field(
        "a list of functions, each with a name and a JSON schema of its arguments",
        "the old form of tools, which go before it; the answer has a function_call",
        by_path=True,
    )
    function_call: Literal["none", "auto"] | FunctionName | None = field(
        '"none", "auto" or an object with a name',
        "the old form of tool_choice",
    )
    modalities: list[Literal["text"]] | None = field(
        '["text"]', "what the answer is made of", max_length=1
    )
    verbosity: Literal["low", "medium", "high"] | None = accepted('"low", "medium" or "high"')
