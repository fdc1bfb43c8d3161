"""The body of POST /v1/responses.

Names and rules are OpenAI's; additional sampling fields are those of chat.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from octavo.api.errors import InvalidRequest
from octavo.api.sampling_params import SamplingParams
from octavo.api.structured_outputs import StructuredOutputs
from octavo.frontend.sampling_defaults import params_over
from octavo.server.fields import Whole, accepted, field, sampling, user_name
from octavo.server.http.body_part import BodyPart
from octavo.server.notes import build_note
from octavo.server.openai.bodies import TokenId
from octavo.server.openai.filter_body import FILTER_FIELDS, FilterBody
from octavo.server.openai.structured import response_format

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

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
"""Fields copied to SamplingParams unchanged."""

OUTPUT_LOGPROBS = "message.output_text.logprobs"
INCLUDED = (OUTPUT_LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url")
"""Values of `include`. Responses always contain image URLs, and never encrypted reasoning."""
MAX_TOP_LOGPROBS = 20
OptionalFlag = Annotated[bool | None, Field(description="true or false")]
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE)],
    ]
    | None,
    Field(
        max_length=MAX_METADATA,
        description=f"an object of at most {MAX_METADATA} strings of at most {MAX_METADATA_VALUE}"
        f" characters, under names of at most {MAX_METADATA_KEY}",
    ),
]
SHORT_TEXT = "a string of at most 200 characters"
ShortText = Annotated[str | None, Field(max_length=200, description=SHORT_TEXT)]


SERVER_ITEMS = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
        *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
        *("mcp_call", "mcp_approval_request", "tool_search_call", "tool_search_output"),
    }
)
"""Item types of server-side tools, which are replaced by text notes."""


class ItemPart(BodyPart):
    """A part of an input item's content."""

    types = (
        *("input_text", "text", "output_text", "refusal", "reasoning_text", "summary_text"),
        *("input_image", "input_audio", "input_file"),
    )

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    detail: str | None = accepted("a string")
    annotations: list[Any] | None = accepted("a list")
    logprobs: list[Any] | None = accepted("a list")


class InputItem(BodyPart):
    """An input item: a message, a tool call or its output, or reasoning."""

    types = (
        *("message", "function_call", "function_call_output", "reasoning", "item_reference"),
        *("custom_tool_call", "custom_tool_call_output"),
    )

    noted = SERVER_ITEMS

    @classmethod
    def make_note(cls, value: dict[str, Any]) -> BodyPart:
        """Returns a message with a note: from the user for an output, else from the assistant."""
        role = "user" if str(value["type"]).endswith("_output") else "assistant"
        return cls(type="message", role=role, content=build_note(value))

    type: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None


class ResponseTool(BodyPart):
    """A function that the model may call, or the tools of an MCP server; other tools of servers are
    ignored.
    """

    types = ("function", "mcp")

    type: Literal["function", "mcp"]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    server_label: str | None = None
    server_url: str | None = None
    server_description: str | None = accepted("a string")
    allowed_tools: list[str] | dict[str, Any] | None = None
    require_approval: Any = None
    authorization: str | None = None
    headers: dict[str, str] | None = None


class ResponseToolName(BodyPart):
    type: Literal["function"]
    name: str


class ResponseAllowedTool(ResponseToolName):
    types = ("function",)


class ResponseAllowedTools(BodyPart):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponseAllowedTool]


class ResponseText(BodyPart):
    """Format and length of the output."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = accepted('"low", "medium" or "high"')


class ResponseReasoning(BodyPart):
    """Reasoning effort; summaries are not supported."""

    effort: str | None = None
    summary: Literal["auto"] | None = accepted('"auto"; summaries are not supported')
    generate_summary: Literal["auto"] | None = accepted('"auto"; summaries are not supported')


class ResponseStreamOptions(BodyPart):
    include_obfuscation: Literal[False] | None = accepted("false; obfuscation is not supported")


class ResponseBody(FilterBody):
    """Body of POST /v1/responses; None means that a field is not given."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"context_management", "moderation", "n"})
    refused: ClassVar[frozenset[str]] = frozenset({"conversation", "prompt"})

    model: Annotated[str | None, Field(description="the name of a model")] = None
    input: Annotated[str | list[InputItem], Field(description="a string or a list of messages")]
    instructions: Annotated[str | None, Field(description="a string")] = None
    max_output_tokens: Annotated[
        Whole | None, Field(ge=1, description="an integer of at least 1")
    ] = None
    temperature: float | None = sampling("temperature")
    top_p: float | None = sampling("top_p")
    top_k: Whole | None = sampling("top_k")
    min_p: float | None = sampling("min_p")
    repetition_penalty: float | None = sampling("repetition_penalty")
    presence_penalty: float | None = sampling("presence_penalty")
    frequency_penalty: float | None = sampling("frequency_penalty")
    seed: Whole | None = sampling("seed")
    stop: str | list[str] | None = sampling("stop")
    min_tokens: Whole | None = sampling("min_tokens")
    ignore_eos: OptionalFlag = None
    allowed_token_ids: list[TokenId] | None = field(
        "a list of token ids", "the only tokens that may be sampled"
    )
    cache_salt: Annotated[str | None, Field(description="a string")] = None
    priority: Annotated[
        int | None,
        Field(ge=-(2**31), lt=2**31, description="a 32-bit integer"),
    ] = None
    store: OptionalFlag = None
    background: OptionalFlag = None
    stream: OptionalFlag = None
    stream_options: ResponseStreamOptions | None = field(
        '{"include_obfuscation": false}',
        "options of the stream",
        by_path=True,
        rules={"needs": {"stream": [True]}, "idle": True},
    )
    metadata: Metadata = None
    previous_response_id: ShortText = None
    truncation: Annotated[
        str | None, Field(pattern="^(auto|disabled)$", description='"auto" or "disabled"')
    ] = None
    user: str | None = user_name()
    text: ResponseText | None = field(
        "an object of format and verbosity", "output format", by_path=True
    )
    reasoning: ResponseReasoning | None = field(
        "an object of effort and summary", "reasoning effort", by_path=True
    )
    tools: list[ResponseTool] | None = field(
        "a list of functions, each with a name and a JSON schema of its arguments",
        "functions that the model can call",
        by_path=True,
    )
    tool_choice: (
        Literal["none", "auto", "required"] | ResponseToolName | ResponseAllowedTools | None
    ) = field(
        '"none", "auto", "required", a function or a list of allowed functions',
        'whether to call a function; "required" and a named function force a call',
        rules={"types": ("function", "allowed_tools")},
    )
    parallel_tool_calls: OptionalFlag = None
    max_tool_calls: Annotated[Whole | None, Field(ge=1, description="an integer of at least 1")] = (
        None
    )
    include: list[str] | None = field(
        f"a list of {', '.join(INCLUDED)}", "additional contents of the response"
    )
    top_logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_TOP_LOGPROBS, description=f"0 to {MAX_TOP_LOGPROBS}"),
    ] = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = accepted(
        '"auto", "default", "flex", "scale" or "priority"'
    )
    prompt_cache_key: str | None = accepted(SHORT_TEXT, max_length=200)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = accepted(
        '"in_memory" or "24h"'
    )
    safety_identifier: str | None = accepted(SHORT_TEXT, max_length=200)

    @property
    def is_stored(self) -> bool:
        """Whether to store the response, if the server has a store."""
        return self.store is not False

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Returns the SamplingParams, with the model's defaults for missing fields."""
        values = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        values |= {"logprobs": self._num_logprobs(), "structured_outputs": self._form()}
        if self.max_output_tokens is not None:
            values["max_tokens"] = self.max_output_tokens
        return params_over(defaults, values)

    def _num_logprobs(self) -> int | None:
        """Returns SamplingParams.logprobs."""
        return (self.top_logprobs or 0) if OUTPUT_LOGPROBS in (self.include or ()) else None

    def check(self) -> None:
        """Raises InvalidRequest for conflicting fields; reports unknown values of `include`."""
        for index, tool in enumerate(self.tools or ()):
            if tool.type == "function" and tool.name is None:
                where = f"tools[{index}].name"
                raise InvalidRequest(f"{where}: field required", param=where)
        for name in self.include or ():
            if name not in INCLUDED:
                self.ignored.add("include", shown_as=f"include[{name[:80]}]")
        if self.background and self.store is False:
            raise InvalidRequest(
                "background: requires store: a background response is fetched later",
                param="background",
            )

    def _form(self) -> StructuredOutputs | None:
        """Returns the structured output options of `text.format`; None for free text."""
        text_format = None if self.text is None else self.text.format
        if text_format is None:
            return None
        if text_format.get("type") == "json_schema":
            schema = {name: value for name, value in text_format.items() if name != "type"}
            text_format = {"type": "json_schema", "json_schema": schema}
        return response_format(text_format, self.ignored, "text.format")


class InputTokensBody(ResponseBody):
    """Body of POST /v1/responses/input_tokens."""

    stream_type = None

    input: Annotated[str | list[InputItem], Field(description="a string or a list of messages")] = (
        Field(default_factory=list)
    )
