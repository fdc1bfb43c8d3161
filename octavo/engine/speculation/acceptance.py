"""Estimates the acceptance rate of draft tokens.

Rates are counted by the length of the match that a draft was copied from, by whether that match was
always followed by the same tokens, and by the depth of a token in its draft. Recent drafts have a
higher weight. Reads no clock, so that a recording replays exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from octavo.engine.speculation.proposer import DIVIDED, RUNNER_UP, WORKER_MATCH

MATCHES = (1, 2, 3, 4, 8, 16, WORKER_MATCH, RUNNER_UP)
"""Minimum match length of each class of drafts, in tokens. The last two classes are drafts of the
worker, and runner-up tokens (siblings of a likelier token), whose depth is their rank among the
siblings.
"""
FIRST_CHANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.4)
"""Initial acceptance rate of each class, before any draft of it was verified."""
DIVIDED_SHARE = 0.6
"""Factor of these rates for a match that was followed by different tokens."""
ALL_FIRST_CHANCES = (*FIRST_CHANCES, *(DIVIDED_SHARE * chance for chance in FIRST_CHANCES))
"""Initial rates of all classes: first the classes of `MATCHES`, then the same with different
continuations.
"""
NUM_DEPTHS = 3
"""Classes of depth: first draft token, second, and all others."""
ROW_PRIOR = 2.0
"""Weight of the rate of all rows in one row's rate, in draft tokens."""
FIRST_PRIOR = 1.0
"""Weight of the initial rate in the rate of all rows, in draft tokens."""
DEPTH_PRIOR = 4.0
"""Weight of the previous depth's rate in a depth's rate, in draft tokens. Deep tokens are rarely
verified when their rate is low.
"""
ROW_DECAY = 0.8
"""Factor by which a row's earlier drafts decay with each new draft."""
SHARED_DECAY = 0.98
"""Factor by which the earlier drafts of all rows decay with each new draft."""


@dataclass(slots=True)
class AcceptanceTally:
    """Numbers of verified and of accepted draft tokens; both decay."""

    num_tried: float = 0.0
    num_accepted: float = 0.0

    def chance(self, prior: float, weight: float) -> float:
        """Returns the acceptance probability of the next draft token, given a prior with the weight
        of `weight` draft tokens.
        """
        return (self.num_accepted + weight * prior) / (self.num_tried + weight)

    def add(self, num_tried: int, num_accepted: int, decay: float) -> None:
        self.num_tried = self.num_tried * decay + num_tried
        self.num_accepted = self.num_accepted * decay + num_accepted


Tallies = list[list[AcceptanceTally]]
"""Tallies by match class, then by depth class."""


class Acceptance:
    """Acceptance rates of the drafts of all rows."""

    def __init__(self) -> None:
        self._shared = _make_tallies()
        self._rows: dict[str, Tallies] = {}

    def chance(self, request_id: str, num_matched: int, depth: int = 0) -> float:
        """Returns the probability that the draft token at `depth` is accepted if all tokens before
        it are.
        """
        kind, depth_class = _get_class(num_matched), min(depth, NUM_DEPTHS - 1)
        shared, weight = ALL_FIRST_CHANCES[kind], FIRST_PRIOR
        for tally in self._shared[kind][: depth_class + 1]:
            shared, weight = tally.chance(shared, weight), DEPTH_PRIOR
        row = self._rows.get(request_id)
        return shared if row is None else row[kind][depth_class].chance(shared, ROW_PRIOR)

    def reached(self, request_id: str, num_matched: int, num_tokens: int) -> list[float]:
        """Returns for each token of a chain the probability that it and all tokens before it are
        accepted.
        """
        chances = [
            self.chance(request_id, num_matched, depth)
            for depth in range(min(num_tokens, NUM_DEPTHS))
        ]
        chances += chances[-1:] * (num_tokens - len(chances))
        return list(accumulate(chances, mul))

    def record(
        self, request_id: str, num_matched: int, num_drafted: int, num_accepted: int
    ) -> None:
        """Records that the first `num_accepted` of `num_drafted` draft tokens were accepted."""
        kind = _get_class(num_matched)
        num_tried = min(num_drafted, num_accepted + 1)
        row = self._get_tallies(request_id)
        for depth in range(min(num_tried, NUM_DEPTHS)):
            is_last = depth == NUM_DEPTHS - 1
            tried = num_tried - depth if is_last else 1
            accepted = min(tried, max(0, num_accepted - depth))
            row[kind][depth].add(tried, accepted, ROW_DECAY)
            self._shared[kind][depth].add(tried, accepted, SHARED_DECAY)

    def record_runner_up(self, request_id: str, rank: int, *, accepted: bool) -> None:
        """Records whether a sibling was accepted after `rank + 1` likelier siblings were
        rejected.
        """
        kind, depth = _get_class(RUNNER_UP), min(rank, NUM_DEPTHS - 1)
        self._get_tallies(request_id)[kind][depth].add(1, accepted, ROW_DECAY)
        self._shared[kind][depth].add(1, accepted, SHARED_DECAY)

    def _get_tallies(self, request_id: str) -> Tallies:
        tallies = self._rows.get(request_id)
        if tallies is None:
            tallies = self._rows[request_id] = _make_tallies()
        return tallies

    def remove_request(self, request_id: str) -> None:
        self._rows.pop(request_id, None)


def _make_tallies() -> Tallies:
    return [[AcceptanceTally() for _ in range(NUM_DEPTHS)] for _ in ALL_FIRST_CHANCES]


def _get_class(num_matched: int) -> int:
    is_divided, length = divmod(num_matched, DIVIDED)
    return is_divided * len(MATCHES) + max(0, bisect_right(MATCHES, length) - 1)
