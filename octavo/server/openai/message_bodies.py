"""What a conversation is made of: messages, the calls in them, and the functions on offer."""

from __future__ import annotations

from typing import Any, Literal

from octavo.server.body import BodyPart


class ContentPart(BodyPart):
    """One part of a message's content; fields of other types of parts lie in `model_extra`."""

    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None


class FunctionCall(BodyPart):
    model_config = BodyPart.model_config | {"extra": "forbid"}

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(BodyPart):
    """A call that an earlier answer made, as its client gives it back."""

    model_config = BodyPart.model_config | {"extra": "forbid"}

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(BodyPart):
    """One message of a conversation; fields beyond these are refused by name."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class OfferedFunctionBody(BodyPart):
    """A function that the model may call."""

    model_config = BodyPart.model_config | {"extra": "forbid"}

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(BodyPart):
    model_config = BodyPart.model_config | {"extra": "forbid"}

    type: Literal["function"]
    function: OfferedFunctionBody


class FunctionName(BodyPart):
    model_config = BodyPart.model_config | {"extra": "forbid"}

    name: str


class NamedTool(BodyPart):
    """The choice of one function, or an entry of those that are allowed."""

    model_config = BodyPart.model_config | {"extra": "forbid"}

    type: Literal["function"]
    function: FunctionName


class AllowedTools(BodyPart):
    model_config = BodyPart.model_config | {"extra": "forbid"}

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(BodyPart):
    model_config = BodyPart.model_config | {"extra": "forbid"}

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
