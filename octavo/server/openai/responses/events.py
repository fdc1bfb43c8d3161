"""Typed events of a response's stream, in OpenAI's order, numbered from 0.

Events depend only on the initial response, the deltas and the final response, so that a stream can
be replayed from the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.openai.responses.output import (
    NO_SERVERS,
    OutputItem,
    OutputItems,
    Piece,
    TokenEntry,
    ToolListing,
)
from octavo.server.output_parser import PLAIN, OutputParser
from octavo.text.parsers.parts import Part, PartKind

Event = dict[str, Any]
Response = Mapping[str, Any]

DELTAS = {
    PartKind.CONTENT: "output_text",
    PartKind.REASONING: "reasoning_text",
    PartKind.CALL: "function_call_arguments",
}
"""Prefix of the delta events' names, by kind of item."""
MCP_ARGUMENTS = "mcp_call_arguments"


class EventWriter:
    """Produces the events of one response."""

    def __init__(self, first: Response, servers: Mapping[str, str] = NO_SERVERS) -> None:
        """`first` is the response before its first token; `servers` maps the names of MCP tools to
        the labels of their servers.
        """
        self._first = dict(first)
        self._parser = PLAIN
        self._reader = PLAIN.reader()
        self._output = OutputItems(first["id"], servers)
        self._open: OutputItem | None = None
        self._num_events = 0

    def parse_with(self, parser: OutputParser) -> None:
        """Sets the output parser, before the first delta."""
        if parser is not self._parser:
            self._parser, self._reader = parser, parser.reader()

    def opening(self) -> list[Event]:
        """Returns the first events; for a background response they begin with its queued state."""
        running = {**self._first, "status": "in_progress"}
        if not self._first["background"]:
            return [
                self._format_response("created", running),
                self._format_response("in_progress", running),
            ]
        queued = {**self._first, "status": "queued"}
        return [
            self._format_response("created", queued),
            self._format_response("queued", queued),
            self._format_response("in_progress", running),
        ]

    def delta(self, piece: Piece) -> list[Event]:
        """Returns the events of a delta."""
        text, logprobs = piece
        return self._format_parts(self._reader.read(text), logprobs)

    @property
    def items(self) -> list[OutputItem | ToolListing]:
        return self._output.items

    def list_tools(self, server: str, tools: Sequence[Mapping[str, Any]]) -> list[Event]:
        """Returns the events of an item with the tools of an MCP server."""
        listing = self._output.list_tools(server, [dict(tool) for tool in tools])
        location = {"item_id": listing.id, "output_index": listing.index}
        item = listing.value("completed")
        whole = {"output_index": listing.index, "item": item}
        return [
            self._event("output_item.added", {**whole, "item": {**item, "tools": []}}),
            self._event("mcp_list_tools.in_progress", location),
            self._event("mcp_list_tools.completed", location),
            self._event("output_item.done", whole),
        ]

    def end_turn(self, status: str) -> list[Event]:
        """Returns the last events of the model's text before MCP tools are called."""
        events = self._format_parts(self._reader.read("", finished=True), [])
        self._output.end_turn()
        return [*events, *self._close_item(status)]

    def call_ended(self, item: OutputItem) -> list[Event]:
        """Returns the events of an MCP call whose result is known."""
        name = "completed" if item.error is None else "failed"
        whole = {"output_index": item.index, "item": item.value("completed")}
        return [
            self._event(f"mcp_call.{name}", _get_location(item)),
            self._event("output_item.done", whole),
        ]

    def closing(self, last: Response) -> list[Event]:
        """Returns the last events, with all items and the final response."""
        status = last["status"]
        if status == "failed":
            return [self._format_response("failed", last)]
        ending = "completed" if status == "completed" else "incomplete"
        events = self._format_parts(self._reader.read("", finished=True), [])
        if not self._output.items:
            self._output.finish()
            (item,) = self._output.items
            assert isinstance(item, OutputItem)
            events += self._open_item(item)
        return [*events, *self._close_item(ending), self._format_response(ending, last)]

    def _format_parts(self, parts: list[Part], logprobs: list[TokenEntry]) -> list[Event]:
        events: list[Event] = []
        for item, part, token_logprobs in self._output.add_piece(parts, logprobs):
            if item is not self._open:
                events += [*self._close_item("completed"), *self._open_item(item)]
            if part.kind is not PartKind.CALL:
                events.append(self._format_delta(item, part.text, token_logprobs))
        return events

    def _open_item(self, item: OutputItem) -> list[Event]:
        """Returns the events that open an item."""
        self._open = item
        value = item.value("in_progress")
        if item.kind is PartKind.CALL:
            added = self._event("output_item.added", {"output_index": item.index, "item": value})
            running = (
                [self._event("mcp_call.in_progress", _get_location(item))] if item.server else []
            )
            return [added, *running]
        value["content"] = []
        empty = OutputItem(item.kind, item.id, item.index).part()
        return [
            self._event("output_item.added", {"output_index": item.index, "item": value}),
            self._event("content_part.added", _get_location(item) | {"part": empty}),
        ]

    def _format_delta(self, item: OutputItem, text: str, logprobs: list[TokenEntry]) -> Event:
        more: Event = {"logprobs": logprobs} if item.kind is PartKind.CONTENT else {}
        return self._event(
            f"{_get_prefix(item)}.delta", _get_location(item) | {"delta": text} | more
        )

    def _close_item(self, status: str) -> list[Event]:
        """Returns the events that close the open item."""
        item, self._open = self._open, None
        if item is None:
            return []
        name = f"{_get_prefix(item)}.done"
        if item.server:
            return [self._event(name, _get_location(item) | {"arguments": item.text})]
        if item.kind is PartKind.CALL:
            fields = {"arguments": item.text, "name": item.name}
            events = [self._event(name, _get_location(item) | fields)]
        else:
            more: Event = {"logprobs": item.logprobs} if item.kind is PartKind.CONTENT else {}
            events = [
                self._event(name, _get_location(item) | {"text": item.text} | more),
                self._event("content_part.done", _get_location(item) | {"part": item.part()}),
            ]
        whole = {"output_index": item.index, "item": item.value(status)}
        return [*events, self._event("output_item.done", whole)]

    def _format_response(self, name: str, response: Response) -> Event:
        return self._event(name, {"response": dict(response)})

    def _event(self, name: str, content: Mapping[str, Any]) -> Event:
        event = {"type": f"response.{name}", "sequence_number": self._num_events, **content}
        self._num_events += 1
        return event


def _get_prefix(item: OutputItem) -> str:
    return MCP_ARGUMENTS if item.server else DELTAS[item.kind]


def _get_location(item: OutputItem) -> dict[str, Any]:
    location = {"item_id": item.id, "output_index": item.index}
    return location if item.kind is PartKind.CALL else location | {"content_index": 0}


def error_event(error: Mapping[str, Any], number: int) -> Event:
    """Returns an error event, which ends a stream."""
    return {
        "type": "error",
        "code": str(error["code"]),
        "message": error["message"],
        "param": error["param"],
        "sequence_number": number,
    }
