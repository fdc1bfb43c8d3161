"""Faults of single requests: a request whose row cannot be set up, prepared or computed fails, and
the others of its step go on.

Preparing a row depends on the plan alone, so every rank meets the same fault and drops the same
row. A fault while rows are computed is narrowed to one request by running the rows one by one,
which other ranks would not know of: with several, it ends the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from octavo.engine.protocol.step import RowResult, ScheduledRequest
from octavo.worker.model_input import ModelInput

logger = logging.getLogger(__name__)

Failures = dict[str, RowResult]
"""Results of failed requests, by request id."""


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
        """Changes a request's row; if that raises, the request fails in each step it is in."""
        if failure := self._try(request_id, action):
            self._failures.setdefault(request_id, failure)

    def prepare(
        self,
        rows: Sequence[ScheduledRequest],
        prepare: Callable[..., list[ModelInput]],
        num_steps: int,
    ) -> tuple[list[ModelInput], Failures]:
        """Prepares the rows that have no fault; returns their inputs and the failures of the rest.

        If preparing raises, the rows are tried one by one, and those that raise alone fail.
        """
        failures: dict[str, str] = {}
        if self._failures:
            ids = [row.request_id for row in rows if row.request_id in self._failures]
            failures = {request_id: self._failures[request_id] for request_id in ids}
            rows = [row for row in rows if row.request_id not in failures]
        try:
            return (prepare(rows, num_steps) if rows else []), _results(failures)
        except Exception:
            logger.exception(
                "a step of %d rows could not be prepared; trying one by one", len(rows)
            )
        for row in rows:
            if failure := self._try(row.request_id, partial(prepare, [row])):
                failures[row.request_id] = failure
        rows = [row for row in rows if row.request_id not in failures]
        return (prepare(rows, num_steps) if rows else []), _results(failures)

    def compute_one_by_one(
        self,
        rows: Sequence[ScheduledRequest],
        error: Exception,
        compute: Callable[[Sequence[ScheduledRequest]], list[RowResult]],
    ) -> list[RowResult]:
        """Computes each row of a step that raised `error` by itself; one that raises again fails.

        A position that is computed twice gets the same KV written twice.
        """
        if not self._is_alone:
            raise error
        if len(rows) > 1:
            logger.error(
                "a step of %d requests failed; running them one by one", len(rows), exc_info=error
            )
            return [result for row in rows for result in compute([row])]
        logger.error("request %s failed in a step", rows[0].request_id, exc_info=error)
        return [RowResult(rows[0].request_id, failure=_describe(error))]

    def _try(self, request_id: str, action: Callable[[], object]) -> str | None:
        """Returns the failure to report to the request's sender; None if nothing was raised."""
        try:
            action()
        except Exception as error:
            if isinstance(error, MemoryError) and not self._is_alone:
                raise  # another rank may have had the memory, and would go on without this one
            logger.exception("request %s could not be prepared for its step", request_id)
            return _describe(error)
        return None


def _describe(error: Exception) -> str:
    """Returns the failure that a request's sender is told."""
    if isinstance(error, MemoryError):
        return "the step ran out of memory"
    return f"the step failed: {type(error).__name__}: {error}"


def _results(failures: dict[str, str]) -> Failures:
    return {
        request_id: RowResult(request_id, failure=failure)
        for request_id, failure in failures.items()
    }
