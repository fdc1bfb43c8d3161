"""Output items of a response: reasoning, messages and tool calls, in order.

Items depend only on the response's id and text, so that a stream, the stored response and a
replayed stream are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from octavo.server.output_parser import OutputParser
from octavo.text.parsers.parts import Part, PartKind

TokenEntry = dict[str, Any]
"""Logprobs of one token in OpenAI's format."""
Piece = tuple[str, list[TokenEntry]]
"""New text of a response, and its tokens' logprobs if requested."""
NO_SERVERS: Mapping[str, str] = {}

PREFIXES = {PartKind.REASONING: "rs", PartKind.CONTENT: "msg", PartKind.CALL: "fc"}
MCP_PREFIX = "mcp"


@dataclass(slots=True)
class OutputItem:
    """An output item, possibly incomplete."""

    kind: PartKind
    id: str
    index: int
    text: str = ""
    """Text of a message or of reasoning; arguments of a tool call."""
    name: str = ""
    call_id: str = ""
    logprobs: list[TokenEntry] = field(default_factory=list)
    """Logprobs of a message's tokens, if they are requested."""
    server: str = ""
    """Label of the MCP server whose tool is called; "" for a function of the client."""
    output: str | None = None
    """Result of an MCP tool."""
    error: str | None = None
    """Why an MCP tool failed."""

    def value(self, status: str) -> dict[str, Any]:
        """Returns the item in OpenAI's format."""
        match self.kind:
            case PartKind.CALL if self.server:
                return {
                    "id": self.id,
                    "type": "mcp_call",
                    "server_label": self.server,
                    "name": self.name,
                    "arguments": self.text,
                    "output": self.output,
                    "error": self.error,
                    "approval_request_id": None,
                    "status": status if self.error is None else "failed",
                }
            case PartKind.CALL:
                return call_item(self.id, self.call_id, self.name, self.text, status)
            case PartKind.REASONING:
                return {
                    "id": self.id,
                    "type": "reasoning",
                    "summary": [],
                    "content": [self.part()] if self.text else [],
                    "status": status,
                }
            case _:
                return {
                    "id": self.id,
                    "type": "message",
                    "role": "assistant",
                    "status": status,
                    "content": [self.part()],
                }

    def part(self) -> dict[str, Any]:
        """Returns the content of a message or of reasoning."""
        if self.kind is PartKind.REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return output_part(self.text, self.logprobs)


@dataclass(frozen=True, slots=True)
class ToolListing:
    """An output item with the tools of an MCP server."""

    id: str
    index: int
    server: str
    tools: Sequence[dict[str, Any]]
    kind: ClassVar[None] = None

    def value(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "mcp_list_tools",
            "server_label": self.server,
            "tools": list(self.tools),
            "error": None,
        }


class OutputItems:
    def __init__(self, response_id: str, servers: Mapping[str, str] = NO_SERVERS) -> None:
        """`servers` maps the names of MCP tools to the labels of their servers."""
        self._hash = response_id.removeprefix("resp_")
        self._servers = servers
        self.items: list[OutputItem | ToolListing] = []
        self._is_ended = False
        self._waiting: list[TokenEntry] = []
        """Logprobs of tokens that have not produced text yet."""

    def add_piece(
        self, parts: Sequence[Part], logprobs: Sequence[TokenEntry]
    ) -> list[tuple[OutputItem, Part, list[TokenEntry]]]:
        """Adds the parts of a piece of text and the logprobs of its tokens; returns each part with
        its item and its logprobs.
        """
        was_message = bool(self.items) and self.items[-1].kind is PartKind.CONTENT
        placed = [(self.add(part), part, list[TokenEntry]()) for part in parts]
        self._waiting += logprobs
        if placed:
            item, _, part_logprobs = placed[-1]
            if item.kind is PartKind.CONTENT:
                # Tokens before a new message, such as the end of the reasoning, do not belong to
                # it.
                part_logprobs += self._waiting if was_message or len(self.items) == 1 else logprobs
                item.logprobs += part_logprobs
            self._waiting = []
        return placed

    def add(self, part: Part) -> OutputItem:
        """Adds a part; returns its item, which may be new."""
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        if (
            self._is_ended
            or part.kind is PartKind.CALL
            or not self.items
            or self.items[-1].kind is not kind
        ):
            self._begin(kind)
            self._is_ended = False
        item = self.items[-1]
        assert isinstance(item, OutputItem), "a listing has no kind"
        if part.kind is PartKind.CALL:
            item.name, item.server = part.text, self._servers.get(part.text, "")
            if item.server:
                item.id = f"{MCP_PREFIX}_{self._hash}{item.index}"
            item.call_id = part.call_id or f"call_{self._hash[:20]}{part.call:04d}"
        else:
            item.text += part.text
        return item

    def end_turn(self) -> None:
        """Makes the next part begin a new item."""
        self._is_ended = True

    def list_tools(self, server: str, tools: Sequence[dict[str, Any]]) -> ToolListing:
        """Adds an item with the tools of an MCP server."""
        index = len(self.items)
        listing = ToolListing(f"mcpl_{self._hash}{index}", index, server, tools)
        self.items.append(listing)
        return listing

    def finish(self) -> None:
        """Adds an empty message if there is no item."""
        if not self.items:
            self._begin(PartKind.CONTENT)

    def _begin(self, kind: PartKind) -> None:
        index = len(self.items)
        is_first = all(item.kind is not kind for item in self.items)
        name = f"{PREFIXES[kind]}_{self._hash}" + ("" if is_first else f"{index}")
        self.items.append(OutputItem(kind, name, index))


def parse_output(response_id: str, parser: OutputParser, pieces: Iterable[Piece]) -> OutputItems:
    """Returns the items of a complete response."""
    reader = parser.reader()
    items = OutputItems(response_id)
    for text, logprobs in pieces:
        items.add_piece(reader.read(text), logprobs)
    items.add_piece(reader.read("", finished=True), [])
    return items


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def output_part(text: str, logprobs: Sequence[TokenEntry] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
