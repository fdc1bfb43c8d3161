"""Ranks of the reference backend in threads of one process: what one gives at a collective op, all
get.

For tests of sharded Programs. Every rank must come to the same collectives in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from numpy.typing import NDArray

from octavo.backends.reference_ops import Exchange


class RanksInThreads:
    """`exchange_of(rank)` is what that rank's backend is given."""

    def __init__(self, num_ranks: int) -> None:
        self._given: list[NDArray | None] = [None] * num_ranks
        self._meeting = threading.Barrier(num_ranks)

    def exchange_of(self, rank: int) -> Exchange:
        def exchange(x: NDArray) -> Sequence[NDArray]:
            self._given[rank] = x
            self._meeting.wait()
            given = [part for part in self._given if part is not None]
            self._meeting.wait()  # nobody gives the next before all have taken this one
            return given

        return exchange

    def abort(self) -> None:
        """Ends the wait of those who are left, with BrokenBarrierError: a rank has failed."""
        self._meeting.abort()
