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
"""An integer that fits the engine's integer types; SamplingParams checks its value."""

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
    include_obfuscation: Literal[False] | None = accepted("false; obfuscation is not supported")


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

    model: str | None = field("the name of a model", "model to use; null: the only model")
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
        "repetition_detection", excludes={"use_beam_search": "beams differ in their tokens"}
    )
    ignore_eos: bool | None = sampling("ignore_eos")
    max_tokens: Whole | None = field(
        "an integer from 1 to 2147483647; -1 is no limit",
        "maximum number of output tokens",
        rules={"minimum": -1, "maximum": 2147483647},
    )
    min_tokens: Whole | None = sampling("min_tokens")
    logprob_token_ids: list[TokenId] | None = sampling(
        "logprob_token_ids", excludes={"use_beam_search": "it returns the top logprobs"}
    )
    logits_processors: list[str] | None = sampling(
        "logits_processors", excludes={"use_beam_search": "a beam search does not sample"}
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
        "output format",
    )
    structured_outputs: dict[str, Any] | None = sampling("structured_outputs")
    guided_json: dict[str, Any] | str | None = field(
        "a JSON schema", "deprecated name of structured_outputs.json"
    )
    guided_regex: str | None = field(
        "a regular expression", "deprecated name of structured_outputs.regex"
    )
    guided_choice: list[str] | None = field(
        "a list of strings", "deprecated name of structured_outputs.choice"
    )
    guided_grammar: str | None = field(
        "a grammar in Lark or GBNF notation",
        "deprecated name of structured_outputs.grammar",
    )
    guided_whitespace_pattern: str | None = field(
        "a regular expression",
        "whitespace pattern between JSON tokens",
        rules={"needs": {"guided_json": []}},
    )
    use_beam_search: bool | None = field(FLAG, "use beam search instead of sampling")
    beam_width: Whole | None = sampling("beam_width", needs={"use_beam_search": [True]})
    length_penalty: float | None = sampling(
        "length_penalty", needs={"use_beam_search": [True]}, idle=True, minimum=-10, maximum=10
    )
    early_stopping: bool | Literal["never"] | None = sampling(
        "early_stopping", needs={"use_beam_search": [True]}, idle=True
    )
    cache_salt: str | None = field("a string", "cache prefixes separately for each salt")
    request_id: str | None = field(
        "a string of 1 to 200 characters",
        "part of the response id",
        min_length=1,
        max_length=200,
    )
    session_id: str | None = accepted("a string of at most 512 characters", max_length=MAX_NAME)
    stream: bool | None = field(
        FLAG,
        "stream the response as server-sent events",
        rules={"excludes": {"use_beam_search": "a beam search cannot be streamed"}},
    )
    stream_options: StreamOptions | None = field(
        "an object of include_usage, continuous_usage_stats and include_obfuscation (false)",
        "options of the stream",
        by_path=True,
        rules={"needs": {"stream": [True]}, "idle": True},
    )
    return_token_ids: bool = field(FLAG, "return token ids", default=False)
    return_tokens_as_token_ids: bool = field(
        FLAG, 'name tokens in logprobs as "token_id:17"', default=False
    )
    return_prompt_text: bool = field(
        FLAG, "return the prompt as text, including special tokens", default=False
    )
    timings: bool = field("true or false", "return queue, prefill and decode times", default=False)
    user: str | None = user_name()
    priority: int | None = field(
        "a 32-bit integer",
        "scheduling priority, lower runs first; requires the priority policy",
        ge=-(2**31),
        lt=2**31,
    )
    metadata: dict[MetadataKey, MetadataText] | None = accepted(
        "an object of at most 16 strings of 512 characters", max_length=16
    )
    store: bool | None = accepted("true or false; this route does not store responses")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = accepted(
        '"auto", "default", "flex", "scale" or "priority"'
    )
    safety_identifier: str | None = accepted(
        "a string of at most 512 characters", max_length=MAX_NAME
    )
    prompt_cache_key: str | None = accepted(
        "a string of at most 512 characters", max_length=MAX_NAME
    )
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
        "-1, or an integer from 1 to the context length minus 1",
        "truncate the prompt to this many tokens; -1 leaves room for max_tokens",
        rules={"minimum": -1},
    )
    truncation_side: Literal["left", "right"] | None = field(
        '"left" or "right"',
        "side from which tokens are removed; null: left",
        rules={"needs": {"truncate_prompt_tokens": []}, "idle": True},
    )


class CompletionBody(PromptBody):
    refused: ClassVar[frozenset[str]] = frozenset()

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] | None = field(
        "a string, token ids, or a list of either; required without prompt_embeds",
        "prompt to complete",
    )
    prompt_embeds: str | list[str] | None = field(
        "the base64 of torch.save's or numpy.save's output, or a list of them; requires"
        " --enable-prompt-embeds",
        "embeddings to continue, of shape [tokens, hidden_size]; their choices come before those of"
        " prompt",
        rules={
            "excludes": {
                "echo": "embeddings have no text",
                "suffix": "not supported with fill-in-the-middle",
                "prompt_logprobs": "embeddings have no token ids",
            }
        },
    )
    echo: bool = field(
        FLAG,
        "return the prompt before the completion",
        default=False,
    )
    logprobs: Whole | None = field(
        "an integer of at least 0",
        "return logprobs of the output tokens",
        ge=0,
    )
    best_of: Whole | None = field(
        "an integer of at least n",
        "number of samples, of which the n most likely are returned; with stream equal to n",
        rules={"minimum": 1},
    )
    decoder_prompt: str | None = field(
        "a string; encoder-decoder models only",
        "decoder prompt, instead of the model's default",
        rules={
            "excludes": {
                "suffix": "an encoder takes a single text",
                "decoder_prompt_token_ids": "both set the decoder prompt",
            }
        },
    )
    decoder_prompt_token_ids: list[TokenId] | None = field(
        "a list of token ids; encoder-decoder models only",
        "decoder prompt as token ids",
    )
    suffix: str | None = field(
        "a string; models with fill-in-the-middle tokens only",
        "text after the completion (fill-in-the-middle)",
        rules={
            "excludes": {
                "echo": "not supported with fill-in-the-middle",
                "truncate_prompt_tokens": "not supported with fill-in-the-middle",
            }
        },
    )
    add_special_tokens: bool = field(FLAG, "add special tokens to the prompt", default=True)


class ConversationBody(Body):
    """Base class of bodies with a conversation for the chat template."""

    messages: list[Message] = required(
        "a list of messages, each with a role and a content", "conversation", by_path=True
    )
    add_generation_prompt: bool | None = field(
        FLAG, "start an assistant message; null: true unless the last message is continued"
    )
    continue_final_message: bool = field(
        FLAG,
        "continue the last message, an assistant message",
        default=False,
        rules={"excludes": {"add_generation_prompt": "a continued message starts no new one"}},
    )
    chat_template: str | None = field(
        f"the name of a template of the model, or a Jinja template of at most {MAX_TEMPLATE}"
        f" characters if the server trusts them",
        "template to use instead of the model's",
        max_length=MAX_TEMPLATE,
    )
    chat_template_kwargs: dict[str, Any] | None = field(
        "an object of the template's variables", "additional variables of the chat template"
    )
    documents: list[dict[str, Any]] | None = field(
        "a list of objects, if the template supports documents", "documents for the template"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        field(
            '"none", "minimal", "low", "medium", "high", "xhigh" or "max"; "none" and '
            '"medium" if the template has no such variable',
            "reasoning effort; overridden by chat_template_kwargs",
        )
    )


class ChatBody(ConversationBody, PromptBody):
    unsupported = SamplingBody.unsupported

    max_completion_tokens: Whole | None = field(
        "an integer from 1 to 2147483647; -1 is no limit",
        "maximum number of output tokens; overrides max_tokens",
        rules={"minimum": -1, "maximum": 2147483647},
    )
    logprobs: bool | None = field(FLAG, "return logprobs of the output tokens")
    top_logprobs: Whole | None = field(
        "an integer of at least 0",
        "number of most likely alternatives returned for each token",
        rules={"needs": {"logprobs": [True]}, "neutral": 0},
        ge=0,
    )
    echo: bool = field(
        FLAG,
        "return the last message before the output if it is an assistant message",
        default=False,
    )
    add_special_tokens: bool = field(
        FLAG, "add special tokens to the rendered prompt", default=False
    )
    tools: list[ToolBody] | None = field(
        "a list of functions, each with a name and a JSON schema of its arguments",
        "functions that the model can call",
        by_path=True,
    )
    tool_choice: (
        Literal["none", "auto", "required", "any"] | NamedTool | AllowedToolsChoice | None
    ) = field(
        '"none", "auto", "required" (or "any"), a function or a list of allowed functions',
        'whether to call a function; "required" and a named function force a call',
        rules={"types": ("function", "tool", "allowed_tools")},
    )
    parallel_tool_calls: bool | None = field(
        FLAG, "allow several function calls in one response; null: true"
    )
    include_reasoning: bool | None = field(FLAG, "return the reasoning; null: true")
    thinking_token_budget: Whole | None = field(
        "an integer of at least 0, or -1 for no limit",
        "maximum number of reasoning tokens; reasoning is then closed",
        rules={"minimum": -1},
        ge=-1,
        lt=2**31,
    )
    functions: list[OfferedFunctionBody] | None = field(
        "a list of functions, each with a name and a JSON schema of its arguments",
        "deprecated form of tools; the response has a function_call",
        by_path=True,
    )
    function_call: Literal["none", "auto"] | FunctionName | None = field(
        '"none", "auto" or an object with a name',
        "deprecated form of tool_choice",
    )
    modalities: list[Literal["text"]] | None = field('["text"]', "output modalities", max_length=1)
    verbosity: Literal["low", "medium", "high"] | None = accepted('"low", "medium" or "high"')
