"""The typed events of a response's stream, in OpenAI's order, numbered from 0.

The events are a function of the first state, the deltas and the last state alone, so a stream can
be told again from what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.server.openai.responses.items import output_item, output_part

Event = dict[str, Any]
Response = Mapping[str, Any]


class EventWriter:
    """The events of one response, made in turn."""

    def __init__(self, first: Response, item_id: str) -> None:
        """Takes the response before its first token."""
        self._first = dict(first)
        self._item_id = item_id
        self._place = {"item_id": item_id, "output_index": 0, "content_index": 0}
        self._text: list[str] = []
        self._has_item = False
        self._num_events = 0

    def opening(self) -> list[Event]:
        """Returns what a stream begins with; a background response waits in a queue first."""
        running = {**self._first, "status": "in_progress"}
        if not self._first["background"]:
            return [self._whole("created", running), self._whole("in_progress", running)]
        queued = {**self._first, "status": "queued"}
        return [
            self._whole("created", queued),
            self._whole("queued", queued),
            self._whole("in_progress", running),
        ]

    def delta(self, text: str) -> list[Event]:
        """Returns the events of more text."""
        self._text.append(text)
        delta = {"delta": text, "logprobs": []}
        return [*self._item_opening(), self._event("output_text.delta", self._place | delta)]

    def closing(self, last: Response) -> list[Event]:
        """Returns what a stream ends with: all of the item, and the response in its last state."""
        status = last["status"]
        ending = "completed" if status == "completed" else "incomplete"
        if status == "failed":
            return [self._whole("failed", last)]
        opening = self._item_opening()
        text = "".join(self._text)
        place = {"output_index": 0, "item": output_item(self._item_id, text, ending)}
        return [
            *opening,
            self._event("output_text.done", self._place | {"text": text, "logprobs": []}),
            self._event("content_part.done", self._place | {"part": output_part(text)}),
            self._event("output_item.done", place),
            self._whole(ending, last),
        ]

    def _item_opening(self) -> list[Event]:
        """Returns the events that announce the message, once."""
        if self._has_item:
            return []
        self._has_item = True
        item = {**output_item(self._item_id, "", "in_progress"), "content": []}
        return [
            self._event("output_item.added", {"output_index": 0, "item": item}),
            self._event("content_part.added", self._place | {"part": output_part("")}),
        ]

    def _whole(self, name: str, response: Response) -> Event:
        return self._event(name, {"response": dict(response)})

    def _event(self, name: str, content: Mapping[str, Any]) -> Event:
        event = {"type": f"response.{name}", "sequence_number": self._num_events, **content}
        self._num_events += 1
        return event


def error_event(error: Mapping[str, Any], number: int) -> Event:
    """Returns the event of an error that ends a stream."""
    return {
        "type": "error",
        "code": str(error["code"]),
        "message": error["message"],
        "param": error["param"],
        "sequence_number": number,
    }
