"""Searches for stop strings and patterns (`stop_regex`).

Knows how far back a match may begin; the Detokenizer holds the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.api.sampling_params import SamplingParams
from octavo.api.stop_patterns import StopPattern


@dataclass(frozen=True, slots=True)
class FoundStop:
    """A match, with positions in the searched text."""

    stop: str
    """The stop string or pattern."""
    start: int
    end: int


class StopSearch:
    """Stop strings and patterns of one request."""

    def __init__(self, params: SamplingParams) -> None:
        self._strings = params.stop_strings
        self._patterns = [StopPattern(text) for text in params.stop_patterns]
        widths = [len(stop) for stop in self._strings]
        widths += [pattern.width for pattern in self._patterns]
        self.reach = max(widths, default=1) - 1
        """Characters before a new piece in which a match that ends in the piece may begin."""
        # `\b` and `^` look at one more.
        self.num_kept = self.reach + 1 if self._patterns else self.reach
        """Number of last characters that the next search needs."""

    def first(self, text: str, num_old: int) -> FoundStop | None:
        """Returns the earliest match that ends after the first `num_old` characters."""
        return min(self._hits(text, num_old), key=lambda hit: hit.start, default=None)

    def holds(self, text: str) -> bool:
        """Returns whether a text is contained in a stop string."""
        return any(text in stop for stop in self._strings)

    def first_string(self, text: str, num_old: int) -> FoundStop | None:
        """Like `first`, for stop strings only."""
        return min(self._strings_in(text, num_old), key=lambda hit: hit.start, default=None)

    def _strings_in(self, text: str, num_old: int) -> Iterator[FoundStop]:
        for stop in self._strings:
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0:
                yield FoundStop(stop, start, start + len(stop))

    def _hits(self, text: str, num_old: int) -> Iterator[FoundStop]:
        yield from self._strings_in(text, num_old)
        for pattern in self._patterns:
            place = pattern.find(text, max(0, num_old + 1 - pattern.width), num_old + 1)
            if place is not None:
                yield FoundStop(pattern.text, *place)
