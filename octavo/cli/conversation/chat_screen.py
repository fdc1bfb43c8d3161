"""Shows an answer while it comes: as markdown on a terminal, as plain text anywhere else.

What is complete (up to a blank line outside code) is printed for good; only the block that still
grows is drawn again, so that a long answer scrolls as any text does.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol

DRAW_EVERY_S = 0.08
"""Least time between two drawings of the growing block, in seconds; each parses its markdown."""
FENCES = ("```", "~~~")


class AnswerScreen(Protocol):
    """A place where one answer is shown."""

    def add(self, text: str) -> None:
        """Shows more of the answer."""

    def close(self) -> None:
        """Ends the answer."""


class PlainScreen:
    """Standard output as it is."""

    def add(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        print(flush=True)


class MarkdownScreen:
    """A terminal on which markdown is rendered."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._block = ""
        self._draw_at = 0.0

    def add(self, text: str) -> None:
        done, self._block = split_blocks(self._block + text)
        if done.strip():
            self._finish(done)
        if self._block.strip() and time.monotonic() >= self._draw_at:
            self._draw(self._block)

    def close(self) -> None:
        if self._block.strip():
            self._finish(self._block)
        self._block = ""

    def _finish(self, text: str) -> None:
        """Draws a block for the last time, and leaves it to the terminal's scrolling."""
        from rich.live import Live

        self._draw(text)
        self._live.stop()
        self._live = Live(console=self._console, auto_refresh=False)

    def _draw(self, text: str) -> None:
        from rich.markdown import Markdown

        if not self._live.is_started:
            self._console.print()
            self._live.start()
        self._live.update(Markdown(text), refresh=True)
        self._draw_at = time.monotonic() + DRAW_EVERY_S


def split_blocks(text: str) -> tuple[str, str]:
    """Splits markdown after its last blank line outside fenced code: what is complete, and the
    rest.
    """
    at = end = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        mark = line.strip()[:3]
        if fence:
            fence = "" if mark == fence else fence
        elif mark in FENCES:
            fence = mark
        elif not mark and line.endswith("\n"):
            end = at
    return text[:end], text[end:]


def answer_screen() -> AnswerScreen:
    """Returns a place for one answer on standard output."""
    return MarkdownScreen() if sys.stdout.isatty() else PlainScreen()
