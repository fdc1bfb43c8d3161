"""Regular expressions that end a request (`stop_regex`): validation and search.

RE2 matches them in linear time. The length of a match is bounded, so that a stream knows how much
text it must hold back.
"""

from __future__ import annotations

import re
from re import _parser  # type: ignore[attr-defined]

import re2

from octavo.api.errors import InvalidRequest, shown

MAX_PATTERNS = 16
MAX_PATTERN = 512
"""Maximum length of a pattern in characters."""
MAX_MATCH = 256
"""Maximum length of a match in characters; a stream holds back one less."""
MAX_PROGRAM_BYTES = 1 << 18
"""Memory limit of one compiled pattern."""


class StopPattern:
    """A compiled pattern; `width` is the maximum length of a match in characters."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN:
            raise _make_error(text, f"at most {MAX_PATTERN} characters, not {len(text)}")
        self.text = text
        self._pattern = _compile(text)
        self.width = _get_max_length(text)

    def find(self, text: str, start: int, least_end: int) -> tuple[int, int] | None:
        """Returns the span of the first match from `start` on that ends at or after `least_end`.
        Returns None if there is none.
        """
        while (match := self._pattern.search(text, start)) is not None:
            begin, end = match.span()
            if end >= least_end:
                return begin, end
            start = begin + 1
        return None


def check_patterns(texts: list[str]) -> None:
    """Raises InvalidRequest for patterns that are not supported."""
    if len(texts) > MAX_PATTERNS:
        raise InvalidRequest(
            f"stop_regex: got {len(texts)} patterns, expected at most {MAX_PATTERNS}",
            hint="combine patterns with |",
            param="stop_regex",
        )
    for text in texts:
        StopPattern(text)


def _compile(text: str) -> re2._Regexp:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PROGRAM_BYTES
    try:
        return re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0]
        words = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise _make_error(text, f"RE2's notation ({words})") from None
    except UnicodeEncodeError:
        raise _make_error(text, "valid Unicode") from None


def _get_max_length(text: str) -> int:
    """Returns the maximum length of a match, from Python's parser of the same syntax."""
    if "[:" in text and ":]" in text:
        raise _make_error(text, r"classes such as \d or a-z, without [:name:]")
    try:
        min_length, max_length = _parser.parse(text).getwidth()
    except (re.error, RecursionError, OverflowError) as error:
        raise _make_error(text, f"a syntax that both Python and RE2 support ({error})") from None
    if min_length == 0:
        raise _make_error(text, "a pattern that does not match the empty string")
    if max_length > MAX_MATCH:
        raise _make_error(
            text,
            f"a pattern whose matches have at most {MAX_MATCH} characters",
            hint="limit its repetitions: a{1,20} instead of a+",
        )
    return int(max_length)


def _make_error(text: str, allowed: str, hint: str | None = None) -> InvalidRequest:
    return InvalidRequest(
        f"stop_regex: got {shown(text)}, expected {allowed}", param="stop_regex", hint=hint
    )
