"""Faults met while one request's row is prepared for a step: that request fails, the others go on.

Owns the faults of the rows that a worker holds; knows nothing of arrays or devices. Preparing a
row depends on the plan alone: every rank of several meets the same fault and drops the same row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from octavo.step import RowResult, ScheduledRow
from octavo.worker.program_runners import PreparedParts

logger = logging.getLogger(__name__)

Prepare = Callable[[Sequence[ScheduledRow]], PreparedParts]


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """A step's arrays without the rows that have a fault."""

    scheduled: Sequence[ScheduledRow]
    """Every row of the plan, in its order."""
    step: PreparedParts | None
    """Arrays of the rows without a fault; None where no row is left."""
    failed: dict[str, RowResult] = field(default_factory=dict)
    """Results of the rows left out, by request id."""

    def in_order(self, results: Sequence[RowResult]) -> list[RowResult]:
        """Returns the results of all rows in the plan's order, given those of the computed ones."""
        if not self.failed:
            return list(results)
        by_id = self.failed | {result.request_id: result for result in results}
        return [by_id[row.request_id] for row in self.scheduled]


class RowFaults:
    """Requests whose rows could not be set up, and why, until their rows are freed."""

    def __init__(self, *, is_alone: bool) -> None:
        """`is_alone`: no other rank has to meet the same faults."""
        self._is_alone = is_alone
        self._failures: dict[str, str] = {}

    def forget(self, request_id: str) -> None:
        """Drops a request's fault: its row is freed."""
        self._failures.pop(request_id, None)

    def set_up(self, request_id: str, action: Callable[[], None]) -> None:
        """Changes a request's row; where that raises, the request fails in each step it is in."""
        if failure := self._try(request_id, action):
            self._failures.setdefault(request_id, failure)

    def prepare(self, rows: Sequence[ScheduledRow], prepare: Prepare) -> PreparedRows:
        """Makes the arrays of the rows that have no fault.

        Where that raises, the rows are tried one by one, and those that raise by themselves fail.
        """
        failures = {
            row.request_id: self._failures[row.request_id]
            for row in (rows if self._failures else ())
            if row.request_id in self._failures
        }
        fit = _without(rows, failures)
        try:
            return PreparedRows(rows, prepare(fit) if fit else None, _results(failures))
        except Exception:
            logger.exception("a step of %d rows could not be prepared; trying one by one", len(fit))
        for row in fit:
            if failure := self._try(row.request_id, partial(prepare, [row])):
                failures[row.request_id] = failure
        fit = _without(fit, failures)
        return PreparedRows(rows, prepare(fit) if fit else None, _results(failures))

    def _try(self, request_id: str, action: Callable[[], object]) -> str | None:
        """Returns what to tell the request's sender; None where nothing was raised."""
        try:
            action()
        except Exception as error:
            if isinstance(error, MemoryError) and not self._is_alone:
                raise  # another rank may have had the memory, and would go on without this one
            logger.exception("request %s could not be prepared for its step", request_id)
            return describe(error)
        return None


def describe(error: Exception) -> str:
    """Returns what the sender of a request is told of a fault."""
    if isinstance(error, MemoryError):
        return "the step ran out of memory"
    return f"the step failed: {type(error).__name__}: {error}"


def _without(rows: Sequence[ScheduledRow], failures: dict[str, str]) -> Sequence[ScheduledRow]:
    return [row for row in rows if row.request_id not in failures] if failures else rows


def _results(failures: dict[str, str]) -> dict[str, RowResult]:
    return {
        request_id: RowResult(request_id, failure=failure)
        for request_id, failure in failures.items()
    }
