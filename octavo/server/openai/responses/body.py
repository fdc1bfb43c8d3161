"""The body of POST /v1/responses, and what it asks for in the engine's terms.

Names and rules are OpenAI's; sampling fields beyond them are those of the chat route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from octavo.errors import InvalidRequest, shown
from octavo.sampling_params import SamplingParams
from octavo.server.body import BodyPart
from octavo.server.fields import Whole, field, sampling, taken
from octavo.server.openai.bodies import TokenId
from octavo.server.openai.filter_body import FILTER_FIELDS, FilterBody
from octavo.server.openai.structured import response_format
from octavo.structured_outputs import StructuredOutputs

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
VERBOSITIES = (None, "low", "medium", "high")
"""Values of `text.verbosity`, which changes nothing, as chat's."""

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "min_tokens",
    "ignore_eos",
    "allowed_token_ids",
    *FILTER_FIELDS,
)
"""Fields that go to SamplingParams unchanged."""

Included = Literal["reasoning.encrypted_content", "message.input_image.image_url"]
Choice = Annotated[bool | None, Field(description="true or false")]
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE)],
    ]
    | None,
    Field(
        max_length=MAX_METADATA,
        description=f"an object of at most {MAX_METADATA} texts of at most {MAX_METADATA_VALUE}"
        f" characters, under names of at most {MAX_METADATA_KEY}",
    ),
]
ShortText = Annotated[
    str | None, Field(max_length=200, description="a text of at most 200 characters")
]


class ItemPart(BodyPart):
    """One part of an input item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(BodyPart):
    """One item of a response's input: a message, a call, its result, or reasoning."""

    type: str = "message"
    role: str | None = None
    content: str | list[ItemPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None


class ResponseTool(BodyPart):
    """A function that the model may call; tools that a server runs are refused by their type."""

    model_config = BodyPart.model_config | {"extra": "forbid"}

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolName(BodyPart):
    model_config = BodyPart.model_config | {"extra": "forbid"}

    type: Literal["function"]
    name: str


class ResponseAllowedTools(BodyPart):
    model_config = BodyPart.model_config | {"extra": "forbid"}

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponseToolName]


class ResponseBody(FilterBody):
    """Body of POST /v1/responses; None stands for a field that is not given."""

    unsupported: ClassVar[frozenset[str]] = frozenset(
        {"context_management", "conversation", "moderation", "n", "prompt"}
    )

    model: Annotated[str | None, Field(description="the name of a model")] = None
    input: Annotated[str | list[InputItem], Field(description="a text or a list of messages")]
    instructions: Annotated[str | None, Field(description="a text")] = None
    max_output_tokens: Annotated[
        Whole | None, Field(ge=1, description="a whole number from 1 up")
    ] = None
    temperature: float | None = sampling("temperature", "randomness of the draws")
    top_p: float | None = sampling("top_p", "share of probability that is drawn from")
    top_k: Whole | None = sampling("top_k", "number of best tokens that are drawn from")
    min_p: float | None = sampling("min_p", "least share of the best probability")
    repetition_penalty: float | None = sampling(
        "repetition_penalty", "penalty of tokens that have occurred"
    )
    presence_penalty: float | None = sampling(
        "presence_penalty", "penalty of tokens in the answer so far"
    )
    frequency_penalty: float | None = sampling(
        "frequency_penalty", "penalty by how often a token has occurred"
    )
    seed: Whole | None = sampling("seed", "seed of the draws")
    stop: str | list[str] | None = field("a text or a list of texts", "ends the answer before it")
    min_tokens: Whole | None = sampling("min_tokens", "tokens before the answer may end")
    ignore_eos: Choice = None
    allowed_token_ids: list[TokenId] | None = field("a list of token ids", "tokens to draw from")
    cache_salt: Annotated[str | None, Field(description="a text")] = None
    priority: Annotated[
        int | None,
        Field(ge=-(2**31), lt=2**31, description="a whole number of at most 32 bits"),
    ] = None
    store: Choice = None
    background: Choice = None
    stream: Choice = None
    stream_options: Annotated[
        dict[str, bool] | None, Field(description='{"include_obfuscation": false}')
    ] = None
    metadata: Metadata = None
    previous_response_id: ShortText = None
    truncation: Annotated[
        str | None, Field(pattern="^(auto|disabled)$", description='"auto" or "disabled"')
    ] = None
    user: ShortText = None
    text: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    reasoning: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    tools: list[ResponseTool] | None = field(
        "a list of functions, each with a name and a JSON schema of its arguments",
        "functions that the model may call",
        by_path=True,
    )
    tool_choice: (
        Literal["none", "auto", "required"] | ResponseToolName | ResponseAllowedTools | None
    ) = field(
        '"none", "auto", "required", a function or a list of allowed ones',
        "whether a function is called; required and named ones are",
    )
    parallel_tool_calls: Choice = None
    max_tool_calls: Annotated[Whole | None, Field(ge=1, description="a whole number from 1 up")] = (
        None
    )
    include: list[Included] | None = taken(
        'a list of "reasoning.encrypted_content" and "message.input_image.image_url"'
    )
    top_logprobs: Annotated[
        int | None, Field(ge=0, le=0, description="0; this server gives no logprobs here")
    ] = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = taken(
        '"auto", "default", "flex", "scale" or "priority"'
    )
    prompt_cache_key: ShortText = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = taken(
        '"in_memory" or "24h"'
    )
    safety_identifier: ShortText = None

    @property
    def is_stored(self) -> bool:
        """Whether the response is to be kept, where the server keeps anything."""
        return self.store is not False

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Returns the SamplingParams; a field that is not given has the model's own value."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        recommended: Mapping[str, Any] = msgspec.structs.asdict(defaults)
        return SamplingParams(
            **{
                **recommended,
                **given,
                "max_tokens": self.max_output_tokens,
                "structured_outputs": _form((self.text or {}).get("format")),
            }
        )


def check(body: ResponseBody) -> None:
    """Raises InvalidRequest for what this server does not do, and for fields at odds."""
    _check_text(body.text or {})
    for name, value in (body.reasoning or {}).items():
        if name in ("summary", "generate_summary") and value == "auto":
            continue  # the server chooses, and writes none
        if value is not None and name != "effort":
            raise InvalidRequest(
                f"reasoning.{name}: this server does not support it", param=f"reasoning.{name}"
            )
    if body.background and body.store is False:
        raise InvalidRequest(
            "background: allowed only where store is not false: its answer is fetched later",
            param="background",
        )
    _check_stream_options(body)


def _check_text(text: dict[str, Any]) -> None:
    """Checks the field `text`, whose format is the only thing that it may set."""
    for name, value in text.items():
        if name == "verbosity" and value in VERBOSITIES:
            continue
        if name != "format":
            raise InvalidRequest(f"text.{name}: this server does not support it", param="text")


def _form(given: Any) -> StructuredOutputs | None:
    """Returns the form that `text.format` asks for; None for any text."""
    if given is None or (isinstance(given, dict) and given.get("type") == "text"):
        return None
    if not isinstance(given, dict):
        raise InvalidRequest(
            f"text.format: got {shown(given)}, allowed is an object", param="text.format"
        )
    if given.get("type") == "json_schema":
        given = {
            "type": "json_schema",
            "json_schema": {name: value for name, value in given.items() if name != "type"},
        }
    return response_format(given, "text.format")


def _check_stream_options(body: ResponseBody) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequest(
            "stream_options: allowed only where stream is true", param="stream_options"
        )
    for name, value in body.stream_options.items():
        if name != "include_obfuscation" or value:
            raise InvalidRequest(
                f"stream_options.{name}: got {value}, allowed is include_obfuscation: false",
                param="stream_options",
            )
