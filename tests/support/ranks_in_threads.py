"""Ranks of the reference backend that compute together, each in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from numpy.typing import NDArray

from octavo.executor.reference.backend import ReferenceBackend
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


def in_threads(num_ranks: int, run: Callable[[int, ReferenceBackend], NDArray]) -> list[NDArray]:
    """Returns what `run(rank, its backend)` gives on each rank."""
    ranks = RanksInThreads(num_ranks)
    found: dict[int, NDArray] = {}
    errors: list[BaseException] = []

    def run_rank(rank: int) -> None:
        try:
            found[rank] = run(rank, ReferenceBackend(exchange=ranks.exchange_of(rank)))
        except BaseException as error:
            errors.append(error)
            ranks.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (error for error in errors if not isinstance(error, threading.BrokenBarrierError)),
            errors[0],
        )
    return [found[rank] for rank in range(num_ranks)]
