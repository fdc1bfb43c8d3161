"""Upper bounds for the length of results of template filters and string methods.

Most calls do not lengthen their input; a few multiply lengths and could exhaust memory in one step,
so their result size is computed before they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

MAX_JSON_INDENT = 64
"""Maximum width of a JSON indent or separator in characters; templates use 2 or 4."""
WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{7,}|\*)")
"""Matches a %-format width or precision that turns one value into megabytes."""
WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*\d{7,}")
"""Matches such a width in a brace format."""


NESTED_BRACES = re.compile(r"\{[^{}]*:[^{}]*\{")
"""Matches a brace format whose width is another value."""


def largest_number(values: Iterable[Any], named: Mapping[str, Any]) -> int:
    """Returns the largest integer argument of a call; 0 without one."""
    numbers = (value for value in (*values, *named.values()) if isinstance(value, int))
    return max(numbers, default=0)


def padded(text: Any, width: Any = 80, *_: Any) -> int:
    """Returns an upper bound for the length of a padded text."""
    return width if isinstance(width, int) else 0


def translated(text: str | bytes, table: Any, *_: Any) -> int:
    """Returns an upper bound for the length of a translated text."""
    longest = max((len(each) for each in table.values() if isinstance(each, str)), default=1)
    return len(text) * max(1, longest)


def batched(values: Any, linecount: Any, fill_with: Any = None) -> int:
    """Returns the maximum number of fill values that `batch` adds."""
    return linecount if isinstance(linecount, int) and fill_with is not None else 0


def filtered(value: Any, old: Any, new: Any, count: int | None = None) -> int:
    """Returns an upper bound for the length of a value's text after replacement."""
    return replaced(str(value), str(old), str(new), count)


def replaced(text: Any, old: Any, new: Any, count: int | None = None) -> int:
    """Returns an upper bound for the length of a text after replacement."""
    occurrences: int = text.count(old)
    return len(text) + (
        occurrences if count is None or count < 0 else min(occurrences, count)
    ) * len(new)


def expanded(text: Any, tabsize: int = 8) -> int:
    """Returns an upper bound for the length of a text after tab expansion."""
    num_tabs: int = text.count("\t" if isinstance(text, str) else b"\t")
    return len(text) + num_tabs * tabsize


def indented(text: str, width: int | str = 4, *_: Any, **__: Any) -> int:
    """Returns an upper bound for the length of an indented text."""
    size = width if isinstance(width, int) else len(width)
    return len(text) + (text.count("\n") + 1) * size


def joined(separator: Any, items: Iterable[Any]) -> int:
    """Returns the joined length; 0 for an iterator: counting would exhaust it, and its items are
    counted as steps.
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
    """Checks the arguments of a JSON filter; raises ValueError for an indent or separator that is
    too wide. Returns 0: the length of the result is not bounded in advance.
    """
    widths = (indent, *(separators or ()))
    width = max(each if isinstance(each, int) else len(each or "") for each in widths)
    if width > MAX_JSON_INDENT:
        raise ValueError(
            f"it formats JSON with an indent or separator of {width} characters, expected at most"
            f" {MAX_JSON_INDENT}"
        )
    return 0


def percent_formatted(text: Any, /, *_: Any, **__: Any) -> int:
    """Returns 0; raises ValueError if a %-format has an unbounded width."""
    return _refuse_wide(WIDE_PERCENT, str(text))


def brace_formatted(text: str, /, *values: Any, **named: Any) -> int:
    """Returns the largest width that a brace format takes from its values; raises ValueError if one
    is unbounded.
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

FILTERS: Mapping[str, Callable[..., int]] = {
    "replace": filtered,
    "center": padded,
    "batch": batched,
    "indent": indented,
    "format": percent_formatted,
    "join": lambda items, d="", attribute=None: 0 if attribute else joined(d, items),
    "tojson": json_length,
}
