"""Finds stop strings in token ids, for beam searches: beams that end affect which others continue,
so the core must detect them.

Works on the bytes of the last few tokens and keeps no state, since it is called for any beam. The
frontend cuts the texts by the same rule (`text/detokenizer.py`).
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
        """Number of bytes before a token in which a stop string that ends in the token may begin.
        """

    def ended_by(self, token_ids: Sequence[int], token_id: int) -> str | None:
        """Returns the stop string that `token_id` completes after `token_ids`; of several, the one
        that begins first.
        """
        piece = self._bytes(token_id)
        if not piece:
            return None
        before = self._last_bytes(token_ids)
        text = before + piece
        starts = {
            stop: text.find(wanted, max(0, len(before) + 1 - len(wanted)))
            for stop, wanted in self._stops.items()
        }
        found = [stop for stop, start in starts.items() if start >= 0]
        return min(found, key=starts.__getitem__) if found else None

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Returns the last bytes of a text, as many as a stop string can match."""
        found = b""
        for token_id in reversed(token_ids):
            if len(found) >= self._reach:
                break
            found = self._bytes(token_id) + found
        return found[len(found) - self._reach :] if len(found) > self._reach else found

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)


MakeStopTexts: TypeAlias = Callable[[SamplingParams], TokenizedStops]


class LazyStopTexts:
    """A MakeStopTexts that reads its tokenizer for the first beam search with stop strings."""

    def __init__(self, read: Callable[[], Tokenizer | None]) -> None:
        self._read = read
        self._tokenizer: Tokenizer | None = None

    def __call__(self, params: SamplingParams) -> TokenizedStops:
        self._tokenizer = self._tokenizer or self._read()
        assert self._tokenizer is not None, "the frontend rejects stop strings without a tokenizer"
        return TokenizedStops(self._tokenizer, params)
