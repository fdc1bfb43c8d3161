"""Tables for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Sequence


def format_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table with its header; columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
