"""A text that comes in pieces, read by parsers that are written as if it were all there.

A parser is a generator that yields when it needs more text. No step depends on where the pieces
were cut: each reads exactly the characters that it decides by.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
"""A parser: yields where it needs more text, and returns its result."""

Emit: TypeAlias = Callable[[str], None]


class MalformedText(Exception):
    """The text is not of the form that its opening announced."""


class CutText(MalformedText):
    """The text ended inside the form."""


class TextSource:
    """The text so far, and the place up to which it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._held: int | None = None
        self._has_ended = False

    def add(self, text: str) -> None:
        """Appends a piece of the text."""
        kept = self._place if self._held is None else self._held
        self._text = self._text[kept:] + text
        self._place -= kept
        self._held = None if self._held is None else 0

    def end(self) -> None:
        """Says that no more text comes."""
        self._has_ended = True

    # -- holding: text that may have to be given back ----------------------------------------------

    def hold(self, already_read: str = "") -> None:
        """Keeps the text from here on, and what was read just before."""
        self._held = self._place - len(already_read)

    def held(self) -> str:
        """Returns the text read since `hold`, and keeps it no more; "" where none is held."""
        start = self._place if self._held is None else self._held
        self._held = None
        return self._text[start : self._place]

    # -- steps -------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> Steps[str]:
        """Returns the next characters without reading them; fewer, or none, at the end."""
        while len(self._text) - self._place < count and not self._has_ended:
            yield
        return self._text[self._place : self._place + count]

    def next(self) -> Steps[str]:
        """Returns the next character without reading it; raises CutText at the end."""
        char = yield from self.peek()
        if not char:
            raise CutText
        return char

    def take(self) -> str:
        """Reads the character that was peeked at."""
        self._place += 1
        return self._text[self._place - 1]

    def skip_space(self) -> Steps[None]:
        while (char := (yield from self.peek())) and char.isspace():
            self._place += 1

    def peek_past_space(self) -> Steps[str]:
        """Returns the next character that is no space, and reads nothing; "" at the end."""
        count = 1
        while True:
            text = yield from self.peek(count)
            if len(text) < count:
                return ""
            if not text[-1].isspace():
                return text[-1]
            count += 1

    def at(self, marks: Sequence[str]) -> Steps[str]:
        """Reads the longest of the marks that the text goes on with; returns it, "" for none."""
        while True:
            found, could_grow = self._mark_at(self._place, marks)
            if not could_grow or self._has_ended:
                self._place += len(found)
                return found
            yield

    def at_or_cut(self, marks: Sequence[str]) -> Steps[str]:
        """Reads the longest of the marks, or at the text's end the beginning of one."""
        found = yield from self.at(marks)
        rest = self._text[self._place :]
        if not found and any(mark.startswith(rest) for mark in marks):
            self._place += len(rest)
        return found

    def expect(self, mark: str) -> Steps[None]:
        """Reads a mark; raises MalformedText where the text goes on otherwise."""
        for wanted in mark:
            if (yield from self.next()) != wanted:
                raise MalformedText
            self._place += 1

    def run(self, pattern: re.Pattern[str], emit: Emit) -> Steps[None]:
        """Reads the characters that a pattern of one character's class repeats, as they come."""
        while True:
            found = pattern.match(self._text, self._place)
            end = self._place if found is None else found.end()
            if end > self._place:
                start, self._place = self._place, end
                emit(self._text[start:end])
            if self._place < len(self._text) or self._has_ended:
                return
            yield

    def until(self, marks: Sequence[str], emit: Emit, *, keeps_end: bool = True) -> Steps[str]:
        """Reads up to and with the first mark, the longest where several begin at one place, and
        emits the text before it as it comes; returns the mark, "" where the text ends before one.

        Without `keeps_end`, the beginning of a mark at the text's very end is not emitted.
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

    def _mark_at(self, place: int, marks: Sequence[str]) -> tuple[str, bool]:
        """Returns the longest mark at a place, and whether more text could make it a longer one."""
        rest = self._text[place : place + max(map(len, marks), default=0)]
        found = max((mark for mark in marks if rest.startswith(mark)), key=len, default="")
        could_grow = any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks)
        return found, could_grow
