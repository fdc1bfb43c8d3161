"""Tables for a terminal or a pipe: columns as wide as their widest cell, two spaces between."""

from __future__ import annotations

from collections.abc import Sequence


def format_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in lines, its header first."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
