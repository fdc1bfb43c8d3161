"""How long a text one call of a template's filter, or of a text's method, would make.

Most calls make a text no longer than what they are given; a few multiply one length by another, and
could take all memory in one step, so their longest outcome is computed before they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

MAX_JSON_INDENT = 64
"""Widest indent or separator of JSON, in characters; templates ask for 2 or 4."""
WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{7,}|\*)")
"""A width or precision in a %-format with which one value becomes megabytes of text."""
WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*\d{7,}")
"""The same in a format of braces."""


NESTED_BRACES = re.compile(r"\{[^{}]*:[^{}]*\{")
"""A format of braces whose width is one of the values."""


def largest_number(values: Iterable[Any], named: Mapping[str, Any]) -> int:
    """Returns the largest whole number among a call's arguments; 0 without one."""
    numbers = (each for each in (*values, *named.values()) if isinstance(each, int))
    return max(numbers, default=0)


def padded(text: Any, width: Any = 80, *_: Any) -> int:
    """Returns the length of a text that is filled up to a width, or more."""
    return width if isinstance(width, int) else 0


def translated(text: str | bytes, table: Any, *_: Any) -> int:
    """Returns the length of a text whose characters become what a table has for them, or more."""
    longest = max((len(each) for each in table.values() if isinstance(each, str)), default=1)
    return len(text) * max(1, longest)


def batched(values: Any, linecount: Any, fill_with: Any = None) -> int:
    """Returns the most values by which `batch` fills up the last row."""
    return linecount if isinstance(linecount, int) and fill_with is not None else 0


def filtered(value: Any, old: Any, new: Any, count: int | None = None) -> int:
    """Returns the length of a value's text in which `old` becomes `new`, or more."""
    return replaced(str(value), str(old), str(new), count)


def replaced(text: Any, old: Any, new: Any, count: int | None = None) -> int:
    """Returns the length of a text in which `old` becomes `new`, or more."""
    found: int = text.count(old)
    return len(text) + (found if count is None or count < 0 else min(found, count)) * len(new)


def expanded(text: Any, tabsize: int = 8) -> int:
    """Returns the length of a text whose tabs become spaces, or more."""
    num_tabs: int = text.count("\t" if isinstance(text, str) else b"\t")
    return len(text) + num_tabs * tabsize


def indented(text: str, width: int | str = 4, *_: Any, **__: Any) -> int:
    """Returns the length of a text whose lines are indented, or more."""
    size = width if isinstance(width, int) else len(width)
    return len(text) + (text.count("\n") + 1) * size


def joined(separator: Any, items: Iterable[Any]) -> int:
    """Returns the length of the items' texts with a separator behind each; 0 for an iterator, which
    this would exhaust and whose items count as steps.
    """
    if not isinstance(items, Sized):
        return 0
    size = len(str(separator))
    return sum(size + len(str(item)) for item in items)


def json_length(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> int:
    """Returns 0; raises ValueError for an indent or a separator that is too wide."""
    given = (indent, *(separators or ()))
    width = max(each if isinstance(each, int) else len(each or "") for each in given)
    if width > MAX_JSON_INDENT:
        raise ValueError(
            f"it makes JSON with an indent or a separator of {width} characters,"
            f" allowed are {MAX_JSON_INDENT}"
        )
    return 0


def percent_formatted(text: Any, /, *_: Any, **__: Any) -> int:
    """Returns 0; raises ValueError where a %-format has an unbounded width."""
    return _refuse_wide(WIDE_PERCENT, str(text))


def brace_formatted(text: str, /, *values: Any, **named: Any) -> int:
    """Returns the largest width that a format of braces has of its values; raises ValueError where
    one is unbounded.
    """
    return _refuse_wide(WIDE_BRACES, text) or (
        largest_number(values, named) if NESTED_BRACES.search(text) else 0
    )


def _refuse_wide(wide: re.Pattern[str], text: str) -> int:
    if wide.search(text):
        raise ValueError("it formats a text of unbounded width")
    return 0


METHODS: Mapping[str, Callable[..., int]] = {
    "replace": replaced,
    "center": padded,
    "ljust": padded,
    "rjust": padded,
    "zfill": padded,
    "translate": translated,
    "expandtabs": expanded,
    "format": brace_formatted,
    "format_map": brace_formatted,
    "join": joined,
}
"""Lengths of what a text's methods make, by the method's name."""

FILTERS: Mapping[str, Callable[..., int]] = {
    "replace": filtered,
    "center": padded,
    "batch": batched,
    "indent": indented,
    "format": percent_formatted,
    "join": lambda items, d="", attribute=None: 0 if attribute else joined(d, items),
    "tojson": json_length,
}
"""Lengths of what filters make, by the filter's name."""
