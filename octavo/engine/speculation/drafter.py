"""What every drafter is: it guesses how one row's tokens go on, and is told those that came.

A guess is free to be wrong: the target draws at every guessed position as it would without it, so a
drafter decides what a step costs and never what it yields. Knows neither blocks nor steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """A guess of a row's next tokens."""

    token_ids: list[int]
    num_matched: int
    """Number of the row's last tokens that the guess follows from, with DIVIDED added where these
    were followed in several ways; 0 where there is no guess.
    """
    parents: Sequence[int] = ()
    """Index of each token's parent in the guess, -1: the row's last token; (): each follows the one
    before. A parent comes before its children, and the likelier child before others.
    """


NO_DRAFT = Draft([], 0)


class GivenDraft(NamedTuple):
    """A guess that came back from the worker, of what follows a row's first `num_tokens` tokens."""

    num_tokens: int
    token_ids: list[int]
    parents: list[int]


NOTHING_GIVEN = GivenDraft(-1, [], [])
GIVEN_MATCH = 1 << 20
"""Length of the match that stands for a guess of the worker, among which chances are measured apart
from those of lookups."""
RUNNER_UP = 1 << 21
"""Length of the match that stands for tokens that are guessed beside a likelier one."""
DIVIDED = 1 << 22
"""Added to the length of a match that other tokens have followed than those that are guessed: among
such guesses chances are measured apart.
"""


class Drafter(Protocol):
    """Guesses for one row; it lives as long as the row."""

    def took(self, token_ids: Sequence[int]) -> None:
        """Takes in the row's next confirmed tokens, its prompt first."""
        ...

    def propose(self, max_tokens: int) -> Draft:
        """Returns a guess, of at most `max_tokens` on each path; the tokens taken in decide it
        alone.
        """
        ...


def continuation(token_ids: Sequence[int], start: int, max_tokens: int) -> list[int]:
    """Returns `max_tokens` tokens copied from `start` on. A copy that reaches the end goes on in
    itself, so that a period repeats (as in LZ77).
    """
    period = len(token_ids) - start
    return [token_ids[start + index % period] for index in range(max_tokens)]
