"""Colours and status marks of the terminal.

The colours are Typer's; rich is not used because it is slow to import. Output has no colours if the
stream is not a terminal, NO_COLOR is set or TERM is "dumb".
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, TextIO

import typer

Status = Literal["ok", "none", "warning", "failure"]

MARKS: dict[Status, tuple[str, str, str | None]] = {
    "ok": ("✓", "+", "green"),
    "none": ("-", "-", None),
    "warning": ("!", "!", "yellow"),
    "failure": ("✗", "x", "red"),
}
"""Mark, ASCII mark and colour of each status; "none" is an optional part that is missing."""


def has_colour(stream: TextIO) -> bool:
    """Returns whether to print colours to a stream."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


def paint(text: str, stream: TextIO | None = None, **style: Any) -> str:
    """Styles a text as `typer.style` does if the stream (default: stdout) shows colours."""
    return typer.style(text, **style) if text and has_colour(stream or sys.stdout) else text


def format_mark(status: Status) -> str:
    """Returns the mark of a status for stdout, in ASCII if its encoding has no check marks."""
    mark, ascii_mark, colour = MARKS[status]
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        mark = ascii_mark
    return paint(mark, fg=colour, bold=True) if colour else mark
