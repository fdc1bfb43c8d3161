"""How likely a guess is to hold: what became of earlier ones, by the length of the match that they
followed from.

Reads no clock, so that a recording replays exactly. Older guesses count less.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from octavo.engine.speculation.drafter import GIVEN_MATCH

MATCHES = (1, 2, 3, 4, 8, 16, GIVEN_MATCH)
"""Least match of each class of guesses, in tokens; the last one's are the worker's."""
FIRST_CHANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9)
"""Chances of a class of which nothing is known."""
PRIOR = 2.0
"""Guessed tokens that a prior counts for."""
ROW_DECAY = 0.8
"""Weight that a row's earlier guesses keep with each new one."""
SHARED_DECAY = 0.98
"""Weight that all rows' earlier guesses together keep with each new one."""


@dataclass(slots=True)
class GuessTally:
    """Guessed tokens that were drawn for, and those of them that held; both decay."""

    num_tried: float = 0.0
    num_held: float = 0.0

    def chance(self, prior: float) -> float:
        """Returns the chance of the next guessed token, where `prior` is expected of it."""
        return (self.num_held + PRIOR * prior) / (self.num_tried + PRIOR)

    def add(self, num_tried: int, num_held: int, decay: float) -> None:
        self.num_tried = self.num_tried * decay + num_tried
        self.num_held = self.num_held * decay + num_held


class Acceptance:
    """The chances of all rows' guesses."""

    def __init__(self) -> None:
        self._shared = [GuessTally() for _ in MATCHES]
        self._rows: dict[str, list[GuessTally]] = {}

    def chance(self, request_id: str, num_matched: int) -> float:
        """Returns the chance that a guessed token holds, given that those before it do."""
        kind = _class_of(num_matched)
        shared = self._shared[kind].chance(FIRST_CHANCES[kind])
        row = self._rows.get(request_id)
        return shared if row is None else row[kind].chance(shared)

    def took(self, request_id: str, num_matched: int, num_guessed: int, num_held: int) -> None:
        """Notes that of `num_guessed` tokens the first `num_held` were drawn."""
        kind = _class_of(num_matched)
        num_tried = min(num_guessed, num_held + 1)
        row = self._rows.setdefault(request_id, [GuessTally() for _ in MATCHES])
        row[kind].add(num_tried, num_held, ROW_DECAY)
        self._shared[kind].add(num_tried, num_held, SHARED_DECAY)

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)


def _class_of(num_matched: int) -> int:
    return max(0, bisect_right(MATCHES, num_matched) - 1)
