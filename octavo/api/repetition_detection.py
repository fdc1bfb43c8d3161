"""RepetitionDetection: ends a request that repeats itself. Names and rule are vLLM's.

Generation stops with the token that completes `min_count` repetitions of a token pattern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from octavo.api.checked_call import CheckedCall
from octavo.api.errors import InvalidRequest, shown

MAX_PATTERN_TOKENS = 256
MAX_COUNT = 256
REPETITION_FOUND = "repetition_detected"
"""Stop reason of a request that was ended by repetition detection."""


class RepetitionDetection(msgspec.Struct, kw_only=True, frozen=True, metaclass=CheckedCall):
    """Stop condition: a pattern of tokens repeated several times in a row; checked when made."""

    max_pattern_size: int
    """Maximum pattern length in tokens; 0 disables detection."""
    min_pattern_size: int = 0
    """Minimum pattern length in tokens; 0 means 1."""
    min_count: int = 0
    """Number of consecutive repetitions that ends the request, at least 2."""

    def __post_init__(self) -> None:
        _check("max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_TOKENS)
        _check("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        if self.max_pattern_size:
            _check("min_count", self.min_count, 2, MAX_COUNT)

    def matches(self, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """Returns whether the output tokens end with a repeated pattern."""
        num_tokens, last = len(token_ids), token_ids[-1]
        longest = (num_tokens - num_prompt_tokens) // max(2, self.min_count)
        max_size = min(self.max_pattern_size, longest)
        for size in range(max(1, self.min_pattern_size), max_size + 1):
            # Most sizes fail at the last token, before anything is copied.
            if token_ids[-1 - size] != last:
                continue
            start = num_tokens - size * self.min_count
            if token_ids[start : num_tokens - size] == token_ids[start + size :]:
                return True
        return False


def parse_repetition_detection(value: object) -> RepetitionDetection | None:
    """Returns the detection from an object or a mapping of its fields; None if it is disabled."""
    if isinstance(value, Mapping):
        try:
            value = RepetitionDetection(**value)
        except InvalidRequest as error:
            error.param = "repetition_detection"
            raise
    if value is not None and not isinstance(value, RepetitionDetection):
        raise InvalidRequest(
            f"repetition_detection: got {shown(value)}, expected None, or RepetitionDetection",
            param="repetition_detection",
        )
    return value if value and value.max_pattern_size else None


def _check(name: str, value: object, low: int, high: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value <= high:  # type: ignore[operator]
        raise InvalidRequest(
            f"repetition_detection.{name}: got {shown(value)}, expected an integer from {low}"
            f" to {high}",
            param="repetition_detection",
        )


LOOP = RepetitionDetection(max_pattern_size=256, min_pattern_size=16, min_count=5)
"""Default detection of endless loops: a pattern of 16 to 256 tokens, five times in a row.

Shorter patterns are found through their multiples. Rows of tables, lists and code differ from line
to line, whereas a model that repeats a line or a paragraph five times rarely recovers.
"""
