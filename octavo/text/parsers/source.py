"""Text source for incremental parsers.

A parser is a generator that yields when it needs more text, so its code is written as if the text
were complete; results do not depend on how the text is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
"""A parser: yields when it needs more text and returns its result."""

Emit: TypeAlias = Callable[[str], None]


class MalformedText(Exception):
    """Raised if the text does not match the format that its opening marker started."""


class CutText(MalformedText):
    """Raised if the text ends before the format is complete."""


class TextSource:
    """The text so far and the read position."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._held: int | None = None
        self._has_ended = False

    def add(self, text: str) -> None:
        kept = self._place if self._held is None else self._held
        self._text = self._text[kept:] + text
        self._place -= kept
        self._held = None if self._held is None else 0

    def end(self) -> None:
        self._has_ended = True

    # -- holding: text that may have to be given back ----------------------------------------------

    def hold(self, already_read: str = "") -> None:
        """Retains the text from here on, plus `already_read`."""
        self._held = self._place - len(already_read)

    def held(self) -> str:
        """Returns the text read since `hold` and releases it; "" if none is held."""
        start = self._place if self._held is None else self._held
        self._held = None
        return self._text[start : self._place]

    # -- steps -------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> Steps[str]:
        """Returns the next characters without consuming them; fewer at the end."""
        while len(self._text) - self._place < count and not self._has_ended:
            yield
        return self._text[self._place : self._place + count]

    def next(self) -> Steps[str]:
        """Returns the next character without consuming it; raises CutText at the end."""
        char = yield from self.peek()
        if not char:
            raise CutText
        return char

    def take(self) -> str:
        """Consumes the peeked character."""
        self._place += 1
        return self._text[self._place - 1]

    def skip_space(self) -> Steps[None]:
        while (char := (yield from self.peek())) and char.isspace():
            self._place += 1

    def peek_past_space(self) -> Steps[str]:
        """Returns the next non-space character without consuming anything; "" at the end."""
        count = 1
        while True:
            text = yield from self.peek(count)
            if len(text) < count:
                return ""
            if not text[-1].isspace():
                return text[-1]
            count += 1

    def at(self, marks: Sequence[str]) -> Steps[str]:
        """Consumes and returns the longest marker that follows; "" if none does."""
        while True:
            mark, could_grow = self._mark_at(self._place, marks)
            if not could_grow or self._has_ended:
                self._place += len(mark)
                return mark
            yield

    def at_or_cut(self, marks: Sequence[str]) -> Steps[str]:
        """Consumes and returns the longest marker that follows; at the end of the text also a
        partial marker.
        """
        found = yield from self.at(marks)
        rest = self._text[self._place :]
        if not found and any(mark.startswith(rest) for mark in marks):
            self._place += len(rest)
        return found

    def expect(self, mark: str) -> Steps[None]:
        """Consumes a marker; raises MalformedText if it does not follow."""
        for character in mark:
            if (yield from self.next()) != character:
                raise MalformedText
            self._place += 1

    def run(self, pattern: re.Pattern[str], emit: Emit) -> Steps[None]:
        """Consumes and emits characters that match a one-character-class pattern."""
        while True:
            match = pattern.match(self._text, self._place)
            end = self._place if match is None else match.end()
            if end > self._place:
                start, self._place = self._place, end
                emit(self._text[start:end])
            if self._place < len(self._text) or self._has_ended:
                return
            yield

    def until(self, marks: Sequence[str], emit: Emit, *, keeps_end: bool = True) -> Steps[str]:
        """Consumes text up to and including the first marker (the longest at its position),
        emitting the text before it; returns the marker, or "" at the end.

        Without `keeps_end`, a partial marker at the end of the text is not emitted.
        """
        beginnings = re.compile(f"[{re.escape(''.join({mark[0] for mark in marks}))}]")
        while True:
            end = len(self._text)
            found = ""
            waits = False
            for start in beginnings.finditer(self._text, self._place):
                found, could_grow = self._mark_at(start.start(), marks)
                waits = could_grow and not (self._has_ended and keeps_end)
                if found or waits:
                    end = start.start()
                    break
            begin, self._place = self._place, end
            if end > begin:
                emit(self._text[begin:end])
            if found and (self._has_ended or not waits):
                self._place += len(found)
                return found
            if self._has_ended:
                self._place = len(self._text)
                return ""
            yield

    def _mark_at(self, offset: int, marks: Sequence[str]) -> tuple[str, bool]:
        """Returns the longest marker at a position, and whether more text could make it longer."""
        rest = self._text[offset : offset + max(map(len, marks), default=0)]
        longest = max((mark for mark in marks if rest.startswith(mark)), key=len, default="")
        could_grow = any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks)
        return longest, could_grow
