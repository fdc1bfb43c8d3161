"""Converts the tools of a chat body to `ToolUse`."""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import InvalidRequest
from octavo.server.http.request_limits import RequestLimits
from octavo.server.openai.bodies import ChatBody
from octavo.server.openai.message_bodies import (
    AllowedToolsChoice,
    FunctionName,
    NamedTool,
    OfferedFunctionBody,
)
from octavo.server.tool_use import (
    OPENAI_NAMES,
    Choice,
    OfferedFunction,
    ToolNames,
    ToolUse,
    make_tool_use,
)

OLD_NAMES = ToolNames("functions", "function_call", "name", "parameters")


def parse_tools(body: ChatBody, limits: RequestLimits) -> ToolUse | None:
    """Returns the checked tools of a body; None if the model may not call any."""
    is_old = uses_functions(body)
    functions = (body.functions or []) if is_old else [tool.function for tool in body.tools or ()]
    if not is_old and body.functions:
        body.ignored.add("functions", "tools overrides it")
    choice, named = _old_choice(body) if is_old else _choice(body)
    return make_tool_use(
        [convert_function(function) for function in functions],
        choice,
        limits,
        named=named,
        is_parallel=body.parallel_tool_calls is not False and not is_old,
        names=OLD_NAMES if is_old else OPENAI_NAMES,
        ignored=body.ignored,
    )


def uses_functions(body: ChatBody) -> bool:
    """Returns whether a body has tools in the old format, so that the response must too."""
    return bool(body.functions) and not body.tools


def _old_choice(body: ChatBody) -> tuple[Choice | None, list[str] | None]:
    match body.function_call:
        case FunctionName(name=name):
            return "required", [name]
        case word:
            return word, None


def convert_function(function: OfferedFunctionBody) -> OfferedFunction:
    """Converts a function; without parameters it takes no arguments."""
    offered = OfferedFunction(
        function.name, description=function.description, is_strict=bool(function.strict)
    )
    parameters = function.parameters
    return replace(offered, parameters=parameters) if isinstance(parameters, dict) else offered


def _choice(body: ChatBody) -> tuple[Choice | None, list[str] | None]:
    """Returns the tool choice and the names of allowed functions."""
    match body.tool_choice:
        case NamedTool() as named:
            return "required", [_get_name(named)]
        case AllowedToolsChoice(allowed_tools=allowed):
            return allowed.mode, [_get_name(tool) for tool in allowed.tools]
        case "any":
            return "required", None
        case word:
            return word, None


def _get_name(tool: NamedTool) -> str:
    name = tool.name if tool.function is None else tool.function.name
    if name is None:
        raise InvalidRequest("tool_choice: got a function without a name", param="tool_choice")
    return name
