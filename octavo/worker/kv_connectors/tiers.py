"""Worker half of the prefix cache's lower tiers: blocks in slots of host memory, backed by files on
disk.

Owns the slots' memory and two threads: one prefetches from files, one writes to them. A block stays
in its slot until it is written, so memory is bounded. Makes no decisions: the scheduler half
(`engine/kv/kv_connector.py`) assigns blocks to slots.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.kv_messages import (
    BlockAnswer,
    BlockHashWithGroupId,
    BlockQuery,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
)
from octavo.worker.cache_engine import HostShape
from octavo.worker.kv_connectors.block_directory import (
    BlockDirectory,
    DirectoryChanges,
    DirectoryFull,
)

logger = logging.getLogger(__name__)


OVERDUE_S = 5.0
"""Seconds after which a request stops waiting for a file, or for ratings of blocks, and computes
instead.
"""
LOOK_S = 30.0
"""Interval in seconds at which the directory is listed for changes by other engines, while there is
work.
"""
PAUSE_S = 30.0
"""Pause in seconds after a failed write."""
CLOSE_S = 3.0
"""Maximum seconds for which writes continue after the engine has closed."""
NICENESS = 10
"""Niceness of the writing thread, which has a lower priority than computing."""


class BlockRater(Protocol):
    """Rates stored blocks for requests that select some of them."""

    def prepare_query(self, query: BlockQuery) -> Any:
        """Computes the part of a rating that depends only on the query; None on failure. May use
        all compute threads.
        """
        ...

    def rate(self, query: BlockQuery, prepared: Any, blocks: NDArray[np.uint8]) -> list[float]:
        """Returns the rating of each of `blocks [B, block_bytes]`; [] on failure. Thread-safe."""
        ...


class TierWorker:
    """Slots of host memory, optionally backed by a directory of files. Implements
    `ports.ConnectorWorker`.
    """

    def __init__(
        self,
        shapes: Sequence[HostShape],
        directory: BlockDirectory | None = None,
        rater: BlockRater | None = None,
    ) -> None:
        """`rater`: rates blocks for queries; None if there are no queries."""
        self._slots = [
            np.empty((shape.num_blocks, shape.block_bytes), np.uint8) for shape in shapes
        ]
        self._directory = directory
        self._rater = rater
        self._report = ConnectorReport()
        self._changed = threading.Condition()
        """Protects the report; notified when an entry is added."""
        self._fetching: dict[BlockHashWithGroupId, float] = {}
        """Start time of each fetch that is not overdue, on the monotonic clock."""
        self._rating: dict[str, float] = {}
        """Start time of each query by request id, on the monotonic clock."""
        self._num_under_way = 0
        self._closing = False
        self._paused_until = 0.0
        self._looked_at = float("-inf")
        self._reader = _JobThread("octavo-cache-read")
        self._writer = _JobThread("octavo-cache-write", niceness=NICENESS)
        if directory is not None:
            self._look()

    def slot(self, group: int, slot: int) -> NDArray[np.uint8]:
        slot_bytes: NDArray[np.uint8] = self._slots[group][slot]
        return slot_bytes

    def begin(self, plan: ConnectorPlan) -> None:
        if self._directory is None:
            return
        directory, write = self._directory, self._writer.put
        with self._changed:
            self._num_under_way += len(plan.fetch) + len(plan.keep) + len(plan.queries)
            self._fetching.update(
                dict.fromkeys((block.name for block in plan.fetch), time.monotonic())
            )
        if plan.forget_all:
            write(directory.remove_all)
        for block in plan.fetch:
            self._reader.put(partial(self._fetch, block))
        for query in plan.queries:
            self._answer(query)
        for block in plan.keep:
            write(partial(self._keep, block))
        for name in plan.touch:
            write(partial(directory.touch, name))
        if plan.pin:
            write(partial(directory.pin, plan.pin))
        for name in plan.forget:
            write(partial(directory.remove, name))
        write(self._look)

    def report(self, *, wait_s: float) -> ConnectorReport | None:
        with self._changed:
            if self._report == EMPTY and self._num_under_way and wait_s:
                self._changed.wait(wait_s)
            self._report.overdue += _remove_overdue(self._fetching)
            self._report.answers += [
                BlockAnswer(each, []) for each in _remove_overdue(self._rating)
            ]
            report, self._report = self._report, ConnectorReport()
        if report == EMPTY:
            return None
        report.stored = None if self._directory is None else self._directory.stored()
        return report

    def close(self) -> None:
        self._closing = True
        self._reader.close(0.0)
        self._writer.close(CLOSE_S)

    def _answer(self, query: BlockQuery) -> None:
        """Queues a query after the fetches of its plan, in the same thread. The part of the rating
        that depends only on the query is computed here, in parallel.
        """
        assert self._rater is not None, "nothing asks an engine that cannot answer"
        prepared = self._rater.prepare_query(query)
        since = time.monotonic()
        with self._changed:
            self._rating[query.request_id] = since
        self._reader.put(partial(self._rate, self._rater, query, prepared, since))

    # -- background threads ------------------------------------------------------------------------

    def _rate(self, rater: BlockRater, query: BlockQuery, prepared: Any, since: float) -> None:
        ratings: list[float] = []
        try:
            if prepared is not None and not self._closing:
                # The slot of a missing file has arbitrary contents; its block is reported missing.
                with np.errstate(all="ignore"):
                    ratings = rater.rate(query, prepared, self._slots[query.group][query.slots])
        finally:
            with self._reporting() as report:
                self._num_under_way -= 1
                if self._rating.get(query.request_id) == since:  # otherwise the query is overdue
                    del self._rating[query.request_id]
                    report.answers.append(BlockAnswer(query.request_id, ratings))

    def _fetch(self, block: SlotBlock) -> None:
        assert self._directory is not None
        ok = False
        try:
            ok = not self._closing and self._directory.read(
                block, self.slot(block.group, block.slot).data
            )
        finally:
            with self._reporting() as report:
                self._fetching.pop(block.name, None)
                self._num_under_way -= 1
                (report.fetched if ok else report.not_fetched).append(block.name)

    def _keep(self, block: SlotBlock) -> None:
        gone = None
        try:
            gone = self._write(block)
        finally:
            with self._reporting() as report:
                self._num_under_way -= 1
                report.gone += gone or []
                (report.not_kept if gone is None else report.kept).append(block.name)

    def _write(self, block: SlotBlock) -> list[BlockHashWithGroupId] | None:
        """Writes a block's file; returns the evicted blocks. Returns None if it could not be
        written.
        """
        assert self._directory is not None
        if time.monotonic() < self._paused_until:
            return None
        try:
            return self._directory.write(block, self.slot(block.group, block.slot).data)
        except DirectoryFull:
            return None
        except OSError as error:
            logger.warning("pausing prefix cache writes for %.0f s: %s", PAUSE_S, error)
            self._paused_until = time.monotonic() + PAUSE_S
            return None

    def _look(self) -> None:
        """Reports changes of the directory, which is listed at most every LOOK_S seconds."""
        assert self._directory is not None
        changes = DirectoryChanges()
        if time.monotonic() - self._looked_at > LOOK_S:
            changes = self._directory.look()
            self._looked_at = time.monotonic()
        with self._reporting() as report:
            report.found += changes.found
            report.gone += changes.gone
            report.pinned += changes.pinned
            report.stored = self._directory.stored()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[ConnectorReport]:
        with self._changed:
            yield self._report
            self._changed.notify_all()


EMPTY = ConnectorReport()


def _remove_overdue(since: dict[Any, float]) -> list[Any]:
    """Removes and returns the overdue entries of `since`, which contains start times on the
    monotonic clock.
    """
    overdue = [name for name, start in since.items() if time.monotonic() - start > OVERDUE_S]
    for name in overdue:
        del since[name]
    return overdue


class _JobThread:
    """A thread that runs jobs in order; started with the first job."""

    def __init__(self, name: str, *, niceness: int = 0) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._niceness = niceness
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def put(self, job: Callable[[], object]) -> None:
        if not self._started:
            self._started = True
            self._thread.start()
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        if self._started:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        # On Linux, each thread has its own priority.
        if self._niceness and hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("the prefix cache thread continues after an error")
