"""Failures of single requests: a request that cannot be set up, prepared or computed fails, and the
other requests of its step continue.

Preparing depends only on the plan, so every rank sees the same failure and drops the same request.
A failure while rows are computed is narrowed to one request by running the requests one by one.
Other ranks would not see this, so with several ranks such a failure ends the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from octavo.engine.protocol.step import RowResult, ScheduledRequest
from octavo.worker.model_input import ModelInput

logger = logging.getLogger(__name__)

Failures = dict[str, RowResult]
"""Results of failed requests, by request id."""


class RequestFaults:
    """Requests that could not be set up, until their rows are freed."""

    def __init__(self, *, is_alone: bool) -> None:
        """`is_alone`: whether there are no other ranks that must see the same failures."""
        self._is_alone = is_alone
        self.failed: dict[str, str] = {}
        """Error of each request that could not be set up; it fails in each of its steps."""

    def add(self, request_id: str, error: Exception) -> None:
        """Records the exception that was raised while a request was set up."""
        self.failed.setdefault(request_id, self._describe(request_id, error))

    def prepare_inputs(
        self,
        rows: Sequence[ScheduledRequest],
        prepare_inputs: Callable[..., list[ModelInput]],
        num_steps: int,
    ) -> tuple[list[ModelInput], Failures]:
        """Prepares the requests that do not fail; returns their inputs, and the failures of the
        others.

        If preparing all of them raises, they are tried one by one, and each request that raises
        fails.
        """
        failures = {
            row.request_id: self.failed[row.request_id]
            for row in rows
            if row.request_id in self.failed
        }
        rows = [row for row in rows if row.request_id not in failures]
        try:
            return (prepare_inputs(rows, num_steps) if rows else []), _make_results(failures)
        except Exception:
            logger.exception(
                "a step of %d rows could not be prepared; trying one by one", len(rows)
            )
        for row in rows:
            try:
                prepare_inputs([row])
            except Exception as error:
                failures[row.request_id] = self._describe(row.request_id, error)
        rows = [row for row in rows if row.request_id not in failures]
        return (prepare_inputs(rows, num_steps) if rows else []), _make_results(failures)

    def compute_one_by_one(
        self,
        rows: Sequence[ScheduledRequest],
        error: Exception,
        compute: Callable[[Sequence[ScheduledRequest]], list[RowResult]],
    ) -> list[RowResult]:
        """Computes each request of a step that raised `error` separately; a request that raises
        again fails. Recomputing a position writes the same KV again.
        """
        if not self._is_alone:
            raise error
        if len(rows) > 1:
            logger.error(
                "a step of %d requests failed; running them one by one", len(rows), exc_info=error
            )
            return [result for row in rows for result in compute([row])]
        logger.error("request %s failed in a step", rows[0].request_id, exc_info=error)
        return [RowResult(rows[0].request_id, failure=_get_message(error))]

    def _describe(self, request_id: str, error: Exception) -> str:
        """Logs an error and returns the failure message for the client."""
        if isinstance(error, MemoryError) and not self._is_alone:
            raise error  # another rank may have had the memory and would continue
        logger.error("request %s could not be prepared for its step", request_id, exc_info=error)
        return _get_message(error)


def _make_results(failures: dict[str, str]) -> Failures:
    return {
        request_id: RowResult(request_id, failure=failure)
        for request_id, failure in failures.items()
    }


def _get_message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "the step ran out of memory"
    return f"the step failed: {type(error).__name__}: {error}"
