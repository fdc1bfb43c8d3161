"""Parts of a conversation: messages, tool calls and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from octavo.server.fields import accepted
from octavo.server.http.body_part import BodyPart

UNREADABLE = ("file",)
"""Types of parts that are not supported; omitting them would change the request's meaning."""
MEDIA = ("image_url", "video_url", "audio_url", "input_audio")
TEXTS = ("text", "input_text", "output_text")
"""Types of text parts: chat's own, and those of the Responses API, which agents also send here."""


class ContentPart(BodyPart):
    types = (*TEXTS, "refusal", *MEDIA, *UNREADABLE)

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    video_url: Any = None
    audio_url: Any = None
    input_audio: Any = None
    cache_control: dict[str, Any] | None = accepted("an object; every prefix is cached anyway")
    role: str | None = accepted("a string; clients copy it from a response")
    annotations: list[Any] | None = accepted("a list; clients copy it from a response")
    logprobs: list[Any] | None = accepted("a list; clients copy it from a response")


class FunctionCall(BodyPart):
    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(BodyPart):
    """A call of a tool with free-text input."""

    name: str
    input: str = ""


class ToolCall(BodyPart):
    """A tool call of an earlier response."""

    types = ("function", "custom")

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    index: int | None = None


class Message(BodyPart):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    """OpenAI's old format of a single call."""
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _list_parts(cls, content: Any) -> Any:
        """Wraps a single part in a list, and texts in a list as parts."""
        parts = [content] if isinstance(content, dict) and "type" in content else content
        if not isinstance(parts, list) or not any(isinstance(part, str) for part in parts):
            return parts
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


class OfferedFunctionBody(BodyPart):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | Annotated[list[Any], Field(max_length=0)] | None = None
    """JSON schema of the arguments. Accepts [], PHP's encoding of an empty object."""
    strict: bool | None = None


class ToolBody(BodyPart):
    types = ("function",)

    type: Literal["function"] = "function"
    function: OfferedFunctionBody

    @model_validator(mode="before")
    @classmethod
    def _nest_function(cls, tool: Any) -> Any:
        """Accepts the flat format of the Responses and Anthropic APIs."""
        if not isinstance(tool, dict) or "function" in tool or "name" not in tool:
            return tool
        rest = dict(tool)
        if "input_schema" in rest:
            rest.setdefault("parameters", rest.pop("input_schema"))
        names = [name for name in OfferedFunctionBody.model_fields if name in rest]
        function = {name: rest.pop(name) for name in names}
        return {**rest, "function": function}


class FunctionName(BodyPart):
    name: str


class NamedTool(BodyPart):
    """The choice of one function, in the format of chat or of Responses (`name`)."""

    type: Literal["function", "tool"]
    function: FunctionName | None = None
    name: str | None = None


class AllowedTool(NamedTool):
    types = ("function",)


class AllowedTools(BodyPart):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedToolsChoice(BodyPart):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
