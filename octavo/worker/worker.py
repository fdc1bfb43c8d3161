"""The execution plane of one device: applies a plan to its rows and blocks, then runs it. Implements `ports.Executor`.

Decides nothing. A fault that a whole step raises is narrowed to the request that raises it, by running the step's rows one by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from octavo.backends.base import Runnable
from octavo.outputs import Profile
from octavo.step import BlockMove, ConnectorReport, RowResult, ScheduledRow, StepPlan, StepResult
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.model_runner import ModelRunner
from octavo.worker.request_rows import RequestRows

logger = logging.getLogger(__name__)

WAIT_S = 0.005
"""So long may a step that computes nothing hold up a request that comes."""


class Worker:
    """Runs the plans of one engine on one device."""

    def __init__(self, runnable: Runnable, cache_engine: CacheEngine, rows: RequestRows, *, close: Callable[[], None]) -> None:
        self._runnable = runnable
        self._rows = rows
        self._cache_engine = cache_engine
        self._runner = ModelRunner(runnable, cache_engine.kv, rows)
        self._close = close

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        moved_s = self._apply(plan)
        results = self._run(plan.rows) if plan.rows else []
        busy_s = time.perf_counter() - began
        kv_bytes = self._cache_engine.places.num_bytes
        return StepResult(plan.step, results, busy_s, moved_s, self._report(waits=not plan.rows), kv_bytes)

    @property
    def progress(self) -> int:
        return self._runnable.progress

    def _apply(self, plan: StepPlan) -> float:
        """Says for how many seconds blocks were moved: out before their places are given up, in when they have new ones."""
        places = self._cache_engine.places
        returning = next((index for index, move in enumerate(plan.moves) if move.kind == "swap_in"), len(plan.moves))
        moved_s = self._move(plan.moves[:returning])
        for request_id in plan.freed_rows:
            self._rows.free(request_id, places)
        for new in plan.new_rows:
            self._rows.add(new)
        for row in plan.rows:
            if row.new_block_ids or row.replaced_blocks:
                self._rows.update_tables(row, places)
        moved_s += self._move(plan.moves[returning:])
        if plan.connector is not None and self._cache_engine.connector is not None:
            self._cache_engine.connector.begin(plan.connector)
        return moved_s

    def _move(self, moves: Sequence[BlockMove]) -> float:
        began = time.perf_counter()
        self._cache_engine.apply(moves)
        return time.perf_counter() - began

    def _report(self, *, waits: bool) -> ConnectorReport | None:
        """Where a step computes nothing it waits a little for what the connector brings."""
        connector = self._cache_engine.connector
        return None if connector is None else connector.report(wait_s=WAIT_S if waits else 0.0)

    def _run(self, rows: Sequence[ScheduledRow]) -> list[RowResult]:
        """Runs them together; where that raises, one by one. To compute a position twice writes the same KV twice."""
        try:
            return self._runner.run(rows)
        except Exception as error:
            if len(rows) > 1:
                logger.exception("a step of %d requests failed; running them one by one", len(rows))
                return [result for row in rows for result in self._run([row])]
            logger.exception("request %s failed in a step", rows[0].request_id)
            return [RowResult(rows[0].request_id, failure=_describe(error))]

    def start_profile(self) -> None:
        self._runnable.start_profile()

    def stop_profile(self) -> Profile:
        return self._runnable.stop_profile()

    def close(self) -> None:
        if self._cache_engine.connector is not None:
            self._cache_engine.connector.close()
        self._close()


def _describe(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "the step ran out of memory"
    return f"the step failed: {type(error).__name__}: {error}"
