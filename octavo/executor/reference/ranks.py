"""Reference ranks as threads of one process, for tests of sharded Programs.

Every rank must reach the same collectives in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from numpy.typing import NDArray

from octavo.executor.reference.step import Exchange


class RanksInThreads:
    """Exchanges arrays between ranks; each rank uses its own `exchange_of(rank)`."""

    def __init__(self, num_ranks: int) -> None:
        self._given: list[NDArray | None] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks)

    def exchange_of(self, rank: int) -> Exchange:
        def exchange(x: NDArray) -> Sequence[NDArray]:
            self._given[rank] = x
            self._barrier.wait()
            given = [part for part in self._given if part is not None]
            self._barrier.wait()  # every rank has read this round before the next one overwrites it
            return given

        return exchange

    def abort(self) -> None:
        """Unblocks the other ranks with BrokenBarrierError after one has failed."""
        self._barrier.abort()
