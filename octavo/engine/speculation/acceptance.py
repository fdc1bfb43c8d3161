"""How likely a guess is to hold: what became of earlier ones, by the length of the match that they
followed from, by whether all that followed it before was the same, and by depth, the place of a
token in its guess.

Reads no clock, so that a recording replays exactly. Older guesses count less.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from octavo.engine.speculation.drafter import DIVIDED, GIVEN_MATCH, RUNNER_UP

MATCHES = (1, 2, 3, 4, 8, 16, GIVEN_MATCH, RUNNER_UP)
"""Least match of each class of guesses, in tokens; the last two are the worker's guesses, and
tokens that are guessed beside likelier ones, for which depth is their rank among these.
"""
FIRST_CHANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.4)
"""Chances of a class of which nothing is known."""
DIVIDED_SHARE = 0.6
"""Share of these chances where a match was followed in several ways."""
ALL_FIRST_CHANCES = (*FIRST_CHANCES, *(DIVIDED_SHARE * chance for chance in FIRST_CHANCES))
"""First chances of all classes: of `MATCHES` in turn, then of the same lengths where divided."""
NUM_DEPTHS = 3
"""Classes of depth: a guess's first token, its second, and all others."""
ROW_PRIOR = 2.0
"""Guessed tokens that the chance of all rows counts for in a row's own."""
FIRST_PRIOR = 1.0
"""Guessed tokens that a first chance counts for in that of all rows."""
DEPTH_PRIOR = 4.0
"""Guessed tokens that the chance of the place before counts for in that of a later one, which is
seldom tried where it looks low.
"""
ROW_DECAY = 0.8
"""Weight that a row's earlier guesses keep with each new one."""
SHARED_DECAY = 0.98
"""Weight that all rows' earlier guesses together keep with each new one."""


@dataclass(slots=True)
class GuessTally:
    """Guessed tokens that were drawn for, and those of them that held; both decay."""

    num_tried: float = 0.0
    num_held: float = 0.0

    def chance(self, prior: float, weight: float) -> float:
        """Returns the chance of the next guessed token, where `prior` is expected of it and counts
        as `weight` guesses.
        """
        return (self.num_held + weight * prior) / (self.num_tried + weight)

    def add(self, num_tried: int, num_held: int, decay: float) -> None:
        self.num_tried = self.num_tried * decay + num_tried
        self.num_held = self.num_held * decay + num_held


Tallies = list[list[GuessTally]]
"""Tallies by the class of the match, then by that of the depth."""


class Acceptance:
    """The chances of all rows' guesses."""

    def __init__(self) -> None:
        self._shared = _no_tallies()
        self._rows: dict[str, Tallies] = {}

    def chance(self, request_id: str, num_matched: int, depth: int = 0) -> float:
        """Returns the chance that the guessed token at a depth holds, given that those before it
        do.
        """
        kind, place = _class_of(num_matched), min(depth, NUM_DEPTHS - 1)
        shared, weight = ALL_FIRST_CHANCES[kind], FIRST_PRIOR
        for tally in self._shared[kind][: place + 1]:
            shared, weight = tally.chance(shared, weight), DEPTH_PRIOR
        row = self._rows.get(request_id)
        return shared if row is None else row[kind][place].chance(shared, ROW_PRIOR)

    def reached(self, request_id: str, num_matched: int, num_tokens: int) -> list[float]:
        """Returns for each token of a chain the chance that it and all those before it hold."""
        each = [
            self.chance(request_id, num_matched, depth)
            for depth in range(min(num_tokens, NUM_DEPTHS))
        ]
        each += each[-1:] * (num_tokens - len(each))
        return list(accumulate(each, mul))

    def took(self, request_id: str, num_matched: int, num_guessed: int, num_held: int) -> None:
        """Notes that of `num_guessed` tokens the first `num_held` were drawn."""
        kind = _class_of(num_matched)
        num_tried = min(num_guessed, num_held + 1)
        row = self._tallies_of(request_id)
        for depth in range(min(num_tried, NUM_DEPTHS)):
            is_last = depth == NUM_DEPTHS - 1
            tried = num_tried - depth if is_last else 1
            held = min(tried, max(0, num_held - depth))
            row[kind][depth].add(tried, held, ROW_DECAY)
            self._shared[kind][depth].add(tried, held, SHARED_DECAY)

    def took_runner_up(self, request_id: str, rank: int, *, held: bool) -> None:
        """Notes that none of `rank + 1` guessed tokens was drawn, and whether the one beside them
        was that comes next.
        """
        kind, place = _class_of(RUNNER_UP), min(rank, NUM_DEPTHS - 1)
        self._tallies_of(request_id)[kind][place].add(1, held, ROW_DECAY)
        self._shared[kind][place].add(1, held, SHARED_DECAY)

    def _tallies_of(self, request_id: str) -> Tallies:
        found = self._rows.get(request_id)
        if found is None:
            found = self._rows[request_id] = _no_tallies()
        return found

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)


def _no_tallies() -> Tallies:
    return [[GuessTally() for _ in range(NUM_DEPTHS)] for _ in ALL_FIRST_CHANCES]


def _class_of(num_matched: int) -> int:
    is_divided, length = divmod(num_matched, DIVIDED)
    return is_divided * len(MATCHES) + max(0, bisect_right(MATCHES, length) - 1)
