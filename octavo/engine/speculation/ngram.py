"""Prompt lookup decoding: proposes the tokens that followed an earlier occurrence of the row's last
n-gram.

Source: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.speculation.proposer import DIVIDED, NO_DRAFT, Draft, continuation


class NgramProposer:
    """Looks up the last `max_ngram` tokens, then fewer, down to `min_ngram`."""

    def __init__(self, *, min_ngram: int = 2, max_ngram: int = 4) -> None:
        assert 1 <= min_ngram <= max_ngram, "the options are checked where they are read"
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._token_ids: list[int] = []
        self._starts: dict[tuple[int, ...], int] = {}
        """Index of the token after each n-gram's latest occurrence."""
        self._divided: set[tuple[int, ...]] = set()
        """N-grams that were followed by different tokens."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends the row's next tokens, and indexes the n-grams before each of them."""
        for token_id in token_ids:
            end = len(self._token_ids)
            for size in self._sizes:
                if size <= end:
                    self._index(tuple(self._token_ids[end - size :]), token_id)
            self._token_ids.append(token_id)

    def propose(self, max_tokens: int) -> Draft:
        """Proposes the tokens that followed the latest occurrence of the longest known n-gram."""
        for size in self._sizes:
            start = self._starts.get(tuple(self._token_ids[-size:]))
            if start is not None and size <= len(self._token_ids):
                is_divided = tuple(self._token_ids[-size:]) in self._divided
                token_ids = continuation(self._token_ids, start, max_tokens)
                return Draft(token_ids, size + DIVIDED * is_divided)
        return NO_DRAFT

    def _index(self, ngram: tuple[int, ...], token_id: int) -> None:
        """Indexes an n-gram with the token that follows it."""
        start = self._starts.get(ngram)
        if start is not None and self._token_ids[start] != token_id:
            self._divided.add(ngram)
        self._starts[ngram] = len(self._token_ids)
