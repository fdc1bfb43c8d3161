"""Responses with tools of MCP servers: the server calls the tools and continues until the model
writes an answer, calls a function of the client, or reaches a limit.

The operator names the servers (--mcp-server). A request can select some of them and of their tools;
no other server is contacted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from starlette.exceptions import HTTPException

from octavo.api.errors import InvalidRequest, OctavoError, did_you_mean, shown
from octavo.api.outputs import RequestOutput
from octavo.server.mcp.client import McpClient, McpError, McpLimits, McpTool
from octavo.server.openai.responses.body import ResponseBody, ResponseTool
from octavo.server.openai.responses.events import Event, EventWriter
from octavo.server.openai.responses.output import OutputItem
from octavo.server.openai.responses.prepare_response import (
    PreparedResponse,
    ResponseRequest,
    format_usage,
    get_status,
    make_failed,
    make_last,
    prepare_response,
)
from octavo.server.response_builder import ResponseBuilder, TokenUsage
from octavo.server.settings import ServerSettings
from octavo.server.state.served_model import ServedModel
from octavo.server.state.store import Store
from octavo.server.tool_use import OfferedFunction, parse_arguments

APPROVAL = "never"


@dataclass(frozen=True, slots=True)
class OfferedServer:
    """An MCP server of a request, with the tools that the model may call."""

    label: str
    client: McpClient
    tools: Sequence[McpTool]


def uses_mcp(body: ResponseBody, settings: ServerSettings) -> bool:
    """Returns whether a response has tools of MCP servers, which are ignored if the operator has
    named none. Raises InvalidRequest for a server that is not one of the operator's.
    """
    urls = settings.mcp_servers()
    requested = [
        (f"tools[{n}]", tool) for n, tool in enumerate(body.tools or ()) if tool.type == "mcp"
    ]
    if not urls or not requested:
        return False
    for where, tool in requested:
        _check(tool, where, urls)
    labels = [tool.server_label for _, tool in requested]
    if len({*labels}) < len(labels):
        raise InvalidRequest("tools: got an MCP server twice", param="tools")
    if body.background:
        raise InvalidRequest("background: not supported with MCP tools", param="background")
    return True


def _check(tool: ResponseTool, where: str, urls: dict[str, str]) -> None:
    label = tool.server_label
    if label not in urls:
        raise InvalidRequest(
            f"{where}.server_label: this server has no MCP server {shown(label)}",
            hint=did_you_mean(label or "", urls),
            param=f"{where}.server_label",
        )
    if tool.server_url is not None and tool.server_url.rstrip("/") != urls[label].rstrip("/"):
        raise InvalidRequest(
            f"{where}.server_url: got {shown(tool.server_url)}, which is not the operator's address"
            f" of {label}",
            hint="leave server_url out",
            param=f"{where}.server_url",
        )
    if tool.require_approval != APPROVAL:
        raise InvalidRequest(
            f"{where}.require_approval: got {shown(tool.require_approval)}, expected"
            f' "{APPROVAL}": the server does not ask for approvals',
            hint="restrict the tools with allowed_tools",
            param=f"{where}.require_approval",
        )
    for name in ("authorization", "headers"):
        if getattr(tool, name) is not None:
            raise InvalidRequest(
                f"{where}.{name}: not supported; the operator configures access to MCP servers",
                param=f"{where}.{name}",
            )


def _get_allowed(tool: ResponseTool) -> list[str] | None:
    """Returns the names of allowed tools; None for all."""
    allowed = tool.allowed_tools
    return allowed.get("tool_names") if isinstance(allowed, dict) else allowed


class McpTurns:
    """One response, computed in turns: the model's text, then the calls of MCP tools in it."""

    def __init__(
        self,
        response_request: ResponseRequest,
        model: ServedModel,
        store: Store | None,
        settings: ServerSettings,
    ) -> None:
        self._request = response_request
        self._model = model
        self._store = store
        self._settings = settings
        self._servers: list[OfferedServer] = []
        self._num_calls_left = min(
            settings.mcp_max_calls, response_request.body.max_tool_calls or settings.mcp_max_calls
        )
        self._outputs: list[RequestOutput] = []
        """Outputs of the turns so far."""
        self.last: dict[str, Any] = {}
        """The final response object, after the events."""

    async def begin(self) -> tuple[PreparedResponse, ResponseBuilder]:
        """Lists the tools and submits the first turn; raises ClientError for an invalid request, a
        424 if an MCP server fails.
        """
        try:
            for tool in self._request.body.tools or ():
                if tool.type == "mcp":
                    self._servers.append(await self._open(tool))
            self._check_names()
            prepared = await self._prepare(self._request)
            return prepared, prepared.start()
        except BaseException:
            await self._close()
            raise

    async def events(
        self, prepared: PreparedResponse, builder: ResponseBuilder
    ) -> AsyncGenerator[list[Event], None]:
        """Yields the events of a response that has begun except the last ones, and sets `last`."""
        first = prepared.first
        labels = {tool.name: server.label for server in self._servers for tool in server.tools}
        writer = self._writer = EventWriter(first, labels)
        turn = 0
        try:
            yield writer.opening()
            for server in self._servers:
                yield writer.list_tools(server.label, [asdict(tool) for tool in server.tools])
            while True:
                num_before = len(writer.items)
                writer.parse_with(prepared.parser)
                async with aclosing(builder.deltas()) as steps:
                    async for (delta,) in steps:
                        if new := writer.delta(prepared.piece(delta)):
                            yield new
                if builder.latest is not None:
                    self._outputs.append(builder.latest)
                is_whole = get_status(builder) == "completed"
                if new := writer.end_turn("completed" if is_whole else "incomplete"):
                    yield new
                items = [each for each in writer.items[num_before:] if isinstance(each, OutputItem)]
                calls = [item for item in items if item.server]
                for item in calls:
                    await self._call(item, is_whole=is_whole)
                    yield writer.call_ended(item)
                calls_client = any(item.name and not item.server for item in items)
                if calls_client or not (calls and is_whole):
                    break
                turn += 1
                prepared = await self._prepare(self._next(writer, first))
                builder = prepared.start(turn)
            self.last = make_last(
                first, get_status(builder), writer.items, format_usage(self._get_usage())
            )
        except OctavoError as error:
            self.last = make_failed(first, error)
        finally:
            await self._close()

    def closing(self) -> list[Event]:
        """Returns the last events."""
        return self._writer.closing(self.last)

    async def _open(self, tool: ResponseTool) -> OfferedServer:
        label = tool.server_label or ""
        settings = self._settings
        client = McpClient(
            settings.mcp_servers()[label],
            McpLimits(settings.mcp_timeout_s, settings.mcp_max_output_bytes),
        )
        try:
            tools = await client.list_tools()
        except McpError as error:
            await client.aclose()
            raise HTTPException(
                424, f"tools: the MCP server {label} does not list its tools: {error}"
            ) from None
        allowed = _get_allowed(tool)
        names = {each.name for each in tools}
        if unknown := [name for name in allowed or () if name not in names]:
            await client.aclose()
            raise InvalidRequest(
                f"tools.allowed_tools: {label} has no tool {shown(unknown[0])}",
                hint=did_you_mean(unknown[0], names),
                param="tools",
            )
        offered = [each for each in tools if allowed is None or each.name in allowed]
        return OfferedServer(label, client, offered)

    def _check_names(self) -> None:
        own = [tool.name for tool in self._request.body.tools or () if tool.type == "function"]
        names = own + [tool.name for server in self._servers for tool in server.tools]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise InvalidRequest(
                f"tools: two tools have the name {shown(twice[0])}",
                hint="select tools with allowed_tools",
                param="tools",
            )

    async def _prepare(self, response_request: ResponseRequest) -> PreparedResponse:
        functions = [
            OfferedFunction(tool.name, tool.input_schema, tool.description)
            for server in self._servers
            for tool in server.tools
        ]
        return await prepare_response(
            response_request,
            self._model,
            self._store,
            functions if self._num_calls_left > 0 else (),
        )

    def _next(self, writer: EventWriter, first: dict[str, Any]) -> ResponseRequest:
        """Returns the request of the next turn: its input ends with the output so far, and calls
        are no longer forced.
        """
        changes: dict[str, Any] = {"tool_choice": None}
        limit = self._request.body.max_output_tokens
        if limit is not None:
            changes["max_output_tokens"] = max(1, limit - self._get_usage().completion_tokens)
        body = self._request.body.model_copy(update=changes)
        done = [item.value("completed") for item in writer.items]
        return replace(self._request, body=body, items=[*self._request.items, *done])

    async def _call(self, item: OutputItem, *, is_whole: bool) -> None:
        """Calls the tool of an item, and stores its result in it."""
        if not is_whole:
            item.error = "the response ended before the call was complete"
            return
        if self._num_calls_left <= 0:
            item.error = "the response has reached its limit of tool calls"
            return
        self._num_calls_left -= 1
        (client,) = (server.client for server in self._servers if server.label == item.server)
        try:
            item.output = await client.call(item.name, parse_arguments(item.text))
        except McpError as error:
            item.error = str(error)

    def _get_usage(self) -> TokenUsage:
        return TokenUsage.of(self._outputs)

    async def _close(self) -> None:
        for server in self._servers:
            await server.client.aclose()
