"""A client of one MCP server over streamable HTTP: lists its tools and calls them.

Sends only to the configured URL: redirects and proxies of the environment are not followed. Answers
are limited in time and size. Source: modelcontextprotocol.io, specification 2025-06-18.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2

from octavo.utils.version import __version__

PROTOCOL = "2025-06-18"
MAX_PAGES = 32
"""Maximum number of pages of a list of tools."""
EVENTS_TYPE = "text/event-stream"


class McpError(Exception):
    """An MCP server that cannot be reached, or that responds with an error."""


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server."""

    name: str
    description: str
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class McpLimits:
    timeout_s: float
    """Time for one request."""
    max_bytes: int
    """Size of one response."""


class McpClient:
    """One session with a server. Call `aclose` at the end."""

    def __init__(self, url: str, limits: McpLimits) -> None:
        self._url = url
        self._limits = limits
        self._http = httpx2.AsyncClient(
            timeout=limits.timeout_s, follow_redirects=False, trust_env=False
        )
        self._headers = {
            "Accept": f"application/json, {EVENTS_TYPE}",
            "Content-Type": "application/json",
        }
        self._num_requests = 0

    async def list_tools(self) -> list[McpTool]:
        """Opens the session and returns the server's tools; raises McpError."""
        about = {"name": "octavo", "version": __version__}
        started = await self._request(
            "initialize",
            {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about},
        )
        self._headers["MCP-Protocol-Version"] = str(started.get("protocolVersion", PROTOCOL))
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        tools: list[McpTool] = []
        cursor: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = await self._request("tools/list", cursor)
            tools += [_parse_tool(each) for each in page.get("tools", ())]
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a tool and returns the text of its result; raises McpError if the tool fails."""
        result = await self._request("tools/call", {"name": name, "arguments": arguments})
        text = _get_text(result)
        if result.get("isError"):
            raise McpError(text or "the tool failed")
        return text

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns its result."""
        self._num_requests += 1
        number = self._num_requests
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        answer = await self._send(message, number)
        if answer is None:
            raise McpError(f"{method}: the server sent no response")
        if "error" in answer:
            error = answer["error"]
            raise McpError(str(error.get("message") if isinstance(error, dict) else error))
        result = answer.get("result")
        if not isinstance(result, dict):
            raise McpError(f"{method}: the response has no result")
        return result

    async def _send(
        self, message: dict[str, Any], number: int | None = None
    ) -> dict[str, Any] | None:
        """Sends a message; returns the response with this number, or None."""
        try:
            async with (
                asyncio.timeout(self._limits.timeout_s),
                self._http.stream(
                    "POST", self._url, json=message, headers=self._headers
                ) as response,
            ):
                if response.status_code >= 300:
                    raise McpError(f"HTTP status {response.status_code}")
                if session := response.headers.get("mcp-session-id"):
                    self._headers["Mcp-Session-Id"] = session
                if number is None:
                    return None
                kind = response.headers.get("content-type", "")
                async for answer in self._read(response.aiter_bytes(), kind):
                    if isinstance(answer, dict) and answer.get("id") == number:
                        return answer
        except TimeoutError:
            raise McpError(f"no response within {self._limits.timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise McpError(f"{type(error).__name__}: {error}") from None
        return None

    async def _read(self, parts: AsyncIterator[bytes], kind: str) -> AsyncIterator[Any]:
        """Yields the JSON messages of a response: one, or those of an event stream."""
        num_bytes, rest = 0, b""
        is_stream = kind.startswith(EVENTS_TYPE)
        async for part in parts:
            num_bytes += len(part)
            if num_bytes > self._limits.max_bytes:
                raise McpError(f"the response is larger than {self._limits.max_bytes} bytes")
            rest += part
            if is_stream:
                *events, rest = rest.replace(b"\r\n", b"\n").split(b"\n\n")
                for event in events:
                    yield _parse(_get_data(event))
        if is_stream:
            rest = _get_data(rest)
        if rest.strip():
            yield _parse(rest)


def _get_data(event: bytes) -> bytes:
    """Returns the data of an event."""
    lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b"data:").removeprefix(b" ") for line in lines)


def _parse(text: bytes) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise McpError("the response is not JSON") from None


def _parse_tool(value: Any) -> McpTool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise McpError("tools/list: a tool has no name")
    schema = value.get("inputSchema")
    annotations = value.get("annotations")
    return McpTool(
        value["name"],
        str(value.get("description") or ""),
        schema if isinstance(schema, dict) else {"type": "object", "properties": {}},
        annotations if isinstance(annotations, dict) else None,
    )


def _get_text(result: dict[str, Any]) -> str:
    """Returns the texts of a result; other contents are named by their type."""
    contents = [each for each in result.get("content") or () if isinstance(each, dict)]
    texts = [
        str(each.get("text", "")) if each.get("type") == "text" else f"[{each.get('type')}]"
        for each in contents
    ]
    if not texts and "structuredContent" in result:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(texts)
