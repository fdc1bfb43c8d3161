"""The earlier text that a row copies, followed through edits: where an answer repeats its prompt
with other names, a lookup finds nothing right behind a name, but the text behind it goes on there.

Owns a place in the row's earlier tokens, and counts since when these agree with what comes. Reads
no clock, and knows neither lookups nor guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_COPIED = 4
"""Tokens that a match must have before an edit in it is looked beyond."""
MOST_REPLACED = 2
"""Tokens that differ after which the copied text is not expected next before some agree."""
MOST_EDITED = 8
"""Tokens of one edit, after which the copy counts as left."""
WINDOW = 8
"""Tokens of the copied text among which the end of an edit is looked for."""


class CopiedText:
    """The place in a row's tokens at which the text lies that is expected next."""

    def __init__(self) -> None:
        self.place = -1
        """Index of the token that is expected next; -1: the row copies nothing."""
        self.num_agreed = 0
        """Tokens that agreed since the last edit."""
        self._num_edited = 0
        """Tokens of the edit that may not have ended yet."""

    @property
    def goes_on(self) -> bool:
        """Whether the text is expected to go on at the place behind an edit, where no lookup finds
        it: some tokens agree, or the edit has just begun.
        """
        is_edited = self.place >= 0 and self._num_edited > 0
        return is_edited and (self.num_agreed > 0 or self._num_edited <= MOST_REPLACED)

    def took(self, token_ids: Sequence[int], num_matched: int, end: int) -> None:
        """Takes in the last one of a row's tokens. A lookup says that the last `num_matched` tokens
        stand before `end` too.
        """
        if self.place >= 0:
            self._follow(token_ids)
        if num_matched > max(self.num_agreed, LEAST_COPIED - 1):
            self.place = end
            self.num_agreed = num_matched
            self._num_edited = 0

    def _follow(self, token_ids: Sequence[int]) -> None:
        last = len(token_ids) - 1
        token_id = token_ids[last]
        if self.place < last and token_ids[self.place] == token_id:
            self.place += 1
            self.num_agreed += 1
            if self.num_agreed >= LEAST_COPIED:
                self._num_edited = 0
            return
        self._num_edited = 1 if self.num_agreed else self._num_edited + 1
        self.num_agreed = 0
        behind = token_ids[self.place + 1 : min(self.place + WINDOW, last)]
        if token_id in behind:
            # Tokens were left out, or several gave way to the one before.
            self.place += behind.index(token_id) + 2
            self.num_agreed = 1
        elif self._num_edited == 1:
            self.place += 1
        elif self._num_edited > MOST_EDITED:
            self.place = -1
