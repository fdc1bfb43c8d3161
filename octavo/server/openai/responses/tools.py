"""Converts the tools of a Responses body to `ToolUse`."""

from __future__ import annotations

from octavo.server.http.request_limits import RequestLimits
from octavo.server.openai.responses.body import (
    ResponseAllowedTools,
    ResponseBody,
    ResponseToolName,
)
from octavo.server.tool_use import (
    NO_ARGUMENTS,
    Choice,
    OfferedFunction,
    ToolNames,
    ToolUse,
    make_tool_use,
)

NAMES = ToolNames(name="name", parameters="parameters")


def parse_tools(body: ResponseBody, limits: RequestLimits) -> ToolUse | None:
    """Returns the checked tools of a body; None if the model may not call any."""
    functions = [
        OfferedFunction(
            tool.name,
            NO_ARGUMENTS if tool.parameters is None else tool.parameters,
            tool.description,
            is_strict=tool.strict is True,
        )
        for tool in body.tools or ()
    ]
    choice, named = _choice(body)
    is_parallel = body.parallel_tool_calls is not False
    return make_tool_use(
        functions,
        choice,
        limits,
        named=named,
        is_parallel=is_parallel,
        names=NAMES,
        ignored=body.ignored,
    )


def _choice(body: ResponseBody) -> tuple[Choice | None, list[str] | None]:
    """Returns the tool choice and the names of allowed functions."""
    match body.tool_choice:
        case ResponseToolName(name=name):
            return "required", [name]
        case ResponseAllowedTools(mode=mode, tools=tools):
            return mode, [tool.name for tool in tools]
        case word:
            return word, None
