"""Turns a step's scheduled rows into one StepBatch, runs a Program that pools over it, and returns
each row's pooled row.

Knows rows and arrays; knows nothing of queues, blocks' owners or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import AsyncRunnable, JoiningRunnable, Runnable
from octavo.backends.batch import StepBatch, StepOutput
from octavo.backends.kv import KvCache
from octavo.pooling_params import PoolingParams
from octavo.step import RowResult, ScheduledRow
from octavo.worker.request_rows import RequestRows
from octavo.worker.step_arrays import Spans, gather

MIN_LENGTH = 1e-12
"""Length below which a row is divided by this instead, as PyTorch's `normalize` does."""


@dataclass(frozen=True, slots=True)
class PooledStep:
    """A step's arrays, ready to be run or launched."""

    scheduled: Sequence[ScheduledRow]
    batch: StepBatch
    rows: NDArray[np.intp]
    """Permanent row of each of `scheduled`."""


class PoolingRunner:
    """Runs steps of one Program that pools, over the KV of the requests that have a row."""

    def __init__(
        self, runnable: Runnable, kv: KvCache, rows: RequestRows, *, num_position_axes: int = 1
    ) -> None:
        """Takes the number of position axes that the Program reads: the second one is the
        segments'.
        """
        self.runnable = runnable
        self._kv = kv
        self._rows = rows
        self._num_position_axes = num_position_axes

    def prepare(self, scheduled: Sequence[ScheduledRow]) -> PooledStep:
        """Gathers the arrays of a step; changes no row."""
        rows = self._rows.indices(scheduled)
        spans = Spans(
            rows,
            np.array([row.start + row.num_tokens for row in scheduled], np.int32),
            np.array([0, *accumulate(row.num_tokens for row in scheduled)], np.int32),
        )
        batch = gather(self._rows, spans)
        if self._num_position_axes > 1:
            batch.positions = np.stack([batch.places, self._segments(batch, rows)])
        return PooledStep(scheduled, batch, rows)

    def _segments(self, batch: StepBatch, rows: NDArray[np.intp]) -> NDArray[np.int32]:
        """Returns 1 for tokens of the second text of a pair, else 0, `[T]`."""
        counts = batch.query_starts[1:] - batch.query_starts[:-1]
        return (batch.places >= self._rows.second_starts[rows].repeat(counts)).astype(np.int32)

    def join(self) -> None:
        """Computes a step of no rows, whose experts compute those of other engines."""
        assert isinstance(self.runnable, JoiningRunnable), "other backends are refused"
        self.runnable.join(self._kv)

    def run(self, step: PooledStep) -> list[RowResult]:
        """Computes a step; returns one result for each row, in order."""
        return self._results(step, self.runnable.run(step.batch, self._kv))

    def launch(self, step: PooledStep) -> Callable[[], list[RowResult]]:
        """Starts a step without waiting for it; returns what waits for its results."""
        assert isinstance(self.runnable, AsyncRunnable), "only what is asynchronous is launched"
        computing = self.runnable.launch(step.batch, self._kv)
        return lambda: self._results(step, computing.result())

    def _results(self, step: PooledStep, output: StepOutput) -> list[RowResult]:
        return [
            self._result(scheduled, self._rows.pooling[row], pooled)
            for scheduled, row, pooled in zip(
                step.scheduled, step.rows.tolist(), output.arrays["pooled"], strict=True
            )
        ]

    def _result(self, scheduled: ScheduledRow, params: PoolingParams, pooled: NDArray) -> RowResult:
        result = RowResult(scheduled.request_id, num_kept=scheduled.num_tokens)
        if scheduled.wants == "pool":
            row = finished(pooled, params)
            if not np.isfinite(row).all():
                what = "the row that the model pooled holds what is not a number (NaN)"
                return RowResult(scheduled.request_id, failure=what)
            result.pooled = row.astype("<f4").tobytes()
        return result


def finished(pooled: NDArray, params: PoolingParams) -> NDArray[np.float64]:
    """Returns a pooled row `[W]` cut, activated and normalized as its params say."""
    row = pooled[: params.dimensions].astype(np.float64)
    if params.activation == "sigmoid":
        row = 0.5 * (1 + np.tanh(0.5 * row))  # which never overflows
    elif params.activation == "softmax":
        row = np.exp(row - row.max())
        row /= row.sum()
    if params.normalize:
        row = row / max(float(np.linalg.norm(row)), MIN_LENGTH)
    return row
