"""Parts of a model's message: reasoning, content and function calls.

A parser emits parts in text order; consecutive parts of one kind are pieces of one part.
`MessageText` joins them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pydantic_core import from_json


class PartKind(Enum):
    """Kinds of parts; a call starts with CALL (its name), followed by ARGUMENTS."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Part:
    kind: PartKind
    text: str
    """New text; for CALL the function name."""
    call: int = -1
    """Index of its call; -1 outside of calls."""
    call_id: str = ""
    """Call id from the model; "" if none."""


@dataclass(slots=True)
class FunctionText:
    """A call, possibly incomplete."""

    name: str
    arguments: str = ""
    """JSON text, incomplete if the call was cut off."""
    call_id: str = ""


def parse_arguments(call: FunctionText) -> dict[str, Any]:
    """Parses a call's arguments, which may be incomplete."""
    try:
        parsed = from_json(call.arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


@dataclass(slots=True)
class MessageText:
    """A message, possibly incomplete."""

    reasoning: str = ""
    content: str = ""
    calls: list[FunctionText] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
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
    """Parts found by a parser since the last `pop_parts`; adjacent pieces are joined."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names` maps aliases to the client's function names."""
        self._names = names
        self._parts: list[Part] = []
        self.num_calls = 0

    def add_text(self, kind: PartKind, text: str) -> None:
        self._add(kind, text, -1)

    def begin_call(self, name: str, call_id: str = "") -> None:
        name = self._names.get(name, name)
        self._parts.append(Part(PartKind.CALL, name, self.num_calls, call_id))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Adds to the arguments of the current call."""
        self._add(PartKind.ARGUMENTS, text, self.num_calls - 1)

    def pop_parts(self) -> list[Part]:
        """Returns and clears the parts."""
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
