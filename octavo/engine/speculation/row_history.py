"""State of one row between two steps: its proposer and the draft that the worker returned."""

from __future__ import annotations

from octavo.engine.speculation.proposer import NO_WORKER_DRAFT, WORKER_MATCH, Draft, Proposer


class RowHistory:
    """One row's proposer, the worker's draft, and the match of the draft verified last."""

    __slots__ = ("is_current", "num_matched", "num_taken", "proposer", "worker_draft")

    def __init__(self, proposer: Proposer | None) -> None:
        self.proposer = proposer
        self.is_current = False
        """Whether the proposer knew all of the row's tokens when the last step was built."""
        self.worker_draft = NO_WORKER_DRAFT
        self.num_taken = 0
        self.num_matched = 0

    def follow(self, token_ids: list[int], most: int) -> int:
        """Passes the row's next tokens to the proposer, at most `most`, or all new ones if it was
        up to date; returns how many.
        """
        num_more = len(token_ids) - self.num_taken
        if not self.is_current:
            num_more = min(most, num_more)
        if self.proposer is not None and num_more > 0:
            self.proposer.extend(token_ids[self.num_taken : self.num_taken + num_more])
            self.num_taken += num_more
        self.is_current = self.num_taken == len(token_ids)
        return max(0, num_more)

    def propose(self, token_ids: list[int], most: int) -> list[Draft]:
        """Returns the worker's draft for this position, and the proposer's if it knows all of the
        row's tokens.
        """
        found = []
        if self.worker_draft.num_tokens == len(token_ids):
            found.append(
                Draft(self.worker_draft.token_ids, WORKER_MATCH, self.worker_draft.parents)
            )
        if self.proposer is not None and self.num_taken == len(token_ids):
            found.append(self.proposer.propose(most))
        return found
