"""Interface of proposers: each proposes draft tokens for one row and receives its confirmed tokens.

The target model samples the same tokens with and without a draft, so a proposer changes only the
duration of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """Draft tokens for a row."""

    token_ids: list[int]
    num_matched: int
    """Number of the row's last tokens that were matched; plus DIVIDED if different tokens followed
    that match. 0 without a draft.
    """
    parents: Sequence[int] = ()
    """Index of each token's parent in the draft, -1: the row's last token; (): a chain. Parents
    precede their children, and the likeliest child precedes its siblings.
    """


NO_DRAFT = Draft([], 0)


class WorkerDraft(NamedTuple):
    """A draft from the worker, which follows a row's first `num_tokens` tokens."""

    num_tokens: int
    token_ids: list[int]
    parents: list[int]


NO_WORKER_DRAFT = WorkerDraft(-1, [], [])
WORKER_MATCH = 1 << 20
"""`num_matched` of the worker's drafts, whose acceptance is counted separately from lookups."""
RUNNER_UP = 1 << 21
"""`num_matched` of runner-up tokens: siblings of a likelier draft token."""
DIVIDED = 1 << 22
"""Added to `num_matched` if the match was also followed by other tokens; the acceptance of such
drafts is counted separately.
"""


class Proposer(Protocol):
    """Proposes draft tokens for one row during its lifetime."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends the row's next confirmed tokens, starting with the prompt."""
        ...

    def propose(self, max_tokens: int) -> Draft:
        """Returns a draft of at most `max_tokens` tokens on each path, which depends only on the
        row's tokens.
        """
        ...


def continuation(token_ids: Sequence[int], start: int, max_tokens: int) -> list[int]:
    """Copies `max_tokens` tokens from `start` on. A copy that reaches the end continues with its
    first tokens, so that a period repeats (as in LZ77).
    """
    period = len(token_ids) - start
    return [token_ids[start + index % period] for index in range(max_tokens)]
