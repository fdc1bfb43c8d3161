"""Prints a response as it is generated: markdown on a terminal, plain text otherwise.

Complete blocks (up to a blank line outside code) are printed once; only the growing block is
redrawn, so that long responses scroll normally.
"""

from __future__ import annotations

import sys
import time

DRAW_EVERY_S = 0.08
"""Minimum time between redraws, in seconds; each parses the block's markdown."""
FENCES = ("```", "~~~")


class PlainScreen:
    def add(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        print(flush=True)


class MarkdownScreen:
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
        """Draws a block for the last time and leaves it to scroll."""
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
    """Splits markdown after its last blank line outside fenced code."""
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


def answer_screen() -> MarkdownScreen | PlainScreen:
    return MarkdownScreen() if sys.stdout.isatty() else PlainScreen()
