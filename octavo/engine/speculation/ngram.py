"""Prompt lookup: the row's last few tokens are looked up among its earlier ones, and what followed
them there is the guess.

Owns an index of one row's n-grams. Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.speculation.drafter import DIVIDED, NO_DRAFT, Draft, continuation


class NgramDrafter:
    """Looks up the last `max_ngram` tokens, then fewer, down to `min_ngram`."""

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = 4) -> None:
        assert 1 <= min_ngram <= max_ngram, "the options are checked where they are read"
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._token_ids: list[int] = []
        self._starts: dict[tuple[int, ...], int] = {}
        """Place of the token that followed an n-gram's latest occurrence."""
        self._divided: set[tuple[int, ...]] = set()
        """The n-grams that different tokens have followed."""

    def took(self, token_ids: Sequence[int]) -> None:
        """Takes in the row's next tokens; each completes the n-grams that end before it."""
        for token_id in token_ids:
            end = len(self._token_ids)
            for size in self._sizes:
                if size <= end:
                    self._note(tuple(self._token_ids[end - size :]), token_id)
            self._token_ids.append(token_id)

    def propose(self, max_tokens: int) -> Draft:
        """Returns what followed the longest n-gram that was met before, the latest time."""
        for size in self._sizes:
            start = self._starts.get(tuple(self._token_ids[-size:]))
            if start is not None and size <= len(self._token_ids):
                is_divided = tuple(self._token_ids[-size:]) in self._divided
                guess = continuation(self._token_ids, start, max_tokens)
                return Draft(guess, size + DIVIDED * is_divided)
        return NO_DRAFT

    def _note(self, ngram: tuple[int, ...], token_id: int) -> None:
        """Notes that a token, the row's next one, follows an n-gram."""
        start = self._starts.get(ngram)
        if start is not None and self._token_ids[start] != token_id:
            self._divided.add(ngram)
        self._starts[ngram] = len(self._token_ids)
