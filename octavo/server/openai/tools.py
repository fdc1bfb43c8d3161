"""The functions that a body of OpenAI's offers, in the terms that all APIs share."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import InvalidRequest
from octavo.server.openai.bodies import ChatBody
from octavo.server.openai.message_bodies import AllowedToolsChoice, NamedTool, OfferedFunctionBody
from octavo.server.request_limits import RequestLimits
from octavo.server.tool_use import Choice, OfferedFunction, ToolUse, tool_use_of


def tools_of(body: ChatBody, limits: RequestLimits) -> ToolUse | None:
    """Returns the body's tools, checked; None where the model may call none."""
    functions = [offered(tool.function) for tool in body.tools or ()]
    choice, named = _choice(body)
    is_parallel = body.parallel_tool_calls is not False
    return tool_use_of(
        functions, choice, limits, named=named, is_parallel=is_parallel, ignored=body.ignored
    )


def offered(function: OfferedFunctionBody) -> OfferedFunction:
    """Returns a function; without parameters it takes none."""
    made = OfferedFunction(
        function.name, description=function.description, is_strict=bool(function.strict)
    )
    parameters = function.parameters
    return replace(made, parameters=parameters) if isinstance(parameters, dict) else made


def _choice(body: ChatBody) -> tuple[Choice | None, list[str] | None]:
    """Returns whether a function is called, and the names of those that may be."""
    match body.tool_choice:
        case NamedTool() as named:
            return "required", [_name_of(named)]
        case AllowedToolsChoice(allowed_tools=allowed):
            return allowed.mode, [_name_of(tool) for tool in allowed.tools]
        case "any":
            return "required", None
        case word:
            return word, None


def _name_of(tool: NamedTool) -> str:
    name = tool.name if tool.function is None else tool.function.name
    if name is None:
        raise InvalidRequest("tool_choice: got a function without a name", param="tool_choice")
    return name
