"""Collects the reports of an engine's transfer workers for its scheduler half.

Every rank transfers its own part of a block. A block counts as received, or stored, when all ranks
report it; it has failed when all ranks have reported and one has failed. A rank that dies ends the
engine, so every pending report arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    ConnectorPlan,
    ConnectorReport,
    StoredBytes,
)

EMPTY = ConnectorReport()


class Reports(Protocol):
    """Collects the reports of a rank's transfer worker. Thread-safe."""

    def begin(self, plan: ConnectorPlan) -> None:
        """Records the transfers that a plan begins."""
        ...

    def add(self, report: ConnectorReport) -> None:
        """Adds results of this rank."""
        ...

    def take(self, *, wait_s: float) -> ConnectorReport | None:
        """Returns everything added since the last call; waits at most `wait_s` seconds for the
        first result while transfers are pending.
        """
        ...


@dataclass(slots=True)
class JoinedOutcome:
    """Outcomes of one block on the ranks that have reported it."""

    num_told: int = 0
    is_good: bool = True


class ReportBox:
    """Merges the reports of all ranks, on the first one. Implements `Reports`."""

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._report = ConnectorReport()
        self._num_under_way = 0
        self._changed = threading.Condition()
        """Condition for all fields; notified when something is added."""
        self._fetches: dict[BlockHashWithGroupId, JoinedOutcome] = {}
        """Fetches that some ranks have reported, but not all."""
        self._keeps: dict[BlockHashWithGroupId, JoinedOutcome] = {}
        self._stored: dict[int, StoredBytes] = {}
        """Latest sums of each rank."""

    def begin(self, plan: ConnectorPlan) -> None:
        with self._changed:
            self._num_under_way += len(plan.fetch) + len(plan.keep)

    def add(self, report: ConnectorReport) -> None:
        self.add_rank(0, report)

    def add_rank(self, rank: int, report: ConnectorReport) -> None:
        with self._changed:
            sums = self._report
            for name in report.gone:  # other ranks may still store these blocks
                if name in self._keeps:
                    self._keeps[name].is_good = False
            sums.gone += report.gone
            fetched, stored = self._fetches, self._keeps
            self._join(fetched, report.fetched, sums.fetched, sums.not_fetched)
            self._join(fetched, report.not_fetched, sums.fetched, sums.not_fetched, is_good=False)
            self._join(stored, report.kept, sums.kept, sums.not_kept)
            self._join(stored, report.not_kept, sums.kept, sums.not_kept, is_good=False)
            if report.stored is not None:
                self._stored[rank] = report.stored
                sums.stored = add_up(self._stored.values())
            self._changed.notify_all()

    def _join(
        self,
        outcomes: dict[BlockHashWithGroupId, JoinedOutcome],
        names: Iterable[BlockHashWithGroupId],
        good: list[BlockHashWithGroupId],
        bad: list[BlockHashWithGroupId],
        *,
        is_good: bool = True,
    ) -> None:
        """Records a rank's outcome of blocks; reports those that all ranks have reported."""
        for name in names:
            outcome = outcomes.setdefault(name, JoinedOutcome())
            outcome.num_told += 1
            outcome.is_good &= is_good
            if outcome.num_told == self._num_ranks:
                del outcomes[name]
                (good if outcome.is_good else bad).append(name)
                self._num_under_way -= 1

    def take(self, *, wait_s: float) -> ConnectorReport | None:
        with self._changed:
            if self._report == EMPTY and self._num_under_way > 0 and wait_s:
                self._changed.wait(wait_s)
            report, self._report = self._report, ConnectorReport()
        return None if report == EMPTY else report


class SentReports:
    """Sends the reports of another rank to the first one at once. Implements `Reports`."""

    def __init__(self, send: Callable[[ConnectorReport], None]) -> None:
        self._send = send

    def begin(self, plan: ConnectorPlan) -> None:
        """No-op: the first rank counts transfers."""

    def add(self, report: ConnectorReport) -> None:
        self._send(report)

    def take(self, *, wait_s: float) -> ConnectorReport | None:
        return None


def add_up(stored: Iterable[StoredBytes]) -> StoredBytes:
    """Returns the sums over the ranks of an engine, which transfer concurrently."""
    ranks = list(stored)
    return StoredBytes(
        sum(one.num_bytes for one in ranks),
        num_expired_leases=sum(one.num_expired_leases for one in ranks),
        link_bytes=sum(one.link_bytes for one in ranks),
        link_s=sum(one.link_s for one in ranks) / len(ranks),
    )
