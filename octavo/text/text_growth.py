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


def replaced(text: str, old: str, new: str, count: int | None = None) -> int:
    """Returns the length of a text in which `old` becomes `new`, or more."""
    found = text.count(old)
    return len(text) + (found if count is None or count < 0 else min(found, count)) * len(new)


def expanded(text: str, tabsize: int = 8) -> int:
    """Returns the length of a text whose tabs become spaces, or more."""
    return len(text) + text.count("\t") * tabsize


def indented(text: str, width: int | str = 4, *_: Any, **__: Any) -> int:
    """Returns the length of a text whose lines are indented, or more."""
    size = width if isinstance(width, int) else len(width)
    return len(text) + (text.count("\n") + 1) * size


def joined(separator: str, items: Iterable[Any]) -> int:
    """Returns the length of the items' texts with a separator behind each; 0 for an iterator, which
    this would exhaust and whose items count as steps.
    """
    if not isinstance(items, Sized):
        return 0
    return sum(len(separator) + len(str(item)) for item in items)


def json_length(value: Any, **options: Any) -> int:
    """Returns 0; raises ValueError for an indent or a separator that is too wide."""
    given = (options.get("indent"), *(options.get("separators") or ()))
    width = max(each if isinstance(each, int) else len(each or "") for each in given)
    if width > MAX_JSON_INDENT:
        raise ValueError(
            f"tojson: got an indent or a separator of {width} characters,"
            f" allowed are {MAX_JSON_INDENT}"
        )
    return 0


def percent_formatted(text: str, *_: Any, **__: Any) -> int:
    """Returns 0; raises ValueError where a %-format has an unbounded width."""
    return _refuse_wide(WIDE_PERCENT, text)


def brace_formatted(text: str, *_: Any, **__: Any) -> int:
    """Returns 0; raises ValueError where a format of braces has an unbounded width."""
    return _refuse_wide(WIDE_BRACES, text)


def _refuse_wide(wide: re.Pattern[str], text: str) -> int:
    if wide.search(text):
        raise ValueError("it formats a text of unbounded width")
    return 0


METHODS: Mapping[str, Callable[..., int]] = {
    "replace": replaced,
    "expandtabs": expanded,
    "format": brace_formatted,
    "format_map": brace_formatted,
    "join": joined,
}
"""Lengths of what a text's methods make, by the method's name."""

FILTERS: Mapping[str, Callable[..., int]] = {
    "replace": replaced,
    "indent": indented,
    "format": percent_formatted,
    "join": lambda items, d="", attribute=None: 0 if attribute else joined(d, items),
    "tojson": json_length,
}
"""Lengths of what filters make, by the filter's name."""
