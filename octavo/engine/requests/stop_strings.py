"""Finds stop strings in token ids, for beam searches: whether a beam ends affects which others
continue, so the core must detect it.

Works on the bytes of the last few tokens and keeps no state, since any beam may call it. The
frontend truncates texts by the same rule (`text/detokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from octavo.api.sampling_params import SamplingParams
from octavo.text.detokenizer import skipped_ids
from octavo.text.ports import Tokenizer


class TokenizedStops:
    """The stop strings of one request."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped_ids(tokenizer, params)
        self._stops = {text: text.encode() for text in params.stop_strings}
        self._reach = max(map(len, self._stops.values()), default=1) - 1
        """Maximum number of bytes before a token that can be part of a stop string ending in the
        token.
        """

    def ended_by(self, token_ids: Sequence[int], token_id: int) -> str | None:
        """Returns the stop string that `token_id` completes after `token_ids`; of several, the one
        that begins first. Returns None if there is none.
        """
        piece = self._bytes(token_id)
        if not piece:
            return None
        before = self._last_bytes(token_ids)
        text = before + piece
        starts = {
            stop: text.find(text_bytes, max(0, len(before) + 1 - len(text_bytes)))
            for stop, text_bytes in self._stops.items()
        }
        matches = [stop for stop, start in starts.items() if start >= 0]
        return min(matches, key=starts.__getitem__) if matches else None

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Returns the last bytes of a text, up to the number that a stop string can match."""
        last_bytes = b""
        for token_id in reversed(token_ids):
            if len(last_bytes) >= self._reach:
                break
            last_bytes = self._bytes(token_id) + last_bytes
        return (
            last_bytes[len(last_bytes) - self._reach :]
            if len(last_bytes) > self._reach
            else last_bytes
        )

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)


MakeStopTexts: TypeAlias = Callable[[SamplingParams], TokenizedStops]


class LazyStopTexts:
    """A MakeStopTexts that loads its tokenizer when the first beam search with stop strings
    arrives.
    """

    def __init__(self, read: Callable[[], Tokenizer | None]) -> None:
        self._read = read
        self._tokenizer: Tokenizer | None = None

    def __call__(self, params: SamplingParams) -> TokenizedStops:
        self._tokenizer = self._tokenizer or self._read()
        assert self._tokenizer is not None, "the frontend rejects stop strings without a tokenizer"
        return TokenizedStops(self._tokenizer, params)
