"""What a conversation is made of: messages, the calls in them, and the functions on offer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from octavo.server.body import Body


class ContentPart(BaseModel):
    """One part of a message's content; fields of other types of parts lie in `model_extra`."""

    model_config = Body.model_config

    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None


class FunctionCall(BaseModel):
    model_config = Body.model_config | {"extra": "forbid"}

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
    """A call that an earlier answer made, as its client gives it back."""

    model_config = Body.model_config | {"extra": "forbid"}

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(BaseModel):
    """One message of a conversation; fields beyond these are refused by name."""

    model_config = Body.model_config

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class OfferedFunctionBody(BaseModel):
    """A function that the model may call."""

    model_config = Body.model_config | {"extra": "forbid"}

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(BaseModel):
    model_config = Body.model_config | {"extra": "forbid"}

    type: Literal["function"]
    function: OfferedFunctionBody


class FunctionName(BaseModel):
    model_config = Body.model_config | {"extra": "forbid"}

    name: str


class NamedTool(BaseModel):
    """The choice of one function, or an entry of those that are allowed."""

    model_config = Body.model_config | {"extra": "forbid"}

    type: Literal["function"]
    function: FunctionName


class AllowedTools(BaseModel):
    model_config = Body.model_config | {"extra": "forbid"}

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(BaseModel):
    model_config = Body.model_config | {"extra": "forbid"}

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
