"""Parts of a model's message: what it thinks, what it says, which functions it calls.

A parser gives parts in the order of the text; parts of one kind that follow one another are one
part cut in pieces. `MessageText` joins them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pydantic_core import from_json


class PartKind(Enum):
    """Kinds of parts; a call begins with its name, and its arguments follow."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a message."""

    kind: PartKind
    text: str
    """New text; the function's name where a call begins."""
    call: int = -1
    """Index of the call that it belongs to, from 0; -1 outside calls."""
    call_id: str = ""
    """Id that the model itself gave a call; "" where it gave none."""


@dataclass(slots=True)
class FunctionText:
    """A call as far as it has been written."""

    name: str
    arguments: str = ""
    """JSON text; incomplete where the call was cut."""
    call_id: str = ""


def arguments_of(call: FunctionText) -> dict[str, Any]:
    """Returns a call's arguments as an object: as much as there is, where they were cut."""
    try:
        found = from_json(call.arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(slots=True)
class MessageText:
    """A message as far as it has been written."""

    reasoning: str = ""
    content: str = ""
    calls: list[FunctionText] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Appends parts in the order in which a reader gives them."""
        for part in parts:
            match part.kind:
                case PartKind.REASONING:
                    self.reasoning += part.text
                case PartKind.CONTENT:
                    self.content += part.text
                case PartKind.CALL:
                    self.calls.append(FunctionText(part.text, call_id=part.call_id))
                case PartKind.ARGUMENTS:
                    self.calls[part.call].arguments += part.text


class PartList:
    """The parts that a parser has found since they were last taken; neighbours are joined."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names` are the client's names of the functions that have an alias, by alias."""
        self._names = names
        self._parts: list[Part] = []
        self.num_calls = 0

    def say(self, kind: PartKind, text: str) -> None:
        """Adds reasoning or content."""
        self._add(kind, text, -1)

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begins the next call."""
        name = self._names.get(name, name)
        self._parts.append(Part(PartKind.CALL, name, self.num_calls, call_id))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Adds to the arguments of the call that was begun last."""
        self._add(PartKind.ARGUMENTS, text, self.num_calls - 1)

    def taken(self) -> list[Part]:
        """Returns the parts and forgets them."""
        parts, self._parts = self._parts, []
        return parts

    def _add(self, kind: PartKind, text: str, call: int) -> None:
        if not text:
            return
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind is kind and last.call == call:
            self._parts[-1] = Part(kind, last.text + text, call)
        else:
            self._parts.append(Part(kind, text, call))
