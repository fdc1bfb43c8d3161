"""Request bodies of the Anthropic API: rows of the table in `server/fields.py`.

Names are Anthropic's. `seed` and the filters of `FilterBody` are extensions, with the same meaning
as in chat completions.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from octavo.server.fields import accepted, field, required, sampling, stop_texts
from octavo.server.http.body import Body
from octavo.server.http.body_part import BodyPart
from octavo.server.notes import build_note
from octavo.server.openai.filter_body import FILTER_FIELDS, FilterBody
from octavo.server.plain_chat import TextBlock

NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "seed": "seed",
    "max_tokens": "max_tokens",
    **{name: name for name in FILTER_FIELDS},
}
"""SamplingParams fields by Anthropic's names."""


SERVER_BLOCKS = frozenset(
    {
        *("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload"),
        *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
        *("tool_search_tool_result", "tool_reference"),
    }
)
"""Block types of server-side tools, which are replaced by text notes."""


class CacheControl(BodyPart):
    """A cache breakpoint. Accepted and ignored: the prefix cache keeps every prefix."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = accepted('"5m" or "1h"')


class PlainBlock(TextBlock):
    """A block of a system message or a tool result."""

    types: ClassVar[tuple[str, ...]] = ("text", "image", "document", "search_result")
    noted: ClassVar[frozenset[str]] = SERVER_BLOCKS

    @classmethod
    def make_note(cls, value: dict[str, Any]) -> BodyPart:
        return cls(type="text", text=build_note(value))

    source: str | dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None
    content: str | list[TextBlock] | None = None
    cache_control: CacheControl | None = accepted('an object with the type "ephemeral"')
    citations: list[Any] | dict[str, Any] | None = accepted(
        "any value; citations are not supported"
    )


class ContentBlock(PlainBlock):
    """A block of a message."""

    types = (*PlainBlock.types, "thinking", "tool_use", "tool_result")

    id: str | None = None
    name: str | None = None
    input: str | dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[PlainBlock] | None = None  # type: ignore[assignment]
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None


class TurnMessage(BodyPart):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class TurnMetadata(BodyPart):
    user_id: str | None = field(
        "a string of at most 512 characters",
        "user id",
        rules={"inert": True},
        max_length=512,
    )


class ThinkingConfig(BodyPart):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0, lt=2**31)
    display: Literal["summarized", "omitted"] | None = field(
        '"summarized" or "omitted"', "whether to return reasoning", rules={"inert": True}
    )


class OfferedTool(BodyPart):
    """A function that the client runs; server-side tools are ignored. The last group of fields has
    no effect here.
    """

    types = ("custom",)

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    cache_control: CacheControl | None = accepted('an object with the type "ephemeral"')
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = accepted("false; deferred tools are not supported")
    allowed_callers: list[Literal["direct"]] | None = accepted('["direct"]')


class ToolChoice(BodyPart):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(BodyPart):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BodyPart):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensBody(Body):
    unsupported: ClassVar[frozenset[str]] = frozenset(
        {
            "container",
            "context_management",
            "diagnostics",
            "inference_geo",
            "mcp_servers",
            "user_profile_id",
            "workspace_id",
        }
    )

    model: str = required("the name of a model", "model to use")
    messages: list[TurnMessage] = required(
        "a list of messages, each with a role and a content",
        "conversation; a last assistant message is continued",
        by_path=True,
    )
    system: str | list[PlainBlock] | None = field(
        "a string, or a list of blocks of text", "system message", by_path=True
    )
    output_format: OutputFormat | None = field(
        'an object with the type "json_schema" and a schema', "output format", by_path=True
    )
    output_config: OutputConfig | None = field(
        "an object with a format like output_format, or an effort; only "
        '"high" if the template does not support effort levels',
        "output format and reasoning effort",
        by_path=True,
        rules={"excludes": {"output_format": "both set the output format"}},
    )
    thinking: ThinkingConfig | None = field(
        'an object with the type "adaptive", "enabled" or "disabled"',
        "enable reasoning, if the model supports it",
        by_path=True,
    )
    tools: list[OfferedTool] | None = field(
        "a list of tools, each with a name and an input_schema",
        "tools that the model can call",
        by_path=True,
    )
    tool_choice: ToolChoice | None = field(
        'an object with the type "auto", "none", "any" or "tool" and a name',
        "whether to call a tool",
        by_path=True,
    )
    cache_control: CacheControl | None = accepted('an object with the type "ephemeral"')


class MessagesBody(CountTokensBody, FilterBody):
    max_tokens: int = field(
        "an integer from 1 to 2147483647",
        "maximum number of output tokens",
        default=...,
        ge=1,
        lt=2**31,
    )
    stop_sequences: list[str] | None = stop_texts("a list of strings")
    temperature: float | None = sampling("temperature")
    top_p: float | None = sampling("top_p")
    top_k: int | None = sampling("top_k")
    seed: int | None = sampling("seed")
    stream: bool | None = field("true or false", "stream the response as typed events")
    metadata: TurnMetadata | None = field(
        "an object with a user_id of at most 512 characters",
        "user id; tenant of the fair scheduling policy",
        by_path=True,
    )
    service_tier: Literal["auto", "standard_only"] | None = accepted('"auto" or "standard_only"')
    speed: Literal["standard"] | None = accepted('"standard"')
