"""Turns a step's scheduled rows into one ModelInput, runs a pooling Program over it, and returns
each row's pooled row, or one for each of its tokens.

Works on rows and arrays; the scheduler owns queues and block allocation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.api.pooling_params import PoolingParams
from octavo.engine.protocol.step import ResultKind, RowResult, ScheduledRequest
from octavo.executor.base import Runnable
from octavo.executor.batch import StepOutput
from octavo.executor.kv import KvCache
from octavo.worker.input_batch import InputBatch
from octavo.worker.model_input import ModelInput, ProgramRunner, gather_scheduled

MIN_LENGTH = 1e-12
"""Minimum norm by which a row is divided, as in PyTorch's `normalize`."""


class PoolingRunner(ProgramRunner):
    """Runs steps of one pooling Program, using the KV of the requests that have a row."""

    def __init__(
        self,
        runnable: Runnable,
        kv: KvCache,
        rows: InputBatch,
        *,
        num_position_axes: int = 1,
        keeps_tokens: bool = False,
    ) -> None:
        """`num_position_axes`: number of position axes that the Program reads; the second one
        contains segments. `keeps_tokens`: whether the Program returns a row per token.
        """
        super().__init__(runnable, kv, rows)
        self._keeps_tokens = keeps_tokens
        self._num_position_axes = num_position_axes

    def prepare_inputs(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the arrays of a step; changes no row."""
        model_input = gather_scheduled(self._rows, scheduled)
        model_input.runner = self
        if self._keeps_tokens:
            model_input.sample_rows = np.arange(len(model_input.token_ids), dtype=np.int32)
        if self._num_position_axes > 1:
            # The second axis counts segments: 1 for tokens of the second text of a pair.
            counts = np.diff(model_input.query_starts)
            second_starts = self._rows.second_starts[model_input.rows].repeat(counts)
            segments = (model_input.key_indices >= second_starts).astype(np.int32)
            model_input.positions = np.stack([model_input.key_indices, segments])
        return [model_input]

    def results(self, model_input: ModelInput, output: StepOutput) -> list[RowResult]:
        pooled: Iterable[NDArray] = output.arrays["pooled"]
        if self._keeps_tokens:
            pooled = np.split(output.arrays["pooled"], model_input.query_starts[1:-1])
        return [
            self._result(scheduled, self._rows.pooling[row], each)
            for scheduled, row, each in zip(
                model_input.scheduled, model_input.rows.tolist(), pooled, strict=True
            )
        ]

    def _result(
        self, scheduled: ScheduledRequest, params: PoolingParams, pooled: NDArray
    ) -> RowResult:
        result = RowResult(scheduled.request_id, num_kept=scheduled.num_tokens)
        if scheduled.result_kind == ResultKind.POOL:
            row = finished(pooled, params)
            if not np.isfinite(row).all():
                what = "the row that the model pooled contains NaN"
                return RowResult(scheduled.request_id, failure=what)
            result.pooled = row.astype("<f4").tobytes()
        return result


def finished(pooled: NDArray, params: PoolingParams) -> NDArray[np.float64]:
    """Returns a pooled row `[W]`, or rows `[T, W]`, truncated, activated and normalized according
    to the params.
    """
    row = pooled[..., : params.dimensions].astype(np.float64)
    if params.activation == "sigmoid":
        row = 0.5 * (1 + np.tanh(0.5 * row))  # never overflows
    elif params.activation == "softmax":
        row = np.exp(row - row.max(axis=-1, keepdims=True))
        row /= row.sum(axis=-1, keepdims=True)
    if params.normalize:
        row = row / np.maximum(np.linalg.norm(row, axis=-1, keepdims=True), MIN_LENGTH)
    return row
