"""Follows a text that a row copies from its earlier tokens, across edits.

When an output repeats the prompt with a name replaced, an n-gram lookup right after the name finds
nothing, although the copied text continues there. This class keeps the position in the copied text
and the number of tokens that agreed since the last edit.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_COPIED = 4
"""Shortest match, in tokens, that is followed across an edit."""
MOST_REPLACED = 2
"""Differing tokens after which the copied text is proposed again only when some tokens agree."""
MOST_EDITED = 8
"""Longest edit, in tokens; after it the row no longer counts as copying."""
WINDOW = 8
"""Tokens of the copied text in which the end of an edit is searched."""


class CopiedText:
    """Position of the text that a row is expected to copy next."""

    def __init__(self) -> None:
        self.place = -1
        """Index of the expected next token; -1 if the row copies nothing."""
        self.num_agreed = 0
        """Tokens that agreed since the last edit."""
        self._num_edited = 0
        """Tokens of the current edit."""

    @property
    def continues(self) -> bool:
        """Whether the copy is expected to continue after an edit, where no lookup finds it: some
        tokens agree again, or the edit has just begun.
        """
        is_edited = self.place >= 0 and self._num_edited > 0
        return is_edited and (self.num_agreed > 0 or self._num_edited <= MOST_REPLACED)

    def extend(self, token_ids: Sequence[int], num_matched: int, end: int) -> None:
        """Processes the last of a row's tokens. A lookup found that the last `num_matched` tokens
        also precede index `end`.
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
            # Tokens were omitted, or the one before replaces several.
            self.place += behind.index(token_id) + 2
            self.num_agreed = 1
        elif self._num_edited == 1:
            self.place += 1
        elif self._num_edited > MOST_EDITED:
            self.place = -1
