"""What is known of one row between two steps: its drafter with the tokens it has taken in, and the
guess that the worker gave.
"""

from __future__ import annotations

from octavo.engine.speculation.drafter import GIVEN_MATCH, NOTHING_GIVEN, Draft, Drafter


class RowHistory:
    """Keeps one row's drafter, and the match that its last guess followed from."""

    __slots__ = ("drafter", "given", "is_current", "num_matched", "num_taken")

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.is_current = False
        """Whether the drafter knew all of the row's tokens when the last step was composed."""
        self.given = NOTHING_GIVEN
        self.num_taken = 0
        self.num_matched = 0

    def follow(self, token_ids: list[int], most: int) -> int:
        """Has the drafter take in the row's next tokens, at most `most`, or all that a row has
        drawn since it was last known whole; returns how many.
        """
        num_more = len(token_ids) - self.num_taken
        if not self.is_current:
            num_more = min(most, num_more)
        if self.drafter is not None and num_more > 0:
            self.drafter.took(token_ids[self.num_taken : self.num_taken + num_more])
            self.num_taken += num_more
        self.is_current = self.num_taken == len(token_ids)
        return max(0, num_more)

    def propose(self, token_ids: list[int], most: int) -> list[Draft]:
        """Returns the guess that the worker gave of what comes now, and the drafter's, which has
        none while it does not know all of the row's tokens.
        """
        found = []
        if self.given.num_tokens == len(token_ids):
            found.append(Draft(self.given.token_ids, GIVEN_MATCH, self.given.parents))
        if self.drafter is not None and self.num_taken == len(token_ids):
            found.append(self.drafter.propose(most))
        return found
